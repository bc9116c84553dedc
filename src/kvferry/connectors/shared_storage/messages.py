"""What the two roles of the shared-storage connector tell each other, once per step."""

from __future__ import annotations

import msgspec

from kvferry.contract.messages import Plan, WorkerMeta
from kvferry.record.schema import RowRange


class ChunkRef(msgspec.Struct, frozen=True, array_like=True):
    """One chunk of a prompt: its key and the position of its first token."""

    key: bytes
    first_token: int


class BlockSlice(msgspec.Struct, frozen=True, array_like=True):
    """The part of one block table that an operation needs; no null block among it."""

    skipped: int
    """Blocks of the request before `ids[0]`."""
    ids: tuple[int, ...]


class Prefetch(msgspec.Struct, frozen=True, array_like=True):
    """Bring into staging, and verify, what a hit of tokens `[start, stop)` needs of these chunks.
    Chunks are consecutive."""

    ticket: int
    chunks: tuple[ChunkRef, ...]
    start: int
    stop: int


class Load(msgspec.Struct, frozen=True, array_like=True):
    """Fill tokens `[start, stop)` of a request from `chunks`, which cover what is needed of them.

    `ticket` names the prefetch that holds the chunks in staging; None if nothing was prefetched
    and the worker reads the store now. `blocks` has one slice per table: all that is to be filled.
    """

    request_id: str
    ticket: int | None
    chunks: tuple[ChunkRef, ...]
    start: int
    stop: int
    blocks: tuple[BlockSlice, ...]


class Save(msgspec.Struct, frozen=True, array_like=True):
    """Take one whole chunk out of the blocks and store it.

    `blocks` has one slice per table. `shared`: several ranks write one record together; the chunk
    is taken out now, because its blocks may be gone in the next step, and written when a later plan
    names the record (`Session`).
    """

    chunk: ChunkRef
    blocks: tuple[BlockSlice, ...]
    shared: bool = False


class Session(msgspec.Struct, frozen=True, array_like=True):
    """The record that the ranks write a chunk to which they took out; None: to none."""

    key: bytes
    name: str | None


class SharedStoragePlan(Plan, frozen=True, kw_only=True, tag=True):
    """Scheduler role to every worker role."""

    prefetches: tuple[Prefetch, ...] = ()
    loads: tuple[Load, ...] = ()
    saves: tuple[Save, ...] = ()
    sessions: tuple[Session, ...] = ()
    """For saves of earlier plans."""
    releases: tuple[int, ...] = ()
    """Tickets whose staging is no longer wanted."""
    failures_known: tuple[int, ...] = ()
    """Per rank, in how many steps a load failed there, as far as the scheduler has heard; empty if
    nowhere. A plan made before it heard of the last one may save what was computed on blocks never
    filled."""
    namespace: bytes | None = None
    """Set when the epoch changed: digest that records carry from now on."""
    has_forward: bool = False
    """Whether tokens are known to be computed in this step."""


EMPTY_PLAN = SharedStoragePlan()


class Prefetched(msgspec.Struct, frozen=True, array_like=True):
    """News of a prefetch on one rank: the first `num_chunks` are in hand and verified."""

    ticket: int
    num_chunks: int
    done: bool
    """False: more may come; told so that a deadline can take what is there."""
    seconds: float = 0.0
    """If done: from the plan to the end of the last read, whatever the step around it took. 0 if it
    was not all read from the store."""
    broken: tuple[bytes, ...] = ()
    """Keys that were found absent or wrong: not to be offered again."""


class Saved(msgspec.Struct, frozen=True, array_like=True):
    """The end of a save on one rank."""

    key: bytes
    stored: bool
    """False: refused or failed; nothing of it is in the store because of this rank."""
    retry: bool = False
    """True: there was no staging memory; the blocks may be offered again."""
    existed: bool = False
    """True: somebody else had stored it before."""
    ranges: tuple[RowRange, ...] = ()
    """Where several ranks write one record: the rows this one wrote ..."""
    leaf_digests: bytes = b""
    """... and their part of the leaf table, in the same order."""


class RankReport(msgspec.Struct, frozen=True, kw_only=True):
    """What one rank has to say after a step."""

    rank: int
    prefetched: tuple[Prefetched, ...] = ()
    saved: tuple[Saved, ...] = ()
    failures: int = 0
    """Steps so far in which a load failed on this rank."""
    failed_requests: tuple[str, ...] = ()
    """Requests whose load failed after it was promised ..."""
    broken: tuple[bytes, ...] = ()
    """... and the keys that failed."""


class SharedStorageMeta(WorkerMeta, frozen=True, kw_only=True, tag=True):
    """Reports of all ranks; one rank sends one."""

    reports: tuple[RankReport, ...] = ()

    def aggregate(self, other: WorkerMeta) -> SharedStorageMeta:
        if not isinstance(other, SharedStorageMeta):
            raise TypeError(f"cannot fold {type(other).__name__} into SharedStorageMeta")
        return SharedStorageMeta(reports=self.reports + other.reports)

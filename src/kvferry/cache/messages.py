"""The messages between the roles of the shared-storage connector: plans down, reports up.

In a step the scheduler role builds a `CachePlan`, which the host brings to the worker role
of every rank. Each worker answers with a `RankReport`. A slot is host memory for one chunk.
"""

from __future__ import annotations

import msgspec

from kvferry.blocks.tables import BlockSlice
from kvferry.contract.messages import Plan, WorkerMeta
from kvferry.errors import Fault
from kvferry.types import NULL_BLOCK, RankShard


class SlotChunk(msgspec.Struct, frozen=True, array_like=True):
    """One chunk of a prompt, and its slot in the host pool."""

    slot: int
    key: bytes
    first_token: int
    """Position of its first token in the prompt."""
    mark: bytes = b""
    """`kvferry.keys.salt_mark` of its salt, for the record that a save makes."""
    part: int = -1
    """If not negative: this is no chunk, but that part of the state after `first_token` tokens."""


class Fetch(msgspec.Struct, frozen=True, array_like=True):
    """Read some groups of a chunk from the store into its slot, and verify them."""

    chunk: SlotChunk
    groups: tuple[int, ...]
    looks_at_values: bool = False
    """Whether NaN and Inf are wrong. Nothing with them is stored, but it was by older releases."""


class Load(msgspec.Struct, frozen=True, array_like=True):
    """Copy tokens `[start, stop)` of a request from slots into blocks.

    `chunks` are the chunks of the hit, and the parts of the state at its end; `blocks` are the
    blocks to fill, one slice per block table. Of a table of recurrent layers that is the one block
    that a state takes.
    """

    request_id: str
    chunks: tuple[SlotChunk, ...]
    start: int
    stop: int
    blocks: tuple[BlockSlice, ...]

    @property
    def is_async(self) -> bool:
        """Whether the host gives the request no tokens before it hears of the load's end. It moves
        a state before the loads of the same step, so one with a state must come before that."""
        return any(chunk.part >= 0 for chunk in self.chunks)


class Save(msgspec.Struct, frozen=True, array_like=True):
    """Copy one whole chunk from blocks into its slot and hash it. A rank that holds whole records
    also writes them to the store. `blocks` has one slice per block table. A part of a state is
    saved likewise, out of the blocks of recurrent layers.

    With `compare_with` it is an audit: nothing is stored.
    """

    chunk: SlotChunk
    blocks: tuple[BlockSlice, ...]
    compare_with: SlotChunk | None = None
    """The chunk's record in another slot: the copy is compared with it and not written."""
    checks: Load | None = None
    """The load that is audited. Unless the comparison passes, its blocks are reported as failed in
    the same step. None: nothing was loaded, or the host cannot compute it again."""


class CachePlan(Plan, frozen=True, kw_only=True, tag=True):
    """The plan of a step, from the scheduler role to every worker role. A worker first begins the
    fetches. It does the loads before the forward and the saves after it."""

    pool: int = 0
    """A random number that names the pool of the slots."""
    number: int = 0
    """Larger than that of any plan before."""
    fetches: tuple[Fetch, ...] = ()
    cancels: tuple[int, ...] = ()
    """Slots whose fetch is no longer wanted. The end of a fetch is still reported."""
    loads: tuple[Load, ...] = ()
    saves: tuple[Save, ...] = ()
    unchecked: tuple[Load, ...] = ()
    """Loads of earlier steps whose audit will never run: their blocks are reported as failed."""
    failures_known: tuple[int, ...] = ()
    """By rank, the number of steps with a failed load that the scheduler role knows of; empty if
    none. A rank that had more puts off the saves of the plan: the chunks may have been computed on
    blocks that were never filled."""
    timed: int = 0
    """Number of a step that measures the speed of prefill; 0 for others. Workers report it back,
    because with overlapping steps the next output may belong to another step."""
    namespace: bytes | None = None
    """Namespace digest that records carry from now on; None: the same as before."""
    first_namespace: bytes = b""
    """Namespace digest that a rank must have begun with: another one reads and saves nothing."""
    are_apart: bool = False
    """Whether ranks are on several machines. Then each writes the rows that it holds as a record of
    its own, a shard, and reads its shard of what is not stored whole. Never unset."""
    writes: tuple[SlotChunk, ...] = ()
    """Chunks of earlier saves whose shards the ranks write now: every rank has hashed its rows. One
    that could not, as its load had failed, would leave the others' shards with wrong KV."""
    discards: tuple[tuple[bytes, str, bytes], ...] = ()
    """Chunks whose shards each rank takes out of its store: key, why, and namespace."""
    touches: tuple[bytes, ...] = ()
    """Chunks that requests have used, in the order of their prompts. Each rank that is apart
    touches its shards, as its store may be one of its own, and reads do not show what ranks hold in
    memory."""
    pins: tuple[tuple[tuple[bytes, ...], float], ...] = ()
    """Chunks whose shards each rank that is apart pins for a client, and until when."""

    def filled_blocks(self) -> frozenset[int]:
        sync = [load for load in self.loads if not load.is_async]
        filled = {block for load in sync for part in load.blocks for block in part.ids}
        return frozenset(filled - {NULL_BLOCK})

    def started_loads(self) -> frozenset[str]:
        return frozenset(load.request_id for load in self.loads if load.is_async)


EMPTY_PLAN = CachePlan()


class Filled(msgspec.Struct, frozen=True, array_like=True):
    """A fetch, the copy of a save, or the comparison of an audit ended on one rank."""

    slot: int
    missed: str | None = None
    """None: the slot holds what the plan said, verified. Else why it does not, a
    `kvferry.record.check.ReadFault`. Of a save or an audit, `CANCELLED`: a later step may try
    again; `IO_ERROR`: that would not help, as where blocks do not hold what the host reported."""
    seconds: float = 0.0
    """For a fetch: the time from the plan to the end of the read."""
    excess: float = 0.0
    """For a comparison: `kvferry.blocks.audit.Difference.excess`; at most 1 if it passed."""
    detail: str = ""
    """For people: where the largest difference of a comparison is, or why a fetch failed."""
    kind: str = ""
    """For a fetch that failed: the `FaultKind` of the first error; empty if the store answered."""

    @property
    def agrees(self) -> bool:
        """Whether a comparison passed."""
        return self.missed is None and self.excess <= 1


class Sealed(msgspec.Struct, frozen=True, array_like=True):
    """A rank hashed its rows of a saved chunk, or failed to. A rank that holds all of the record
    also wrote the head into the slot, unless it failed."""

    slot: int
    leaf_digests: bytes | None = b""
    """If several ranks hold a record: the digests of the rows that this rank contributes, in the
    record's order. None if the rank failed to hash its rows, or they are not finite."""
    is_finite: bool = True
    """False: the rank's rows have NaN or Inf, so nothing of the chunk is stored or served."""


class Saved(msgspec.Struct, frozen=True, array_like=True):
    """A rank that holds all of a record, or writes a shard, wrote it to the store, or could
    not."""

    slot: int
    result: str
    """A `kvferry.store.base.PutResult`."""
    fault: Fault | None = None
    """Why the store does not have it; None if it has, or a bug kept it from being asked."""


class SlotRegion(msgspec.Struct, frozen=True, array_like=True):
    """Where the slots of one rank are, and which part of each record they hold. See
    `kvferry.cache.memory.open_slots`. `namespace` is the digest that this rank began with: it tells
    whether the rank describes the model as the scheduler role does. `loads_only`: they are those of
    the first rank that holds the same kv heads. `num_slots`: how many there are; 0 if not told."""

    name: str
    process: int
    fd: int
    shard: RankShard
    namespace: bytes
    loads_only: bool = False
    num_slots: int = 0
    slot_bytes: int = 0
    """From one slot to the next: more than records take where drafts lie behind them. 0: not
    told."""


class RankReport(msgspec.Struct, frozen=True, kw_only=True):
    """The operations that ended on one rank since its last report."""

    rank: int
    pool: int = 0
    """Names the host pool of the slots. A report for another pool is ignored: a host with two
    connectors may bring one of them the reports of the other."""
    filled: tuple[Filled, ...] = ()
    sealed: tuple[Sealed, ...] = ()
    saved: tuple[Saved, ...] = ()
    region: SlotRegion | None = None
    """The rank's slots; in every report, since the scheduler role may start later than the rank.
    None while the rank hashes the weights."""
    timed: int = 0
    """`CachePlan.timed` of the step that ended; 0 if it was not timed."""
    off: str = ""
    """Why this rank neither loads nor saves, in the first report of one that cannot."""
    failures: int = 0
    """Steps in which a load failed on this rank, since its start."""
    failed_requests: frozenset[str] = frozenset()
    """Requests whose load failed after it was promised."""
    failed_keys: tuple[bytes, ...] = ()
    """Keys of the chunks that could not be copied for these loads."""


class CacheMeta(WorkerMeta, frozen=True, kw_only=True, tag=True):
    """One report of a rank, or those of all ranks once they are folded."""

    reports: tuple[RankReport, ...] = ()

    def aggregate(self, other: WorkerMeta) -> CacheMeta:
        if not isinstance(other, CacheMeta):
            raise TypeError(f"cannot fold {type(other).__name__} into CacheMeta")
        return CacheMeta(reports=self.reports + other.reports)

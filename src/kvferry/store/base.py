"""The store contract: opaque bytes under 32-byte keys, whole or absent.

Every store implements it. Commands also ask the catalogue that a store hands out
(`kvferry.store.catalogue`). A store knows nothing of heads, ranks or requests, and verifies
nothing: `kvferry.store.recordio` checks records.

`accepts`, `values_per_put`, `where`, `touch`, `stat`, `probe`, `learn`,
`on_result`, `tier_of`, `erased_since`, `tiers`, `catalogues` and `in_namespace` do
no I/O. All others may block on it: while an engine serves, they run on I/O threads, never on a
scheduler's. A call with a deadline (`time.monotonic()` seconds) ends at it or shortly after; but
writes to a directory ignore it, and a mount that hangs overruns it. If the caller gives none,
stores on servers set a limit.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from enum import Enum, StrEnum
from typing import NamedTuple, NewType, Self

from kvferry.errors import Fault, FaultKind, StoreError
from kvferry.store.catalogue import Catalogue, Contract
from kvferry.types import ChunkKey

Buffer = memoryview | bytearray | bytes

Address = tuple[str, int]
"""Host and port, as an operator wrote them."""

ReadRange = tuple[int, memoryview]
"""Where to read in a value, in bytes, and the buffer to fill."""

RecordBytes = NewType("RecordBytes", int)
"""Size of a value as it is put and read: `len` of a record. What it takes on the medium may differ
(`kvferry.store.catalogue.StoredBytes`)."""

Value = tuple[ChunkKey, Sequence[Buffer]]
"""A key, and buffers that hold its value one after the other."""

NO_DEADLINE = math.inf

_NO_KEY = ChunkKey(b"\xff" * 32)
"""A key of no value."""

ASK_SECONDS = 0.25
"""How long a look-up waits for the answer to a probe."""


COMPUTED_WRONG = "computed_wrong"
"""Why a value is discarded that this process computed wrong: no store is to blame for it."""


class PutResult(StrEnum):
    """Outcome of a write."""

    STORED = "stored"
    EXISTS = "exists"
    """The key has a value already, perhaps of another writer; it stays."""
    NO_SPACE = "no_space"
    """Quota (nothing left to evict), ENOSPC or EDQUOT."""
    FAILED = "failed"
    """Read-only, permission, EIO, a store that was fenced off or closed."""
    NOT_FINITE = "not_finite"
    """The value has NaN or Inf, so that its writer asked no store to take it."""

    @property
    def is_there(self) -> bool:
        """Whether the store has the value now."""
        return self in (PutResult.STORED, PutResult.EXISTS)


class Put(NamedTuple):
    """The answer to one write. A failed write raises nothing: serving continues without it."""

    result: PutResult
    fault: Fault | None = None
    """Why the store does not have the value; None if it has, or was not asked to take it."""

    @property
    def is_there(self) -> bool:
        """Whether the store has the value now."""
        return self.result.is_there

    @classmethod
    def failed(cls, fault: Fault) -> Put:
        is_full = fault.kind is FaultKind.FULL
        return cls(PutResult.NO_SPACE if is_full else PutResult.FAILED, fault)


STORED, EXISTS = Put(PutResult.STORED), Put(PutResult.EXISTS)
CLOSED = Fault(FaultKind.CLOSED, "it is closed")
UNWRITTEN = Fault(FaultKind.BUG, "the write failed before its store was asked; the log has more")


class StoreStat(NamedTuple):
    """What a store holds, from counts in memory."""

    url: str
    num_records: int
    used_bytes: int
    """Stored bytes counted against the quota, over all processes that share the store."""
    max_bytes: int | None
    index_complete: bool
    """False while the index still fills in the background."""


class TierStatus(NamedTuple):
    """The state of one tier. Tiers are several stores that are used as if they were one."""

    name: str
    """Its name in metrics: the scheme, with the tier's number if a nearer tier has the same."""
    state: str
    since: float
    """Seconds since the epoch."""
    because: Fault | None
    """Why the tier is not fully in use; None if it is."""
    stat: Callable[[], StoreStat]
    """Counts its values; only when called, as each look-up that misses asks for `fault`."""
    fault: Fault | None = None
    """Why its values may not be found now: its state, or the error of its last call. None if its
    last call succeeded."""


class Where(Enum):
    """What a store knows of a key."""

    HERE = "here"
    ABSENT = "absent"
    ASKED = "asked"
    """The medium is being asked."""
    COMING = "coming"
    """The medium said that it is about to have it, as a peer may."""


HERE, ABSENT = Where.HERE, Where.ABSENT
ASKED, COMING = Where.ASKED, Where.COMING
"""For look-ups: a member of an enum is a slow attribute in Python 3.11."""


class ValueCheck(NamedTuple):
    """How a store, which knows only bytes, tells sound values from wrong ones."""

    record_bytes: RecordBytes
    """Size of the largest sound value."""
    why_wrong: Callable[[ChunkKey, memoryview, int], str | None]
    """Gets the key, up to the first `record_bytes` bytes of the value, and the size of the value.
    Returns None for a sound value."""
    sized_by: str = "chunk_tokens"
    """The option that says how large values are, for messages."""
    sizes: frozenset[int] = frozenset()
    """Sizes of sound values, if there are several."""

    def has_size(self, size: int) -> bool:
        """Whether a sound value may have this size."""
        return size == self.record_bytes or size in self.sizes


class Store(Contract, ABC):
    """Whole values under content keys. A value appears and goes, but never changes.

    Thread-safe. `close` is idempotent and leaves no thread behind. A closed store answers every
    call: `put` is FAILED, `read` None, `where` ABSENT, `delete` False, `stat` works, all else finds
    and does nothing.

    In a directory and in memory, the least recent value is evicted first. `put` and `touch` update
    recency and reads do not, so a full scan leaves the eviction order alone. Servers evict by their
    own rules, and there a read may count as a use.

    What is not abstract follows from what is. So a store answers nothing that it cannot know: one
    that lacks a method cannot be made.
    """

    url: str
    multi_process: bool
    """True if several processes may open the same URL at once."""
    quarantines: bool = False
    """True if `discard` keeps the value in a quarantine."""

    @abstractmethod
    def accepts(self) -> Fault | None:
        """Why a `put` would fail now, whatever the value, so that none is made in vain; None if it
        may succeed. A hint."""

    @property
    def values_per_put(self) -> int:
        """How many values to give to `put_all` at a time, as they share a cost."""
        return 1

    @abstractmethod
    def where(self, key: ChunkKey) -> Where:
        """What is known of `key`. A hint, which may be stale. Never blocks.

        HERE at once after a `put` of this store returned STORED, ABSENT after its own `delete`.
        What other processes did shows later, of some stores only after a `probe`. A `read` that
        finds nothing corrects the answer.
        """

    @abstractmethod
    def read(
        self, key: ChunkKey, ranges: Sequence[ReadRange], deadline: float = NO_DEADLINE
    ) -> RecordBytes | None:
        """Fill the buffers of all ranges. A range that reaches past the end of the value is filled
        up to the end. Asks the medium, and so finds also values that the index does not know yet.
        Writes to no buffer after it has returned or raised.

        Returns:
            The size of the whole value in bytes; None if it is absent (the index then forgets it).

        Raises:
            StoreError: the medium failed, or the deadline passed.
        """

    def check_medium(self, deadline: float) -> None:
        """Raise StoreError unless the medium answers. A failed call does not tell that: one value
        alone may be at fault."""
        # Asked for bytes of a value, a server says more than of its size, such as "no bucket".
        self.read(_NO_KEY, [(0, memoryview(bytearray(1)))], deadline)

    @abstractmethod
    def put(self, key: ChunkKey, buffers: Sequence[Buffer], deadline: float = NO_DEADLINE) -> Put:
        """Store the concatenation of `buffers`, at least one byte. Atomic: whole or absent.

        Never raises for a full, read-only or failing medium. Evicts to stay within a quota, but
        nothing for a value that can never fit. Does not sync to the medium. The buffers may be
        reused as soon as this returns.
        """

    def put_all(self, values: Sequence[Value], deadline: float = NO_DEADLINE) -> list[Put]:
        """Store each of `values` as `put` does; return their answers in order."""
        return [self.put(key, buffers, deadline) for key, buffers in values]

    @abstractmethod
    def discard(self, key: ChunkKey, reason: str) -> None:
        """Take out a value that failed verification, or that was `COMPUTED_WRONG`: quarantine it if
        the store can, else delete it. Never raises. Concurrent discards of one key count once as
        `store_quarantined`."""

    @abstractmethod
    def delete(self, key: ChunkKey) -> bool:
        """Remove a value. True if this call removed it. Never raises for an absent key."""

    @abstractmethod
    def touch(self, keys: Iterable[ChunkKey]) -> None:
        """Note that values were used. `keys` are in prompt order: the first, the root of the
        prefix, is evicted last. Written back in batches."""

    @abstractmethod
    def stat(self) -> StoreStat:
        """Counts."""

    @abstractmethod
    def tiers(self) -> list[TierStatus]:
        """The stores that this one consists of, nearest first. Empty for a single store."""

    @abstractmethod
    def close(self) -> None:
        """Stop background work. Idempotent."""

    @abstractmethod
    def erased_since(self, number: int) -> Sequence[str]:
        """What commands erased meanwhile, by the names of `kvferry.store.erasures`, without the
        first `number` that this object heard of. Memory only."""

    @abstractmethod
    def describe(self, namespace: bytes, description: str) -> None:
        """Keep what a namespace is, as text for people and tools (`Namespace.as_text`), in place of
        what was kept before; later if not now. Nothing where no text can be kept. Never raises."""

    # -- other faces of the same values ---------------------------------------------------------

    @abstractmethod
    def in_namespace(self, namespace: bytes) -> Store:
        """Return this store as it reads, writes and removes the values of a namespace. Where keys
        alone name values, this is the store itself; else it is a view that shares all but the
        names, and needs no close of its own."""

    @abstractmethod
    def catalogues(self) -> Sequence[Catalogue | Fault]:
        """What commands ask: the catalogue of each tier, nearest first, or why there is none
        now. A single store has one."""

    def catalogue(self) -> Catalogue:
        """The only catalogue. Raises StoreError if there is none now, or there are several."""
        found = self.catalogues()
        if len(found) > 1:
            said = f"{self.url} are several stores; give one of them"
            raise StoreError(FaultKind.UNLISTED, said)
        (only,) = found
        if isinstance(only, Fault):
            raise StoreError(*only)
        return only

    # -- an index that lags behind what other processes store -----------------------------------

    @abstractmethod
    def probe(self, keys: Sequence[ChunkKey], *, again: bool = False) -> Where:
        """Find out in the background whether `keys` (a prefix chain, in order) are here, for a
        later `where`. Dropped when too many probes wait.

        Args:
            again: ask also for keys whose answer is known, as of a producer that stores them one
                by one. Their first few are asked for first.

        Returns:
            ASKED where only a probe finds what others stored, so that `where` is ASKED meanwhile;
            COMING where it is found without one; ABSENT where nothing else may appear. Also of no
            keys, which asks nothing.
        """

    @abstractmethod
    def learn(self, keys: Sequence[ChunkKey], holder: Address | None = None) -> bool:
        """Learn that `keys` are here without asking the medium: they were stored through another
        store object of the same URL, or a peer, the `holder`, has them in memory. Whether this
        store reads from there."""

    @abstractmethod
    def wait_indexed(self, timeout: float) -> bool:
        """Wait up to `timeout` seconds for the first fill of the index. Whether it is complete."""

    @abstractmethod
    def on_result(self, heard: Callable[[StoreError | None], None]) -> None:
        """Call `heard` on an I/O thread after each question of a `probe`: with None if the medium
        answered, else with the error."""

    @abstractmethod
    def tier_of(self, key: ChunkKey) -> str:
        """Name of the tier that `key` would be read from; the scheme of a single store. If the tier
        is several peers, a space and the peer's address follow. A hint."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


class SingleStore(Store):
    """A store of one medium: it consists of no others, and hears of no erasures."""

    def tiers(self) -> list[TierStatus]:
        return []

    def tier_of(self, key: ChunkKey) -> str:
        return self.url.partition(":")[0]

    def erased_since(self, number: int) -> Sequence[str]:
        return ()

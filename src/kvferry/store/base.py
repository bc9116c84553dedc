"""The store contract: opaque bytes under 32-byte keys, whole or absent.

Every store implements it: engines call a `Store`, commands a `Catalogue`. A store knows nothing
of heads, ranks or requests, and verifies nothing: `kvferry.store.recordio` checks records.

`accepts`, `values_per_put`, `where`, `touch`, `stat`, `needs_probes`, `probe`, `assume`,
`note_stored`, `on_result`, `tier_of`, `erased_since` and `tiers` do no I/O. All others
may block on it: while an engine serves, they run on I/O threads, never on a scheduler's. A call
with a deadline
(`time.monotonic()` seconds) ends at it or shortly after; but writes to a directory ignore it, and a
mount that hangs overruns it. If the caller gives none, stores on servers set a limit.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from enum import Enum, StrEnum
from typing import NamedTuple, Self

from kvferry.errors import ConfigError, Fault, FaultKind, StoreError
from kvferry.types import ChunkKey

Buffer = memoryview | bytearray | bytes

Address = tuple[str, int]
"""Host and port, as an operator wrote them."""

ReadRange = tuple[int, memoryview]
"""Where to read in a value, in bytes, and the buffer to fill."""

Value = tuple[ChunkKey, Sequence[Buffer]]
"""A key, and buffers that hold its value one after the other."""

NO_DEADLINE = math.inf

_NO_KEY = ChunkKey(b"\xff" * 32)
"""A key of no value."""

ASK_SECONDS = 0.25
"""How long a look-up waits for the answer to a probe."""


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
    """Bytes counted against the quota, over all processes that share the store."""
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
    stat: StoreStat
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


class Entry(NamedTuple):
    """One stored value, as `scan` finds it."""

    key: ChunkKey
    num_bytes: int
    last_used: float
    """Seconds since the epoch; 0 if unknown. May lag, as uses are written back in batches."""
    namespace: bytes = b""
    """The namespace that it belongs to; empty if the store does not know."""
    pinned_until: float = 0.0
    """Seconds since the epoch; the value is not evicted before. 0: not pinned."""


class Removal(NamedTuple):
    """One value that was removed, or found to be gone."""

    key: ChunkKey
    num_bytes: int
    at: float
    """Seconds since the epoch."""
    reason: str
    """evicted, deleted, damaged, or vanished: the file was removed from outside."""
    detail: str
    by: str
    """The process that removed it, or found it gone."""


class ValueCheck(NamedTuple):
    """How a store, which knows only bytes, tells sound values from wrong ones."""

    num_bytes: int
    """Size of every sound value."""
    why_wrong: Callable[[ChunkKey, memoryview, int], str | None]
    """Gets the key, up to the first `num_bytes` bytes of the value, and the size of the value.
    Returns None for a sound value."""
    sized_by: str = "chunk_tokens"
    """The option that says how large values are, for messages."""


class GcReport(NamedTuple):
    """What was removed to make a store smaller, and what is stored now."""

    removed_records: int
    removed_bytes: int
    used_bytes: int


def too_many_pins(num_pinned: int) -> ConfigError:
    """Return the refusal of pins beyond half of the quota, where `num_pinned` values are pinned."""
    return ConfigError(
        f"{num_pinned:,} records are pinned now, and these would be too many: pins may take half "
        "of the quota, so that others are still stored; raise max_bytes or pin less"
    )


class Store(ABC):
    """Whole values under content keys. A value appears and goes, but never changes.

    Thread-safe. `close` is idempotent and leaves no thread behind. A closed store answers every
    call: `put` is FAILED, `read` None, `where` ABSENT, `delete` False, `stat` works, `gc` and `pin`
    may raise StoreError, all else finds and does nothing.

    In a directory and in memory, the least recent value is evicted first. `put` and `touch` update
    recency and reads do not, so a full scan leaves the eviction order alone. Servers evict by their
    own rules, and there a read may count as a use.

    Methods that are not abstract have defaults, so that a caller can call any of them on any store.
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
    ) -> int | None:
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
        """Take out a value that failed verification: quarantine it if the store can, else delete
        it. Never raises. Concurrent discards of one key count once as `store_quarantined`."""

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

    def tiers(self) -> list[TierStatus]:
        """The stores that this one consists of, nearest first. Empty for a single store."""
        return []

    @abstractmethod
    def close(self) -> None:
        """Stop background work. Idempotent."""

    def erased_since(self, number: int) -> Sequence[str]:
        """What commands erased meanwhile, by the names of `kvferry.store.erasures`, without the
        first `number` that this object heard of. Memory only."""
        return ()

    # -- an index that lags behind what other processes store -----------------------------------

    @property
    def needs_probes(self) -> bool:
        """Whether `where` learns only by a `probe` what others stored. It is ASKED meanwhile."""
        return False

    def probe(self, keys: Sequence[ChunkKey], *, again: bool = False) -> bool:
        """Find out in the background whether `keys` (a prefix chain, in order) are here, for a
        later `where`. Dropped when too many probes wait.

        Args:
            again: ask also for keys whose answer is known, as of a producer that stores them one
                by one. Their first few are asked for first.

        Returns:
            Whether there is a medium to ask, in which a key may appear that is not here yet.
        """
        return False

    def assume(self, keys: Sequence[ChunkKey], peer: Address) -> bool:
        """Take it that `peer` has `keys` in memory, if this store reads from there. Whether it
        does."""
        return False

    def note_stored(self, key: ChunkKey) -> None:  # noqa: B027  # known at once
        """Learn that `key` was stored through another store object of the same URL."""

    def wait_indexed(self, timeout: float) -> bool:
        """Wait up to `timeout` seconds for the first fill of the index. Whether it is complete."""
        return True

    def on_result(  # noqa: B027  # asks nothing of its own accord
        self, heard: Callable[[StoreError | None], None]
    ) -> None:
        """Call `heard` on an I/O thread after each question of a `probe`: with None if the medium
        answered, else with the error."""

    def tier_of(self, key: ChunkKey) -> str:
        """Name of the tier that `key` would be read from; the scheme of a single store. If the tier
        is several peers, a space and the peer's address follow. A hint."""
        return self.url.partition(":")[0]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


class Catalogue(Store):
    """A store that also says what is there, for commands, and that pins. Calls may be slow."""

    def of(self, namespace: bytes) -> Catalogue:
        """Return a store that reads and removes the values of a namespace. Where keys alone name
        values, this is the store itself; else it is a view that shares its connections and needs no
        close of its own."""
        return self

    def lists(self, key: ChunkKey) -> bool:
        """Whether an index on the medium lists `key`, whose value may be gone. Raises as `scan`."""
        return False

    def scan(self) -> Iterator[Entry]:
        """Yield every value that is stored throughout the call; of those that come or go meanwhile,
        any may be missing. Has no effect on later reads. Keeps a bounded number of names in memory:
        a name that a server lists twice, far apart, may come twice.
        Raises StoreError if the store cannot list its values, or the medium failed."""
        raise StoreError(FaultKind.UNLISTED, f"{self.url} cannot list its values")

    def stored(self) -> Iterator[Entry]:
        """Yield every value that the medium lists, also those that an index does not know. Size and
        last use are 0 where only the index knows them. Raises as `scan`."""
        return self.scan()

    def recent(self, limit: int) -> Iterator[Entry]:
        """Yield up to `limit` values, the most recently used first, without listing all. Raises
        as `scan`."""
        said = f"{self.url} does not know which values were used last"
        raise StoreError(FaultKind.UNLISTED, said)

    def namespaces(self) -> dict[bytes, tuple[int, int]]:
        """Number of values and of their bytes by namespace. Empty bytes stand for a namespace that
        is not known yet. Raises as `scan`."""
        found: dict[bytes, tuple[int, int]] = {}
        for entry in self.scan():
            num_records, num_bytes = found.get(entry.namespace, (0, 0))
            found[entry.namespace] = (num_records + 1, num_bytes + entry.num_bytes)
        return found

    def described(self) -> list[bytes]:
        """The namespaces that may have a description. Does not list all values where the store
        keeps a list of namespaces. Raises as `scan`."""
        return list(self.namespaces())

    def describe(self, namespace: bytes, description: str | None = None) -> str | None:
        """What a namespace is, as text for people and tools (`Namespace.as_text`); None if unknown.
        The text is untrusted, and empty or cut if it is too long. A given `description` replaces
        the stored one, later if not now, and then this never raises. Without one, it raises
        StoreError if the medium failed."""
        return None

    def notice(self, text: str | None = None) -> str | None:
        """The notice of what commands erased (`kvferry.store.erasures`); None if there is none, or
        the store keeps none. A given `text` replaces it. The text is untrusted. Never raises."""
        return None

    def removals(self, limit: int) -> list[Removal] | None:
        """The last `limit` removals, newest first; None where the store remembers none. Raises
        StoreError if the medium failed."""
        return None

    def facts(self) -> dict[str, int | bool | None]:
        """Facts about the store for people to read, by name."""
        return {}

    def gc(self, max_bytes: int | None = None, older_than_seconds: float | None = None) -> GcReport:
        """Remove unpinned values: those not used for `older_than_seconds`, then the least recently
        used, until all that stay have at most `max_bytes` (None: the store's quota, if any).

        Raises:
            ConfigError: the store does not know when its values were used.
            StoreError: the store cannot be changed, or the medium failed.
        """
        said = f"{self.url} cannot be made smaller by a command"
        raise StoreError(FaultKind.UNUSABLE, said)

    def pin(self, keys: Iterable[ChunkKey], until: float, *, by_client: bool = False) -> int:
        """Keep `keys` from eviction before `until` (seconds since the epoch; a time that is past
        ends their pins). Pinned values take at most half of the quota. They can be deleted.

        Args:
            by_client: whether a client asked for it, not an operator: then longer pins stay, and
                pinned values take at most a quarter of the quota.

        Returns:
            How many of the keys are here, and so are pinned.

        Raises:
            ConfigError: the store has no quota, or more would be pinned than may be; the keys
                before that stay pinned.
            StoreError: the store cannot pin, cannot be changed, or the medium failed.
        """
        raise StoreError(FaultKind.UNUSABLE, f"{self.url} cannot pin; a directory can")

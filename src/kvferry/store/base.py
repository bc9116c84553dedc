"""The store contract: opaque bytes under 32-byte keys, whole or absent.

A store knows nothing of heads, ranks or requests, and verifies nothing: that is done by
`kvferry.store.recordio`, which knows the record. `takes_values`, `contains`, `touch`, `stat`,
`probe`, `expect`, `awaits`, `note_stored`, `pin_for`, `tier_of` and `tiers` use memory only. All
others may block on I/O: while an engine serves, they run on I/O threads, never on a scheduler's. A
call with a deadline (`time.monotonic()` seconds) ends at it or shortly after; without one, a medium
that can hang sets its own.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from enum import StrEnum
from typing import NamedTuple, Self

from kvferry.errors import StoreError
from kvferry.types import ChunkKey

Buffer = memoryview | bytearray | bytes

Address = tuple[str, int]
"""Host and port, as an operator wrote them."""

ReadRange = tuple[int, memoryview]
"""Where to read in a value, in bytes, and the buffer to fill."""

Value = tuple[ChunkKey, Sequence[Buffer]]
"""A key, and buffers that hold its value one after the other."""

NO_DEADLINE = math.inf

ASK_SECONDS = 0.25
"""How long a look-up waits for the answer to a probe."""


class PutResult(StrEnum):
    """Outcome of a write. A failed one is no exception: serving continues without it."""

    STORED = "stored"
    EXISTS = "exists"
    """Another writer was first; its record stands."""
    NO_SPACE = "no_space"
    """Quota (nothing left to evict), ENOSPC or EDQUOT."""
    FAILED = "failed"
    """Read-only, permission, EIO, a store that was fenced off or closed."""

    @property
    def is_there(self) -> bool:
        """Whether the store has the value now."""
        return self in (PutResult.STORED, PutResult.EXISTS)


class StoreStat(NamedTuple):
    """What a store holds, from memory; never a scan."""

    url: str
    num_records: int
    used_bytes: int
    """Bytes counted against the quota, over all processes that share the store."""
    max_bytes: int | None
    index_complete: bool
    """False while the index still fills in the background."""


class TierStatus(NamedTuple):
    """One of several stores, as it is now."""

    name: str
    """In metrics: its scheme; of a second tier of one scheme, with its number."""
    state: str
    since: float
    """Seconds since the epoch."""
    because: str
    """Why it is not used as it should be; empty if it is."""
    stat: StoreStat


class Entry(NamedTuple):
    """One stored value, as `scan` finds it."""

    key: ChunkKey
    num_bytes: int
    last_used: float
    """Seconds since the epoch, to the accuracy of batched recency."""
    namespace: bytes = b""
    """The namespace that it belongs to; empty if the store does not know."""
    pinned_until: float = 0.0
    """Seconds since the epoch; not evicted before. 0: not pinned."""


class Removal(NamedTuple):
    """One value that was removed, or found to be gone."""

    key: ChunkKey
    num_bytes: int
    at: float
    """Seconds since the epoch."""
    reason: str
    """evicted, deleted, quarantined, or vanished: the file was removed from outside."""
    detail: str
    by: str
    """The process that took it out, or found it gone."""


class ValueCheck(NamedTuple):
    """Tells sound values from wrong ones, for stores, which know only bytes."""

    num_bytes: int
    """Size of every sound value."""
    why_wrong: Callable[[ChunkKey, memoryview, int], str | None]
    """Gets the key, the first `num_bytes` bytes of the value or all that there are, and its size;
    None for a sound value."""


class GcReport(NamedTuple):
    """What was removed to make a store smaller, and what is stored now."""

    removed_records: int
    removed_bytes: int
    used_bytes: int


class Store(ABC):
    """Whole values under content keys: a value never changes, it appears, and it goes.

    Thread-safe. `close` is idempotent and leaves no thread behind. A closed store answers every
    call: `put` is FAILED, `read` None, `contains` and `delete` False, `stat` works, `gc` and `pin`
    may raise StoreError, all else finds and does nothing.

    In a directory and in memory, `put` and `touch` update recency and reads do not, so a full scan
    leaves the eviction order alone; the least recent value is evicted first. Servers evict by their
    own rules, and there a read may count as a use.

    The other methods have defaults, so that no caller asks what a store is able to do.
    """

    url: str
    multi_process: bool
    """True if several processes may open the same URL at once."""
    quarantines: bool = False
    """True if `discard` keeps what it takes out."""

    @property
    def takes_values(self) -> bool:
        """Whether a `put` has a chance now, so that no value is made in vain. A hint."""
        return True

    @property
    def values_per_put(self) -> int:
        """How many values are best given to `put_all` at a time: they share a cost."""
        return 1

    @property
    def refusal(self) -> str:
        """Why the last `put` was FAILED, in one line without a credential; empty if
        that is not known. For a log line."""
        return ""

    @abstractmethod
    def contains(self, key: ChunkKey) -> bool | None:
        """Whether `key` is known to be here. A hint: memory only, never blocks, may be stale. None
        while a `probe` asks the medium.

        True at once after a `put` of this store returned STORED, False after its own `delete`.
        What other processes did shows later; a `read` that finds nothing corrects it.
        """

    @abstractmethod
    def read(
        self, key: ChunkKey, ranges: Sequence[ReadRange], deadline: float = NO_DEADLINE
    ) -> int | None:
        """Fill the buffers of all ranges; one that reaches past the end is filled up to the end.
        Asks the medium, so it also finds what the index does not know yet. Buffers are written to
        until this returns or raises, not later.

        Returns:
            The size of the whole value in bytes; None if it is absent (the index then forgets it).

        Raises:
            StoreError: the medium failed, or the deadline passed.
        """

    @abstractmethod
    def put(
        self, key: ChunkKey, buffers: Sequence[Buffer], deadline: float = NO_DEADLINE
    ) -> PutResult:
        """Store the concatenation of `buffers`. Atomic: whole or absent, whatever happens.

        Never raises for a full, read-only or failing medium. Makes room by evicting if a quota
        says so, and evicts nothing for a value that can never fit. Does not sync to the medium.
        The buffers together hold at least one byte and may be reused as soon as this returns.
        """

    def put_all(self, values: Sequence[Value], deadline: float = NO_DEADLINE) -> list[PutResult]:
        """Store each of `values` as `put` does; their results, in order."""
        return [self.put(key, buffers, deadline) for key, buffers in values]

    @abstractmethod
    def discard(self, key: ChunkKey, reason: str) -> None:
        """Take a value out because it failed verification: quarantined if the store can, else
        deleted. Never raises. Concurrent discards of one key count once as `store_quarantined`."""

    @abstractmethod
    def delete(self, key: ChunkKey) -> bool:
        """Remove a value. True if this call removed it. Never raises for an absent key."""

    @abstractmethod
    def touch(self, keys: Iterable[ChunkKey]) -> None:
        """Note that these were used. `keys` are in prompt order: the first, the root of the prefix,
        is evicted last. Written back in batches."""

    @abstractmethod
    def stat(self) -> StoreStat:
        """Counts."""

    def tiers(self) -> list[TierStatus]:
        """The stores that this one consists of, nearest first; memory only. Empty for a single
        store."""
        return []

    @abstractmethod
    def close(self) -> None:
        """Stop background work. Idempotent."""

    # -- an index that lags behind what other processes store -----------------------------------

    def probe(self, keys: Sequence[ChunkKey]) -> None:  # noqa: B027  # nothing to ask
        """Have the background find out whether `keys` (a prefix chain, in order) are here, so that
        a later `contains` knows. Dropped when too many wait."""

    def expect(  # noqa: B027  # no other process stores
        self, keys: Sequence[ChunkKey], until: float, held_by: Address | None = None
    ) -> None:
        """A producer was heard to be making `keys` (a prefix chain, in order): look for them in the
        background until they have come or it is `until` (`time.monotonic()` seconds). Those that
        come late are found as before.

        Args:
            held_by: a peer that says that it has them in memory, or is about to. A store that
                `reads_from` it awaits none that it lacks, and looks elsewhere for `ASK_SECONDS`.
        """

    def reads_from(self, peer: Address) -> bool:
        """Whether values are read from the memory of this peer."""
        return False

    def awaits(self, key: ChunkKey) -> bool:
        """Whether a key that `contains` did not find may still come: it was expected, its time is
        not over, and the medium answers. "Not yet" instead of "absent"; ask after `contains`."""
        return False

    def note_stored(self, key: ChunkKey) -> None:  # noqa: B027  # known at once
        """Learn that `key` was stored through another store object of the same URL."""

    def pin_for(self, keys: Sequence[ChunkKey], seconds: float) -> bool:
        """Keep these from eviction for `seconds` from now, also those that are about to be stored.
        Done in the background; longer pins by commands stay. What clients pin takes at most a
        quarter of the quota.

        Returns:
            Whether the store can pin.
        """
        return False

    def wait_indexed(self, timeout: float) -> bool:
        """Block up to `timeout` seconds until the first fill of the index is complete."""
        return True

    def on_result(  # noqa: B027  # asks nothing of its own accord
        self, heard: Callable[[StoreError | None], None]
    ) -> None:
        """Have `heard` called on an I/O thread after each `probe`: with None if the medium
        answered, else with the error."""

    def tier_of(self, key: ChunkKey) -> str:
        """Name of the tier that `key` would be read from: of a single store, its scheme. A
        hint."""
        return self.url.partition(":")[0]

    # -- what is there: for commands; may be slow -----------------------------------------------

    def of(self, namespace: bytes) -> Store:
        """Where the values of a namespace are read and removed: for entries that a `scan` found.
        This store itself where keys alone name values; else one that shares its connections and
        needs no close of its own."""
        return self

    def scan(self) -> Iterator[Entry]:
        """Every stored value at some moment during the call; has no effect on later reads. Keeps a
        bounded number of names in memory: one that a server lists twice, far apart, may come twice.
        Raises StoreError if the store cannot list its values, or the medium failed."""
        raise StoreError(f"{self.url} cannot list its values")

    def stored(self) -> Iterator[Entry]:
        """Every value that the medium lists, also those that an index does not know; size and last
        use are 0 where only the index knows them. Raises as `scan`."""
        return self.scan()

    def recent(self, limit: int) -> Iterator[Entry]:
        """Up to `limit` values, the most recently used first, without listing them all. Raises as
        `scan`."""
        raise StoreError(f"{self.url} does not know which values were used last")

    def namespaces(self) -> dict[bytes, tuple[int, int]]:
        """Values and their bytes by namespace; empty bytes stand for what is not known yet. Raises
        as `scan`."""
        found: dict[bytes, tuple[int, int]] = {}
        for entry in self.scan():
            num_records, num_bytes = found.get(entry.namespace, (0, 0))
            found[entry.namespace] = (num_records + 1, num_bytes + entry.num_bytes)
        return found

    def described(self) -> list[bytes]:
        """The namespaces that may have a description, without listing all values where the store
        keeps a list of these. Raises as `scan`."""
        return list(self.namespaces())

    def describe(self, namespace: bytes, description: str | None = None) -> str | None:
        """What a namespace is, as text for people and tools (`Namespace.as_text`); None if unknown.
        The text is untrusted, and empty if it is too long. A `description` replaces the earlier
        one. Never raises."""
        return None

    def removals(self, limit: int) -> list[Removal] | None:
        """The last `limit` removals, newest first; None where the store remembers none. Raises
        StoreError if the medium failed."""
        return None

    def facts(self) -> dict[str, int | bool | None]:
        """What people may want to know besides the values, by name."""
        return {}

    def gc(self, max_bytes: int | None = None, older_than_seconds: float | None = None) -> GcReport:
        """Remove what was not used for `older_than_seconds`, then the least recently used until the
        rest has at most `max_bytes`; None: the store's quota.

        Raises:
            ConfigError: the store does not know when its values were used.
            StoreError: the store cannot be changed, or the medium failed.
        """
        raise StoreError(f"{self.url} cannot be made smaller by a command")

    def pin(self, keys: Iterable[ChunkKey], until: float) -> int:
        """Do not evict these before `until` (seconds since the epoch; a time that is past ends
        their pins). Pinned values take at most half of the quota. They can be deleted.

        Returns:
            How many of them are here, and so are pinned.

        Raises:
            ConfigError: the store has no quota, or more would be pinned than may be; those before
                are.
            StoreError: the store cannot pin, cannot be changed, or the medium failed.
        """
        raise StoreError(f"{self.url} cannot pin; a directory can")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

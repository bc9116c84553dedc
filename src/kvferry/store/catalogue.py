"""What a store lists, tells and changes for commands: its catalogue.

`Store.catalogue` hands it out, or says why there is none: several stores have one each, a peer has
none. All calls may be slow. The catalogue of a closed store finds nothing; its `gc` and `pin` may
raise StoreError.

What not every store can do is an ability: a subclass of `Catalogue` with abstract methods, from
which the catalogues that have it inherit, and which commands ask for by type (`find`, `of`). So
nothing in between, such as tiers, knows of it, and no store answers for what it lacks.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from typing import NamedTuple, NewType, Protocol, Self

from kvferry.errors import ConfigError, ContractError, Fault, FaultKind, StoreError
from kvferry.types import ChunkKey

StoredBytes = NewType("StoredBytes", int)
"""What a value takes on its medium: the size in listings, of counts, quotas and evictions. That of
its record, as readers get it, is `kvferry.store.base.RecordBytes`. They are equal where a store
keeps values as they are; nothing may count on it."""


class Entry(NamedTuple):
    """One stored value, as `scan` finds it."""

    key: ChunkKey
    stored_bytes: StoredBytes
    last_used: float
    """Seconds since the epoch; 0 if unknown. May lag, as uses are written back in batches."""
    namespace: bytes = b""
    """The namespace that it belongs to; empty if the store does not know."""
    pinned_until: float = 0.0
    """Seconds since the epoch; the value is not evicted before. 0: not pinned."""


class Removal(NamedTuple):
    """One value that was removed, or found to be gone."""

    key: ChunkKey
    stored_bytes: StoredBytes
    at: float
    """Seconds since the epoch."""
    reason: str
    """evicted, deleted, damaged, or vanished: the file was removed from outside."""
    detail: str
    by: str
    """The process that removed it, or found it gone."""


class GcReport(NamedTuple):
    """What was removed to make a store smaller, and what is stored now."""

    removed_records: int
    removed_bytes: int  # as stored
    used_bytes: int


def too_many_pins(num_pinned: int) -> ConfigError:
    """Return the refusal of pins beyond half of the quota, where `num_pinned` values are pinned."""
    return ConfigError(
        f"{num_pinned:,} records are pinned now, and these would be too many: pins may take half "
        "of the quota, so that others are still stored; raise max_bytes or pin less"
    )


class Contract:
    """What a store's author writes: a class that lacks methods is refused by their names."""

    def __new__(cls, *_args: object, **_options: object) -> Self:
        if lacking := sorted(getattr(cls, "__abstractmethods__", ())):
            raise ContractError(f"{cls.__name__} lacks {', '.join(lacking)}")
        return super().__new__(cls)


class HasCatalogue(Protocol):
    """A `Store`."""

    url: str

    def catalogue(self) -> Catalogue: ...


class Catalogue(Contract, ABC):
    """The values of one store, and what it knows of them. Thread-safe, as the store is."""

    @classmethod
    def find(cls, store: HasCatalogue) -> Self | None:
        """Return the catalogue of a store; None if it does not have the ability that this class is.
        Raises StoreError if there is none now."""
        found = store.catalogue()
        return found if isinstance(found, cls) else None

    @classmethod
    def of(cls, store: HasCatalogue, lacks: str) -> Self:
        """As `find`, but where the ability is missing, raise a StoreError that says so: the URL,
        and `lacks`."""
        found = cls.find(store)
        if found is None:
            raise StoreError(FaultKind.UNUSABLE, f"{store.url} {lacks}")
        return found

    @abstractmethod
    def scan(self) -> Iterator[Entry]:
        """Yield every value that is stored throughout the call; of those that come or go meanwhile,
        any may be missing. Has no effect on later reads. Keeps a bounded number of names in memory:
        a name that a server lists twice, far apart, may come twice.
        Raises StoreError if the medium failed."""

    def stored(self) -> Iterator[Entry]:
        """Yield every value that the medium lists, also those that an index does not know. Size and
        last use are 0 where only the index knows them. Raises as `scan`."""
        return self.scan()

    def namespaces(self) -> dict[bytes, tuple[int, int]]:
        """Number of values and of their stored bytes by namespace. Empty bytes stand for a
        namespace that is not known yet. Raises as `scan`."""
        found: dict[bytes, tuple[int, int]] = {}
        for entry in self.scan():
            num_records, used = found.get(entry.namespace, (0, 0))
            found[entry.namespace] = num_records + 1, used + entry.stored_bytes
        return found

    def described(self) -> list[bytes]:
        """The namespaces that may have a description. Does not list all values where the store
        keeps a list of namespaces. Raises as `scan`."""
        return list(self.namespaces())

    @abstractmethod
    def description(self, namespace: bytes) -> str | None:
        """The text of `Store.describe`; None if there is none. It is untrusted, and empty or cut if
        it is too long. Raises StoreError if the medium failed."""

    @abstractmethod
    def notice(self, text: str | None = None) -> str | None:
        """The notice of what commands erased (`kvferry.store.erasures`); None if there is none, or
        the store keeps none. A given `text` replaces it. The text is untrusted. Raises StoreError:
        that there is none is not known."""

    @abstractmethod
    def facts(self) -> dict[str, int | bool | None]:
        """Facts about the store for people to read, by name."""

    @abstractmethod
    def gc(self, max_bytes: int | None = None, older_than_seconds: float | None = None) -> GcReport:
        """Remove unpinned values: those not used for `older_than_seconds`, then the least recently
        used, until all that stay have at most `max_bytes` (None: the store's quota, if any).

        Raises:
            ConfigError: the store does not know when its values were used.
            StoreError: the store cannot be changed by commands, or the medium failed.
        """


class Indexed(Catalogue):
    """The ability of a store with an index on its medium: it knows what was used and removed."""

    @abstractmethod
    def lists(self, key: ChunkKey) -> bool:
        """Whether the index lists `key`, whose value may be gone. Raises as `scan`."""

    @abstractmethod
    def recent(self, limit: int) -> Iterator[Entry]:
        """Yield up to `limit` values, the most recently used first, without listing all. Raises
        as `scan`."""

    @abstractmethod
    def removals(self, limit: int) -> list[Removal]:
        """The last `limit` removals, newest first. Raises StoreError if the medium failed."""

    @abstractmethod
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
            StoreError: the store cannot be changed, or the medium failed.
        """


def pin_for_client(
    catalogues: Iterable[Catalogue | Fault], keys: Sequence[ChunkKey], until: float
) -> bool:
    """Pin those of `keys` that are there, in each tier that can: see `Indexed.pin`. Whether one
    can, and clients have not pinned enough there. Never raises."""
    is_pinned = False
    for found in catalogues:
        with suppress(ConfigError, StoreError):
            if isinstance(found, Indexed):
                found.pin(keys, until, by_client=True)
                is_pinned = True
    return is_pinned

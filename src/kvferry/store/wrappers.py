"""The base of stores that stand in front of another store and change one thing about it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

from kvferry.errors import StoreError
from kvferry.store.base import (
    NO_DEADLINE,
    Address,
    Buffer,
    Entry,
    GcReport,
    PutResult,
    ReadRange,
    Removal,
    Store,
    StoreStat,
    TierStatus,
)
from kvferry.types import ChunkKey


class WrapperStore(Store):
    """A store that hands every call to `inner`; `put_all` becomes one `put` after another.
    Subclasses override what they change.

    Closing the wrapper closes the inner store.
    """

    def __init__(self, inner: Store) -> None:
        self.inner = inner
        self.url = inner.url
        self.multi_process = inner.multi_process
        self.quarantines = inner.quarantines

    @property
    def takes_values(self) -> bool:
        return self.inner.takes_values

    @property
    def refusal(self) -> str:
        return self.inner.refusal

    def contains(self, key: ChunkKey) -> bool | None:
        return self.inner.contains(key)

    def read(
        self, key: ChunkKey, ranges: Sequence[ReadRange], deadline: float = NO_DEADLINE
    ) -> int | None:
        return self.inner.read(key, ranges, deadline)

    def put(
        self, key: ChunkKey, buffers: Sequence[Buffer], deadline: float = NO_DEADLINE
    ) -> PutResult:
        return self.inner.put(key, buffers, deadline)

    def discard(self, key: ChunkKey, reason: str) -> None:
        self.inner.discard(key, reason)

    def delete(self, key: ChunkKey) -> bool:
        return self.inner.delete(key)

    def touch(self, keys: Iterable[ChunkKey]) -> None:
        self.inner.touch(keys)

    def stat(self) -> StoreStat:
        return self.inner.stat()

    def close(self) -> None:
        self.inner.close()

    def probe(self, keys: Sequence[ChunkKey]) -> None:
        self.inner.probe(keys)

    def expect(
        self, keys: Sequence[ChunkKey], until: float, held_by: Address | None = None
    ) -> None:
        self.inner.expect(keys, until, held_by)

    def reads_from(self, peer: Address) -> bool:
        return self.inner.reads_from(peer)

    def awaits(self, key: ChunkKey) -> bool:
        return self.inner.awaits(key)

    def note_stored(self, key: ChunkKey) -> None:
        self.inner.note_stored(key)

    def wait_indexed(self, timeout: float) -> bool:
        return self.inner.wait_indexed(timeout)

    def on_result(self, heard: Callable[[StoreError | None], None]) -> None:
        self.inner.on_result(heard)

    def tier_of(self, key: ChunkKey) -> str:
        return self.inner.tier_of(key)

    def of(self, namespace: bytes) -> Store:
        values = self.inner.of(namespace)
        return self if values is self.inner else values

    def scan(self) -> Iterator[Entry]:
        return self.inner.scan()

    def stored(self) -> Iterator[Entry]:
        return self.inner.stored()

    def recent(self, limit: int) -> Iterator[Entry]:
        return self.inner.recent(limit)

    def namespaces(self) -> dict[bytes, tuple[int, int]]:
        return self.inner.namespaces()

    def described(self) -> list[bytes]:
        return self.inner.described()

    def describe(self, namespace: bytes, description: str | None = None) -> str | None:
        return self.inner.describe(namespace, description)

    def removals(self, limit: int) -> list[Removal] | None:
        return self.inner.removals(limit)

    def facts(self) -> dict[str, int | bool | None]:
        return self.inner.facts()

    def gc(self, max_bytes: int | None = None, older_than_seconds: float | None = None) -> GcReport:
        return self.inner.gc(max_bytes, older_than_seconds)

    def pin(self, keys: Iterable[ChunkKey], until: float, *, by_client: bool = False) -> int:
        return self.inner.pin(keys, until, by_client=by_client)

    def tiers(self) -> list[TierStatus]:
        return self.inner.tiers()

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {self.inner!r}>"

"""The base of stores that stand in front of another store and change one thing about it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from kvferry.errors import Fault, StoreError
from kvferry.store.base import (
    NO_DEADLINE,
    Address,
    Buffer,
    Put,
    ReadRange,
    RecordBytes,
    Store,
    StoreStat,
    TierStatus,
    Where,
)
from kvferry.store.catalogue import Catalogue
from kvferry.types import ChunkKey


class WrapperStore(Store):
    """A store that hands every call to `inner`; `put_all` becomes one `put` after another, and
    `check_medium` a `read`. Subclasses override what they change.

    Closing the wrapper closes the inner store. Views of other namespaces share its attributes.
    """

    __slots__ = ("inner",)

    def __init__(self, inner: Store) -> None:
        self.inner = inner
        self.url = inner.url
        self.multi_process = inner.multi_process
        self.quarantines = inner.quarantines

    def in_namespace(self, namespace: bytes) -> Store:
        values = self.inner.in_namespace(namespace)
        if values is self.inner:
            return self
        view = type(self).__new__(type(self))
        view.__dict__ = self.__dict__
        view.inner = values
        return view

    def catalogues(self) -> Sequence[Catalogue | Fault]:
        return self.inner.catalogues()

    def describe(self, namespace: bytes, description: str) -> None:
        self.inner.describe(namespace, description)

    def accepts(self) -> Fault | None:
        return self.inner.accepts()

    def where(self, key: ChunkKey) -> Where:
        return self.inner.where(key)

    def read(
        self, key: ChunkKey, ranges: Sequence[ReadRange], deadline: float = NO_DEADLINE
    ) -> RecordBytes | None:
        return self.inner.read(key, ranges, deadline)

    def put(self, key: ChunkKey, buffers: Sequence[Buffer], deadline: float = NO_DEADLINE) -> Put:
        return self.inner.put(key, buffers, deadline)

    def discard(self, key: ChunkKey, reason: str) -> None:
        self.inner.discard(key, reason)

    def delete(self, key: ChunkKey) -> bool:
        return self.inner.delete(key)

    def touch(self, keys: Iterable[ChunkKey]) -> None:
        self.inner.touch(keys)

    def stat(self) -> StoreStat:
        return self.inner.stat()

    def tiers(self) -> list[TierStatus]:
        return self.inner.tiers()

    def tier_of(self, key: ChunkKey) -> str:
        return self.inner.tier_of(key)

    def erased_since(self, number: int) -> Sequence[str]:
        return self.inner.erased_since(number)

    def probe(self, keys: Sequence[ChunkKey], *, again: bool = False) -> Where:
        return self.inner.probe(keys, again=again)

    def learn(self, keys: Sequence[ChunkKey], holder: Address | None = None) -> bool:
        return self.inner.learn(keys, holder)

    def wait_indexed(self, timeout: float) -> bool:
        return self.inner.wait_indexed(timeout)

    def on_result(self, heard: Callable[[StoreError | None], None]) -> None:
        self.inner.on_result(heard)

    def close(self) -> None:
        self.inner.close()

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {self.inner!r}>"

"""Stores that stand in front of another store and change one thing about it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import ClassVar, Self

from kvferry.store.base import (
    Buffer,
    Entry,
    PutResult,
    Source,
    Store,
    StoreStat,
    SupportsNamespaces,
    SupportsProbe,
    SupportsScan,
    SupportsShardedWrite,
)
from kvferry.types import ChunkKey


class ScanDelegate:
    """`SupportsScan` for a wrapper whose inner store has it."""

    inner: SupportsScan

    def scan(self) -> Iterator[Entry]:
        return self.inner.scan()


class NamespacesDelegate:
    """`SupportsNamespaces` for a wrapper whose inner store has it."""

    inner: SupportsNamespaces

    def namespaces(self) -> dict[bytes, tuple[int, int]]:
        return self.inner.namespaces()

    def describe(self, namespace: bytes, description: str | None = None) -> str | None:
        return self.inner.describe(namespace, description)


class ProbeDelegate:
    """`SupportsProbe` for a wrapper whose inner store has it."""

    inner: SupportsProbe

    def probe(self, keys: Sequence[ChunkKey]) -> None:
        self.inner.probe(keys)

    def note_stored(self, key: ChunkKey) -> None:
        self.inner.note_stored(key)

    def wait_indexed(self, timeout: float) -> bool:
        return self.inner.wait_indexed(timeout)


class ShardedWriteDelegate:
    """`SupportsShardedWrite` for a wrapper whose inner store has it."""

    inner: SupportsShardedWrite

    def begin(self, key: ChunkKey, num_bytes: int) -> str | PutResult:
        return self.inner.begin(key, num_bytes)

    def write_at(self, session: str, offset: int, buffers: Sequence[Buffer]) -> bool:
        return self.inner.write_at(session, offset, buffers)

    def commit(self, session: str, head: Buffer) -> PutResult:
        return self.inner.commit(session, head)

    def abort(self, session: str) -> None:
        self.inner.abort(session)


class WrapperStore(Store):
    """Hands every call to `inner`. Subclasses override what they change.

    `isinstance(wrapper, SupportsScan)` must answer for the inner store, and every caller asks just
    once, at construction. So the object made is of a subclass that has, besides this class, one
    delegate from `abilities` for each optional Protocol which `inner` has. A subclass that changes
    an optional method replaces the delegate in `abilities`; one that defined the method itself
    would claim the ability for every inner store.

    Closing the wrapper closes the inner store.
    """

    abilities: ClassVar[tuple[tuple[type, type], ...]] = (
        (SupportsScan, ScanDelegate),
        (SupportsNamespaces, NamespacesDelegate),
        (SupportsProbe, ProbeDelegate),
        (SupportsShardedWrite, ShardedWriteDelegate),
    )

    def __new__(cls, inner: Store, *args: object, **kwargs: object) -> Self:
        delegates = tuple(
            delegate for protocol, delegate in cls.abilities if isinstance(inner, protocol)
        )
        made = type(cls.__name__, (cls, *delegates), {"__module__": cls.__module__})
        instance: Self = object.__new__(made)
        return instance

    def __init__(self, inner: Store) -> None:
        self.inner = inner
        self.url = inner.url
        self.multi_process = inner.multi_process

    def contains(self, key: ChunkKey) -> bool:
        return self.inner.contains(key)

    def open_read(self, key: ChunkKey) -> Source | None:
        return self.inner.open_read(key)

    def put(self, key: ChunkKey, buffers: Sequence[Buffer]) -> PutResult:
        return self.inner.put(key, buffers)

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

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {self.inner!r}>"

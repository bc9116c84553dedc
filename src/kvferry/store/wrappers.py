"""Stores that stand in front of another store and change one thing about it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar, Self

from kvferry.store.base import (
    NO_DEADLINE,
    Buffer,
    PutResult,
    ReadRange,
    Store,
    StoreStat,
    SupportsNamespaces,
    SupportsProbe,
    SupportsRecent,
    SupportsScan,
    SupportsShardedWrite,
)
from kvferry.types import ChunkKey


def _delegate(protocol: type) -> type:
    """A class whose methods are those of an optional Protocol, handed to `inner`."""

    def forward(name: str) -> Callable[..., Any]:
        return lambda self, *args: getattr(self.inner, name)(*args)

    return type(
        protocol.__name__,
        (),
        {name: forward(name) for name in vars(protocol) if not name.startswith("_")},
    )


_DELEGATES = {
    protocol: _delegate(protocol)
    for protocol in (
        SupportsScan,
        SupportsRecent,
        SupportsNamespaces,
        SupportsProbe,
        SupportsShardedWrite,
    )
}


class WrapperStore(Store):
    """Hands every call to `inner`. Subclasses override what they change.

    `isinstance(wrapper, SupportsScan)` must answer for the inner store, and every caller asks just
    once, at construction. So the object made is of a subclass that has the methods of each optional
    Protocol which `inner` has. A subclass that changes an optional method names a class with all
    methods of that Protocol in `abilities`; one that defined the method itself would claim the
    ability for every inner store.

    Closing the wrapper closes the inner store.
    """

    abilities: ClassVar[Mapping[type, type]] = {}

    def __new__(cls, inner: Store, *args: object, **kwargs: object) -> Self:
        delegates = _DELEGATES | dict(cls.abilities)
        bases = [each for protocol, each in delegates.items() if isinstance(inner, protocol)]
        made = type(cls.__name__, (cls, *bases), {"__module__": cls.__module__})
        instance: Self = object.__new__(made)
        return instance

    def __init__(self, inner: Store) -> None:
        self.inner = inner
        self.url = inner.url
        self.multi_process = inner.multi_process

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

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {self.inner!r}>"

"""Which idle chunk of the host pool is evicted next.

The pool keeps the chunks that no request uses in an `EvictionOrder`. The order decides nothing
else, so `kvferry simulate` replays the classes that run here, and those that might
(`kvferry.simulate.policies`). docs/simulate.md shows what the alternatives to `Lru` gain.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Sequence
from typing import Generic, Protocol, TypeVar

K = TypeVar("K", bound=Hashable)


class EvictionOrder(Protocol[K]):
    """The idle chunks, ordered by their worth. Runs in: scheduler thread; not thread-safe.

    A chunk that a request uses is removed, and added again at the end of the use.
    """

    def add(self, key: K) -> None:
        """A chunk became idle, just after its use. Adding an idle chunk counts as a use."""

    def remove(self, key: K) -> None:
        """A chunk is used, or was given up; without effect if it is not idle."""

    def touch(self, keys: Sequence[K]) -> None:
        """A request used a prefix: of its idle chunks, the root is evicted last."""

    def evict(self) -> K:
        """Remove and return the chunk of the least worth.

        Raises:
            KeyError: no chunk is idle.
        """

    def __contains__(self, key: object) -> bool: ...

    def __len__(self) -> int: ...


class Lru(Generic[K]):
    """Evicts the least recently used chunk. See `EvictionOrder`.

    The chunks of a prefix are used together, and `touch` puts the root last. So a prompt loses its
    end first, and a chunk never stays behind without its parents.
    """

    __slots__ = ("_order",)

    def __init__(self) -> None:
        self._order: OrderedDict[K, None] = OrderedDict()

    def add(self, key: K) -> None:
        self._order[key] = None
        self._order.move_to_end(key)

    def remove(self, key: K) -> None:
        self._order.pop(key, None)

    def touch(self, keys: Sequence[K]) -> None:
        order = self._order
        for key in reversed(keys):
            if key in order:
                order.move_to_end(key)

    def evict(self) -> K:
        return self._order.popitem(last=False)[0]

    def __contains__(self, key: object) -> bool:
        return key in self._order

    def __len__(self) -> int:
        return len(self._order)

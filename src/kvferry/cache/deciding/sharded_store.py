"""The store as the scheduler role sees it, where ranks may be on several machines.

A rank whose memory this process cannot open writes the rows that it holds as a record of its own, a
shard. From then on a chunk is here if its whole record is, or the shard of the first rank: that the
others have theirs, only their reads can tell.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kvferry.cache.deciding.rank_slots import RankSlots
from kvferry.store.base import ABSENT, ASKED, HERE, Store, Where
from kvferry.store.wrapper import WrapperStore
from kvferry.types import ChunkKey

MAX_NAMES = 1 << 16
"""Most keys of shards that are remembered."""


class ShardedStore(WrapperStore):
    """Finds shards under the keys of the whole records. Runs in: scheduler thread, but for
    `discard` and `delete`. Of a namespace it is the store itself until ranks are apart, so that
    look-ups of ranks on one machine pay nothing.

    `touch` is of whole records: each rank touches its own shards (`CachePlan.touches`).

    Args:
        ranks: knows whether ranks are apart, and what each holds.
    """

    def __init__(self, inner: Store, ranks: RankSlots) -> None:
        super().__init__(inner)
        self._ranks = ranks
        self._names: dict[ChunkKey, tuple[ChunkKey, ...]] = {}

    def in_namespace(self, namespace: bytes) -> Store:
        if self._ranks.are_apart:
            return super().in_namespace(namespace)
        return self.inner.in_namespace(namespace)

    def _names_of(self, key: ChunkKey) -> tuple[ChunkKey, ...]:
        found = self._names.get(key)
        if found is None:
            if len(self._names) >= MAX_NAMES:
                self._names.clear()
            found = self._names[key] = self._ranks.first_names(key)
        return found

    def where(self, key: ChunkKey) -> Where:
        found = self.inner.where(key)
        if found is HERE or not self._ranks.counts(key):
            return found
        for name in self._names_of(key):
            other = self.inner.where(name)
            if other is HERE:
                return other
            if other is not ABSENT and found is not ASKED:
                found = other
        return found

    def probe(self, keys: Sequence[ChunkKey], *, again: bool = False) -> Where:
        if self._ranks.are_apart:
            # By turns: a store goes on while it has some of what it was asked for.
            keys = [name for key in keys for name in (key, *self._names_of(key))]
        return self.inner.probe(keys, again=again)

    def tier_of(self, key: ChunkKey) -> str:
        names = (key, *self._names_of(key)) if self._ranks.are_apart else ()
        here = (name for name in names if self.inner.where(name) is HERE)
        return self.inner.tier_of(next(here, key))

    # -- any thread -----------------------------------------------------------------------------

    def discard(self, key: ChunkKey, reason: str) -> None:
        self._each(key, lambda name: self.inner.discard(name, reason))

    def delete(self, key: ChunkKey) -> bool:
        return any(self._each(key, self.inner.delete))

    def _each(self, key: ChunkKey, do: Callable[[ChunkKey], object]) -> list[object]:
        return [do(name) for name in dict.fromkeys(self._ranks.names_of([key]))]

"""The store as the scheduler role sees it, where ranks may be on several machines.

A rank whose memory this process cannot open writes the rows that it holds as a record of its own, a
shard. From then on a chunk is here if its whole record is, or the shard of the first rank: that the
others have theirs, only their reads can tell.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kvferry.cache.deciding.rank_slots import RankSlots
from kvferry.store.base import ABSENT, ASKED, HERE, Address, Store, Where
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
        self._names: dict[ChunkKey, ChunkKey] = {}

    def in_namespace(self, namespace: bytes) -> Store:
        if self._ranks.are_apart:
            return super().in_namespace(namespace)
        return self.inner.in_namespace(namespace)

    def _shard_of(self, key: ChunkKey) -> ChunkKey:
        found = self._names.get(key)
        if found is None:
            if len(self._names) >= MAX_NAMES:
                self._names.clear()
            found = self._names[key] = self._ranks.shards[0].of(key)
        return found

    def where(self, key: ChunkKey) -> Where:
        found = self.inner.where(key)
        if found is HERE or not self._ranks.counts(key):
            return found
        other = self.inner.where(self._shard_of(key))
        return found if other is ABSENT or (found is ASKED and other is not HERE) else other

    def probe(self, keys: Sequence[ChunkKey], *, again: bool = False) -> Where:
        if self._ranks.are_apart:
            # By turns: a store goes on while it has some of what it was asked for.
            keys = [name for key in keys for name in (key, self._shard_of(key))]
        return self.inner.probe(keys, again=again)

    def learn(self, keys: Sequence[ChunkKey], holder: Address | None = None) -> bool:
        if holder is not None or not self._ranks.are_apart:
            return self.inner.learn(keys, holder)
        self._ranks.stored(keys)
        return self.inner.learn([self._shard_of(key) for key in keys])

    def tier_of(self, key: ChunkKey) -> str:
        is_whole = not self._ranks.are_apart or self.inner.where(key) is HERE
        return self.inner.tier_of(key if is_whole else self._shard_of(key))

    # -- any thread -----------------------------------------------------------------------------

    def discard(self, key: ChunkKey, reason: str) -> None:
        self._each(key, lambda name: self.inner.discard(name, reason))

    def delete(self, key: ChunkKey) -> bool:
        return any(self._each(key, self.inner.delete))

    def _each(self, key: ChunkKey, do: Callable[[ChunkKey], object]) -> list[object]:
        return [do(name) for name in dict.fromkeys(self._ranks.names_of([key]))]

"""The store as the scheduler role sees it, where ranks may be on several machines.

A rank whose memory this process cannot open writes the rows that it holds as a record of its own, a
shard. From then on a chunk is here if its whole record is, or the shard of the first rank: that the
others have theirs, only their reads can tell.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from kvferry.cache.deciding.rank_slots import RankSlots
from kvferry.store.base import ABSENT, ASKED, HERE, Address, Store, Where
from kvferry.store.wrapper import WrapperStore
from kvferry.types import ChunkKey

MAX_NAMES = 1 << 16
"""Most keys of shards that are remembered, and most chunks that are known to lack a shard."""


class ShardedStore(WrapperStore):
    """Finds shards under the keys of the whole records. Runs in: scheduler thread, but for
    `discard`, `delete` and `names_of`. Of a namespace it is the store itself until ranks are apart,
    so that look-ups of ranks on one machine pay nothing.

    Args:
        ranks: knows whether ranks are apart, and what each holds.
    """

    def __init__(self, inner: Store, ranks: RankSlots) -> None:
        super().__init__(inner)
        self._ranks = ranks
        self._names: dict[ChunkKey, ChunkKey] = {}
        # Chunks that not all ranks have stored, as far as this process knows.
        self._lacking: dict[ChunkKey, None] = {}

    @property
    def is_divided(self) -> bool:
        """Whether ranks write shards."""
        return self._ranks.are_apart

    def in_namespace(self, namespace: bytes) -> Store:
        if self.is_divided:
            return super().in_namespace(namespace)
        return self.inner.in_namespace(namespace)

    def _shard_of(self, key: ChunkKey) -> ChunkKey:
        found = self._names.get(key)
        if found is None:
            if len(self._names) >= MAX_NAMES:
                self._names.clear()
            found = self._names[key] = self._ranks.shards[0].of(key)
        return found

    def has_whole(self, key: ChunkKey) -> bool:
        """Whether the whole record is known to be here."""
        return self.inner.where(key) is HERE

    def expect(self, key: ChunkKey) -> None:
        """Note that ranks begin to write shards of a chunk. Until `learn`, none counts."""
        if len(self._lacking) >= MAX_NAMES:
            del self._lacking[next(iter(self._lacking))]
        self._lacking[key] = None

    def where(self, key: ChunkKey) -> Where:
        found = self.inner.where(key)
        if found is HERE or not self.is_divided or key in self._lacking:
            return found
        other = self.inner.where(self._shard_of(key))
        return found if other is ABSENT or (found is ASKED and other is not HERE) else other

    def probe(self, keys: Sequence[ChunkKey], *, again: bool = False) -> Where:
        if self.is_divided:  # by turns: a store goes on while it has some of what it was asked for
            keys = [name for key in keys for name in (key, self._shard_of(key))]
        return self.inner.probe(keys, again=again)

    def learn(self, keys: Sequence[ChunkKey], holder: Address | None = None) -> bool:
        if holder is not None or not self.is_divided:
            return self.inner.learn(keys, holder)
        for key in keys:
            self._lacking.pop(key, None)
        return self.inner.learn([self._shard_of(key) for key in keys])

    def tier_of(self, key: ChunkKey) -> str:
        return self.inner.tier_of(self._stored(key))

    def touch(self, keys: Iterable[ChunkKey]) -> None:
        self.inner.touch([self._stored(key) for key in keys])

    def _stored(self, key: ChunkKey) -> ChunkKey:
        return self._shard_of(key) if self.is_divided and not self.has_whole(key) else key

    # -- any thread -----------------------------------------------------------------------------

    def names_of(self, keys: Sequence[ChunkKey]) -> list[ChunkKey]:
        """Return the keys, and those of all shards of these records."""
        shards = self._ranks.shards if self.is_divided else []
        return [name for key in keys for name in (key, *(shard.of(key) for shard in shards))]

    def discard(self, key: ChunkKey, reason: str) -> None:
        self._each(key, lambda name: self.inner.discard(name, reason))

    def delete(self, key: ChunkKey) -> bool:
        return any(self._each(key, self.inner.delete))

    def _each(self, key: ChunkKey, do: Callable[[ChunkKey], object]) -> list[object]:
        return [do(name) for name in dict.fromkeys(self.names_of([key]))]

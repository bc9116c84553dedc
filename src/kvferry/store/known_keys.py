"""Which keys are known to be in a store, for look-ups that may neither block nor lock."""

from __future__ import annotations

from kvferry.types import ChunkKey

NUM_SETS = 32
_MAX_BANNED = 4096


class KnownKeys:
    """Which keys are known to be there: the answer to `contains`, without a lock. A hint.

    Memory per key: 31 bytes of it, a 64-byte object (the first byte tells the set and three bits
    that nobody misses among 248), plus 27 to 73 bytes of hash table at the fill levels of Python's
    sets. 32 of them stay below 150 bytes a key from 1e3 to 1e6.

    Args:
        learns: False where nobody looks keys up: then none is added, so that it does not grow.
    """

    def __init__(self, learns: bool = True) -> None:
        self.learns = learns
        self._sets: list[set[bytes]] = [set() for _ in range(NUM_SETS)]
        self._banned: dict[ChunkKey, None] = {}

    def __len__(self) -> int:
        return sum(map(len, self._sets))

    def contains(self, key: ChunkKey) -> bool:
        return key[1:] in self._sets[key[0] >> 3]

    def add(self, key: ChunkKey) -> None:
        if self.learns and key not in self._banned:
            self._sets[key[0] >> 3].add(key[1:])

    def discard(self, key: ChunkKey) -> None:
        self._sets[key[0] >> 3].discard(key[1:])

    def ban(self, key: ChunkKey) -> None:
        """Forget a key whose record is broken and cannot be taken out; do not learn it again."""
        if len(self._banned) < _MAX_BANNED:
            self._banned[key] = None
        self.discard(key)

    def stored(self, key: ChunkKey) -> None:
        """We have just written it: an earlier `ban` no longer holds."""
        self._banned.pop(key, None)
        self.add(key)

    def clear(self) -> None:
        self._sets = [set() for _ in range(NUM_SETS)]

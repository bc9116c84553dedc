"""Which keys are known to be in a store, for look-ups that may neither block nor lock."""

from __future__ import annotations

from kvferry.types import ChunkKey

_MAX_BANNED = 4096


class KnownKeys:
    """Which keys are known to be there: the answer to `contains`, without a lock. A hint.

    Args:
        learns: False where keys are never looked up: then none is added, so that it does not grow.
    """

    def __init__(self, learns: bool = True) -> None:
        self.learns = learns
        self._keys: set[ChunkKey] = set()
        self._banned: set[ChunkKey] = set()

    def contains(self, key: ChunkKey) -> bool:
        return key in self._keys

    def add(self, key: ChunkKey) -> None:
        if self.learns and key not in self._banned:
            self._keys.add(key)

    def discard(self, key: ChunkKey) -> None:
        self._keys.discard(key)

    def ban(self, key: ChunkKey) -> None:
        """Forget a key whose record is broken and cannot be taken out; do not learn it again."""
        if len(self._banned) < _MAX_BANNED:
            self._banned.add(key)
        self.discard(key)

    def stored(self, key: ChunkKey) -> None:
        """We have just written it: an earlier `ban` no longer holds."""
        self._banned.discard(key)
        self.add(key)

    def clear(self) -> None:
        self._keys = set()

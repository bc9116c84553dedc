"""Which keys are known to be there, in memory: the answer to `contains`.

A hint in both directions. It is filled from directory listings (no file is touched), kept fresh by
our own writes and removals, by probes, and by what the system tells of directories; those of which
it does not tell are listed again when they changed.

Memory per key: 31 bytes of it, a 64-byte object (the first byte tells the shard and three bits that
nobody misses among 248), plus 27 to 73 bytes of hash table at the fill levels of Python's sets.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable

from kvferry.store.file.layout import NUM_SHARDS, shard_of
from kvferry.types import ChunkKey

_MAX_BANNED = 4096


class KeyIndex:
    """Thread-safe; `contains` takes no lock."""

    def __init__(self) -> None:
        self._shards: list[set[bytes]] = [set() for _ in range(NUM_SHARDS)]
        self._lock = threading.Lock()
        # Changes to the shard that is being listed: the listing may or may not have seen them.
        self._listed_shard = -1
        self._changes: dict[bytes, bool] = {}
        self._banned: dict[ChunkKey, None] = {}

    def __len__(self) -> int:
        return sum(map(len, self._shards))

    def contains(self, key: ChunkKey) -> bool:
        return key[1:] in self._shards[key[0] >> 3]  # shard_of, without the call

    def add(self, key: ChunkKey, *, stored: bool = False) -> None:
        """Note that a key is there.

        Args:
            key: the key.
            stored: we have just written it, so an earlier `ban` no longer holds.
        """
        with self._lock:
            if stored:
                self._banned.pop(key, None)
            elif key in self._banned:
                return
            self._set(key, present=True)

    def discard(self, key: ChunkKey) -> None:
        """Note that a key is not there."""
        with self._lock:
            self._set(key, present=False)

    def ban(self, key: ChunkKey) -> None:
        """Forget a key whose record is broken and cannot be taken out; do not learn it again."""
        with self._lock:
            self._set(key, present=False)
            while len(self._banned) >= _MAX_BANNED:
                del self._banned[next(iter(self._banned))]
            self._banned[key] = None

    def start_listing(self, shard: int) -> None:
        """A directory listing of `shard` begins; one at a time."""
        with self._lock:
            self._listed_shard = shard
            self._changes = {}

    def end_listing(self, keys: Iterable[ChunkKey]) -> None:
        """Replace the shard by what was listed, except where we know better by now."""
        listed = {key[1:] for key in keys}
        with self._lock:
            shard = self._listed_shard
            self._listed_shard = -1
            for rest, present in self._changes.items():
                (listed.add if present else listed.discard)(rest)
            for key in self._banned:
                if shard_of(key) == shard:
                    listed.discard(key[1:])
            self._shards[shard] = listed

    def learn(self, take: Callable[[], tuple[Iterable[tuple[ChunkKey, bool]], bool]]) -> bool:
        """Follow news of keys that came or went, oldest first. They are taken under our lock: what
        is discarded from then on, no earlier news puts back.

        Args:
            take: gives the next ones, and whether that is all.

        Returns:
            Whether that was all.
        """
        with self._lock:
            news, is_all = take()
            for key, present in news:
                if not (present and key in self._banned):
                    self._set(key, present=present)
        return is_all

    def clear(self) -> None:
        with self._lock:
            self._shards = [set() for _ in range(NUM_SHARDS)]

    def _set(self, key: ChunkKey, *, present: bool) -> None:
        shard, rest = shard_of(key), key[1:]
        if present:
            self._shards[shard].add(rest)
        else:
            self._shards[shard].discard(rest)
        if shard == self._listed_shard:
            self._changes[rest] = present


class NoIndex(KeyIndex):
    """Of a store that nobody looks keys up in: learns nothing, so that it does not grow."""

    def _set(self, key: ChunkKey, *, present: bool) -> None:
        pass

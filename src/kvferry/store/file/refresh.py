"""Keeping the index fresh: the first fill, news of directories, probes. Runs in: background."""

from __future__ import annotations

import math
import stat
import threading
from collections import deque
from collections.abc import Callable, Sequence

from kvferry.observe import Observer
from kvferry.store.file.fileio import FileIO
from kvferry.store.file.index import KeyIndex
from kvferry.store.file.layout import NUM_SHARDS, Layout, key_of_record_name, shard_of
from kvferry.store.file.shard_news import ShardNews
from kvferry.types import ChunkKey

POLL_SECONDS = 1.0
_DUTY = 20
"""A round of listing is followed by at least so many times its own duration of rest."""
_AGAIN_DUTY = 500
"""So is the listing of a shard for no other reason than that it was long ago."""
_SETTLED_SECONDS = 1.0
"""A directory that changed later than that may change again within the same tick of its clock."""
_MAX_PROBES = 256


class IndexRefresh:
    """Lists one shard per step, or two, so that a probe never waits long. Of a shard that was
    listed the system tells what changes; where it does not, a shard is listed again when its
    directory changed. What went wrong all the same (nothing is told of directories above that are
    moved, and what we note ourselves may come after the news of what happened since) is right again
    after half a minute: in that time each shard is listed once more, in large stores later.

    `probe` and `wait_complete` are for any thread, the rest for one.
    """

    def __init__(
        self,
        io: FileIO,
        layout: Layout,
        index: KeyIndex,
        *,
        clock: Callable[[], float],
        wall: Callable[[], float],
        observer: Observer,
    ) -> None:
        self._io = io
        self._layout = layout
        self._index = index
        self._clock = clock
        self._wall = wall
        self._observer = observer
        self._news = ShardNews(io, layout)
        self._complete = threading.Event()
        self._probes: deque[tuple[ChunkKey, ...]] = deque()
        self._changed_at = [-1] * NUM_SHARDS
        self._next_shard = 0
        self._next_again = 0
        self._round_started = 0.0
        self._rests_until = self._lists_again_at = -math.inf

    @property
    def is_complete(self) -> bool:
        """Whether every shard was listed at least once."""
        return self._complete.is_set()

    def wait_complete(self, timeout: float) -> bool:
        return self._complete.wait(timeout)

    def request(self, keys: Sequence[ChunkKey]) -> None:
        """Queue a probe of a prefix chain; dropped when too many wait."""
        if len(self._probes) >= _MAX_PROBES:
            self._observer.count("store_probe_dropped")
            return
        self._probes.append(tuple(keys))

    def answer_probes(self) -> None:
        """Look up every queued chain on disk, up to its first absent key.

        Raises:
            OSError: the medium failed.
        """
        while self._probes:
            for key in self._probes.popleft():
                if not self._index.contains(key) and not self._find(key):
                    break

    def step(self) -> float:
        """Learn what is told, and list the next shard that changed and of which nothing is told.
        Returns the seconds until the next step is worth it.

        Raises:
            OSError: the medium failed.
        """
        while not self._index.learn(self._news.take):
            pass
        now = self._clock()
        if self._next_shard == 0:
            if now < self._rests_until:
                return min(POLL_SECONDS, self._rests_until - now)
            self._round_started = now
            self._list_one_again(now)
        shard = self._next_shard
        while shard < NUM_SHARDS and not self._list_if_changed(shard):
            shard += 1
        self._next_shard = shard + 1
        if self._next_shard < NUM_SHARDS:
            return 0.0
        self._next_shard = 0
        self._complete.set()
        now = self._clock()
        self._rests_until = now + _DUTY * (now - self._round_started)
        return POLL_SECONDS

    def close(self) -> None:
        """Hear of nothing any more."""
        self._news.close()

    def _list_one_again(self, now: float) -> None:
        """The next of the shards that are told of."""
        if not self.is_complete or now < self._lists_again_at:
            return
        shard = self._next_again
        self._next_again = (shard + 1) % NUM_SHARDS
        if self._news.is_told_of(shard):
            self._news.leave(shard)
            self._list_if_changed(shard)
            self._lists_again_at = now + _AGAIN_DUTY * (self._clock() - now)

    def _list_if_changed(self, shard: int) -> bool:
        if self._news.is_told_of(shard):
            return False
        path = self._layout.shard(shard)
        try:
            changed_at = self._io.lstat(path).st_mtime_ns
        except FileNotFoundError:
            changed_at = 0
        if changed_at == self._changed_at[shard]:
            return False
        is_told = self._news.follow(shard)  # before: what happens from here on is told
        try:
            self._list(shard)
        except OSError:
            self._news.leave(shard)
            raise
        settled = self._wall() - changed_at / 1e9 > _SETTLED_SECONDS
        self._changed_at[shard] = changed_at if settled and not is_told else -1
        return True

    def _list(self, shard: int) -> None:
        self._index.start_listing(shard)
        try:
            names = self._io.listdir(self._layout.shard(shard))
        except FileNotFoundError:
            names = []
        keys = [key for name in names if (key := key_of_record_name(name)) is not None]
        self._index.end_listing(key for key in keys if shard_of(key) == shard)

    def _find(self, key: ChunkKey) -> bool:
        try:
            found = stat.S_ISREG(self._io.lstat(self._layout.record(key)).st_mode)
        except FileNotFoundError:
            found = False
        if found:
            self._index.add(key)
        return found

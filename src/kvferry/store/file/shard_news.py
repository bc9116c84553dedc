"""Which records come and go, as the system tells it: instead of listing a directory again whenever
something in it changed, which takes the longer the more is stored."""

from __future__ import annotations

from contextlib import suppress

from kvferry.store.file import inotify
from kvferry.store.file.fileio import FileIO
from kvferry.store.file.inotify import Inotify, News, tells_all
from kvferry.store.file.layout import Layout, key_of_record_name, shard_of
from kvferry.types import ChunkKey

_APPEARS = inotify.CREATE | inotify.MOVED_TO
_DISAPPEARS = inotify.DELETE | inotify.MOVED_FROM
_CHANGES = _APPEARS | _DISAPPEARS | inotify.MOVE_SELF | inotify.NO_LINKS
_NEWS_BYTES = 4096


class ShardNews:
    """The shards of one store that are listened to. For one thread.

    On file systems that other machines may change, too, it listens to none.
    """

    def __init__(self, io: FileIO, layout: Layout) -> None:
        self._io = io
        self._layout = layout
        self._inotify: Inotify | None = None
        self._is_asked = False
        self._tells: dict[int, bool] = {}  # by device: shards may be on several
        self._shards: dict[int, int] = {}  # by watch

    def is_told_of(self, shard: int) -> bool:
        return shard in self._shards.values()

    def follow(self, shard: int) -> bool:
        """Listen to a shard from now on; whether that can be done."""
        if not self._is_asked:
            self._is_asked = True
            self._inotify = _listen()
        if self._inotify is None:
            return False
        path = self._layout.shard(shard)
        try:
            if not self._is_local(path):
                return False
            watch = self._inotify.add(path, _CHANGES)
        except OSError:
            return False  # it is not there, is a link, or the user has no watch left
        # Of a directory that is two shards, or became another one, it would not be told which.
        return self._shards.setdefault(watch, shard) == shard

    def leave(self, shard: int) -> None:
        """Listen to a shard no longer: it is to be listed, and followed, anew."""
        for watch in [watch for watch, of in self._shards.items() if of == shard]:
            del self._shards[watch]
            if self._inotify is not None:
                with suppress(OSError):
                    self._inotify.remove(watch)

    def take(self) -> tuple[list[tuple[ChunkKey, bool]], bool]:
        """What was told since the last call, in the order it happened: keys, and whether their
        record is there by now. A piece at a time, and whether this was all. Memory only."""
        if self._inotify is None:
            return [], True
        try:
            news, is_all = self._inotify.take(_NEWS_BYTES)
        except OSError:
            news, is_all = [News(-1, inotify.OVERFLOW, "")], True
        found = []
        for watch, what, name in news:
            if what & inotify.OVERFLOW:
                self._leave_all()
            elif (shard := self._shards.get(watch)) is None:
                continue
            elif what & inotify.GONE:
                self.leave(shard)
            elif (key := key_of_record_name(name)) is not None and shard_of(key) == shard:
                found.append((key, bool(what & _APPEARS)))
        return found, is_all

    def close(self) -> None:
        """Listen to nothing any more. Idempotent."""
        self._leave_all()
        if self._inotify is not None:
            self._inotify.close()
            self._inotify = None

    def _leave_all(self) -> None:
        for shard in set(self._shards.values()):
            self.leave(shard)

    def _is_local(self, path: str) -> bool:
        device = self._io.lstat(path).st_dev
        if device not in self._tells:
            self._tells[device] = tells_all(path)
        return self._tells[device]


def _listen() -> Inotify | None:
    try:
        return Inotify()
    except OSError:
        return None  # of the queues that a user may have, none is left

"""Which records come and go, as the system tells it: instead of listing a directory again whenever
something in it changed, which takes the longer the more is stored."""

from __future__ import annotations

from kvferry.store.file import inotify
from kvferry.store.file.fileio import FileIO
from kvferry.store.file.inotify import Inotify, News, tells_all
from kvferry.store.file.layout import Layout, key_of_record_name, shard_of
from kvferry.types import ChunkKey

_APPEARS = inotify.CREATE | inotify.MOVED_TO
_DISAPPEARS = inotify.DELETE | inotify.MOVED_FROM
_MASK = _APPEARS | _DISAPPEARS | inotify.DELETE_SELF | inotify.MOVE_SELF


class ShardNews:
    """The shards of one store that are listened to. For one thread.

    On file systems that other machines may change, too, it listens to none.
    """

    def __init__(self, io: FileIO, layout: Layout) -> None:
        self._io = io
        self._layout = layout
        self._inotify: Inotify | None = None
        self._has_tried = False
        self._shards: dict[int, int] = {}  # by watch
        self._places: dict[int, tuple[int, int]] = {}  # device and inode, by shard

    def is_told_of(self, shard: int) -> bool:
        return shard in self._places

    def follow(self, shard: int) -> bool:
        """Listen to a shard from now on; whether that can be done."""
        if not self._has_tried:
            self._has_tried = True
            self._inotify = _listen(self._layout.root)
        if self._inotify is None:
            return False
        try:
            place = self._place(shard)
            self._shards[self._inotify.add(self._layout.shard(shard), _MASK)] = shard
        except OSError:
            return False  # it is not there, or the user has no watch left
        self._places[shard] = place
        return True

    def leave(self, shard: int) -> None:
        """Listen to a shard no longer."""
        self._places.pop(shard, None)
        for watch in [watch for watch, of in self._shards.items() if of == shard]:
            del self._shards[watch]
            if self._inotify is not None:
                self._inotify.remove(watch)

    def check(self, shard: int) -> None:
        """Leave a shard whose path leads somewhere else by now: of a directory above that is moved
        away nothing is told.

        Raises:
            OSError: the medium failed.
        """
        if shard not in self._places:
            return
        try:
            is_same = self._places[shard] == self._place(shard)
        except FileNotFoundError:
            is_same = False
        if not is_same:
            self.leave(shard)

    def take(self) -> tuple[list[tuple[ChunkKey, bool]], bool]:
        """What was told since the last call, in the order it happened: keys, and whether their
        record is there by now. And whether this was all. Memory only."""
        if self._inotify is None:
            return [], True
        try:
            news, is_all = self._inotify.take()
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
        """Listen to nothing any more, for good. Idempotent."""
        self._has_tried = True
        if self._inotify is not None:
            self._inotify.close()
            self._inotify = None
        self._leave_all()

    def _leave_all(self) -> None:
        """News were lost: every shard is to be listed, and followed, anew."""
        for shard in list(self._places):
            self.leave(shard)

    def _place(self, shard: int) -> tuple[int, int]:
        status = self._io.lstat(self._layout.shard(shard))
        return status.st_dev, status.st_ino


def _listen(root: str) -> Inotify | None:
    try:
        return Inotify() if tells_all(root) else None
    except OSError:
        return None  # of the queues that a user may have, none is left

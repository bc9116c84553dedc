"""What the system tells of changes to records, so that one can know without a look at the medium.

Linux tells of writes, renames and removals as they happen, whoever does them on this machine
(inotify). The news lie in memory until somebody takes them: nothing of ours runs when they come.
Not told of: what other machines do to a network file system, what is written through a memory map,
a directory above that is moved away.
"""

from __future__ import annotations

import ctypes
import errno
import os
import struct
import threading

from kvferry.store.file.layout import key_of_record_name
from kvferry.types import ChunkKey

_MODIFY, _MOVED_FROM, _MOVED_TO = 0x2, 0x40, 0x80
_DELETE, _DELETE_SELF, _MOVE_SELF = 0x200, 0x400, 0x800
_UNMOUNT, _OVERFLOW, _IGNORED = 0x2000, 0x4000, 0x8000
_ONLY_DIRECTORIES = 0x1000000
_MASK = _MODIFY | _MOVED_FROM | _MOVED_TO | _DELETE | _DELETE_SELF | _MOVE_SELF | _ONLY_DIRECTORIES
_ALL_LOST = _DELETE_SELF | _MOVE_SELF | _UNMOUNT | _OVERFLOW | _IGNORED

_EVENT = struct.Struct("iIII")
"""Watch, what happened, a cookie, bytes of the name that follows."""

_READ_BYTES = 64 << 10
"""Some 700 events, half a millisecond: what one call takes at most."""

_MAX_CHANGED = 8192


class RecordWatch:
    """Changes to the records of a store, counted. Thread-safe.

    Raises:
        OSError: the system does not tell (any more of us).
    """

    def __init__(self) -> None:
        try:
            self._libc = ctypes.CDLL(None, use_errno=True)
            self._fd = self._libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
        except AttributeError as error:
            raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS)) from error
        if self._fd < 0:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        self._process = os.getpid()
        self._lock = threading.Lock()
        self._watched: set[str] = set()
        self._moment = 0
        self._complete_since = 0  # changes before this moment may have been lost
        self._changed: dict[ChunkKey, int] = {}

    def follow(self, directory: str) -> int | None:
        """Listen to what is done in a directory of records; the present moment. None if that cannot
        be done. May block on the medium."""
        if directory not in self._watched:
            path = os.fsencode(directory)
            # Not under the lock, which look-ups take.
            if self._libc.inotify_add_watch(self._fd, path, ctypes.c_uint32(_MASK)) < 0:
                return None
            with self._lock:
                self._watched.add(directory)
        with self._lock:
            # While older news wait, none is right: they would be taken for later ones. And they may
            # say that it was another directory of this name that was followed.
            is_known = self._take_news() and directory in self._watched
            return self._moment if is_known else None

    def is_unchanged(self, key: ChunkKey, since: int) -> bool:
        """Whether nothing was done to a record since a moment. Memory only; False if not known."""
        with self._lock:
            is_complete = self._take_news() and since >= self._complete_since
            return is_complete and self._changed.get(key, 0) <= since

    def close(self) -> None:
        """Know nothing from now on. Idempotent."""
        with self._lock:
            if self._fd >= 0:
                os.close(self._fd)
                self._fd = -1

    def _take_news(self) -> bool:
        """Whether this was all."""
        if self._fd < 0 or os.getpid() != self._process:
            return False  # a process that was forked would take the news from its parent
        try:
            news = os.read(self._fd, _READ_BYTES)
        except BlockingIOError:
            return True
        except OSError:
            self._lose_all()
            return False
        at = 0
        while at < len(news):
            _, what, _, size = _EVENT.unpack_from(news, at)
            at += _EVENT.size
            self._note(what, news[at : at + size])
            at += size
        # The next event may not have fitted.
        return len(news) < _READ_BYTES - _EVENT.size - 256

    def _note(self, what: int, name: bytes) -> None:
        if what & _ALL_LOST:
            self._lose_all()
            return
        key = key_of_record_name(os.fsdecode(name.rstrip(b"\0")))
        if key is None:
            return
        if len(self._changed) >= _MAX_CHANGED:
            self._lose_all()
        self._moment += 1
        self._changed[key] = self._moment

    def _lose_all(self) -> None:
        """Directories are to be followed anew, and all that was read before is in doubt."""
        self._watched.clear()
        self._changed.clear()
        self._moment += 1
        self._complete_since = self._moment

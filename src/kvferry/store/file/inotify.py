"""What Linux tells of changes in directories.

It tells of what anybody on this machine does, as it happens. The news lie in the kernel until
somebody takes them: nothing of ours runs when they come. Not told of: what other machines do to a
network file system, what is written through a memory map, a directory above that is moved away.
"""

from __future__ import annotations

import ctypes
import errno
import os
import struct
from typing import NamedTuple

from kvferry.store.file.mounts import file_system

MODIFY, MOVED_FROM, MOVED_TO, CREATE = 0x2, 0x40, 0x80, 0x100
DELETE, DELETE_SELF, MOVE_SELF = 0x200, 0x400, 0x800
UNMOUNT, OVERFLOW, IGNORED = 0x2000, 0x4000, 0x8000
GONE = DELETE_SELF | MOVE_SELF | UNMOUNT | IGNORED
"""The directory itself: no more is told of what its path leads to."""
NO_LINKS = 0x2000000
"""Not to listen to what a symbolic link leads to."""
_ONLY_DIRECTORIES = 0x1000000

_EVENT = struct.Struct("iIII")
"""Watch, what happened, a cookie, bytes of the name that follows."""

_MAX_EVENT_BYTES = _EVENT.size + 256

_LOCAL = frozenset(
    {"bcachefs", "btrfs", "ext2", "ext3", "ext4", "f2fs", "overlay", "ramfs", "tmpfs", "xfs", "zfs"}
)


class News(NamedTuple):
    """One change.

    Attributes:
        watch: the directory, as `Inotify.add` numbered it.
        what: flags of this module.
        name: what changed in the directory; empty for the directory itself.
    """

    watch: int
    what: int
    name: str


class Inotify:
    """One queue of news. A forked child has none: it would take the news from its parent.

    Raises:
        OSError: the system does not tell, or not any more of us.
    """

    def __init__(self) -> None:
        try:
            self._libc = ctypes.CDLL(None, use_errno=True)
            self._fd = self._libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
        except AttributeError as error:
            raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS)) from error
        if self._fd < 0:
            raise _last_error()
        self._process = os.getpid()

    def add(self, directory: str, what: int) -> int:
        """Listen to a directory; the number of its watch, the same for every path that leads to it.
        May block on the medium.

        Raises:
            OSError: it cannot be listened to.
        """
        self._check()
        flags = ctypes.c_uint32(what | _ONLY_DIRECTORIES)
        watch: int = self._libc.inotify_add_watch(self._fd, os.fsencode(directory), flags)
        if watch < 0:
            raise _last_error()
        return watch

    def remove(self, watch: int) -> None:
        """Listen to a directory no longer. News of it may still lie in the queue.

        Raises:
            OSError: closed, or in a forked child.
        """
        self._check()
        self._libc.inotify_rm_watch(self._fd, watch)

    def take(self, max_bytes: int) -> tuple[list[News], bool]:
        """News, in the order they happened, and whether these are all there are by now. Memory
        only.

        Args:
            max_bytes: what to take at most: a record's news are 112, half a microsecond.

        Raises:
            OSError: closed, or in a forked child.
        """
        self._check()
        try:
            data = os.read(self._fd, max_bytes)
        except BlockingIOError:
            return [], True
        news = []
        at = 0
        while at < len(data):
            watch, what, _, size = _EVENT.unpack_from(data, at)
            at += _EVENT.size
            news.append(News(watch, what, os.fsdecode(data[at : at + size].rstrip(b"\0"))))
            at += size
        # The next event may not have fitted.
        return news, len(data) < max_bytes - _MAX_EVENT_BYTES

    def close(self) -> None:
        """Idempotent."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def _check(self) -> None:
        if self._fd < 0 or os.getpid() != self._process:
            raise OSError(errno.EBADF, "not listening")


def tells_all(directory: str) -> bool:
    """Whether a directory is on a file system that nobody but this machine changes. False if that
    is not known."""
    return file_system(directory) in _LOCAL


def _last_error() -> OSError:
    number = ctypes.get_errno()
    return OSError(number, os.strerror(number))

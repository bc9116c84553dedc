"""The bytes of one file: reading it, writing it.

Direct I/O with `auto` is one rule: a record that is not in the page cache is read past it, and
everything else goes through it.
"""

from __future__ import annotations

import ctypes
import errno
import os
import random
from collections.abc import Sequence
from typing import Literal

from kvferry.errors import StoreError
from kvferry.store.base import Buffer, Source

DirectIO = Literal["auto", "off"]

BLOCK_BYTES = 4096
"""Alignment that O_DIRECT is content with on every common file system."""

_MIN_DIRECT_BYTES = 64 * 1024
"""Below, a look at the page cache costs more than it can save."""

_IOV_MAX = 1024
_O_DIRECT: int = getattr(os, "O_DIRECT", 0)
_RWF_NOWAIT: int = getattr(os, "RWF_NOWAIT", 0)
_UNSUPPORTED = frozenset({errno.EOPNOTSUPP, errno.ENOTSUP, errno.EINVAL, errno.ENOSYS})


def open_at(name: str, flags: int, directory: int) -> int:
    """Open a file in a directory, through no link; one that is made is private to the user."""
    return os.open(name, flags | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600, dir_fd=directory)


def as_views(buffers: Sequence[Buffer]) -> list[memoryview]:
    """The non-empty buffers as flat byte views."""
    views = [memoryview(buffer) for buffer in buffers]
    return [view.cast("B") for view in views if view.nbytes]


def write_all(fd: int, views: Sequence[memoryview], offset: int) -> None:
    """Write all of `views` one after the other from `offset` on, however short single calls are.

    Raises:
        OSError: the medium refused; what was written so far is unspecified.
    """
    waiting = list(views)
    while waiting:
        written = os.pwritev(fd, waiting[:_IOV_MAX], offset)
        if written <= 0:
            raise OSError(errno.EIO, "a write made no progress")
        offset += written
        while waiting and written >= waiting[0].nbytes:
            written -= waiting.pop(0).nbytes
        if written:
            waiting[0] = waiting[0][written:]


class FileSource(Source):
    """One open record. Keeps its bytes even if the record is removed meanwhile. Not thread-safe.

    Whether it is in the page cache, one random page tells, read with RWF_NOWAIT, which fails if the
    disk would be needed. It is one page, because even a failing attempt makes the kernel start
    reading ahead what was asked for, and a random one, because it is in the cache from then on.

    Args:
        fd: the file, which is closed with this.
        size: of the file, in bytes.
        direct: whether reads may go past the page cache.
    """

    def __init__(self, fd: int, size: int, *, direct: bool) -> None:
        self.size = size
        self._fd = fd
        self._direct_fd = -1
        self._direct = direct and _O_DIRECT != 0 and _RWF_NOWAIT != 0 and size >= _MIN_DIRECT_BYTES
        self._cached: bool | None = None  # not looked yet

    def is_cached(self) -> bool:
        if self._direct and self._cached is None:
            page = random.randrange(self.size // BLOCK_BYTES) * BLOCK_BYTES
            try:
                os.posix_fadvise(self._fd, 0, 0, os.POSIX_FADV_RANDOM)
                self._cached = self._read_cached(memoryview(bytearray(BLOCK_BYTES)), page) > 0
            except OSError:
                self._cached = False  # a medium that fails: the read itself will say so
        return not self._direct or bool(self._cached)

    def read_into(self, buffer: memoryview, offset: int) -> int:
        if self._fd < 0:
            raise StoreError("this record is closed")
        target = buffer.cast("B")
        done = 0
        try:
            while done < target.nbytes:
                count = self._read_some(target[done:], offset + done)
                if count == 0:
                    break
                done += count
        except OSError as error:
            raise StoreError(f"a stored record cannot be read: {error.strerror}") from error
        return done

    def close(self) -> None:
        for fd in (self._fd, self._direct_fd):
            if fd >= 0:
                os.close(fd)
        self._fd = self._direct_fd = -1

    def __del__(self) -> None:
        self.close()

    def _read_some(self, target: memoryview, offset: int) -> int:
        inside = min(target.nbytes, self.size - offset)
        whole = inside - inside % BLOCK_BYTES
        if (
            self._direct
            and whole >= _MIN_DIRECT_BYTES
            and _is_aligned(offset)
            and _is_aligned(address_of(target))
        ):
            if self.is_cached() and self._direct:
                count = self._read_cached(target, offset)
                self._cached = count >= inside  # if not, the rest comes past the cache
                if count:
                    return count
            count = self._read_direct(target[:whole], offset)
            if count:
                return count
        return os.preadv(self._fd, [target], offset)

    def _read_cached(self, target: memoryview, offset: int) -> int:
        """What the page cache holds from `offset` on; 0 if that is nothing."""
        try:
            return os.preadv(self._fd, [target], offset, _RWF_NOWAIT)
        except BlockingIOError:
            return 0
        except OSError as error:
            if error.errno not in _UNSUPPORTED:
                raise
            # Warm and cold look alike here, and a warm direct read is the worse mistake.
            self._direct = False
            return 0

    def _read_direct(self, target: memoryview, offset: int) -> int:
        """Past the page cache; 0 at the end, and if that is not possible (any more)."""
        if not self._direct:
            return 0
        try:
            if self._direct_fd < 0:
                # Through /proc: the very same file, whatever its name means by now.
                self._direct_fd = os.open(
                    f"/proc/self/fd/{self._fd}", os.O_RDONLY | os.O_CLOEXEC | _O_DIRECT
                )
            return os.preadv(self._direct_fd, [target], offset)
        except OSError as error:
            if error.errno not in _UNSUPPORTED and error.errno != errno.ENOENT:
                raise
            self._direct = False
            return 0


def address_of(buffer: memoryview) -> int:
    """Memory address of a writable, contiguous buffer."""
    return ctypes.addressof(ctypes.c_char.from_buffer(buffer))


def _is_aligned(value: int) -> bool:
    return value % BLOCK_BYTES == 0

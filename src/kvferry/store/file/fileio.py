"""File I/O of a directory store: opens, reads and writes single files, on the caller's thread.

With direct I/O set to `auto`, large aligned reads of a record that is not in the page cache bypass
that cache. All other I/O goes through it. `FileStore`, `Directory` and `Writing` call this module.
"""

from __future__ import annotations

import ctypes
import errno
import os
import random
import time
from collections.abc import Sequence

from kvferry.errors import FaultKind, StoreError
from kvferry.store.base import Buffer, ReadRange

PRIVATE = 0o600
"""Mode of a file that only this user may read and write."""

BLOCK_BYTES = 4096
"""Alignment that is enough for O_DIRECT on every common file system."""

_MIN_DIRECT_BYTES = 64 * 1024
"""For smaller reads, a look at the page cache costs more than direct I/O can save."""

_MAX_READ_BYTES = 16 << 20
"""Most bytes that one system call reads; the deadline is checked before each."""

_IOV_MAX = 1024
_O_DIRECT: int = getattr(os, "O_DIRECT", 0)
_RWF_NOWAIT: int = getattr(os, "RWF_NOWAIT", 0)
_UNSUPPORTED = frozenset(
    {errno.EOPNOTSUPP, errno.ENOTSUP, errno.EINVAL, errno.ENOSYS, errno.ENOENT}
)


def open_at(path: str, flags: int, mode: int = PRIVATE) -> int:
    """Open a file; a symbolic link in its place is an error. A file that this makes is private to
    the user, or has this `mode`, whatever the umask."""
    fd = os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC, PRIVATE)
    if mode != PRIVATE:
        try:
            os.fchmod(fd, mode)
        except OSError:
            os.close(fd)
            raise
    return fd


def as_views(buffers: Sequence[Buffer]) -> list[memoryview]:
    """Return the non-empty buffers as flat byte views."""
    views = [memoryview(buffer) for buffer in buffers]
    return [view.cast("B") for view in views if view.nbytes]


def write_all(fd: int, views: Sequence[memoryview], offset: int) -> None:
    """Write all of `views` one after the other from `offset` on, in as many calls as it takes."""
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


class OpenRecord:
    """One open record, readable even after the record is removed. Not thread-safe. Owns `fd`, and
    uses direct I/O only if `direct`. Use as a context manager.

    To find out whether the record is in the page cache, it reads one random page with RWF_NOWAIT,
    which fails if the page is not cached. It reads only one, because even a failing attempt makes
    the kernel read ahead what was asked for. The page is random: this look brings it into the page
    cache, so a fixed one would seem cached ever after.
    """

    def __init__(self, fd: int, size: int, *, direct: bool) -> None:
        self.size = size
        self._fd = fd
        self._direct_fd = -1
        self._direct = direct and _O_DIRECT != 0 and _RWF_NOWAIT != 0 and size >= _MIN_DIRECT_BYTES
        self._looked = False

    def is_cached(self) -> bool:
        """Whether to read through the page cache: the record is likely in it, or direct I/O is not
        used."""
        if self._direct and not self._looked:
            self._looked = True
            page = random.randrange(self.size // BLOCK_BYTES) * BLOCK_BYTES
            try:
                os.posix_fadvise(self._fd, 0, 0, os.POSIX_FADV_RANDOM)
                os.preadv(self._fd, [bytearray(BLOCK_BYTES)], page, _RWF_NOWAIT)
                self._direct = False
            except BlockingIOError:
                pass
            except OSError as error:
                # Without RWF_NOWAIT, cached and uncached records look alike. A direct read of a
                # cached one is the worse mistake. If the medium failed, the read itself says so.
                self._direct = error.errno not in _UNSUPPORTED
        return not self._direct

    def read(self, ranges: Sequence[ReadRange], deadline: float) -> None:
        """See `Store.read`; raises OSError if the medium refuses."""
        for start, buffer in ranges:
            offset, target = start, buffer.cast("B")
            while target:
                if time.monotonic() > deadline:
                    raise StoreError(FaultKind.LATE, "a stored record was not read in time")
                count = self._read_some(target[:_MAX_READ_BYTES], offset)
                if count == 0:
                    break
                target, offset = target[count:], offset + count

    def __enter__(self) -> OpenRecord:
        return self

    def __exit__(self, *exc: object) -> None:
        os.close(self._fd)
        if self._direct_fd >= 0:
            os.close(self._direct_fd)

    def _read_some(self, target: memoryview, offset: int) -> int:
        inside = min(target.nbytes, self.size - offset)
        whole = inside - inside % BLOCK_BYTES
        address = ctypes.addressof(ctypes.c_char.from_buffer(target))
        is_aligned = offset % BLOCK_BYTES == 0 and address % BLOCK_BYTES == 0
        if whole >= _MIN_DIRECT_BYTES and is_aligned and not self.is_cached():
            try:
                if self._direct_fd < 0:
                    # /proc opens the same file, even if its name belongs to another file by now.
                    name = f"/proc/self/fd/{self._fd}"
                    self._direct_fd = os.open(name, os.O_RDONLY | os.O_CLOEXEC | _O_DIRECT)
                return os.preadv(self._direct_fd, [target[:whole]], offset)
            except OSError as error:
                if error.errno not in _UNSUPPORTED:
                    raise
                self._direct = False
        return os.preadv(self._fd, [target], offset)

"""Reading one record: from the page cache if it is there, else past it.

A warm read is a copy. A cold one is fastest with O_DIRECT: no second copy, no readahead guess.
Which one it is, a sample tells: one random page of the range is read with RWF_NOWAIT, which fails
if the disk would be needed. It is one page, and the file is marked for random access, because even
a failing attempt makes the kernel start reading ahead what was asked for; asked for the whole
range, it cost a third of the speed. It is a random one, because that page is in the cache from then
on.

The price of direct reads: a record read cold is not in the page cache afterwards.
"""

from __future__ import annotations

import errno
import os
import random
import stat
from dataclasses import dataclass, field

from kvferry.errors import StoreError
from kvferry.store.base import Source, Stamp
from kvferry.store.file.fileio import (
    BLOCK_BYTES,
    O_DIRECT,
    RWF_NOWAIT,
    FileIO,
    address_of,
    is_aligned,
)

_MIN_DIRECT_BYTES = 64 * 1024
"""Below, a look costs more than it can save."""

_SETTLED_SECONDS = 2.0
"""Clocks of file systems are that coarse: two changes within it may bear one time."""

_UNSUPPORTED = frozenset({errno.EOPNOTSUPP, errno.ENOTSUP, errno.EINVAL, errno.ENOSYS})


@dataclass(slots=True)
class ReadAbilities:
    """What the file system turned out to support; learnt once per store, only ever switched off.

    Attributes:
        direct: direct reads, and telling a cold file from a warm one.
        rng: draws the page to look at.
    """

    direct: bool = O_DIRECT != 0 and RWF_NOWAIT != 0
    rng: random.Random = field(default_factory=random.Random)


def stamp_of(status: os.stat_result, now: float) -> Stamp:
    """The stamp of a file.

    Args:
        status: of the file.
        now: seconds since the epoch.
    """
    # Whatever is done to a file sets the second time. A write sets both, to the same moment; links,
    # renames and noted uses do not.
    times = (status.st_mtime_ns, status.st_ctime_ns)
    settled = now - status.st_ctime > _SETTLED_SECONDS
    return Stamp(
        value=(status.st_dev, status.st_ino, status.st_size),
        changes=times if settled else None,
        written=times[0] == times[1],
    )


class NotARecord(Exception):
    """Something that is no regular file stands where a record should."""


def open_record(io: FileIO, path: str, abilities: ReadAbilities, now: float) -> FileSource | None:
    """Open a record; None if it is absent.

    Args:
        io: system calls.
        path: of the record.
        abilities: of the file system.
        now: seconds since the epoch.

    Raises:
        NotARecord: a directory, link, fifo, socket or device.
        OSError: it cannot be opened.
    """
    try:
        # Without O_NONBLOCK a fifo would wait for a writer for ever.
        fd = io.open(path, os.O_RDONLY | os.O_NONBLOCK)
    except FileNotFoundError:
        return None
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENXIO, errno.ENODEV):
            raise NotARecord(path) from error
        raise
    try:
        status = os.fstat(fd)
    except OSError:
        io.close(fd)
        raise
    if not stat.S_ISREG(status.st_mode):
        io.close(fd)
        raise NotARecord(path)
    return FileSource(io, fd, stamp_of(status, now), status.st_size, abilities)


class FileSource(Source):
    """One open record. Keeps its bytes even if the record is removed meanwhile. Not thread-safe."""

    def __init__(
        self, io: FileIO, fd: int, stamp: Stamp, size: int, abilities: ReadAbilities
    ) -> None:
        self.size = size
        self.stamp = stamp
        self._io = io
        self._fd = fd
        self._direct_fd = -1
        self._is_random = False
        self._abilities = abilities

    def is_cached(self) -> bool:
        if not self._abilities.direct or self.size < _MIN_DIRECT_BYTES:
            return True
        page = self._abilities.rng.randrange(self.size // BLOCK_BYTES) * BLOCK_BYTES
        cached = self._read_cached(memoryview(bytearray(BLOCK_BYTES)), page) > 0
        return cached or not self._abilities.direct

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
                self._io.close(fd)
        self._fd = self._direct_fd = -1

    def __del__(self) -> None:
        self.close()

    def _read_some(self, target: memoryview, offset: int) -> int:
        inside = min(target.nbytes, self.size - offset)
        whole = inside - inside % BLOCK_BYTES
        if whole < _MIN_DIRECT_BYTES or not is_aligned(offset) or not self._abilities.direct:
            return self._io.preadv(self._fd, [target], offset)
        if not is_aligned(address_of(target)):
            return self._io.preadv(self._fd, [target], offset)
        sample = self._abilities.rng.randrange(whole // BLOCK_BYTES) * BLOCK_BYTES
        count = 0
        if self._read_cached(target[sample : sample + BLOCK_BYTES], offset + sample):
            count = self._read_cached(target, offset)
        return (
            count
            or self._read_direct(target[:whole], offset)
            or self._io.preadv(self._fd, [target], offset)
        )

    def _read_cached(self, target: memoryview, offset: int) -> int:
        """What the page cache holds from `offset` on; 0 if that is nothing."""
        try:
            if not self._is_random:
                os.posix_fadvise(self._fd, 0, 0, os.POSIX_FADV_RANDOM)
                self._is_random = True
            return self._io.preadv(self._fd, [target], offset, RWF_NOWAIT)
        except BlockingIOError:
            return 0
        except OSError as error:
            if error.errno not in _UNSUPPORTED:
                raise
            # Warm and cold look alike here, and a warm direct read is the worse mistake.
            self._abilities.direct = False
            return 0

    def _read_direct(self, target: memoryview, offset: int) -> int:
        """Past the page cache; 0 at the end, and if that is not possible (any more)."""
        if not self._abilities.direct:
            return 0
        try:
            if self._direct_fd < 0:
                # Through /proc: the very same file, whatever its name means by now.
                self._direct_fd = os.open(
                    f"/proc/self/fd/{self._fd}", os.O_RDONLY | os.O_CLOEXEC | O_DIRECT
                )
            return self._io.preadv(self._direct_fd, [target], offset)
        except OSError as error:
            if error.errno not in _UNSUPPORTED and error.errno != errno.ENOENT:
                raise
            self._abilities.direct = False
            return 0

"""Reading one record: from the page cache if it is there, else past it.

A warm read is a copy. A cold one is fastest with O_DIRECT: no second copy, no readahead guess.
Which one it is, the kernel tells: a read with RWF_NOWAIT returns what the page cache holds and
stops where the disk would be needed; what is left then goes direct where address, offset and length
allow it. The price: a record read cold is not in the page cache afterwards.
"""

from __future__ import annotations

import errno
import os
import stat
from dataclasses import dataclass

from kvferry.errors import StoreError
from kvferry.store.base import Source
from kvferry.store.file.fileio import (
    BLOCK_BYTES,
    O_DIRECT,
    RWF_NOWAIT,
    FileIO,
    address_of,
    is_aligned,
)

_UNSUPPORTED = frozenset({errno.EOPNOTSUPP, errno.ENOTSUP, errno.EINVAL, errno.ENOSYS})


@dataclass(slots=True)
class ReadAbilities:
    """What the file system turned out to support; learnt once per store, only ever switched off."""

    nowait: bool = RWF_NOWAIT != 0
    direct: bool = O_DIRECT != 0


class NotARecord(Exception):
    """Something that is no regular file stands where a record should."""


def open_record(io: FileIO, path: str, abilities: ReadAbilities) -> FileSource | None:
    """Open a record; None if it is absent.

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
    return FileSource(io, fd, status.st_size, abilities)


class FileSource(Source):
    """One open record. Keeps its bytes even if the record is removed meanwhile. Not thread-safe."""

    def __init__(self, io: FileIO, fd: int, size: int, abilities: ReadAbilities) -> None:
        self.size = size
        self._io = io
        self._fd = fd
        self._direct_fd = -1
        self._abilities = abilities

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
        if self._abilities.nowait:
            count = self._read_cached(target, offset)
            if count is not None:
                return count
        if self._abilities.direct:
            count = self._read_direct(target, offset)
            if count:
                return count
        return self._io.preadv(self._fd, [target], offset)

    def _read_cached(self, target: memoryview, offset: int) -> int | None:
        """What the page cache holds; None if it holds nothing here or cannot tell."""
        try:
            return self._io.preadv(self._fd, [target], offset, RWF_NOWAIT)
        except BlockingIOError:
            return None
        except OSError as error:
            if error.errno not in _UNSUPPORTED:
                raise
            # Warm and cold look alike now, and a warm direct read is the worse mistake.
            self._abilities.nowait = self._abilities.direct = False
            return None

    def _read_direct(self, target: memoryview, offset: int) -> int:
        """The whole blocks at the front of `target`; 0 if that is none."""
        num_bytes = target.nbytes - target.nbytes % BLOCK_BYTES
        if not num_bytes or not is_aligned(offset) or not is_aligned(address_of(target)):
            return 0
        try:
            if self._direct_fd < 0:
                # Through /proc: the very same file, whatever its name means by now.
                self._direct_fd = os.open(
                    f"/proc/self/fd/{self._fd}", os.O_RDONLY | os.O_CLOEXEC | O_DIRECT
                )
            return self._io.preadv(self._direct_fd, [target[:num_bytes]], offset)
        except OSError as error:
            if error.errno not in _UNSUPPORTED and error.errno != errno.ENOENT:
                raise
            self._abilities.direct = False
            return 0

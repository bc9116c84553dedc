"""The system calls of the directory store, behind one object that tests can make fail.

Nothing here decides anything. What the medium refuses comes out as `OSError`; the callers
translate.
"""

from __future__ import annotations

import ctypes
import errno
import os
import stat
from collections.abc import Sequence
from contextlib import suppress

from kvferry.store.base import Buffer

BLOCK_BYTES = 4096
"""Alignment that O_DIRECT is content with on every common file system."""

IOV_MAX = 1024
"""Buffers per vectored call: what POSIX systems allow. More are split."""

NO_FOLLOW = os.O_NOFOLLOW | os.O_CLOEXEC
O_DIRECT: int = getattr(os, "O_DIRECT", 0)
RWF_NOWAIT: int = getattr(os, "RWF_NOWAIT", 0)


class FileIO:
    """One method per system call, nothing added. Subclass it to inject faults.

    Thread-safe. Directories are private to the user, files too, whatever the umask says.
    """

    def open(self, path: str, flags: int) -> int:
        return os.open(path, flags | NO_FOLLOW, 0o600)

    def close(self, fd: int) -> None:
        os.close(fd)

    def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int, flags: int = 0) -> int:
        if flags:
            return os.preadv(fd, buffers, offset, flags)
        return os.preadv(fd, buffers, offset)

    def pwritev(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        return os.pwritev(fd, buffers, offset)

    def truncate(self, fd: int, size: int) -> None:
        os.ftruncate(fd, size)

    def truncate_path(self, path: str) -> None:
        os.close(os.open(path, os.O_WRONLY | os.O_TRUNC | NO_FOLLOW))

    def lstat(self, path: str) -> os.stat_result:
        return os.lstat(path)

    def listdir(self, path: str) -> list[str]:
        return os.listdir(path)

    def mkdir(self, path: str) -> None:
        os.mkdir(path, 0o700)

    def rmdir(self, path: str) -> None:
        os.rmdir(path)

    def link(self, source: str, target: str) -> None:
        os.link(source, target, follow_symlinks=False)

    def rename(self, source: str, target: str) -> None:
        os.rename(source, target)

    def unlink(self, path: str) -> None:
        os.unlink(path)

    def utime(self, path: str, nanoseconds: int) -> None:
        os.utime(path, ns=(nanoseconds, nanoseconds), follow_symlinks=False)


def as_views(buffers: Sequence[Buffer]) -> list[memoryview]:
    """The non-empty buffers as flat byte views."""
    views = [memoryview(buffer) for buffer in buffers]
    return [view.cast("B") for view in views if view.nbytes]


def write_all(io: FileIO, fd: int, views: Sequence[memoryview], offset: int) -> None:
    """Write all of `views` one after the other from `offset` on, however short single calls are.

    Raises:
        OSError: the medium refused; what was written so far is unspecified.
    """
    position = 0
    rest: memoryview | None = None
    while position < len(views):
        batch = list(views[position : position + IOV_MAX])
        if rest is not None:
            batch[0] = rest
        written = io.pwritev(fd, batch, offset)
        if written <= 0:
            raise OSError(errno.EIO, "a write made no progress")
        offset += written
        rest = None
        for view in batch:
            if written < view.nbytes:
                rest = view[written:]
                break
            written -= view.nbytes
            position += 1


def read_up_to(io: FileIO, path: str, size: int) -> bytes:
    """The first `size` bytes of a regular file, fewer if it is shorter.

    Raises:
        OSError: it is absent, not a regular file, or unreadable.
    """
    fd = io.open(path, os.O_RDONLY | os.O_NONBLOCK)
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise OSError(errno.EINVAL, "not a regular file", path)
        buffer = memoryview(bytearray(size))
        done = 0
        while done < size:
            count = io.preadv(fd, [buffer[done:]], done)
            if count == 0:
                break
            done += count
        return bytes(buffer[:done])
    finally:
        io.close(fd)


def ensure_directory(io: FileIO, path: str) -> None:
    """Make one directory if it is not there; its parent must be."""
    try:
        io.mkdir(path)
    except FileExistsError:
        if not stat.S_ISDIR(io.lstat(path).st_mode):
            raise NotADirectoryError(errno.ENOTDIR, "something else is in the way", path) from None


def list_directory(io: FileIO, path: str) -> list[str]:
    """Names in a directory that kvferry made; empty if there is none, or anything else instead. A
    link is not followed: what it leads to is not ours to change.

    Raises:
        OSError: the medium failed.
    """
    try:
        return io.listdir(path) if stat.S_ISDIR(io.lstat(path).st_mode) else []
    except (FileNotFoundError, NotADirectoryError):
        return []


def remove_tree(io: FileIO, path: str) -> None:
    """Delete a directory and all in it, or what stands in its place; no link is followed, and what
    is gone already is fine.

    Raises:
        OSError: something in it cannot be deleted.
    """
    with suppress(FileNotFoundError):
        if not stat.S_ISDIR(io.lstat(path).st_mode):
            io.unlink(path)
            return
        for name in io.listdir(path):
            remove_tree(io, f"{path}/{name}")
        io.rmdir(path)


def exists(io: FileIO, path: str) -> bool:
    """Whether a name is taken. Errors other than absence are raised."""
    try:
        io.lstat(path)
    except FileNotFoundError:
        return False
    return True


def address_of(buffer: memoryview) -> int:
    """Memory address of a writable, contiguous buffer."""
    return ctypes.addressof(ctypes.c_char.from_buffer(buffer))


def is_aligned(value: int) -> bool:
    return value % BLOCK_BYTES == 0

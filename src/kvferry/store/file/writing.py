"""A value on its way into a directory store: a hidden file, until it gets its record's name.

`FileStore` uses one `Writing` for each value that it stores, on its caller's thread.
"""

from __future__ import annotations

import errno
import fcntl
import os
import secrets
import stat
from collections.abc import Sequence
from contextlib import suppress

from kvferry.store.file.directory import (
    HEAD_BYTES,
    Directory,
    lstat_at,
    machine_of,
    record_name,
    remove_any,
    shard_of,
)
from kvferry.store.file.fileio import open_at, write_all
from kvferry.types import ChunkKey

_MAX_TRIES = 8
_NO_LINKS = frozenset({errno.EPERM, errno.EOPNOTSUPP, errno.ENOTSUP, errno.ENOSYS, errno.EMLINK})


class Writing:
    """One value that is being written: a hidden file in the folder `writing`, to which `place`
    gives the name of its record. `close` removes the hidden name. Not thread-safe. Every method but
    `unplace` and `close` raises OSError if the medium refuses.

    Args:
        directory: directory of the store.
        key: key of the value.

    Attributes:
        key: key of the value.
        name: name of the hidden file; empty before there is one.
        num_bytes, head: size and first bytes of what `write` has written.
    """

    def __init__(self, directory: Directory, key: ChunkKey) -> None:
        self.key = key
        self.num_bytes = 0
        self.head = b""
        self.name = ""
        self._directory = directory
        self._handles: list[int] = []
        self._folder = self._shard = -1

    def _kept(self, fd: int) -> int:
        self._handles.append(fd)
        return fd

    def is_taken(self) -> bool:
        """Whether a record has this key."""
        return _is_record(self._find())

    def begin(self) -> int:
        """Make and lock the hidden file, and return its descriptor. The lock shows that the writer
        lives, because the system drops it when the process dies."""
        self._folder = self._kept(self._directory.open("writing", make=True))
        for _ in range(_MAX_TRIES):
            name = f"{self.key.hex()}.{machine_of(self._folder)}.{secrets.token_hex(12)}"
            fd = self._kept(open_at(name, os.O_RDWR | os.O_CREAT | os.O_EXCL, self._folder))
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                is_ours = os.fstat(fd).st_nlink > 0
            except OSError as error:
                is_ours = error.errno != errno.EWOULDBLOCK  # a file system may have no locks
            if is_ours:
                self.name = name
                return fd
            with suppress(OSError):  # an upkeep took it for a dead writer's
                os.unlink(name, dir_fd=self._folder)
        raise OSError(errno.EAGAIN, "no file can be locked")

    def write(self, views: Sequence[memoryview]) -> None:
        """Write all of `views` into a new hidden file."""
        fd = self.begin()
        write_all(fd, views, 0)
        self.num_bytes = sum(view.nbytes for view in views)
        self.head = os.pread(fd, HEAD_BYTES, 0)
        os.close(os.dup(fd))  # a network file system says here what it could not write

    def place(self) -> bool:
        """Give the file its record's name. False if the key is taken: the first writer wins."""
        target, there = record_name(self.key), self._find(make=True)
        if _is_record(there):
            return False
        if there is not None:
            with suppress(FileNotFoundError):
                remove_any(target, self._shard)  # something else in its place
        handles = {"src_dir_fd": self._folder, "dst_dir_fd": self._shard}
        if self._directory.loses_links:
            os.rename(self.name, target, **handles)
            return True
        try:
            os.link(self.name, target, **handles, follow_symlinks=False)
        except OSError as error:
            with suppress(FileNotFoundError):
                # A network file system may send the request twice: then the name is ours already.
                return self._has_name(target)
            if error.errno not in _NO_LINKS:
                raise
            # Without hard links, two writers of one key may both believe to be first. The later one
            # replaces the file of the earlier one with equal bytes.
            os.rename(self.name, target, **handles)
        return True

    def unplace(self) -> None:
        """Undo what `place` did, unless it renamed. Never raises: the upkeep finds what stays."""
        with suppress(OSError):
            if self._has_name(target := record_name(self.key)):
                os.unlink(target, dir_fd=self._shard)

    def close(self) -> None:
        """Remove the hidden name. Idempotent. Never raises: the upkeep finds what stays."""
        if self.name:
            with suppress(OSError):
                remove_any(self.name, self._folder)
        handles, self._handles = self._handles, []
        for fd in handles:
            with suppress(OSError):
                os.close(fd)

    def _find(self, *, make: bool = False) -> os.stat_result | None:
        """Status of what has the record's name, or None. Makes its directory if `make`."""
        try:
            if self._shard < 0:
                self._shard = self._kept(self._directory.open(*shard_of(self.key), make=make))
        except FileNotFoundError:
            if make:
                raise
            return None
        with suppress(FileNotFoundError):
            return lstat_at(record_name(self.key), self._shard)
        return None

    def _has_name(self, name: str) -> bool:
        """Whether `name`, in the directory of the record, is a name of this file."""
        return os.path.samestat(lstat_at(name, self._shard), lstat_at(self.name, self._folder))


def _is_record(status: os.stat_result | None) -> bool:
    return status is not None and stat.S_ISREG(status.st_mode) and status.st_size > 0

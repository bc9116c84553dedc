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
    machine_of,
    record_path,
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
        path: path of the hidden file; empty before there is one.
        num_bytes, head: size and first bytes of what `write` has written.
    """

    def __init__(self, directory: Directory, key: ChunkKey) -> None:
        self.key = key
        self.num_bytes = 0
        self.head = b""
        self.path = ""
        self._directory = directory
        self._record = record_path(directory.root, key)
        self._fd = -1

    def is_taken(self) -> bool:
        """Whether a record has this key."""
        return _is_record(self._find())

    def begin(self) -> int:
        """Make and lock the hidden file, and return its descriptor. The lock shows that the writer
        lives, because the system drops it when the process dies."""
        folder = self._directory.made("writing")
        start = f"{folder}/{self.key.hex()}.{machine_of(folder)}."
        for _ in range(_MAX_TRIES):
            self.path = f"{start}{secrets.token_hex(12)}"
            flags = os.O_RDWR | os.O_CREAT | os.O_EXCL
            self._fd = open_at(self.path, flags, self._directory.file_mode)
            try:
                fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                is_ours = os.fstat(self._fd).st_nlink > 0
            except OSError as error:
                is_ours = error.errno != errno.EWOULDBLOCK  # a file system may have no locks
            if is_ours:
                return self._fd
            self.close()  # an upkeep took it for a dead writer's
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
        self._directory.made(*shard_of(self.key))
        there = self._find()
        if _is_record(there):
            return False
        if there is not None:
            with suppress(FileNotFoundError):
                remove_any(self._record)  # something else in its place
        if self._directory.loses_links:
            os.rename(self.path, self._record)
            return True
        try:
            os.link(self.path, self._record, follow_symlinks=False)
        except OSError as error:
            with suppress(FileNotFoundError):
                # A network file system may send the request twice: then the name is ours already.
                return self._has_record()
            if error.errno not in _NO_LINKS:
                raise
            # Without hard links, two writers of one key may both believe to be first. The later one
            # replaces the file of the earlier one with equal bytes.
            os.rename(self.path, self._record)
        return True

    def unplace(self) -> None:
        """Undo what `place` did, unless it renamed. Never raises: the upkeep finds what stays."""
        with suppress(OSError):
            if self._has_record():
                os.unlink(self._record)

    def close(self) -> None:
        """Remove the hidden name. Idempotent. Never raises: the upkeep finds what stays."""
        if self._fd >= 0:
            with suppress(OSError):
                remove_any(self.path)
            with suppress(OSError):
                os.close(self._fd)
            self._fd = -1

    def _find(self) -> os.stat_result | None:
        """Status of what has the record's name, or None."""
        with suppress(FileNotFoundError):
            return os.lstat(self._record)
        return None

    def _has_record(self) -> bool:
        """Whether the record's name is a name of this file."""
        return os.path.samestat(os.lstat(self._record), os.lstat(self.path))


def _is_record(status: os.stat_result | None) -> bool:
    return status is not None and stat.S_ISREG(status.st_mode) and status.st_size > 0

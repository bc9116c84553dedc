"""Records that the ranks of one machine put together in shared memory before one of them sends it.

No kind of server has to offer more than whole values, and a record is one value there.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import re
import secrets
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from kvferry.store.base import Buffer, PutResult
from kvferry.types import ChunkKey

logger = logging.getLogger(__name__)

_SESSION = re.compile(r"[0-9a-f]{32}")


class _Begun(NamedTuple):
    key: ChunkKey
    fd: int
    """Holds the file's lock, which ends with the process: an unlocked file is a dead writer's."""


class PartFiles:
    """The values under way of one store. Thread-safe.

    Ranks on another machine cannot write parts; their records are not stored. The parts of a
    process that was killed are removed by the next one that opens a store.

    Args:
        parent: where the user's folder is made; shared memory, if there is any.

    Attributes:
        refusal: why the last `begin` was FAILED; empty if it was not.
    """

    def __init__(self, parent: Path | None = None) -> None:
        if parent is None:
            shared = Path("/dev/shm")
            parent = shared if os.access(shared, os.W_OK) else Path(tempfile.gettempdir())
        self._folder = parent / f"kvferry-parts-{os.getuid()}"
        self._lock = threading.Lock()
        self._has_warned = False
        self.refusal = ""
        self._begun: dict[str, _Begun] = {}
        with suppress(OSError):
            self._remove_abandoned()

    def begin(self, key: ChunkKey, num_bytes: int) -> str | PutResult:
        """See `SupportsShardedWrite`."""
        session = secrets.token_hex(16)
        fd = -1
        try:
            self._folder.mkdir(mode=0o700, exist_ok=True)
            with self._opened() as folder:
                flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
                fd = os.open(session, flags, 0o600, dir_fd=folder)
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if not os.fstat(fd).st_nlink:
                raise BlockingIOError(errno.EAGAIN, "taken for a dead writer's")
            # Memory that is full says so now, not by a signal later.
            reserve = getattr(os, "posix_fallocate", None)
            os.ftruncate(fd, num_bytes) if reserve is None else reserve(fd, 0, num_bytes)
        except OSError as error:
            if fd >= 0:
                self._end(session, fd)
            if error.errno not in (errno.ENOSPC, errno.ENOMEM, errno.EDQUOT):
                self.refusal = (
                    f"ranks cannot put records together in {self._folder}: {error.strerror}; it "
                    "must be a folder that this user alone can write to"
                )
                return PutResult.FAILED
            if not self._has_warned:
                self._has_warned = True
                logger.warning(
                    "%s: no room to put a record together: %s; give /dev/shm some gigabytes",
                    self._folder,
                    error.strerror,
                )
            return PutResult.NO_SPACE
        self.refusal = ""
        with self._lock:
            self._begun[session] = _Begun(key, fd)
        return session

    @contextmanager
    def _opened(self) -> Iterator[int]:
        """Handle of the folder. OSError if another user made it, who could change what is in it."""
        flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
        fd = os.open(self._folder, flags)
        try:
            if os.fstat(fd).st_uid != os.getuid():
                raise PermissionError(errno.EPERM, "it is of another user")
            yield fd
        finally:
            os.close(fd)

    def write_at(self, session: str, offset: int, buffers: Sequence[Buffer]) -> bool:
        """See `SupportsShardedWrite`."""
        if _SESSION.fullmatch(session) is None or offset < 0:
            return False
        views = [memoryview(buffer).cast("B") for buffer in buffers if memoryview(buffer).nbytes]
        try:
            with self._opened() as folder:
                flags = os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC
                fd = os.open(session, flags, dir_fd=folder)
            try:
                if offset + sum(map(len, views)) > os.fstat(fd).st_size:
                    return False
                for view in views:
                    while view:
                        written = os.pwrite(fd, view, offset)
                        view, offset = view[written:], offset + written  # noqa: PLW2901
            finally:
                os.close(fd)
        except OSError:
            return False
        return True

    def take(self, session: str, head: Buffer) -> tuple[ChunkKey, bytes] | None:
        """The whole value, with its head; None for a session that is over or never began here.
        The file is gone afterwards."""
        with self._lock:
            begun = self._begun.pop(session, None)
        if begun is None:
            return None
        try:
            if self.write_at(session, 0, [head]):
                with os.fdopen(os.dup(begun.fd), "rb") as file:
                    file.seek(0)
                    return begun.key, file.read()
        except OSError:
            pass
        finally:
            self._end(session, begun.fd)
        return None

    def abort(self, session: str) -> None:
        """Remove what was begun here."""
        with self._lock:
            begun = self._begun.pop(session, None)
        if begun is not None:
            self._end(session, begun.fd)

    def close(self) -> None:
        """Remove all that was begun here."""
        for session in list(self._begun):
            self.abort(session)

    def _end(self, session: str, fd: int) -> None:
        with suppress(OSError), self._opened() as folder:
            os.unlink(session, dir_fd=folder)
        os.close(fd)

    def _remove_abandoned(self) -> None:
        with self._opened() as folder:
            for name in filter(_SESSION.fullmatch, os.listdir(folder)):
                with suppress(OSError):
                    fd = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder)
                    try:
                        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                        os.unlink(name, dir_fd=folder)
                    finally:
                        os.close(fd)

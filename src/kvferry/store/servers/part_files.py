"""Records that the ranks of one machine put together in shared memory before one of them sends it:
servers store whole values only."""

from __future__ import annotations

import errno
import logging
import os
import stat
import tempfile
import threading
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from kvferry.store.base import Buffer, PutResult
from kvferry.store.file.directory import Directory
from kvferry.store.file.fileio import as_views
from kvferry.types import ChunkKey

logger = logging.getLogger(__name__)


class PartFiles:
    """The values under way of one store. Thread-safe.

    Ranks on another machine cannot write parts; their records are not stored. The parts of a
    process that was killed are removed by the next one that opens a store.

    Args:
        parent: where the user's folder is made; shared memory, if there is any.
    """

    def __init__(self, parent: Path | None = None) -> None:
        if parent is None:
            shared = Path("/dev/shm")
            parent = shared if os.access(shared, os.W_OK) else Path(tempfile.gettempdir())
        self._directory = Directory(f"{parent}/kvferry-parts-{os.getuid()}")
        self._lock = threading.Lock()
        self._has_warned = False
        self.refusal = ""  # why the last `begin` was FAILED
        self._begun: dict[str, tuple[ChunkKey, int]] = {}
        with suppress(OSError):
            self._check_folder()
            for name in self._directory.list_files("writing"):
                self._directory.drop_abandoned(name, is_old=False, first=lambda: None)

    def begin(self, key: ChunkKey, num_bytes: int) -> str | PutResult:
        """See `SupportsShardedWrite`."""
        session, fd = "", -1
        try:
            os.makedirs(self._directory.root, mode=0o700, exist_ok=True)
            self._check_folder()
            session, fd = self._directory.begin(key)
            # Memory that is full says so now, not by a signal later.
            reserve = getattr(os, "posix_fallocate", None)
            os.ftruncate(fd, num_bytes) if reserve is None else reserve(fd, 0, num_bytes)
        except OSError as error:
            if fd >= 0:
                self._end(session, fd)
            return self._refused(error)
        self.refusal = ""
        with self._lock:
            self._begun[session] = key, fd
        return session

    def _refused(self, error: OSError) -> PutResult:
        folder, reason = self._directory.root, error.strerror
        if error.errno not in (errno.ENOSPC, errno.ENOMEM, errno.EDQUOT):
            self.refusal = (
                f"ranks cannot put records together in {folder}: {reason}; it must be a folder "
                "that this user alone can write to"
            )
            return PutResult.FAILED
        if not self._has_warned:
            self._has_warned = True
            logger.warning(
                "%s: no room to put a record together: %s; give /dev/shm some gigabytes",
                folder,
                reason,
            )
        return PutResult.NO_SPACE

    def _check_folder(self) -> None:
        """OSError if another user made the folder, who could change what is in it. Once it is ours,
        no other user can replace it: its parent is sticky."""
        status = os.lstat(self._directory.root)
        if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid():
            raise PermissionError(errno.EPERM, "it is of another user")

    def write_at(self, session: str, offset: int, buffers: Sequence[Buffer]) -> bool:
        """See `SupportsShardedWrite`."""
        with suppress(OSError):
            self._check_folder()
            return self._directory.write_at(session, offset, as_views(buffers))
        return False

    def pop(self, session: str, head: Buffer) -> tuple[ChunkKey, bytes] | None:
        """The whole value, with its head; None for a session that is over or never began here.
        The file is gone afterwards."""
        with self._lock:
            key, fd = self._begun.pop(session, (None, -1))
        if key is None:
            return None
        try:
            if self.write_at(session, 0, [head]):
                with suppress(OSError), os.fdopen(os.dup(fd), "rb") as file:
                    file.seek(0)
                    return key, file.read()
        finally:
            self._end(session, fd)
        return None

    def abort(self, session: str) -> None:
        """Remove what was begun here."""
        with self._lock:
            _, fd = self._begun.pop(session, (None, -1))
        if fd >= 0:
            self._end(session, fd)

    def close(self) -> None:
        """Remove all that was begun here."""
        for session in list(self._begun):
            self.abort(session)

    def _end(self, session: str, fd: int) -> None:
        self._directory.drop("writing", session)
        os.close(fd)

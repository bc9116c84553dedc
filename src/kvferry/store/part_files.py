"""Records that the ranks of one machine put together in shared memory before one of them sends it.

No kind of server has to offer more than whole values, and a record is one value there.
"""

from __future__ import annotations

import logging
import os
import re
import secrets
import stat
import tempfile
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from kvferry.store.base import Buffer, PutResult
from kvferry.types import ChunkKey

logger = logging.getLogger(__name__)

STALE_SECONDS = 600.0
"""Age of a part file whose writer is taken to be dead."""

_SESSION = re.compile(r"[0-9a-f]{32}")


class PartFiles:
    """The values under way of one store. Thread-safe.

    Ranks on another machine cannot write parts; their records are not stored. A part file whose
    process was killed is removed by the next one that opens a store, some minutes later.
    """

    def __init__(self) -> None:
        shared = Path("/dev/shm")
        parent = shared if os.access(shared, os.W_OK) else Path(tempfile.gettempdir())
        self._folder = parent / f"kvferry-parts-{os.getuid()}"
        self._lock = threading.Lock()
        self._has_warned = False
        self._begun: dict[str, ChunkKey] = {}
        with suppress(OSError):
            self._remove_stale()

    def begin(self, key: ChunkKey, num_bytes: int) -> str | PutResult:
        """See `SupportsShardedWrite`."""
        session = secrets.token_hex(16)
        try:
            self._folder.mkdir(mode=0o700, exist_ok=True)
            status = self._folder.lstat()
            if status.st_uid != os.getuid() or not stat.S_ISDIR(status.st_mode):
                return PutResult.FAILED  # another user made it, and could change what is in it
            fd = os.open(self._folder / session, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
            try:
                # Memory that is full says so now, not by a signal later.
                reserve = getattr(os, "posix_fallocate", None)
                os.ftruncate(fd, num_bytes) if reserve is None else reserve(fd, 0, num_bytes)
            finally:
                os.close(fd)
        except OSError as error:
            self._unlink(session)
            if not self._has_warned:
                self._has_warned = True
                logger.warning(
                    "%s: no room to put a record together: %s; give /dev/shm some gigabytes",
                    self._folder,
                    error.strerror,
                )
            return PutResult.NO_SPACE
        with self._lock:
            self._begun[session] = key
        return session

    def write_at(self, session: str, offset: int, buffers: Sequence[Buffer]) -> bool:
        """See `SupportsShardedWrite`."""
        if _SESSION.fullmatch(session) is None or offset < 0:
            return False
        views = [memoryview(buffer).cast("B") for buffer in buffers if memoryview(buffer).nbytes]
        try:
            fd = os.open(self._folder / session, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
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
            key = self._begun.pop(session, None)
        if key is None:
            return None
        try:
            if self.write_at(session, 0, [head]):
                return key, (self._folder / session).read_bytes()
        except OSError:
            pass
        finally:
            self._unlink(session)
        return None

    def abort(self, session: str) -> None:
        """Remove what was begun here."""
        with self._lock:
            begun = self._begun.pop(session, None)
        if begun is not None:
            self._unlink(session)

    def close(self) -> None:
        """Remove all that was begun here."""
        for session in list(self._begun):
            self.abort(session)

    def _unlink(self, session: str) -> None:
        with suppress(OSError):
            os.unlink(self._folder / session)

    def _remove_stale(self) -> None:
        for path in self._folder.iterdir():
            with suppress(OSError):
                if time.time() - path.lstat().st_mtime > STALE_SECONDS:
                    path.unlink()

"""Where values go that failed verification: out of service at once, kept a while to look at."""

from __future__ import annotations

import itertools
import re
import secrets
import stat
from contextlib import suppress

from kvferry.store.file.eviction import list_files
from kvferry.store.file.fileio import FileIO, ensure_directory
from kvferry.store.file.layout import Layout
from kvferry.types import ChunkKey

MAX_FILES = 64
_MAX_FRACTION = 20
"""At most one twentieth of the quota, but the newest file stays."""
_UNSAFE = re.compile(r"[^a-z0-9_]+")


class Quarantine:
    """Moves records aside. Their bytes still count against the quota; they are evicted first.
    Thread-safe."""

    def __init__(self, io: FileIO, layout: Layout, max_bytes: int | None) -> None:
        self._io = io
        self._layout = layout
        self._max_bytes = None if max_bytes is None else max_bytes // _MAX_FRACTION
        self._tag = secrets.token_hex(8)
        self._numbers = itertools.count(1)

    def take(self, key: ChunkKey, reason: str) -> bool:
        """Move the record of `key` aside, whatever it is. False if it is not there (any more).

        Raises:
            OSError: it is there but cannot be moved.
        """
        source = self._layout.record(key)
        why = _UNSAFE.sub("_", reason.lower())[:32] or "unknown"
        target = f"{self._layout.quarantine}/{key.hex()}.{why}.{self._tag}.{next(self._numbers)}"
        try:
            self._io.rename(source, target)
        except FileNotFoundError:
            if not self._is_there(source):
                return False
            ensure_directory(self._io, self._layout.quarantine)
            self._io.rename(source, target)
        return True

    def surplus(self) -> list[str]:
        """Files beyond the bounds, the oldest first, for the caller to remove.

        Raises:
            OSError: the medium failed.
        """
        files = list_files(self._io, self._layout.quarantine)
        total = sum(file.num_bytes for file in files)
        surplus = []
        while len(files) > 1 and (
            len(files) > MAX_FILES or (self._max_bytes is not None and total > self._max_bytes)
        ):
            oldest = files.pop(0)
            total -= oldest.num_bytes
            surplus.append(oldest.path)
        return surplus

    def remove_foreign(self) -> None:
        """Delete what is no regular file: it was never counted. Directories only if empty: nobody
        knows what is in them.

        Raises:
            OSError: the medium failed.
        """
        for name in self._io.listdir(self._layout.quarantine):
            path = f"{self._layout.quarantine}/{name}"
            with suppress(FileNotFoundError):
                mode = self._io.lstat(path).st_mode
                if stat.S_ISDIR(mode):
                    with suppress(OSError):
                        self._io.rmdir(path)
                elif not stat.S_ISREG(mode):
                    self._io.unlink(path)

    def _is_there(self, path: str) -> bool:
        try:
            self._io.lstat(path)
        except FileNotFoundError:
            return False
        return True

"""When records were last used, gathered in memory and written back in batches as file times."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable

from kvferry.store.file.fileio import FileIO
from kvferry.store.file.layout import Layout
from kvferry.types import ChunkKey

_MAX_PENDING = 65536
_STEP_NANOSECONDS = 1000
"""Each chunk of a prefix counts as used a microsecond before its parent: suffixes go first, since a
chunk without its prefix is worth nothing."""


class Recency:
    """Thread-safe. `note` only touches memory."""

    def __init__(self, io: FileIO, layout: Layout, wall: Callable[[], float]) -> None:
        self._io = io
        self._layout = layout
        self._wall = wall
        self._lock = threading.Lock()
        self._pending: dict[ChunkKey, int] = {}

    def note(self, keys: Iterable[ChunkKey]) -> None:
        """These were used just now, the nearest to the root of the prefix first. Beyond a bound of
        65536 waiting keys more are dropped."""
        used = int(self._wall() * 1e9)
        with self._lock:
            for key in keys:
                if len(self._pending) >= _MAX_PENDING and key not in self._pending:
                    break
                self._pending[key] = used
                used -= _STEP_NANOSECONDS

    def flush(self) -> list[ChunkKey]:
        """Write the times back; returns keys that turned out to be absent.

        Raises:
            OSError: the medium failed; the rest of the batch is dropped.
        """
        with self._lock:
            pending, self._pending = self._pending, {}
        absent = []
        for key, used in pending.items():
            try:
                self._io.utime(self._layout.record(key), used)
            except FileNotFoundError:
                absent.append(key)
            except PermissionError:
                # Another user's record in a shared store: its own recency must do.
                continue
        return absent

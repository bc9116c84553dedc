"""Counters as JSON lines, for machines without a scraper: one object per call, appended."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from kvferry.errors import ConfigError
from kvferry.observe import Counters


class JsonLinesExporter:
    """Appends snapshots of `counters` to a file: `{"time": ..., <labels>, <counts>}`.

    One `write` per line on a descriptor opened for appending, so several processes may share a file
    of a local disk. Opens the file at construction and keeps it; use as a context manager.

    Args:
        path: created if missing; its directory must exist.
        counters: the observer that was handed to stores, connectors and engine.
        labels: constant members of every line, for example `{"rank": "0"}`.
        clock: seconds since the epoch.

    Raises:
        ConfigError: the file cannot be opened for appending.
    """

    def __init__(
        self,
        path: Path,
        counters: Counters,
        *,
        labels: Mapping[str, str] | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._counters = counters
        self._labels = dict(labels or {})
        self._clock = clock
        try:
            self._fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise ConfigError(
                f"cannot append metrics to {path}: {error.strerror}; name a file in a directory "
                "that exists and may be written"
            ) from error

    def write(self) -> bool:
        """Append one line. False if the medium refused: metrics never stop the work they count."""
        if self._fd < 0:
            return False
        line = {"time": self._clock(), **self._labels, **self._counters.snapshot()}
        text = json.dumps(line).encode() + b"\n"
        try:
            return os.write(self._fd, text) == len(text)
        except OSError:
            return False

    def close(self) -> None:
        """Idempotent."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def __enter__(self) -> JsonLinesExporter:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

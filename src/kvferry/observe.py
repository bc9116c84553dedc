"""Counts: an observer of no-op methods, and one that adds up.

The core calls the observer and never reads it; exporters and `stat` live outside. Methods must be
cheap and must not raise; they are called from scheduler, worker and I/O threads alike.
"""

from __future__ import annotations

import threading
from collections import defaultdict


class Observer:
    """Receives counts and durations. Every method is an optional no-op."""

    def count(self, name: str, amount: int = 1) -> None:
        """Add `amount` to the counter `name` (snake_case; bytes end in `_bytes`)."""

    def observe(self, name: str, seconds: float) -> None:
        """Record one duration in seconds under `name`."""


class Counters(Observer):
    """Keeps sums in memory. Thread-safe; takes memory per name."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sums: defaultdict[str, float] = defaultdict(int)

    def count(self, name: str, amount: int = 1) -> None:
        with self._lock:
            self._sums[name] += amount

    def observe(self, name: str, seconds: float) -> None:
        with self._lock:
            self._sums[f"{name}_count"] += 1
            self._sums[f"{name}_seconds"] += seconds

    def __getitem__(self, name: str) -> int:
        return int(self._sums.get(name, 0))

    def snapshot(self) -> dict[str, float]:
        """All sums so far: counters by name, durations as `<name>_count` and `<name>_seconds`."""
        with self._lock:
            return dict(self._sums)

    def pop_all(self) -> dict[str, float]:
        """Return what `snapshot` does, and start again from zero."""
        if not self._sums:
            return {}
        with self._lock:
            sums, self._sums = self._sums, defaultdict(int)
        return dict(sums)

"""What happened, for whoever counts: an observer of no-op methods, and one that adds up.

The core calls the observer and never reads it; exporters and `stat` live outside. Methods must be
cheap and must not raise; they are called from scheduler, worker and I/O threads alike.
"""

from __future__ import annotations

import threading
from collections import Counter


class Observer:
    """Receives counts and durations. Every method is an optional no-op."""

    def count(self, name: str, amount: int = 1) -> None:
        """Add `amount` to the counter `name` (snake_case; bytes end in `_bytes`)."""

    def observe(self, name: str, seconds: float) -> None:
        """Record one duration in seconds under `name`."""


class Counters(Observer):
    """An observer that keeps sums in memory. Thread-safe; bounded by the number of names."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()
        self._seconds: dict[str, tuple[int, float]] = {}

    def count(self, name: str, amount: int = 1) -> None:
        with self._lock:
            self._counts[name] += amount

    def observe(self, name: str, seconds: float) -> None:
        with self._lock:
            number, total = self._seconds.get(name, (0, 0.0))
            self._seconds[name] = (number + 1, total + seconds)

    def __getitem__(self, name: str) -> int:
        return self._counts[name]

    def snapshot(self) -> dict[str, float]:
        """All sums so far: counters by name, durations as `<name>_count` and `<name>_seconds`."""
        with self._lock:
            result: dict[str, float] = dict(self._counts)
            for name, (number, total) in self._seconds.items():
                result[f"{name}_count"] = number
                result[f"{name}_seconds"] = total
        return result

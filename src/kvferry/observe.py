"""Counts and events: an observer of no-op methods, and one that adds up.

The core calls the observer and never reads it; exporters and `stat` live outside. Methods must be
cheap and must not raise; they are called from scheduler, worker and I/O threads alike.
"""

from __future__ import annotations

import threading
from collections import Counter
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """One thing that happened, with its reason.

    Attributes:
        name: "hit", "miss", "fetch", "fetch_missed", "save" or "save_failed".
        key: of the chunk; None where it is about a whole request.
        request: id of the request; None where no single request asked for it.
        tier: where the chunk came from or went to: "memory" or the scheme of a store.
        reason: why it did not happen, or not wholly; None if it did.
        num_tokens: how many tokens it is about.
        seconds: how long it took.
    """

    name: str
    key: bytes | None = None
    request: str | None = None
    tier: str | None = None
    reason: str | None = None
    num_tokens: int = 0
    seconds: float = 0.0


class Observer:
    """Receives counts, durations and events. Every method is an optional no-op."""

    def count(self, name: str, amount: int = 1) -> None:
        """Add `amount` to the counter `name` (snake_case; bytes end in `_bytes`)."""

    def observe(self, name: str, seconds: float) -> None:
        """Record one duration in seconds under `name`."""

    def event(self, event: Event) -> None:
        """Take note of one event."""


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

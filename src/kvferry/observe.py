"""Counts and events: an observer of no-op methods, and one that adds up.

The core calls the observer and never reads it; exporters and `stat` live outside. Methods must be
cheap and must not raise; they are called from scheduler, worker and I/O threads alike.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """One thing that happened, with its reason.

    Attributes:
        name: "hit", "miss", "fetch", "fetch_missed", "save" or "save_failed".
        key: of the chunk; None for an event of a whole request.
        request: id of the request; None for an event of no single request.
        tier: source or target of the chunk: "memory" or the scheme of a store.
        reason: why it failed, wholly or in part; None if it did not.
        num_tokens: tokens concerned.
        seconds: duration.
        detail: the numbers behind the reason, for people.
    """

    name: str
    key: bytes | None = None
    request: str | None = None
    tier: str | None = None
    reason: str | None = None
    num_tokens: int = 0
    seconds: float = 0.0
    detail: str = ""


class Observer:
    """Receives counts, durations and events. Every method is an optional no-op."""

    def count(self, name: str, amount: int = 1) -> None:
        """Add `amount` to the counter `name` (snake_case; bytes end in `_bytes`)."""

    def observe(self, name: str, seconds: float) -> None:
        """Record one duration in seconds under `name`."""

    def event(self, event: Event) -> None:
        """Record one event."""


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

    def take(self) -> dict[str, float]:
        """Return what `snapshot` does, and start again from zero."""
        if not self._sums:
            return {}
        with self._lock:
            sums, self._sums = self._sums, defaultdict(int)
        return dict(sums)

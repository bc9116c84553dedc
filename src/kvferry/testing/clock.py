"""A clock that a test moves, for code that takes a clock as an argument."""

from __future__ import annotations

import threading


class FakeClock:
    """Stands in for `time.monotonic` or `time.time` (call it) and for `time.sleep` (`sleep`).

    Thread-safe. Only `advance` and `sleep` move time, and return at once: code that polls until a
    deadline runs through without waiting.
    """

    def __init__(self, start: float = 1_000_000.0) -> None:
        self._lock = threading.Lock()
        self._now = start

    def __call__(self) -> float:
        with self._lock:
            return self._now

    def advance(self, seconds: float) -> None:
        """Move time forward. Refuses a negative amount."""
        if seconds < 0:
            raise ValueError(f"time does not go back by {-seconds} s")
        with self._lock:
            self._now += seconds

    def sleep(self, seconds: float) -> None:
        self.advance(max(seconds, 0.0))

"""A clock that a test moves, for code that takes a clock as an argument."""

from __future__ import annotations

import threading
import time

_SIX_DAYS = 1 << 19
"""In seconds."""


class FakeClock:
    """Stands in for `time.monotonic` or `time.time` (call it) and for `time.sleep` (`sleep`).

    Thread-safe. Only `advance` and `sleep` move time, and return at once: code that polls until a
    deadline runs through without waiting.

    It starts some days ahead of `time.monotonic`: a deadline by this clock is still to come for
    code that has the real one. On a machine that started in the last six days, it starts at 10**6.
    """

    def __init__(self, start: float | None = None) -> None:
        self._lock = threading.Lock()
        self._now = time.monotonic() // _SIX_DAYS * _SIX_DAYS + 1e6 if start is None else start

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

"""Which way a store's writes go: through the page cache, or past it to the disk.

The page cache is the better place, since a record just written is often the next one read. But it
needs memory that is free, and on a virtual machine that memory may have to come from the host page
by page: writing through the cache then takes several times as long as the disk does, all of it CPU
time taken from the engine. No system says which machine is such a one, so both ways are timed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

ADVANTAGE = 2.0
"""How many times faster the disk must be before the page cache is passed by."""

LOOK_EVERY = 32
"""Of so many writes one goes the other way, to learn what that takes by now."""

SAMPLES = 2
"""Writes each way before the two are compared."""

_WEIGHT = 0.25
"""Of the newest write in the average."""


@dataclass(slots=True)
class _Way:
    samples: int = 0
    seconds_per_byte: float = 0.0

    def took(self, seconds_per_byte: float) -> None:
        if self.samples:
            seconds_per_byte = _WEIGHT * seconds_per_byte + (1 - _WEIGHT) * self.seconds_per_byte
        self.seconds_per_byte = seconds_per_byte
        self.samples += 1


class Ways:
    """Thread-safe: threads that choose or time at once may lose a sample, no more.

    Args:
        clock: monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._cached, self._direct = _Way(), _Way()
        self._num_chosen = 0

    def choose_direct(self) -> bool:
        """Whether the next write goes past the page cache."""
        self._num_chosen += 1
        if min(self._cached.samples, self._direct.samples) < SAMPLES:
            return self._direct.samples < self._cached.samples
        faster = self._direct.seconds_per_byte * ADVANTAGE < self._cached.seconds_per_byte
        return faster != (self._num_chosen % LOOK_EVERY == 0)

    @contextmanager
    def timed(self, num_bytes: int, *, direct: bool) -> Iterator[None]:
        """Time a write of `num_bytes`; one that raises says nothing."""
        started = self._clock()
        yield
        way = self._direct if direct else self._cached
        way.took((self._clock() - started) / num_bytes)

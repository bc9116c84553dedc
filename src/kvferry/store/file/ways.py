"""Which way a store's writes go: through the page cache, or past it to the disk.

What goes through the page cache takes CPU time from the engine, where waiting for a disk takes next
to none; on a virtual machine that gets its memory from the host page by page, it takes longer than
the disk does. So writes go past it for as long as the disk keeps up with them: they happen behind,
and nobody waits for one. Only a disk that does not keep up is compared with the page cache, by the
time that writes take, and the faster way is taken until the disk would keep up again.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

WORTH_BYTES = 1 << 20
"""Smaller writes say more about the threads of a process than about disk and memory."""

BUSY = 0.5
"""A disk keeps up if writing all that was written lately, one record after another, would take it
no more than this part of the time."""

LATELY_SECONDS = 10.0
"""A prompt's records come all at once, and then none for a while."""

MARGIN = 1.2
"""How many times faster the way that is not in use must be before it is taken."""

LEARN_EVERY = 8
"""While the disk does not keep up, one write of so many goes through the page cache, until that is
known."""

LOOK_EVERY = 32
"""From then on one of so many goes the other way, to learn what that takes by now. If it took ten
times as long, one of ten times as many."""

LOOK_EVERY_MOST = 1024
"""However long it took: it may have been in a bad moment."""

SAMPLES = 2
"""Writes through the page cache before the two are compared."""

_WEIGHT = 0.25
"""Of the newest write in the average."""

_OUTLIER = 1.75
"""No write counts for more than so many times the average: a process that was stopped for a minute
meanwhile says nothing about disks. One such write alone stays below `MARGIN`."""


@dataclass(slots=True)
class _Way:
    samples: int = 0
    seconds_per_byte: float = 0.0

    def took(self, seconds_per_byte: float) -> None:
        average = self.seconds_per_byte
        if not self.samples:
            self.seconds_per_byte = seconds_per_byte
        elif self.samples < SAMPLES:
            self.seconds_per_byte = min(average, seconds_per_byte)
        else:
            newest = min(seconds_per_byte, _OUTLIER * average)
            self.seconds_per_byte = _WEIGHT * newest + (1 - _WEIGHT) * average
        self.samples += 1


class Ways:
    """Thread-safe: threads that choose or time at once may lose a sample, no more.

    Args:
        clock: monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._cached, self._direct = _Way(), _Way()
        self._since_look = 0
        self._prefers_direct = True
        self._lately_bytes = 0.0
        self._last_write = clock()

    def choose_direct(self) -> bool:
        """Whether the next write goes past the page cache."""
        cached, direct = self._cached, self._direct
        if self._bytes_per_second() * direct.seconds_per_byte <= BUSY:
            self._prefers_direct = True
            return True
        used, other = (direct, cached) if self._prefers_direct else (cached, direct)
        self._since_look += 1
        if other.samples < SAMPLES:
            is_due = self._since_look >= LEARN_EVERY
        else:
            if other.seconds_per_byte * MARGIN < used.seconds_per_byte:
                used, other = other, used
            self._prefers_direct = used is direct
            dear = LOOK_EVERY * other.seconds_per_byte > self._since_look * used.seconds_per_byte
            is_due = self._since_look >= (LOOK_EVERY_MOST if dear else LOOK_EVERY)
        if not is_due:
            return self._prefers_direct
        self._since_look = 0
        return not self._prefers_direct

    @contextmanager
    def timed(self, num_bytes: int, *, direct: bool) -> Iterator[None]:
        """Time a write of `num_bytes`; one that raises says nothing."""
        started = self._clock()
        yield
        way = self._direct if direct else self._cached
        way.took((self._clock() - started) / num_bytes)
        self._lately_bytes = self._bytes_per_second() * LATELY_SECONDS + num_bytes
        self._last_write = self._clock()

    def _bytes_per_second(self) -> float:
        """What was written lately; the longer ago, the less it counts."""
        age = self._clock() - self._last_write
        return self._lately_bytes * math.exp(-age / LATELY_SECONDS) / LATELY_SECONDS

"""Whether a store that fails is asked: it is left alone for a while, then tried again."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

logger = logging.getLogger(__name__)

MAX_FAILURES = 3
"""In a row, after which a store is left alone."""

FIRST_PAUSE_SECONDS = 0.5
LONGEST_PAUSE_SECONDS = 5.0
"""A store that is back is used again within this time and one trial."""

SOON_SECONDS = 30.0
"""A store that fails again within this time comes and goes."""

MIN_LIMIT_SECONDS = 0.5
"""No call has a shorter limit: below it, what was measured is noise."""

MIN_WRITE_SECONDS = 2.0
"""No write has a shorter limit: no request waits for it. Nor should it be much longer: a server
that hangs holds a thread for as long, and the close of an engine waits for that thread."""

MAX_LIMIT_SECONDS = 30.0


class Breaker:
    """Open while a store is not asked. One log line when it opens, one when it closes. Thread-safe.

    Args:
        what: for the log, such as "reads of s3://bucket".
        clock: monotonic seconds.

    Attributes:
        is_open: the store is not asked but for trials.
        num_opened: how often it was left alone.
    """

    def __init__(self, what: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._what = what
        self._clock = clock
        self._lock = threading.Lock()
        self.is_open = False
        self.num_opened = 0
        self._num_failures = 0
        self._pause = FIRST_PAUSE_SECONDS
        self._opened_at = 0.0
        self._closed_at = -SOON_SECONDS
        self._try_at = 0.0
        self._num_again = 0

    def take_trial(self) -> bool:
        """Whether the caller is to make the trial that is due. The next one is due after a pause,
        which grows with each."""
        if not self.is_open or self._clock() < self._try_at:
            return False
        with self._lock:
            now = self._clock()
            if not self.is_open or now < self._try_at:
                return False
            self._pause = min(2 * self._pause, LONGEST_PAUSE_SECONDS)
            self._try_at = now + self._pause
            return True

    def succeeded(self, num_opened: int) -> bool:
        """A call got its answer.

        Args:
            num_opened: when the call began. What began before the store was left alone says nothing
                of it now.

        Returns:
            True if the store was left alone until now.
        """
        if not self._num_failures:
            return False
        with self._lock:
            if num_opened != self.num_opened:
                return False
            self._num_failures = 0
            was_open, self.is_open = self.is_open, False
            if was_open:
                self._closed_at = self._clock()
        if was_open and not self._num_again:
            seconds = self._clock() - self._opened_at
            logger.warning("%s: used again after %.1f s", self._what, seconds)
        return was_open

    def failed(self, why: object, num_opened: int) -> None:
        """A call failed, or took too long; `num_opened` as for `succeeded`."""
        with self._lock:
            if self.is_open or num_opened != self.num_opened:
                return
            self._num_failures += 1
            if self._num_failures < MAX_FAILURES:
                return
            self.is_open = True
            self.num_opened += 1
            self._opened_at = self._clock()
            if self._opened_at - self._closed_at >= SOON_SECONDS:
                self._pause = FIRST_PAUSE_SECONDS
                self._num_again = 0
            else:  # trials say nothing of what fails: the pauses stay long
                self._num_again += 1
            self._try_at = self._opened_at + self._pause
            num_again = self._num_again
        if not num_again:
            logger.warning("%s: left alone until it answers: %s", self._what, why)
        elif num_again == 1:
            logger.warning("%s: fails again; no more is said while it comes and goes", self._what)


class Limit:
    """How long a call may take, from how long such calls took, as TCP sets its timeout: the average
    and four deviations, twice. Not exact under threads, which does not matter.

    Args:
        least: seconds; the limit is never shorter.
    """

    def __init__(self, least: float = MIN_LIMIT_SECONDS) -> None:
        self._least = least
        self._average = 0.0
        # At first two seconds: the first calls may be many at once.
        self._deviation = 0.25

    @property
    def seconds(self) -> float:
        expected = 2 * (self._average + 4 * self._deviation)
        return min(max(expected, self._least), MAX_LIMIT_SECONDS)

    def saw(self, seconds: float) -> None:
        """A call took so long; one that was cut short counts, too, so that the limit grows."""
        difference = seconds - self._average
        self._average += difference / 8
        self._deviation += (abs(difference) - self._deviation) / 4

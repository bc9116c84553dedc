"""When something that failed is tried again.

Used for a store that is away or refuses writes, reads that bring nothing, a child process that
crashed, and keys that have not come.
"""

from __future__ import annotations

import math
from collections.abc import Callable


class Backoff:
    """Pauses after failures. A pause is twice as long as the last one, until something succeeds.

    Args:
        clock: clock that gives monotonic seconds.
        first: the first pause, in seconds.
        longest: the longest pause, in seconds; None: all are as long as the first.

    Attributes:
        pause: last pause, in seconds; 0 after a success.
        until: when the pause ends.
    """

    def __init__(
        self, clock: Callable[[], float], first: float, longest: float | None = None
    ) -> None:
        self._clock = clock
        self._first = first
        self._longest = first if longest is None else longest
        self.pause = 0.0
        self.until = -math.inf

    @property
    def is_over(self) -> bool:
        """Whether a try is due: the pause is over, or there is none."""
        return self._clock() >= self.until

    def failed(self) -> None:
        self.pause = min(2 * self.pause or self._first, self._longest)
        self.until = self._clock() + self.pause

    def succeeded(self) -> None:
        self.pause, self.until = 0.0, -math.inf

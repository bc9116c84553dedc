"""Decides how much of a hit to load and what to compute, by the rates measured in this engine.

Look-ups ask it, and tell it how long loads took; the scheduler role tells it of timed steps. No hit
is waited for longer than computing it would take (at least `MIN_WAIT_SECONDS`), or than the load
timeout. If tiers of different speed hold a prompt, its first part may be worth loading and the rest
not. While a tier is slower than the engine, one hit is loaded from it every `RETRY_SLOW_SECONDS`.
"""

from __future__ import annotations

import logging
import time
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from kvferry.store.base import ASK_SECONDS
from kvferry.types import ScheduledRequest

logger = logging.getLogger(__name__)

RETRY_SLOW_SECONDS = 4.0
"""How often a hit is loaded although computing is expected to be faster, to notice a store that has
recovered. Together with the longest pause of a circuit breaker it is less than ten seconds."""

_WEIGHT = 0.25
"""Weight of a new sample in a moving average: an outlier fades within a few samples."""

MIN_WAIT_SECONDS = 0.25
"""A fetch gets at least this long: for shorter times, the measured rates are noise."""

SLACK_SECONDS = 0.1
"""A load is refused only if it is expected to take this much longer than computing. The rate of a
small hit shows the latency of a step more than the speed of the store."""

MAX_LOSSES = 2.0
MIN_LOSSES = 1.5
"""A tier counts as slow after two loads that were slower than computing, or one that was given up.
A single slow load may be an outlier, or a small hit, whose rate is a bad guide to a large one. Each
fast load halves the count: if every second load is slow, the tier is slow half the time."""

MAX_TIMED = 8
"""Steps whose output may be awaited at once; earlier ones are not timed any more."""

PREFILL_TOKENS = 64
"""A step with fewer tokens shows no speed of prefill."""


FEW = 3
"""After so many waits in vain, one after the other, a warning says what to do."""

LONGEST_LOOKS_SECONDS = 300.0
"""The longest time without a whole wait: `load_timeout_seconds`, doubled by each wait in vain."""


@dataclass(slots=True)
class TierSpeed:
    """How fast one tier brings tokens.

    Attributes:
        rate: tokens per second; None before the first load.
        losses: loads that were slower than computing; see `MIN_LOSSES`.
    """

    rate: float | None = None
    losses: float = 0.0

    @property
    def is_slow(self) -> bool:
        """Whether loading was slower than computing lately."""
        return self.losses >= MIN_LOSSES


class _TimedStep(NamedTuple):
    number: int
    planned: float
    num_tokens: int


class LoadDecision(NamedTuple):
    """How much of a hit is worth loading, and why."""

    num_chunks: int
    """Number of leading chunks."""
    load_seconds: float
    """Expected, for the whole hit."""
    compute_seconds: float
    """Expected, for the whole hit."""
    is_trial: bool = False
    """Whether all of it is loaded only to see whether a slow tier has recovered: then
    `LoadPolicy.tries_slow` is to be called."""


def _prefilled(scheduled: Sequence[ScheduledRequest], num_tokens: int) -> int:
    """Return how many of a step's `num_tokens` are of prompts; 0 if most are not: its time is that
    of decoding, however many requests decode."""
    lacking = (
        (item.request.num_prompt_tokens - item.num_computed_tokens, item.num_scheduled_tokens)
        for item in scheduled
    )
    found = sum(min(each) for each in lacking if each[0] > 0)
    return found if 2 * found > num_tokens else 0


class LoadPolicy:
    """Rates of loading and computing, and what follows for one hit. Runs in: scheduler thread.

    Args:
        load_timeout_seconds: upper bound of any wait for a hit.
        clock: monotonic seconds.
    """

    def __init__(
        self, load_timeout_seconds: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._timeout = load_timeout_seconds
        self._clock = clock
        self._num_timed = 0
        self._timed: deque[_TimedStep] = deque(maxlen=MAX_TIMED)
        self._last_end = 0.0
        self.tiers: defaultdict[str, TierSpeed] = defaultdict(TierSpeed)
        self._compute_rate: float | None = None
        self._retry_slow_at = 0.0

    def saw_load(self, tier: str, num_tokens: int, seconds: float) -> None:
        """Learn that a fetch of `num_tokens` from a tier took `seconds`."""
        if num_tokens > 0 and seconds > 0:
            speed, compute = self.tiers[tier], self._compute_rate
            speed.rate = _average(speed.rate, num_tokens / seconds)
            lost = compute is not None and seconds > num_tokens / compute + SLACK_SECONDS
            speed.losses = min(MAX_LOSSES, speed.losses + 1) if lost else speed.losses / 2
            if lost:
                self._retry_slow_at = self._clock() + RETRY_SLOW_SECONDS

    def saw_slow_load(self, tier: str, num_tokens: int, seconds: float) -> None:
        """Learn that a fetch of `num_tokens` was given up after `seconds`: the rate is lower."""
        if seconds > 0 and num_tokens > 0:
            speed = self.tiers[tier]
            speed.losses = MAX_LOSSES
            self._retry_slow_at = self._clock() + RETRY_SLOW_SECONDS
            bound = num_tokens / seconds / 2
            if speed.rate is None or bound < speed.rate:
                speed.rate = _average(speed.rate, bound)

    def begin_step(self, scheduled: Sequence[ScheduledRequest], *, loads: bool) -> int:
        """Time a step.

        Returns:
            The number by which `end_step` knows the step; 0 if it is not timed.
        """
        num_tokens = sum(item.num_scheduled_tokens for item in scheduled)
        if num_tokens < PREFILL_TOKENS:
            return 0
        self._num_timed += 1
        # The time of a step that also loads shows neither speed; its end shows when the next began.
        shown = 0 if loads else _prefilled(scheduled, num_tokens)
        self._timed.append(_TimedStep(self._num_timed, self._clock(), shown))
        return self._num_timed

    def end_step(self, number: int) -> None:
        """Learn from a timed step that ended. Where steps overlap, the engine begins one when the
        one before has ended, not when it is planned."""
        while self._timed and self._timed[0].number <= number:
            step = self._timed.popleft()
            if step.number == number:
                now = self._clock()
                self.saw_compute(step.num_tokens, now - max(step.planned, self._last_end))
                self._last_end = now

    def saw_compute(self, num_tokens: int, seconds: float) -> None:
        """Learn that a step computed `num_tokens` in `seconds`."""
        if num_tokens > 0 and seconds > 0:
            # Of times, not rates: outputs that come late and then at once must not look fast.
            old = None if self._compute_rate is None else 1 / self._compute_rate
            self._compute_rate = 1 / _average(old, seconds / num_tokens)

    @property
    def compute_rate(self) -> float:
        """Tokens a second that the engine computes; 0 if none were timed."""
        return self._compute_rate or 0.0

    @property
    def is_any_slow(self) -> bool:
        """Whether some tier counts as slow; if none does, everything is worth loading."""
        return any(speed.is_slow for speed in self.tiers.values())

    def worth_loading(self, tiers: Sequence[str | None], tokens: int) -> LoadDecision:
        """Decide how much of a hit to load: all of it when a slow tier is tried again. Changes
        nothing.

        Args:
            tiers: tier of each chunk, in the order of the prompt; None for a chunk in memory.
            tokens: number of tokens of a chunk.
        """
        compute = self._compute_rate
        if compute is None:
            return LoadDecision(len(tiers), 0.0, 0.0)
        best = saved = 0.0
        count, load = 0, 0.0
        for index, tier in enumerate(tiers):
            seconds = self._load_seconds(tier, tokens, tokens / compute)
            load += seconds
            saved += tokens / compute - seconds
            if saved >= best:
                best, count = saved, index + 1
        worth = LoadDecision(count, load, len(tiers) * tokens / compute)
        if best - saved > SLACK_SECONDS:
            if self._clock() < self._retry_slow_at:
                return worth
            return worth._replace(num_chunks=len(tiers), is_trial=True)
        return worth._replace(num_chunks=len(tiers))

    def tries_slow(self) -> None:
        """Learn that a hit is loaded from a slow tier. No other one is for some time."""
        self._retry_slow_at = self._clock() + RETRY_SLOW_SECONDS

    def _load_seconds(self, tier: str | None, num_tokens: int, compute_seconds: float) -> float:
        """Expected time of a load; no more than computing takes, unless the tier is slow."""
        if tier is None:
            return 0.0
        speed = self.tiers[tier]
        if speed.rate is None:
            return compute_seconds
        seconds = num_tokens / speed.rate
        return seconds if speed.is_slow else min(seconds, compute_seconds)

    def wait_seconds(self, num_tokens: int) -> float:
        """How long a hit of `num_tokens` may take before it is cut short."""
        if self._compute_rate is None:
            return self._timeout
        return min(self._timeout, max(MIN_WAIT_SECONDS, num_tokens / self._compute_rate))


class ProducerWaits:
    """How long a request waits for another engine to store its first chunk. Runs in: scheduler
    thread; no I/O.

    A producer whose chunks never come may store them elsewhere. So after a wait in vain, requests
    only look for `ASK_SECONDS`. Now and then one of them waits as long as the first, until chunks
    come.
    """

    def __init__(self, seconds: float, url: str) -> None:
        self._seconds = seconds
        self._url = url
        self._num_in_vain = 0
        self._only_looks_until = 0.0

    def seconds(self, now: float) -> float:
        """How long a request waits until the first chunk comes."""
        if now < self._only_looks_until:
            return min(ASK_SECONDS, self._seconds)
        if self._num_in_vain:
            self._only_looks_until = now + self._seconds  # one request at a time tries
        return self._seconds

    def came(self) -> None:
        """Learn that a chunk came while a request waited for it."""
        self._num_in_vain, self._only_looks_until = 0, 0.0

    def in_vain(self, now: float) -> None:
        """Learn that a request waited and no chunk came. Of waits that end together, one counts."""
        if now < self._only_looks_until:
            return
        self._num_in_vain += 1
        looks_seconds = min(LONGEST_LOOKS_SECONDS, self._seconds * 2**self._num_in_vain)
        self._only_looks_until = now + looks_seconds
        if self._num_in_vain == FEW:
            logger.warning(
                "nothing came of %d handovers, each waited for %g s: the engines that prefill "
                "seem to store elsewhere than in %s. Give them and this engine one store, or "
                "list the address that they serve (option `serve`) as peer://HOST:PORT in "
                "`store` here. Until chunks come, most requests wait for %g s only",
                FEW,
                self._seconds,
                self._url,
                ASK_SECONDS,
            )


def _average(old: float | None, sample: float) -> float:
    return sample if old is None else old + _WEIGHT * (sample - old)

"""The state of one tier: whether it is read, whether it is written to, and when it is tried.

A tier is one of several stores that act as one. `Health` is its circuit breaker, and more: a store
that is not open yet is tried by opening it, and a store that answers but stores nothing is still
read. `Tier` reports events and claims tries under its lock. No threads and no I/O.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from kvferry.errors import StoreError, StorePlaceError


@dataclass(frozen=True, slots=True, kw_only=True)
class Patience:
    """The waits and sizes of tiers; all times in seconds. A store that is away is not asked, except
    by trials: single reads that show whether it answers.

    Attributes:
        start_seconds: how long a start waits for stores to open.
        max_failures: number of failures in a row after which a store is away.
        first_pause_seconds: pause before an away store is tried; doubled with each trial. After a
            write that failed, writes pause for this and four times what that write took, so that at
            most a fifth of a thread's time goes into writes that fail.
        longest_pause_seconds: longest pause between trials: an away store that answers again is
            used after this and one trial at most. Also the pause before a store whose medium did
            not answer is opened again.
        soon_seconds: a store that is away again this soon after it came back is unstable: its
            pauses stay long.
        accepts_again_seconds: a write that succeeds this long after the last refusal, or later, is
            logged as their end. So a store that takes only some values has one log line.
        min_limit_seconds: shortest limit of a read, because shorter times measure noise. A read
            that was given less than half of this, and took all of that, is no failure. A read that
            exceeds its limit by twice this hangs.
        min_write_seconds: shortest limit of a write, and deadline of a trial. It can be long, since
            no request waits for these; not much longer, since a server that hangs holds a thread
            for as long, and the close of an engine waits for that thread.
        max_limit_seconds: longest limit of a read or write, and deadline of a copy.
        look_seconds: how often a tier's thread looks for reads that hang.
        max_waiting: number of values that may wait to be copied to a tier; then the oldest is
            dropped for a new one.
        close_seconds: how long a close lets copies go on.
    """

    start_seconds: float = math.inf
    max_failures: int = 3
    first_pause_seconds: float = 0.5
    longest_pause_seconds: float = 5.0
    soon_seconds: float = 30.0
    accepts_again_seconds: float = 60.0
    min_limit_seconds: float = 0.5
    min_write_seconds: float = 2.0
    max_limit_seconds: float = 30.0
    look_seconds: float = 0.25
    max_waiting: int = 4096
    close_seconds: float = 5.0


class Limit:
    """How long a call may take, learned from earlier calls as TCP sets its timeout: twice the sum
    of the average and four deviations. Not exact under threads, which does not matter.

    Args:
        least: shortest limit, in seconds.
        most: longest limit, in seconds.

    Attributes:
        average: average duration of a call, in seconds.
    """

    def __init__(self, least: float, most: float) -> None:
        self._least = least
        self._most = most
        self.average = 0.0
        # So the limit begins at two seconds: many first calls may come at once.
        self._deviation = 0.25

    @property
    def seconds(self) -> float:
        expected = 2 * (self.average + 4 * self._deviation)
        return min(max(expected, self._least), self._most)

    def saw(self, seconds: float) -> None:
        """Learn from a call that took `seconds`. One that was cut short counts: the limit grows."""
        difference = seconds - self.average
        self.average += difference / 8
        self._deviation += (abs(difference) - self._deviation) / 4


class State(StrEnum):
    """The state of a tier."""

    OPENING = "opening"
    """There is no store yet; every read misses."""
    UP = "up"
    REFUSING = "refuses writes"
    """Read as when up, and written to again after a pause."""
    AWAY = "away"
    """Not asked, except by trials."""
    CLOSED = "closed"


class Standing(NamedTuple):
    """A state, since when, and why."""

    state: State
    since: float
    """Monotonic seconds, of the clock of `Health`."""
    because: str = ""
    """One line without a credential; empty if nothing is wrong."""


_MAX_BECAUSE = 120
_UNTIL_IT_CAN = ": serving without it until it can"

_UP = frozenset({State.UP, State.REFUSING})


class Health:
    """State machine of one tier. The caller lets one thread in at a time. Methods that return text
    return a line to log, or "".

    Reads and probes decide whether the store is away. A failed write does not: the store may be
    full or read-only, and still be read. Such a write asks for a check of the store, and the next
    writes pause.

    Args:
        what: name of the store in log lines, such as "store s3://bucket".
        clock: clock that gives monotonic seconds.

    Attributes:
        standing: the state as it is now.
        until: when an unopened or away store is tried next, or a refusing one is written to again.
        fault: error of the last call; empty after one that succeeded.
        generation: how often the store went away. Results of calls that began in an earlier
            generation are ignored.
        may_create: whether opening may make a store. False once the medium did not answer, since a
            mount that is away may show an empty directory.
    """

    def __init__(self, what: str, clock: Callable[[], float], patience: Patience) -> None:
        self._what = what
        self._clock = clock
        self._patience = patience
        self.standing = Standing(State.OPENING, clock())
        self.until = -math.inf
        self.fault = ""
        self.generation = 0
        self.may_create = True
        self._is_announced = False  # the log says that the store is not open, and why
        self._breaker = _Counts(pause=patience.first_pause_seconds, since=clock())
        self._wants_check = False
        self._refused_at: float | None = None

    @property
    def state(self) -> State:
        return self.standing.state

    def _stand(self, state: State, because: object = "") -> None:
        is_same = state is self.state
        since = self.standing.since if is_same else self._clock()
        self.standing = Standing(state, since, str(because)[:_MAX_BECAUSE])

    @property
    def is_up(self) -> bool:
        return self.state in _UP

    @property
    def accepts_writes(self) -> bool:
        """False while the store is not asked, and for a while after a write that failed."""
        is_over = self.state is State.REFUSING and self._clock() >= self.until
        return is_over or self.state is State.UP

    # -- trials ---------------------------------------------------------------------------------

    @property
    def next_try(self) -> float:
        """When the store is to be opened or tried next; infinite if it need not be."""
        if self.state in (State.OPENING, State.AWAY):
            return self.until
        return -math.inf if self._wants_check and self.is_up else math.inf

    def claim_try(self) -> bool:
        """Whether a try is due. If so, the caller makes it, and the next is due after a pause."""
        now = self._clock()
        if now < self.next_try:
            return False
        if self.state is State.OPENING:
            self.until = math.inf  # until this one ends
        elif self.state is State.AWAY:
            counts, longest = self._breaker, self._patience.longest_pause_seconds
            counts.pause = min(2 * counts.pause, longest)
            self.until = now + counts.pause
        return True

    # -- opening --------------------------------------------------------------------------------

    def opened(self) -> str:
        if self.state is not State.OPENING:
            return ""
        self._stand(State.UP)
        seconds = self._clock() - self._breaker.since
        return f"{self._what}: opened after {seconds:.1f} s" if self._is_announced else ""

    def is_late(self, seconds: float) -> str:
        """The start goes on without the store, `seconds` after it began."""
        if self.state is not State.OPENING or self._is_announced:
            return ""
        self._is_announced = True
        self._stand(State.OPENING, "does not answer")
        return f"{self._what} did not open within {seconds:g} s: serving without it until it does"

    def open_failed(self, error: BaseException) -> str:
        """The store could not be opened. It is tried again if its medium did not answer, or if what
        stands in its place is no store. After the latter, the start decides if it goes on."""
        if self.state is not State.OPENING:
            return ""
        is_away, was = isinstance(error, StoreError), self.standing.because
        is_tried_again = is_away or isinstance(error, StorePlaceError)
        pause = self._patience.longest_pause_seconds
        self.until = self._clock() + pause if is_tried_again else math.inf
        self.may_create &= not is_away
        self._is_announced |= is_away
        self._stand(State.OPENING, error)
        if not self._is_announced or self.standing.because == was:
            return ""
        return f"{self._what} cannot be opened: {error}{_UNTIL_IT_CAN * is_tried_again}"

    def is_left_out(self, error: BaseException) -> str:
        """The start goes on, though `error` says that the place of the store is none."""
        if self.state is not State.OPENING or self._is_announced:
            return ""
        self._is_announced = True
        return f"{self._what} cannot be opened: {error}{_UNTIL_IT_CAN}"

    # -- calls ----------------------------------------------------------------------------------

    def succeeded(self, generation: int) -> str:
        """A call that began in this generation got its answer."""
        if generation != self.generation or self.state in (State.OPENING, State.CLOSED):
            return ""
        counts = self._breaker
        counts.num_failures, self.fault = 0, ""
        if self.state is not State.AWAY:
            return ""
        self._stand(State.UP)
        now = self._clock()
        seconds, counts.since, counts.is_back = now - counts.since, now, True
        return "" if counts.num_again else f"{self._what}: used again after {seconds:.1f} s"

    def failed(self, why: object, generation: int) -> str:
        """A call that began in this generation failed, or took too long."""
        if generation != self.generation or not self.is_up:
            return ""
        counts, patience, now = self._breaker, self._patience, self._clock()
        counts.num_failures += 1
        self.fault = str(why)[:_MAX_BECAUSE]
        if counts.num_failures < patience.max_failures:
            return ""
        is_again = counts.is_back and now - counts.since < patience.soon_seconds
        # A store that answers trials and fails otherwise keeps its long pause.
        counts.num_again = counts.num_again + 1 if is_again else 0
        counts.pause = counts.pause if is_again else patience.first_pause_seconds
        counts.num_failures, counts.since = 0, now
        self._stand(State.AWAY, why)
        self.until = now + counts.pause
        self.generation += 1
        self._wants_check = False
        if not is_again:
            return f"{self._what}: not used until it answers: {why}"
        if counts.num_again == 1:
            return f"{self._what}: fails again; not logged again until it stays up"
        return ""

    # -- writes ---------------------------------------------------------------------------------

    def write_failed(self, seconds: float, generation: int) -> None:
        """A write of this generation failed after `seconds`: ask for a check, and pause writes."""
        if generation == self.generation and self.is_up:
            self._pause_writes(seconds)
            self._wants_check = True

    def no_room(self, seconds: float) -> str:
        """A write found no room."""
        if not self.is_up:
            return ""
        self._pause_writes(seconds)
        return self._refused("it has no room for a value")

    def begin_check(self) -> bool:
        """A check of the store begins. Whether a failed write asked for it."""
        wanted, self._wants_check = self._wants_check, False
        return wanted

    def write_refused(self, why: str) -> str:
        """The store answers a check, though a write failed; `why` may be empty."""
        if not self.is_up:
            return ""
        return self._refused(f"a value could not be stored{f': {why}' if why else ''}")

    def stored(self) -> str:
        """A write succeeded."""
        if not self.is_up:
            return ""
        now = self._clock()
        if self.state is State.REFUSING and now >= self.until:
            self._stand(State.UP)
        refused_at, again = self._refused_at, self._patience.accepts_again_seconds
        if refused_at is None or now < refused_at + again:
            return ""
        self._refused_at = None
        return f"{self._what}: takes values again"

    def _pause_writes(self, seconds: float) -> None:
        self._stand(State.REFUSING, self.standing.because or "a write failed")
        self.until = self._clock() + self._patience.first_pause_seconds + 4 * seconds

    def _refused(self, why: str) -> str:
        if self.state is State.REFUSING:
            self._stand(State.REFUSING, why)
        is_new = self._refused_at is None
        self._refused_at = self._clock()
        return f"{self._what}: answers, but {why}" if is_new else ""

    def close(self) -> None:
        """No event has an effect after this."""
        self._stand(State.CLOSED)

    def __repr__(self) -> str:
        return f"<Health {self._what}: {self.state}>"


@dataclass(slots=True, kw_only=True)
class _Counts:
    """The counts and times that decide how long a store stays away.

    Attributes:
        pause: last pause before a trial, in seconds.
        since: when the store went away or came back; at first, when it began to be opened.
        is_back: whether the store has come back once.
        num_failures: number of failures in a row.
        num_again: how often in a row the store went away soon after it had come back.
    """

    pause: float
    since: float
    is_back: bool = False
    num_failures: int = 0
    num_again: int = 0

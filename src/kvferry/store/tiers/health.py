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

from kvferry.errors import Fault, FaultKind, StoreError, StorePlaceError
from kvferry.store.backoff import Backoff
from kvferry.store.faults import fault_kind


@dataclass(frozen=True, slots=True, kw_only=True)
class Patience:
    """The waits and sizes of tiers; all times in seconds. A store that is away is not asked, except
    by trials: single reads that show whether it answers.

    Attributes:
        start_seconds: how long a start waits for stores to open.
        max_failures: number of quick failures in a row after which a store is tried: one record may
            be at fault, or the medium.
        long_seconds: after one failure that took this long, the store is tried; if its deadline
            passed, it is away. A read that was given less, and took all of it, says nothing.
        hang_seconds: a read that has not ended so long after its deadline hangs: the store is away.
            Longer than a busy machine stalls.
        first_pause_seconds: pause before an away store is tried, and before a store that refused a
            write is written to again; doubled each time.
        longest_pause_seconds: longest such pause: an away store that answers again is used after
            this and one trial at most. Also the pause before a store whose medium did not answer is
            opened again.
        soon_seconds: a store that is away again this soon after it came back is unstable: its
            pauses stay long.
        accepts_again_seconds: a write that succeeds this long after the last refusal, or later, is
            logged as their end. So a store that takes only some values has one log line.
        trial_seconds: deadline of a trial.
        write_seconds: longest time of a write, and of a copy. It can be long, since no request
            waits for these; not much longer, since a server that hangs holds a thread for as long,
            and the close of an engine waits for that thread.
        look_seconds: how often a tier's thread looks whether something is due.
        max_waiting: number of values that may wait to be copied to a tier; then the oldest is
            dropped for a new one.
        close_seconds: how long a close lets copies go on.
    """

    start_seconds: float = math.inf
    max_failures: int = 3
    long_seconds: float = 0.5
    hang_seconds: float = 10.0
    first_pause_seconds: float = 0.5
    longest_pause_seconds: float = 5.0
    soon_seconds: float = 30.0
    accepts_again_seconds: float = 60.0
    trial_seconds: float = 2.0
    write_seconds: float = 10.0
    look_seconds: float = 0.25
    max_waiting: int = 4096
    close_seconds: float = 5.0


class State(StrEnum):
    """The state of a tier."""

    OPENING = "opening"
    """There is no store yet."""
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
    because: Fault | None = None
    """None if nothing is wrong."""


_MAX_TEXT = 120
_UP = State.UP, State.REFUSING  # no set: to hash a member of an enum takes longer


def _shortened(fault: Fault | None) -> Fault | None:
    """Return a fault whose text fits into a label of a metric."""
    return None if fault is None else fault._replace(text=fault.text[:_MAX_TEXT])


class Health:
    """State machine of one tier. The caller lets one thread in at a time. Methods that return text
    return a line to log, or "".

    Calls that hang and trials decide whether the store is away. A call that failed does not, since
    one record may be at fault, nor a failed write: the store may be full or read-only, and still be
    read. Both ask for a trial; after a failed write, the next writes pause.

    Args:
        what: name of the store in log lines, such as "store s3://bucket".
        clock: clock that gives monotonic seconds.

    Attributes:
        standing: the state as it is now.
        fault: error of the last call; None after one that succeeded.
        may_create: whether opening may make a store. False once the medium did not answer, since a
            mount that is away may show an empty directory.
    """

    def __init__(self, what: str, clock: Callable[[], float], patience: Patience) -> None:
        self._what = what
        self._clock = clock
        self._patience = patience
        self.standing = Standing(State.OPENING, clock())
        self.fault: Fault | None = None
        self.may_create = True
        self._is_announced = False  # the log says that the store is not open, and why
        pauses = patience.first_pause_seconds, patience.longest_pause_seconds
        self._tries = Backoff(clock, *pauses)  # of opening or trying the store
        self._writes = Backoff(clock, *pauses)
        self._num_failures = 0  # in a row
        self._is_in_doubt = False  # calls failed, until a trial ends
        self._num_again = 0  # how often in a row it went away soon after it had come back
        self._back_at = -math.inf
        self._unexplained: Fault | None = None  # why a write failed, until a trial ends
        self._refused_at: float | None = None

    @property
    def state(self) -> State:
        return self.standing.state

    def _stand(self, state: State, because: Fault | None = None) -> None:
        is_same = state is self.state
        since = self.standing.since if is_same else self._clock()
        self.standing = Standing(state, since, _shortened(because))

    @property
    def is_up(self) -> bool:
        return self.state in _UP

    @property
    def accepts_writes(self) -> bool:
        """False while the store is not asked, and for a while after a write that failed."""
        is_over = self.state is State.REFUSING and self._writes.is_over
        return is_over or self.state is State.UP

    # -- trials ---------------------------------------------------------------------------------

    @property
    def next_try(self) -> float:
        """When the store is to be opened or tried next; infinite if it need not be."""
        if self.state in (State.OPENING, State.AWAY):
            return self._tries.until
        is_asked_for = self._is_in_doubt or self._unexplained is not None
        return -math.inf if is_asked_for and self.is_up else math.inf

    def claim_try(self) -> bool:
        """Whether a try is due. If so, the caller makes it, and the next is due after a pause."""
        if self._clock() < self.next_try:
            return False
        if self.state is State.OPENING:
            self._tries.until = math.inf  # until this one ends
        elif self.state is State.AWAY:
            self._tries.failed()
        return True

    # -- opening --------------------------------------------------------------------------------

    def opened(self) -> str:
        if self.state is not State.OPENING:
            return ""
        seconds = self._clock() - self.standing.since
        self._stand(State.UP)
        return f"{self._what}: opened after {seconds:.1f} s" if self._is_announced else ""

    def open_failed(self, error: BaseException) -> str:
        """The store could not be opened. It is tried again if its medium did not answer, or if what
        stands in its place is no store. After the latter, the start decides if it goes on."""
        if self.state is not State.OPENING:
            return ""
        is_away, was = isinstance(error, StoreError), self.standing.because
        is_tried_again = is_away or isinstance(error, StorePlaceError)
        pause = self._patience.longest_pause_seconds
        self._tries.until = self._clock() + pause if is_tried_again else math.inf
        self.may_create &= not is_away
        self._is_announced |= is_away
        self._stand(State.OPENING, Fault(fault_kind(error), str(error)))
        if not self._is_announced or self.standing.because == was:
            return ""
        without = ": serving without it until it can" if is_tried_again else ""
        return f"{self._what} cannot be opened: {error}{without}"

    def is_left_out(self, why: str, because: Fault | None = None) -> str:
        """The start goes on without the store; `why` is the end of the line that says so, and
        `because` the reason from then on, if it is known."""
        if self.state is not State.OPENING or self._is_announced:
            return ""
        self._is_announced = True
        because = because or self.standing.because
        self._stand(State.OPENING, because or Fault(FaultKind.AWAY, "does not answer"))
        return f"{self._what} {why}"

    # -- calls ----------------------------------------------------------------------------------

    def answered(self) -> None:
        """A read or a probe got its answer. It may be older than the fault of an away store."""
        if self.is_up:
            self._num_failures, self.fault = 0, None

    def failed(self, why: Fault, *, is_long: bool = False) -> None:
        """A call failed. The last of several in a row asks for a trial, or one that took long."""
        if not self.is_up:
            return
        self._num_failures += 1
        self.fault = _shortened(why)
        self._is_in_doubt |= is_long or self._num_failures >= self._patience.max_failures

    def hangs(self, why: Fault) -> None:
        """A call of the client does not end, or one that opens the store."""
        if self.state is State.OPENING:
            self._stand(State.OPENING, why)
        self.failed(why)

    def is_lost(self, why: Fault) -> str:
        """A trial failed, or a call hangs: the medium does not answer."""
        if not self.is_up:
            return ""
        self.fault = _shortened(why)
        is_again = self._clock() - self._back_at < self._patience.soon_seconds
        # A store that answers trials and fails otherwise is tried after longer and longer pauses.
        self._num_again = self._num_again + 1 if is_again else 0
        if not is_again:
            self._tries.succeeded()
        self._tries.failed()
        self._unexplained, self._is_in_doubt = None, False
        self._stand(State.AWAY, why)
        if not is_again:
            return f"{self._what}: not used until it answers: {why}"
        if self._num_again == 1:
            return f"{self._what}: fails again; not logged again until it stays up"
        return ""

    def trial_answered(self) -> str:
        """A trial got its answer: an away store is used again, failed calls were of single records,
        and a failed write was refused."""
        why, self._is_in_doubt = self._unexplained, False
        if self.state is State.AWAY:
            self._back_at = self._clock()
            seconds = self._back_at - self.standing.since
            self._writes.succeeded()
            self._stand(State.UP)
            self.answered()
            return "" if self._num_again else f"{self._what}: used again after {seconds:.1f} s"
        self.answered()
        self._unexplained = None
        if why is None or not self.is_up:
            return ""
        return self._refused(Fault(why.kind, f"a value could not be stored: {why}"))

    # -- writes ---------------------------------------------------------------------------------

    def write_failed(self, why: Fault) -> None:
        """A write failed. Ask for a trial, and pause writes."""
        if self.is_up:
            self._pause_writes(why)
            self._unexplained = why

    def no_room(self) -> str:
        """A write found no room."""
        if not self.is_up:
            return ""
        self._pause_writes()
        return self._refused(Fault(FaultKind.FULL, "it has no room for a value"))

    def stored(self) -> str:
        """A write succeeded."""
        if not self.accepts_writes:
            return ""
        self._stand(State.UP)
        self._writes.succeeded()
        refused_at, again = self._refused_at, self._patience.accepts_again_seconds
        if refused_at is None or self._clock() < refused_at + again:
            return ""
        self._refused_at = None
        return f"{self._what}: takes values again"

    def _pause_writes(self, because: Fault | None = None) -> None:
        self._writes.failed()
        self._stand(State.REFUSING, self.standing.because or because)

    def _refused(self, why: Fault) -> str:
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

"""One store among several: whether it is asked, and how long."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

from kvferry.errors import StoreError
from kvferry.observe import Observer
from kvferry.store.base import PutResult, ReadRange, Store
from kvferry.store.io_pool import IOPool
from kvferry.store.tiers.breaker import MIN_WRITE_SECONDS, Breaker, Limit
from kvferry.store.tiers.late import LateStore
from kvferry.types import ChunkKey

logger = logging.getLogger(__name__)

Begun = TypeVar("Begun", bound=str)

TRIAL_SECONDS = 2.0
MIN_BLAMED_SECONDS = 0.25
OVERDUE_SECONDS = 1.0
"""A read that takes so much longer than it may does not end."""

WRITE_PAUSE_SECONDS = 0.5
"""No write follows one that failed for so long, and four times what it took: a fifth of a thread's
time at most goes into writes that fail."""

TAKES_AGAIN_SECONDS = 60.0
"""A store that stores a value after so long without a refusal takes them again. One that takes some
values and not others has one log line."""

_TRIAL_KEY = ChunkKey(b"\xff" * 32)
"""Of no record: a trial reads it to see whether a store answers."""


class Tier:
    """One store, whether it is asked, and how long. Thread-safe.

    Reads and probes decide whether the store is left alone. A write that fails does not: the store
    may be full or read-only, and still be read. It has a trial read begin, and the next writes are
    skipped for a while. One log line when a store that answers takes no values, one when it does.
    """

    def __init__(
        self, store: Store, number: int, observer: Observer, clock: Callable[[], float]
    ) -> None:
        self.store = store
        self.number = number
        self.name = store.url.partition(":")[0]
        self._observer = observer
        self._clock = clock
        self._breaker = Breaker(f"store {store.url}", clock)
        self._limit = Limit()
        self._write_limit = Limit(MIN_WRITE_SECONDS)
        self._trials = IOPool(1, "kvferry-trial")
        # When each read under way began.
        self._reading: dict[object, float] = {}
        self._write_at = 0.0
        self._refused_at: float | None = None
        self._closed = False
        store.on_result(self._heard)

    @property
    def is_asked(self) -> bool:
        """False while the store is left alone. Memory only; lets a trial begin when one is due."""
        if isinstance(self.store, LateStore) and self.store.opened is None:
            return False
        if self._reading:
            self._find_overdue()
        if self._breaker.take_trial():
            self._submit(self.answers)
        return not self._breaker.is_open

    def _find_overdue(self) -> None:
        """A read that does not return, as on a mount that hangs, is a failure when its time is
        over, and holds its thread. Memory only."""
        overdue = time.monotonic() - self._limit.seconds - OVERDUE_SECONDS
        for call, started in tuple(self._reading.items()):
            if started < overdue and self._reading.pop(call, None) is not None:
                self._heard(StoreError("a read does not end"))

    def answers(self) -> bool:
        """Whether the store answers now, and is not closed. Runs in: I/O thread."""
        num_opened = self._breaker.num_opened
        try:
            self.store.read(_TRIAL_KEY, (), time.monotonic() + TRIAL_SECONDS)
        except StoreError as error:
            self._heard(error, num_opened)
            return False
        self._heard(None, num_opened)
        return not self._closed

    def _heard(self, fault: StoreError | None, num_opened: int | None = None) -> None:
        """A call ended. Without the `num_opened` of its begin, it says nothing while the store is
        left alone: it may have begun before."""
        if self._closed:
            return  # what is cut short by the close says nothing about the store
        if num_opened is None:
            if self._breaker.is_open:
                return
            num_opened = self._breaker.num_opened
        if fault is not None:
            self._breaker.failed(fault, num_opened)
        elif self._breaker.succeeded(num_opened):
            self._write_at = 0.0

    def read(self, key: ChunkKey, ranges: Sequence[ReadRange], deadline: float) -> int | None:
        """See `Store.read`; counted."""
        try:
            size = self.ask(key, ranges, deadline)
        except StoreError:
            self._observer.count(f"tier{self.number}_failed")
            raise
        if size is None:
            self._observer.count(f"tier{self.number}_miss")
            return None
        self._observer.count(f"tier{self.number}_hit")
        num_bytes = sum(max(0, min(len(buffer), size - start)) for start, buffer in ranges)
        self._observer.count(f"tier{self.number}_hit_bytes", num_bytes)
        return size

    def ask(self, key: ChunkKey, ranges: Sequence[ReadRange], deadline: float) -> int | None:
        """See `Store.read`; with the limit of this store, and heard by its breaker."""
        call, started, num_opened = object(), time.monotonic(), self._breaker.num_opened
        self._reading[call] = started
        try:
            size = self.store.read(key, ranges, min(deadline, started + self._limit.seconds))
        except StoreError as error:
            seconds = time.monotonic() - started
            self._limit.saw(seconds)
            # A read that was given little time and took all of it says nothing about the store.
            is_blamed = time.monotonic() < deadline or seconds >= MIN_BLAMED_SECONDS
            if self._reading.pop(call, None) is not None and is_blamed:
                self._heard(error, num_opened)
            raise
        finally:
            self._reading.pop(call, None)
        self._heard(None, num_opened)
        if size is not None:
            self._limit.saw(time.monotonic() - started)
        return size

    @property
    def takes_values(self) -> bool:
        """False while the store is left alone, and for a while after a write that failed."""
        return self.is_asked and self._clock() >= self._write_at

    def begin(self, begin: Callable[[float], Begun], deadline: float) -> Begun | PutResult:
        """Begin a write in parts, unless values are not taken now. It moves no bytes, so its time
        and a want of room for parts say nothing about the store."""
        if not self.takes_values:
            return self._skipped()
        result = begin(min(deadline, time.monotonic() + self._write_limit.seconds))
        if result is PutResult.FAILED:
            self._write_failed(0.0)
        if isinstance(result, PutResult):
            self._observer.count(f"tier{self.number}_put_{result}")
        return result

    def write(
        self, write: Callable[[float], PutResult], deadline: float, *, is_begun: bool = False
    ) -> PutResult:
        """Do a write, unless the store is left alone or did not take the last one.

        Args:
            write: gets its deadline: that of the limit, if it is earlier than `deadline`.
            is_begun: it is whole and waits for nothing else, so it is tried.
        """
        if not (self.is_asked if is_begun else self.takes_values):
            return self._skipped()
        started, num_opened = time.monotonic(), self._breaker.num_opened
        result = write(min(deadline, started + self._write_limit.seconds))
        seconds = time.monotonic() - started
        if result is not PutResult.EXISTS:
            self._write_limit.saw(seconds)
        # One that failed because the server was away needs no pause of its own.
        if result is PutResult.FAILED and num_opened == self._breaker.num_opened:
            self._write_failed(seconds)
        elif result is PutResult.NO_SPACE:
            self._pause_writes(seconds)
            self._submit(lambda: self._refused("it has no room for a value"))
        elif result is PutResult.STORED and self._refused_at is not None:
            self._submit(self._takes_again)
        self._observer.count(f"tier{self.number}_put_{result}")
        return result

    def _skipped(self) -> PutResult:
        self._observer.count(f"tier{self.number}_put_skipped")
        return PutResult.FAILED

    def _write_failed(self, seconds: float) -> None:
        self._pause_writes(seconds)
        self._submit(self._ask_why)

    def _pause_writes(self, seconds: float) -> None:
        self._write_at = self._clock() + WRITE_PAUSE_SECONDS + 4 * seconds

    def _submit(self, work: Callable[[], object]) -> None:
        """Do this on the thread of trials, unless something waits for it."""
        if not self._trials.num_waiting:
            self._trials.submit(lambda _job: work())

    def _ask_why(self) -> None:
        """A write failed. Runs in: I/O thread."""
        if self.answers():
            why = self.store.refusal
            self._refused(f"a value could not be stored{f': {why}' if why else ''}")

    def _refused(self, why: str) -> None:
        """Runs in: I/O thread."""
        if self._refused_at is None:
            logger.warning("store %s: answers, but %s", self.store.url, why)
        self._refused_at = self._clock()

    def _takes_again(self) -> None:
        """Runs in: I/O thread."""
        refused_at = self._refused_at
        if refused_at is not None and self._clock() >= refused_at + TAKES_AGAIN_SECONDS:
            self._refused_at = None
            logger.warning("store %s: takes values again", self.store.url)

    def close(self) -> None:
        """Close the store. A trial that hangs is left behind."""
        self._closed = True
        self._trials.close(0.1)
        self.store.close()

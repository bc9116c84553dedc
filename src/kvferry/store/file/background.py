"""One thread that does everything a store does on its own, in small steps."""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

logger = logging.getLogger(__name__)

_RETRY_SECONDS = 10.0


@dataclass(slots=True)
class Job:
    """Something to do again and again.

    Attributes:
        name: for log lines.
        step: does a bounded piece of work; returns the seconds until the next piece is due.
        on_error: told what went wrong in a step; the step is tried again 10 seconds later.
        urgent: runs at once when the thread is woken.
        due: when the next step runs, in seconds of the thread's clock.
    """

    name: str
    step: Callable[[], float]
    on_error: Callable[[str, OSError], None]
    urgent: bool = False
    due: float = 0.0


class Background:
    """Runs jobs in turn: when several are due, each does one step before any does its second.

    Args:
        jobs: what to do.
        last: done once, when the thread stops.
        clock: monotonic seconds.
    """

    def __init__(
        self, jobs: Sequence[Job], last: Callable[[], None], clock: Callable[[], float]
    ) -> None:
        self._jobs = jobs
        self._last = last
        self._first: Callable[[], None] | None = None
        self._clock = clock
        self._wake = threading.Event()
        self._stopping = False
        # Jobs are for one thread at a time, and `run_until_idle` is a second one.
        self._turn = threading.Lock()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Start the thread. It never keeps the process from ending."""
        self._thread = threading.Thread(target=self._run, name="kvferry-store", daemon=True)
        self._thread.start()

    def wake(self) -> None:
        """Run the urgent jobs as soon as the step under way is done. Memory only."""
        self._wake.set()

    def stop(self, timeout: float, first: Callable[[], None] | None = None) -> None:
        """Stop after the step under way, do `first` and then `last`; waits `timeout` seconds at
        most. Without a thread, both are done here. Once only."""
        self._first = first
        self._stopping = True
        self._wake.set()
        if self._thread is None:
            self._end()
        elif self._thread is not threading.current_thread():
            self._thread.join(timeout)

    def run_until_idle(self) -> None:
        """Run every job now, in this thread, until none has more to do at once."""
        for job in self._jobs:
            job.due = 0.0
        while not self._stopping and self._run_due() <= 0.0:
            pass

    def _run(self) -> None:
        while not self._stopping:
            delay = self._run_due()
            if delay > 0:
                self._wake.wait(None if math.isinf(delay) else delay)
            if self._wake.is_set():
                self._wake.clear()
                for job in self._jobs:
                    job.due = 0.0 if job.urgent else job.due
        self._end()

    def _end(self) -> None:
        if self._first is not None:
            self._first()
        self._last()

    def _run_due(self) -> float:
        """One step of every job that is due; seconds until the next one is."""
        for job in self._jobs:
            with self._turn:
                if not self._stopping and job.due <= self._clock():
                    job.due = self._clock() + self._step(job)
        return min(job.due for job in self._jobs) - self._clock()

    def _step(self, job: Job) -> float:
        try:
            return job.step()
        except OSError as error:
            job.on_error(job.name, error)
        except Exception:
            # The outermost loop of this thread: one broken job must not stop the others.
            logger.exception("kvferry store: background job %s failed", job.name)
        return _RETRY_SECONDS

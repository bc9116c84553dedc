"""A few threads, and the handles of what they do: for blocking I/O, and for work in memory that
must not hold up its caller.

Daemon threads of our own, not `concurrent.futures`: its threads are joined when the interpreter
ends, so one read that hangs in a stalled file system would hang the shutdown.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Generic, TypeVar

from kvferry.processors import leave_processor

T = TypeVar("T")


class Job(Generic[T]):
    """One operation under way. Poll it, wait for it with a deadline, or cancel it: a job that looks
    at `cancelled` then ends early. It may write to what it was given until it has ended."""

    __slots__ = ("_done", "cancelled", "error", "result")

    def __init__(self) -> None:
        self._done = threading.Event()
        self.cancelled = False
        self.result: T | None = None
        self.error: BaseException | None = None

    def poll(self) -> bool:
        """True once the job has ended, or never ran. Never blocks."""
        return self._done.is_set()

    def wait(self, timeout: float) -> bool:
        """Wait up to `timeout` seconds; True if the job ended."""
        return self._done.wait(timeout)

    def cancel(self) -> None:
        """Ask the job to stop. Never blocks."""
        self.cancelled = True


class IOPool:
    """Runs jobs in order of submission on up to `num_threads` threads, whose names begin with
    `name`. A thread is started with each of the first jobs."""

    def __init__(self, num_threads: int, name: str) -> None:
        self._queue: queue.SimpleQueue[tuple[Job[object], Callable[[Job[object]], object]] | None]
        self._queue = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        self.num_threads = num_threads
        self.name = name
        self._closed = False

    def submit(self, run: Callable[[Job[T]], T]) -> Job[T]:
        """Queue `run(job)`; never blocks. It runs even if the job was cancelled meanwhile, so that
        it can give back what it holds; it looks at `job.cancelled` first. After `close` it does not
        run: the job is done and cancelled when this returns. Where the process can start no
        thread, those that it has run the job; without any, the job is done and has an error."""
        job: Job[T] = Job()
        if self._closed:
            job.cancelled = True
            job._done.set()
            return job
        if len(self._threads) < self.num_threads:
            thread = threading.Thread(
                target=self._loop, name=f"{self.name}-{len(self._threads)}", daemon=True
            )
            try:
                thread.start()
            except RuntimeError as error:  # the process has as many as it may have
                if not self._threads:
                    job.error = error
                    job._done.set()
                    return job
            else:
                self._threads.append(thread)
        self._queue.put((job, run))  # type: ignore[arg-type]  # T is erased inside the queue
        return job

    def spread(
        self, items: Sequence[T], work: Callable[[T], None], *, alone: bool = False
    ) -> list[Exception | None]:
        """Do `work` on every item, on this thread and on threads of the pool that are free by then.
        For work in memory: it waits for no job that is under way or queued, only for items begun.

        Args:
            items: what to work on; begun in this order.
            work: called once for each, by up to `num_threads` threads at a time.
            alone: on this thread only.

        Returns:
            For each item the exception that it raised, or None.
        """
        errors: list[Exception | None] = [RuntimeError("interrupted")] * len(items)
        waiting = deque(enumerate(items))
        ended = threading.Semaphore(0)

        def run() -> None:
            while waiting:
                try:
                    index, item = waiting.popleft()
                except IndexError:  # another thread was first
                    return
                try:
                    work(item)
                    errors[index] = None
                except Exception as error:
                    errors[index] = error
                finally:
                    ended.release()

        try:
            for _ in range(0 if alone else min(len(items), self.num_threads) - 1):
                self.submit(lambda _job: run())
            run()
        finally:
            while waiting:  # this thread was interrupted: hand out nothing more
                with suppress(IndexError):
                    waiting.popleft()
                    ended.release()
            for _ in items:
                ended.acquire()
        return errors

    def close(self, timeout: float) -> bool:
        """Let queued jobs finish for up to `timeout` seconds. True if every thread ended.

        A thread stuck in a system call stays behind as a daemon. Its job must be cancelled by the
        caller that submitted it, so that it touches nothing of the engine's.
        """
        if not self._closed:
            self._closed = True
            for _ in self._threads:
                self._queue.put(None)
        deadline = time.monotonic() + timeout
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    def _loop(self) -> None:
        leave_processor()
        while (item := self._queue.get()) is not None:
            job, run = item
            try:
                job.result = run(job)
            except BaseException as error:  # outermost loop of a thread: the job has the error
                job.error = error
            job._done.set()
            del item, job, run

"""A few threads for blocking I/O, and the handles of what they do.

Daemon threads of our own, not `concurrent.futures`: its threads are joined when the interpreter
ends, so one read that hangs in a stalled file system would hang the shutdown.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from kvferry.store.cpus import leave_processor

T = TypeVar("T")


class Job(Generic[T]):
    """One operation under way. Poll it, wait for it with a deadline, or cancel it.

    After `cancel` returns, the operation writes to nothing but memory of its own: whatever it
    delivers to others it delivers inside `claim`, which then fails.
    """

    __slots__ = ("_done", "_lock", "cancelled", "error", "result")

    def __init__(self) -> None:
        self._done = threading.Event()
        self._lock = threading.Lock()
        self.cancelled = False
        self.result: T | None = None
        self.error: BaseException | None = None

    @classmethod
    def ended(cls) -> Job[T]:
        """One that ended before it began, without a result."""
        job = cls()
        job._done.set()
        return job

    def poll(self) -> bool:
        """True once `result` or `error` is set. Never blocks."""
        return self._done.is_set()

    def wait(self, timeout: float) -> bool:
        """Wait up to `timeout` seconds; True if the job ended."""
        return self._done.wait(timeout)

    def cancel(self) -> None:
        """Ask the job to stop. Waits only for a delivery (a copy in memory) under way."""
        with self._lock:
            self.cancelled = True

    def claim(self) -> bool:
        """Begin a delivery; True if the job may write to memory that is not its own. A caller that
        got True calls `release` after it."""
        self._lock.acquire()
        if self.cancelled:
            self._lock.release()
            return False
        return True

    def release(self) -> None:
        self._lock.release()


class Spread(Generic[T]):
    """Items that several threads work on; each takes the next one when it is through with its
    last.

    Attributes:
        errors: what was raised, by item.
    """

    def __init__(self, items: Sequence[T], work: Callable[[T], None]) -> None:
        self._items = items
        self._work = work
        self._next = 0
        self._stop = len(items)
        self._changed = threading.Condition()
        self._running: set[int] = set()
        self.errors: list[Exception | None] = [None] * len(items)

    def run(self, stop: int | None = None) -> None:
        """Work until nothing (before item `stop`) is left to take."""
        while (index := self._take(stop)) is not None:
            try:
                self._work(self._items[index])
            except Exception as error:
                self.errors[index] = error
            except BaseException as error:
                self.errors[index] = RuntimeError(f"interrupted by {error!r}")
                raise
            finally:
                with self._changed:
                    self._running.discard(index)
                    self._changed.notify_all()

    def _take(self, stop: int | None) -> int | None:
        with self._changed:
            index = self._next
            if index >= (self._stop if stop is None else min(stop, self._stop)):
                return None
            self._next += 1
            self._running.add(index)
            return index

    def complete(self, stop: int) -> None:
        """Have every item before `stop` done. Waits for no thread but those that have begun one of
        them."""
        self.run(stop)
        with self._changed:
            self._changed.wait_for(lambda: all(index >= stop for index in self._running))

    def end(self) -> int:
        """Hand out nothing more, and wait for what was handed out; how many items were."""
        with self._changed:
            self._stop = self._next
            self._changed.wait_for(lambda: not self._running)
            return self._next


class IOPool:
    """Runs jobs in order of submission on `num_threads` threads, started with the first job.

    Args:
        num_threads: how many operations run at once.
        name: prefix of the thread names.
    """

    def __init__(self, num_threads: int, name: str) -> None:
        self._queue: queue.SimpleQueue[tuple[Job[object], Callable[[Job[object]], object]] | None]
        self._queue = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        self.num_threads = num_threads
        self._name = name
        self._closed = False

    def submit(self, run: Callable[[Job[T]], T]) -> Job[T]:
        """Queue `run(job)`; never blocks. It runs even if the job was cancelled meanwhile, so that
        it can give back what it holds; it looks at `job.cancelled` first. After `close` it does not
        run: the job is done and cancelled when this returns."""
        job: Job[T] = Job()
        if self._closed:
            job.cancelled = True
            job._done.set()
            return job
        if len(self._threads) < self.num_threads:
            thread = threading.Thread(
                target=self._loop, name=f"{self._name}-{len(self._threads)}", daemon=True
            )
            try:
                thread.start()
            except RuntimeError:  # the process has as many as it may have
                if not self._threads:
                    raise
            else:
                self._threads.append(thread)
        self._queue.put((job, run))  # type: ignore[arg-type]  # T is erased inside the queue
        return job

    def spread(
        self, items: Sequence[T], work: Callable[[T], None], *, alone: bool = False
    ) -> list[Exception | None]:
        """Do `work` on every item, here and on threads of the pool that are free by then. For work
        in memory: it waits for no job that is under way or queued, only for items begun.

        Args:
            items: what to work on; begun in this order.
            work: called once for each, by up to `num_threads` threads at a time.
            alone: by this thread only.

        Returns:
            What it raised, by item.
        """
        helpers = 0 if alone else min(len(items), self.num_threads) - 1
        spread = self.begin(items, work, helpers)
        try:
            spread.run()
        finally:
            spread.end()
        return spread.errors

    def begin(self, items: Sequence[T], work: Callable[[T], None], num_threads: int) -> Spread[T]:
        """Let up to `num_threads` threads that are free by then work on items, while the caller
        does something else. The caller ends it."""
        spread = Spread(items, work)
        try:
            for _ in range(num_threads):
                self.submit(lambda _job: spread.run())
        except BaseException:
            spread.end()
            raise
        return spread

    def close(self, timeout: float) -> bool:
        """Let queued jobs finish for up to `timeout` seconds. True if every thread ended.

        A thread stuck in a system call stays behind as a daemon; its job is cancelled by whoever
        holds it, so it can touch nothing of the engine's.
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
            except BaseException as error:  # outermost loop of a thread: the handle tells
                job.error = error
            job._done.set()
            del item, job, run

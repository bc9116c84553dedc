"""A small pool of threads, and a handle for each job: for blocking I/O, and for work in memory that
must not hold up its caller. Stores, the cache and the adapters have pools of their own.

The threads are daemons. Those of `concurrent.futures` are not: they are joined when the interpreter
ends, so a read that hangs in a stalled file system would hang the shutdown.

Threads end with their owner. A pool that is dropped ends its threads, since these do not refer to
it. Objects whose end takes longer (stores, engines) have `end_when_dropped` end them.
"""

from __future__ import annotations

import os
import queue
import threading
import time
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Generic, TypeVar

from kvferry.processors import begin_io_thread

T = TypeVar("T")


def end_when_dropped(owner: object, name: str, end: Callable[[], object]) -> Callable[[], object]:
    """Have `end` called if `owner` is dropped without a close, as by a notebook's cell that runs
    again: on a thread of its own, with a `ResourceWarning` as for files. Not in a forked process,
    and not as the interpreter ends. `end`, and the threads that it ends, must not refer to `owner`.

    Returns:
        What a close of the owner calls first, so that this does not happen any more.
    """
    dropped = weakref.finalize(owner, _end, name, end, os.getpid())
    dropped.atexit = False
    return dropped.detach


def _end(name: str, end: Callable[[], object], process: int) -> None:
    """Runs wherever garbage is collected, perhaps under a lock, so it waits for nothing."""
    if os.getpid() == process:
        with suppress(RuntimeError):  # the process can start no thread
            threading.Thread(target=end, name="kvferry-end", daemon=True).start()
        warnings.warn(f"{name} was dropped and not closed", ResourceWarning, stacklevel=2)


class Job(Generic[T]):
    """The handle of one operation: poll it, wait for it with a deadline, or cancel it. A job that
    looks at `cancelled` then ends early. A job may write to its buffers until it has ended."""

    __slots__ = ("_done", "cancelled", "error", "result")

    def __init__(self) -> None:
        self._done = threading.Event()
        self.cancelled = False
        self.result: T | None = None
        self.error: BaseException | None = None

    def poll(self) -> bool:
        """Whether the job has ended, or will never run. Never blocks."""
        return self._done.is_set()

    def wait(self, timeout: float) -> bool:
        """Wait up to `timeout` seconds; True if the job ended."""
        return self._done.wait(timeout)

    def cancel(self) -> None:
        """Ask the job to stop. Never blocks."""
        self.cancelled = True


class IOPool:
    """Begins jobs in order of submission on up to `num_threads` threads, whose names begin with
    `name`. A job for which no thread is free starts one."""

    def __init__(self, num_threads: int, name: str) -> None:
        self._queue: _Queue = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._open: set[Job[object]] = set()  # that wait or run
        self._waiting: deque[tuple[Job[object], Callable[[Job[object]], object]]] = deque()
        self._num_begun = 0  # jobs that can wait, and that do not
        self.num_threads = num_threads
        self.name = name
        self._closed = False
        self._lock = threading.Lock()  # for the threads and the end
        weakref.finalize(self, _end_threads, self._queue, self._threads).atexit = False

    def submit(self, run: Callable[[Job[T]], T], *, can_wait: bool = False) -> Job[T]:
        """Queue `run(job)`. Never blocks. Jobs that can wait get half of the threads at a time, but
        one at least: other jobs find a free thread, or wait for one such job at most.

        `run` is called even if the job was cancelled meanwhile, so that it can give back what it
        holds; it should look at `job.cancelled` first. After `close` it is not called: the returned
        job is done and cancelled. If the process can start no thread, the pool's threads run the
        job; if the pool has none, the returned job is done and has an error."""
        job: Job[T] = Job()
        with self._lock:
            if self._closed:
                job.cancelled = True
                job._done.set()
                return job
            if can_wait:
                run = self._in_turn(run)
                if self._num_begun >= max(1, self.num_threads // 2):
                    self._waiting.append((job, run))  # type: ignore[arg-type]  # T is erased
                    return job
            self._open.add(job)  # type: ignore[arg-type]
            if len(self._threads) < min(len(self._open), self.num_threads):
                thread = threading.Thread(
                    target=_work,
                    args=(self._queue, self._open),
                    name=f"{self.name}-{len(self._threads)}",
                    daemon=True,
                )
                try:
                    thread.start()
                except RuntimeError as error:  # the process has as many as it may have
                    if not self._threads:
                        self._open.clear()
                        job.error = error
                        job._done.set()
                        return job
                else:
                    self._threads.append(thread)
            self._num_begun += can_wait
            self._queue.put((job, run))  # type: ignore[arg-type]
        return job

    def _in_turn(self, run: Callable[[Job[T]], T]) -> Callable[[Job[T]], T]:
        """As `run`, but then the next job that waits begins."""

        def run_in_turn(job: Job[T]) -> T:
            try:
                return run(job)
            finally:
                with self._lock:
                    if self._waiting:
                        self._open.add(self._waiting[0][0])
                        self._queue.put(self._waiting.popleft())
                    else:
                        self._num_begun -= 1

        return run_in_turn

    def spread(
        self, items: Sequence[T], work: Callable[[T], None], *, alone: bool = False
    ) -> list[Exception | None]:
        """Call `work` for every item, on the calling thread and on threads of the pool that are
        free. Blocks until every item is done, but waits for no other job of the pool. For work in
        memory.

        Args:
            items: what to work on; begun in this order.
            work: called once for each item, by up to `num_threads` threads at a time.
            alone: whether to use the calling thread only.

        Returns:
            For each item the exception that `work` raised, or None.
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

    def close(self, timeout: float = 2.0) -> bool:
        """Let queued jobs finish for up to `timeout` seconds. True if every thread ended.

        A thread stuck in a system call stays behind as a daemon. The submitter of its job must
        cancel it, so that it touches no memory of the engine.
        """
        with self._lock:
            if not self._closed:
                self._closed = True
                while self._waiting:
                    self._queue.put(self._waiting.popleft())
                _end_threads(self._queue, self._threads)
        deadline = time.monotonic() + timeout
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)


_Queue = queue.SimpleQueue[tuple[Job[object], Callable[[Job[object]], object]] | None]


def _work(waiting: _Queue, unfinished: set[Job[object]]) -> None:
    """The loop of a pool's thread. It does not refer to the pool, which may be dropped."""
    begin_io_thread()
    while (item := waiting.get()) is not None:
        job, run = item
        try:
            job.result = run(job)
        except BaseException as error:  # outermost loop of a thread: the job keeps the error
            job.error = error
        unfinished.discard(job)
        job._done.set()
        del item, job, run


def _end_threads(waiting: _Queue, threads: Sequence[threading.Thread]) -> None:
    """Let each thread end after the jobs that wait. Takes no lock, as it runs in finalisers."""
    for _ in threads:
        waiting.put(None)

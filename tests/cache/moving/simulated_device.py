"""A stand-in for a GPU whose two streams run only when a test says so. The test chooses the stream
that runs first, as far as the marks that a stream waits for allow."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

import torch

from kvferry.blocks.copies import DeviceSetup
from kvferry.layout.streams import Mark
from kvferry.store.io_pool import Job
from kvferry.testing.stores.hooks import PATIENCE_SECONDS


class Event:
    """A point in a stream, reached once the device has run all work before it."""

    def __init__(self, asked: threading.Event) -> None:
        self.reached = False
        self._asked = asked

    def query(self) -> bool:
        if not self.reached and threading.current_thread() is not threading.main_thread():
            self._asked.set()
        return self.reached


class SimulatedDevice:
    """The engine's stream and a side stream over CPU tensors. It replaces a `SideStream`."""

    overlaps = True

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._asked = threading.Event()
        self.queues: dict[str, deque[Event | Callable[[], object]]] = {
            "engine": deque(),
            "side": deque(),
        }
        self.memory_left = 10**9
        """Calls of `run` with work before the device is out of memory."""
        self.pinned = 0

    def setup(self, **options: int) -> DeviceSetup:
        return DeviceSetup(stream=lambda _device: self, pin=self.pin, **options)

    def pin(self, _memory: memoryview, _device: torch.device):
        return Pin(self)

    # -- SideStream -----------------------------------------------------------------------------

    def mark(self) -> Mark:
        return self._record("engine")

    def hold(self, mark: Mark) -> None:
        self._wait("engine", mark)

    def end(self) -> Mark:
        with self._lock:
            return self._record("side")

    def run(self, work: Callable[[], object], *, after: Mark) -> Mark:
        if self.memory_left == 0:
            raise torch.cuda.OutOfMemoryError
        self.memory_left -= 1
        with self._lock:
            self._wait("side", after)
            self.queues["side"].append(work)
            return self._record("side")

    def _record(self, stream: str) -> Mark:
        event = Event(self._asked)
        event.reached = not self.queues[stream]
        self.queues[stream].append(lambda: setattr(event, "reached", True))
        return Mark(event)

    def _wait(self, stream: str, mark: Mark) -> None:
        if mark.event is not None:
            self.queues[stream].append(mark.event)

    # -- the engine and time --------------------------------------------------------------------

    def compute(self, work: Callable[[], object]) -> None:
        """Submit work of the engine."""
        self.queues["engine"].append(work)

    def wait_until_waited_for(self) -> None:
        """Return once another thread has found a mark that is not reached, and so waits for it."""
        assert self._asked.wait(PATIENCE_SECONDS), "no thread waits for the device"

    def drain(self, first: str = "engine") -> None:
        """Run everything. Whenever both streams could go on, `first` goes on."""
        other = "side" if first == "engine" else "engine"
        while self._advance(first) or self._advance(other):
            pass
        left = {name: len(queue) for name, queue in self.queues.items() if queue}
        assert not left, f"streams wait for each other: {left}"

    def _advance(self, stream: str) -> bool:
        queue = self.queues[stream]
        if not queue:
            return False
        item = queue[0]
        if isinstance(item, Event):
            if item.reached:
                queue.popleft()
            return item.reached
        queue.popleft()
        item()
        return True


class Pin:
    """A context manager that counts as pinned memory while it is entered."""

    def __init__(self, device: SimulatedDevice) -> None:
        self._device = device

    def __enter__(self) -> None:
        self._device.pinned += 1

    def __exit__(self, *_error: object) -> None:
        self._device.pinned -= 1


def job_without_a_thread() -> Job[object]:
    """Return the job that `IOPool.submit` returns if the process can start no thread."""
    job: Job[object] = Job()
    job.error = RuntimeError("can't start new thread")
    job._done.set()
    return job

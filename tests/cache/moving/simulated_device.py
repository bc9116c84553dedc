"""A stand-in for a GPU whose streams run only when a test says so. The test chooses the stream that
runs first, as far as the marks that a stream waits for allow. A copy reads when it runs."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

import torch

from kvferry.blocks.copies import DeviceSetup
from kvferry.layout.streams import Mark, Streams
from kvferry.store.io_pool import Job
from kvferry.testing.stores.hooks import wait_until


class Event:
    """A point in a stream, reached once the device has run all work before it."""

    def __init__(self, askers: set[str]) -> None:
        self.reached = False
        self._askers = askers

    def query(self) -> bool:
        if not self.reached:
            self._askers.add(threading.current_thread().name)
        return self.reached


STREAMS = ("engine", "inward", "outward", "hashing")


class SimulatedStream:
    """Replaces a `DeviceStream`."""

    def __init__(self, device: SimulatedDevice, name: str) -> None:
        self.device = device
        self.queue = device.queues[name] = deque()

    def run(self, work: Callable[[], object] | None = None, *after: Mark) -> Mark:
        device = self.device
        if work is not None:
            if device.memory_left == 0:
                raise torch.cuda.OutOfMemoryError
            device.memory_left -= 1
        event = Event(device.askers)
        with device.lock:
            self.queue.extend(mark.event for mark in after if mark.event is not None)
            if work is not None:
                self.queue.append(work)
            event.reached = not self.queue
            if not event.reached:
                self.queue.append(lambda: setattr(event, "reached", True))
        if device.is_eager:
            device.drain()
        return Mark(event)


class SimulatedDevice:
    """The streams of a device over CPU tensors."""

    kind = "cpu"
    """Of the tensors."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.askers: set[str] = set()
        """Threads that found a mark that was not reached."""
        self.queues: dict[str, deque[Event | Callable[[], object]]] = {}
        self.streams = Streams(*(SimulatedStream(self, name) for name in STREAMS))
        self.memory_left = 10**9
        """Calls of `run` with work before the device is out of memory."""
        self.pinned = 0
        self.is_eager = True
        """Whether everything runs at once, as while the engine starts."""

    def setup(self, num_pieces: int = 64, chunk_tokens: int = 32, **options: object) -> DeviceSetup:
        """Memory for so many chunks; a quarter, or one at least, is for loads."""

        def num_bytes(_device: torch.device, step_bytes: int) -> int:
            return num_pieces * step_bytes * chunk_tokens // 8192

        options = {"pin": self.pin, "num_bytes": num_bytes} | options
        return DeviceSetup(streams=lambda _device: self.streams, **options)

    def pin(self, _memory: memoryview, _device: torch.device):
        return Pin(self)

    # -- the engine and time --------------------------------------------------------------------

    def compute(self, work: Callable[[], object]) -> None:
        """Submit work of the engine."""
        self.queues["engine"].append(work)

    def wait_until_waited_for(self) -> None:
        """Return once another thread has found a mark that is not reached, and so waits for it."""
        main = {threading.main_thread().name}
        wait_until(lambda: self.askers - main, "a thread waits for the device")

    def drain(self, first: str = "engine") -> None:
        """Run everything. Whenever the stream `first` could go on, it does."""
        while any(self.advance(name) for name in (first, *STREAMS)):
            pass
        left = {name: len(queue) for name, queue in self.queues.items() if queue}
        assert not left, f"streams wait for each other: {left}"

    def run_until(self, is_reached: Callable[[], bool]) -> None:
        """Run the other streams as late as possible."""
        while not is_reached():
            assert any(self.advance(name) for name in reversed(STREAMS))

    def is_idle(self, stream: str) -> bool:
        return not self.queues[stream]

    def advance(self, stream: str, count: int = 1) -> bool:
        """Run the next pieces of work of a stream; False if it has none, or waits for a mark."""
        return all(self._run_next(stream) for _ in range(count))

    def _run_next(self, stream: str) -> bool:
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
        if torch.cuda.is_available():  # kernels on tensors of a real one: what has run is done
            torch.cuda.synchronize()
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

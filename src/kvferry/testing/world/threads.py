"""What stands in for threads, locks, queues and clocks while code of kvferry runs in a world.

`in_world` is the seam between kvferry and a world: it puts these in the place of `threading`,
`time` and `queue`, and of what reaches other processes, in all modules of kvferry. So nothing in
the cache knows of it and no step pays for it, and code that begins to use a thread or a clock
tomorrow is in the world without a change. A thread of a test that is not the world's gets the
real ones.
"""

from __future__ import annotations

import math
import queue
import random
import secrets
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent import futures
from contextlib import contextmanager
from types import FunctionType, ModuleType
from typing import Any, Generic, NamedTuple, TypeVar

from kvferry.processors import begin_io_thread
from kvferry.testing.world.loop import START, Loop, Task

T = TypeVar("T")

EPOCH = 1_800_000_000.0
"""Seconds since the epoch at which a world begins."""


class Waiters:
    """Tasks that wait for one thing."""

    def __init__(self, loop: Loop) -> None:
        self._loop = loop
        self._tasks: list[Task] = []

    def wait_for(self, holds: Callable[[], bool], timeout: float | None) -> bool:
        """Wait until `holds`, at most `timeout` seconds."""
        if holds():
            return True
        until = math.inf if timeout is None else self._loop.now + max(0.0, timeout)
        task = self._loop.current
        while self._loop.now < until:
            if task is not None and task not in self._tasks:
                self._tasks.append(task)
            self._loop.wait(until)
            if holds():
                return True
        return holds()

    def wake(self) -> None:
        if self._tasks:
            tasks, self._tasks = self._tasks, []
            for task in tasks:
                self._loop.wake(task)


class Event:
    def __init__(self, loop: Loop) -> None:
        self._is_set = False
        self._waiters = Waiters(loop)

    def is_set(self) -> bool:
        return self._is_set

    def set(self) -> None:
        self._is_set = True
        self._waiters.wake()

    def clear(self) -> None:
        self._is_set = False

    def wait(self, timeout: float | None = None) -> bool:
        return self._waiters.wait_for(self.is_set, timeout)


class Semaphore:
    def __init__(self, loop: Loop, value: int = 1) -> None:
        self._value = value
        self._waiters = Waiters(loop)

    def acquire(self, blocking: bool = True, timeout: float | None = None) -> bool:
        if self._value <= 0 and not self._waiters.wait_for(
            lambda: self._value > 0, timeout if blocking else 0.0
        ):
            return False
        self._value -= 1
        return True

    def release(self) -> None:
        self._value += 1
        self._waiters.wake()

    def locked(self) -> bool:
        return self._value <= 0

    def __enter__(self) -> bool:
        if self._value > 0:  # most locks are free
            self._value -= 1
            return True
        return self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()


class SimpleQueue(Generic[T]):
    def __init__(self, loop: Loop) -> None:
        self._items: deque[T] = deque()
        self._waiters = Waiters(loop)

    def put(self, item: T) -> None:
        self._items.append(item)
        self._waiters.wake()

    def get(self, block: bool = True, timeout: float | None = None) -> T:
        if not self._waiters.wait_for(lambda: bool(self._items), timeout if block else 0.0):
            raise queue.Empty
        return self._items.popleft()


class Thread:
    def __init__(
        self,
        loop: Loop,
        target: Callable[..., Any],
        args: Sequence[Any] = (),
        name: str = "thread",
        daemon: bool = True,
    ) -> None:
        self._loop = loop
        self._run = lambda: target(*args)
        self.name = name
        self.daemon = daemon
        self.task: Task | None = None

    def start(self) -> None:
        self.task = self._loop.spawn(self._run, self.name)

    def join(self, timeout: float | None = None) -> None:
        if self.task is not None:
            seconds = math.inf if timeout is None else timeout
            self._loop.join(self.task, self._loop.now + seconds)

    def is_alive(self) -> bool:
        return self.task is not None and not self.task.ended


class Future(Generic[T]):
    def __init__(self, loop: Loop) -> None:
        self._is_done = Event(loop)
        self._result: Any = None
        self._error: BaseException | None = None

    def done(self) -> bool:
        return self._is_done.is_set()

    def set_result(self, result: T) -> None:
        self._result = result
        self._is_done.set()

    def set_exception(self, error: BaseException | None) -> None:
        self._error = error
        self._is_done.set()

    def exception(self, timeout: float | None = None) -> BaseException | None:
        if not self._is_done.wait(timeout):
            raise TimeoutError
        return self._error

    def result(self, timeout: float | None = None) -> T:
        if (error := self.exception(timeout)) is not None:
            raise error
        result: T = self._result
        return result


class _Waited(NamedTuple):
    done: set[Future[Any]]
    not_done: set[Future[Any]]


def wait_for_futures(fs: Sequence[Future[Any]], timeout: float | None = None) -> _Waited:
    """As `concurrent.futures.wait`, of one future."""
    (future,) = fs
    is_done = future._is_done.wait(timeout)
    return _Waited({future}, set()) if is_done else _Waited(set(), {future})


class Seam:
    """The stand-ins of one world after another. Threads that are not of the world, which earlier
    tests may have left, get what is real.

    Attributes:
        loop: of the world that runs.
        epoch: seconds since the epoch at which it begins.
        random: draws what code of kvferry draws, such as the namespace of an epoch.
        media, peers, world: of that world, for the kind of store, links and devices that it brings.
    """

    def __init__(self) -> None:
        self.loop = Loop(0)
        self.random = random.Random(0)
        self.media: Any = None
        self.peers: Any = None
        self.world: Any = None
        self.epoch = EPOCH
        self._undo: list[Callable[[], object]] = []
        self._thread = threading.get_ident()
        self.threading = self._module(
            threading,
            Lock=lambda: Semaphore(self.loop),
            Event=lambda: Event(self.loop),
            Semaphore=lambda value=1: Semaphore(self.loop, value),
            Thread=lambda **given: Thread(self.loop, **given),
            current_thread=lambda: self.loop.current,
        )
        self.time = self._module(
            time,
            monotonic=lambda: self.loop.now,
            perf_counter=lambda: self.loop.now,
            time=self.wall,
            sleep=lambda seconds: self.loop.sleep(seconds),
        )
        self.queue = self._module(queue, SimpleQueue=_Generic(lambda: SimpleQueue(self.loop)))
        self.secrets = self._module(
            secrets,
            token_bytes=lambda num_bytes=32: self.random.randbytes(num_bytes),
            token_hex=lambda num_bytes=32: self.random.randbytes(num_bytes).hex(),
            randbits=lambda num_bits: self.random.getrandbits(num_bits),
        )
        self.stands_for: dict[int, Any] = {
            id(threading): self.threading,
            id(time): self.time,
            id(queue): self.queue,
            id(secrets): self.secrets,
            id(time.monotonic): self.time.monotonic,
            id(time.perf_counter): self.time.perf_counter,
            id(time.time): self.time.time,
            id(time.sleep): self.time.sleep,
            id(random.random): self._mine(random.random, lambda: self.random.random()),
            id(futures.Future): _Generic(self._mine(futures.Future, lambda: Future(self.loop))),
            id(futures.wait): self._mine(futures.wait, wait_for_futures),
            id(begin_io_thread): self._mine(begin_io_thread, lambda: None),
        }

    def put(self, place: Any, name: str, value: Any) -> None:
        """Set an attribute until `end`."""
        old = getattr(place, name)
        self._undo.append(lambda: setattr(place, name, old))
        setattr(place, name, value)

    def end(self) -> None:
        while self._undo:
            self._undo.pop()()

    def wall(self) -> float:
        """Seconds since the epoch."""
        return self.epoch + self.loop.now - START

    def _mine(self, real: Callable[..., Any], stand_in: Callable[..., Any]) -> Callable[..., Any]:
        """A function that only the world's thread finds replaced."""
        thread, get_ident = self._thread, threading.get_ident

        def either(*args: Any, **given: Any) -> Any:
            return (stand_in if get_ident() == thread else real)(*args, **given)

        return either

    def _module(self, real: ModuleType, **stand_ins: Callable[..., Any]) -> Any:
        """A module whose other names are those of the real one."""
        made = ModuleType(real.__name__)
        made.__getattr__ = lambda name: getattr(real, name)  # type: ignore[method-assign]
        for name, stand_in in stand_ins.items():
            setattr(made, name, self._mine(getattr(real, name), stand_in))
        return made


class _Generic:
    """A class that is called or subscripted."""

    def __init__(self, make: Callable[..., Any]) -> None:
        self._make = make

    def __call__(self, *args: Any, **given: Any) -> Any:
        return self._make(*args, **given)

    def __getitem__(self, _: object) -> Callable[..., Any]:
        return self._make


def _modules() -> Iterator[ModuleType]:
    """The modules of kvferry, but for the worlds themselves."""
    for name, module in list(sys.modules.items()):
        if name.split(".")[0] == "kvferry" and not name.startswith("kvferry.testing.world"):
            yield module


def _functions(module: ModuleType) -> Iterator[FunctionType]:
    """The functions and methods that a module defines."""
    for value in list(vars(module).values()):
        if getattr(value, "__module__", None) != module.__name__:
            continue
        if isinstance(value, FunctionType):
            yield value
        elif isinstance(value, type):
            yield from (each for each in vars(value).values() if isinstance(each, FunctionType))


@contextmanager
def in_world() -> Iterator[Seam]:
    """Let the modules of kvferry that are loaded find the stand-ins, until the block ends."""
    seam = Seam()
    stands_for = seam.stands_for
    try:
        for module in _modules():
            for name, value in list(vars(module).items()):
                if id(value) in stands_for:
                    seam.put(module, name, stands_for[id(value)])
            for function in _functions(module):
                given, named = function.__defaults__ or (), function.__kwdefaults__ or {}
                if any(id(each) in stands_for for each in given):
                    new = tuple(stands_for.get(id(each), each) for each in given)
                    seam.put(function, "__defaults__", new)
                if any(id(each) in stands_for for each in named.values()):
                    of_names = {name: stands_for.get(id(g), g) for name, g in named.items()}
                    seam.put(function, "__kwdefaults__", of_names)
        yield seam
    finally:
        seam.end()

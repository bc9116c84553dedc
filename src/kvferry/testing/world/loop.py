"""Virtual time, and a ready queue whose order is drawn from a seed: the one thread of a world.

A *task* stands for a thread. It runs alone until it waits; then the loop draws which ready task
goes on. If none is ready, time jumps to when the next one is due, so hours cost milliseconds. The
same seed gives the same order, and so the same run.
"""

from __future__ import annotations

import heapq
import math
import random
from collections.abc import Callable
from typing import Any, NoReturn

from greenlet import getcurrent, greenlet

START = 1e6
"""Monotonic seconds at which a world begins."""

MAX_TURNS = 400_000
"""Turns of tasks in one world. More are a loop that waits for nothing."""


class Killed(BaseException):
    """Raised in a task whose process was killed, where it waits."""


class Stuck(Exception):
    """A world that cannot go on: it has no end."""


class Wrong(Exception):
    """An invariant of the world is broken.

    Attributes:
        what: which one, in a word or two.
    """

    def __init__(self, what: str, said: str) -> None:
        super().__init__(f"{what}: {said}")
        self.what = what


class Task:
    """A thread of a world.

    Attributes:
        owner: the process to which it belongs.
    """

    __slots__ = ("ended", "greenlet", "is_killed", "name", "number", "owner", "waiters", "wakes")

    def __init__(self, name: str, owner: str, number: int) -> None:
        self.name = name
        self.owner = owner
        self.number = number
        self.wakes = 0  # how often it was made ready: older timers of it are stale
        self.ended = False
        self.is_killed = False
        self.waiters: list[Task] = []
        self.greenlet: greenlet | None = None

    def __repr__(self) -> str:
        return f"<Task {self.number} {self.owner}/{self.name}>"


class Loop:
    """The tasks of a world and their time.

    Args:
        seed: decides which ready task runs next.

    Attributes:
        now: virtual monotonic seconds.
        current: the task that runs; None outside of `run`.
        num_turns: how often a task has gone on.
        failure: the first error that ended a task; `run` raises it.
    """

    def __init__(self, seed: int) -> None:
        self.now = START
        self.current: Task | None = None
        self.num_turns = 0
        self.failure: BaseException | None = None
        self.tasks: dict[greenlet, Task] = {}
        self._random = random.Random(f"loop {seed}").random
        self._ready: list[Task] = []
        self._timers: list[tuple[float, int, int, Task]] = []  # due, number, wakes of the task
        self._num_timers = 0
        self._num_tasks = 0
        self._hub = getcurrent()

    def fail(self, wrong: Wrong) -> NoReturn:
        """End the world, also from within calls whose errors kvferry catches."""
        self.failure = self.failure or wrong
        raise wrong

    def spawn(self, run: Callable[[], Any], name: str, owner: str | None = None) -> Task:
        """Begin a task. Without an owner, it belongs to the process of the current task."""
        if owner is None:
            owner = "" if self.current is None else self.current.owner
        self._num_tasks += 1
        task = Task(name, owner, self._num_tasks)

        def body() -> None:
            try:
                run()
            except Killed:
                pass
            except BaseException as error:
                self.failure = self.failure or error
            finally:
                task.ended = True
                self.current = None
                self.tasks.pop(getcurrent(), None)
                for waiter in task.waiters:
                    self.wake(waiter)

        task.greenlet = greenlet(body, self._hub)
        self.tasks[task.greenlet] = task
        self._ready.append(task)
        return task

    # -- what a task calls ----------------------------------------------------------------------

    def wait(self, until: float = math.inf) -> None:
        """Let others run until the current task is woken, or `until`. May return earlier."""
        task = self.current
        if task is None:
            raise Stuck("something waits outside of a task: it would wait for ever")
        if task.is_killed:
            raise Killed
        if until < math.inf:
            self._num_timers += 1
            heapq.heappush(self._timers, (until, self._num_timers, task.wakes, task))
        chosen = self._next()
        if chosen is not task:  # else it goes on at once
            self.current = chosen
            if chosen is None or chosen.greenlet is None:
                self._hub.switch()
            else:
                chosen.greenlet.switch()
            self.current = task
        if task.is_killed:
            raise Killed

    def wake(self, task: Task) -> None:
        """Make a task that waits ready. It looks itself what it waited for."""
        if not (task.is_killed or task.ended or task in self._ready):
            task.wakes += 1
            self._ready.append(task)

    def sleep(self, seconds: float) -> None:
        until = self.now + max(0.0, seconds)
        if seconds <= 0:
            self.pause()
        while self.now < until:
            self.wait(until)

    def pause(self) -> None:
        """Let other ready tasks run first, perhaps."""
        task = self.current
        if task is not None:
            self._ready.append(task)
            self.wait()

    def join(self, task: Task, until: float = math.inf) -> bool:
        """Wait for the end of a task. Whether it has ended."""
        me = self.current
        if me is not None:
            task.waiters.append(me)
        while not (task.ended or task.is_killed) and self.now < until:
            self.wait(until)
        return task.ended

    # -- the loop -------------------------------------------------------------------------------

    def run(self, main: Task) -> None:
        """Run all tasks until `main` has ended. Raises what ended a task before its time.

        Raises:
            Stuck: nothing can run any more, or the turns have no end.
        """
        self._hub = getcurrent()
        while not main.ended:
            task = self._next()
            if task is None:
                if self.num_turns > MAX_TURNS:
                    raise Stuck(f"{MAX_TURNS} turns, and no end; last {self._ready[:4]}")
                waiting = ", ".join(map(repr, self.tasks.values()))
                raise Stuck(f"{main} waits for what never comes; others that wait: {waiting}")
            assert task.greenlet is not None
            self.current = task
            task.greenlet.switch()
            self.current = None
            if self.failure is not None:
                raise self.failure

    def _next(self) -> Task | None:
        """Draw the task that goes on; let time pass if none is ready. None: the loop must end."""
        ready = self._ready
        while self.num_turns <= MAX_TURNS:
            if not ready:
                if not self._next_timer():
                    return None
                continue
            self.num_turns += 1
            number = len(ready)
            place = int(self._random() * number) if number > 1 else 0
            task, ready[place] = ready[place], ready[-1]
            ready.pop()
            if not (task.is_killed or task.greenlet is None):
                return task
        return None

    def _next_timer(self) -> bool:
        """Go on to the time at which some task is due. False: none ever is."""
        while self._timers:
            until, _, wakes, task = heapq.heappop(self._timers)
            if task.wakes == wakes and not (task.ended or task.is_killed):
                self.now = max(self.now, until)
                self.wake(task)
                return True
        return False

    def of(self, owner: str) -> list[Task]:
        """The tasks of a process that have not ended."""
        return [task for task in self.tasks.values() if task.owner == owner]

    def kill(self, owner: str) -> None:
        """End a process: none of its tasks runs again, and no `finally` of theirs."""
        for task in self.of(owner):
            task.is_killed = True
            for waiter in task.waiters:
                self.wake(waiter)

    def dispose(self) -> None:
        """Unwind what is left of all tasks. Nothing of it counts any more."""
        for task in list(self.tasks.values()):
            task.is_killed = True
        for each in list(self.tasks):
            while not each.dead and each:  # a task may catch it, and wait again
                self.current = self.tasks.get(each)
                each.throw(Killed)
            self.current = None
            self.tasks.pop(each, None)

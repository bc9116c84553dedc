"""Keys that a producer is heard to be making: a store looks for them until they come."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import NamedTuple

from kvferry.store.io_pool import IOPool, Job
from kvferry.types import ChunkKey

FIRST_PAUSE_SECONDS = 0.01
LAST_PAUSE_SECONDS = 0.25
"""Between two looks at the medium; each pause without a new key is twice as long as the last."""

MAX_PROMPTS = 1024
"""Prompts that are looked for at a time; further ones are not expected, and miss."""

MAX_KEYS = 1 << 16
"""Keys that are expected at a time; likewise. Those whose time is over are forgotten."""

CLOSE_SECONDS = 2.0


class _Prompt(NamedTuple):
    keys: tuple[ChunkKey, ...]
    until: float


class ExpectedKeys:
    """Thread-safe; `add` and `awaits` use memory only. A thread looks while something is expected.

    Args:
        has: whether a key is known to be there. Memory only.
        look: asks the medium for the keys of several prompts, each in order, and makes `has` know
            those that are there. A medium that fails has nothing new: whether one that goes on
            failing is waited for is decided by its tier.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        has: Callable[[ChunkKey], bool | None],
        look: Callable[[list[tuple[ChunkKey, ...]]], object],
        clock: Callable[[], float],
    ) -> None:
        self._has = has
        self._look = look
        self._clock = clock
        self._until: dict[ChunkKey, float] = {}
        self._final: set[ChunkKey] = set()
        self._prompts: list[_Prompt] = []
        self._is_looking = False
        self._lock = threading.Lock()  # of the four above; never held across I/O
        self._ends = threading.Event()
        self._thread: IOPool | None = None

    def add(self, keys: Sequence[ChunkKey], until: float, *, final: bool = False) -> None:
        """See `Store.expect`. `final`: the medium has them already, or never; see `end`."""
        missing = self._missing(_Prompt(tuple(keys), until))
        if missing is None or self._ends.is_set():
            return
        with self._lock:
            if len(self._prompts) < MAX_PROMPTS and len(self._until) < MAX_KEYS:
                if final:
                    self._final.update(key for key in keys if not self.awaits(key))
                else:
                    self._final.difference_update(keys)
                for key in keys:
                    self._until[key] = max(until, self._until.get(key, until))
                self._prompts.append(missing)
            if not self._is_looking:
                self._is_looking = True
                self._thread = self._thread or IOPool(1, "kvferry-expect")
                self._thread.submit(self._run)

    def awaits(self, key: ChunkKey) -> bool:
        """See `Store.awaits`. A key that came stays until its time is over, so that a caller who
        asked `has` before does not take it for one that never comes."""
        until = self._until.get(key)  # without a lock
        return until is not None and self._clock() < until

    def end(self, absent: Sequence[ChunkKey]) -> None:
        """The medium has not these: do not await those whose absence is final."""
        with self._lock:
            for key in self._final.intersection(absent):
                self._final.discard(key)
                self._until.pop(key, None)

    def close(self) -> None:
        """Idempotent; bounded in time."""
        self._ends.set()
        if self._thread is not None:
            self._thread.close(CLOSE_SECONDS)

    def _missing(self, prompt: _Prompt) -> _Prompt | None:
        """The part of a prompt from the first key on that has not come; None if all have, or their
        time is over."""
        for index, key in enumerate(prompt.keys):
            if not self._has(key):
                is_over = self._clock() >= prompt.until
                return None if is_over else prompt._replace(keys=prompt.keys[index:])
        return None

    def _forget_what_came(self) -> list[tuple[ChunkKey, ...]] | None:
        """The keys that are still missing; None if there are none, and the thread is to end."""
        with self._lock:
            before = list(self._prompts)
        left = [rest for prompt in before if (rest := self._missing(prompt)) is not None]
        with self._lock:
            self._prompts[: len(before)] = left  # those that were added meanwhile stay
            self._is_looking = bool(self._prompts)
            prompts = [prompt.keys for prompt in self._prompts]
        if len(self._until) >= MAX_KEYS:
            for key, _until in tuple(self._until.items()):
                with self._lock:
                    if not self.awaits(key):
                        self._until.pop(key, None)
                        self._final.discard(key)
        return prompts or None

    def _run(self, _job: Job[None]) -> None:
        """Runs in: the thread of this object."""
        pause, num_before = FIRST_PAUSE_SECONDS, 0
        while not self._ends.wait(pause):
            prompts = self._forget_what_came()
            if prompts is None:
                return
            self._look(prompts)
            num_missing = sum(map(len, prompts))
            pause = FIRST_PAUSE_SECONDS if num_missing != num_before else 2 * pause
            pause, num_before = min(pause, LAST_PAUSE_SECONDS), num_missing

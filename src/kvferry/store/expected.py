"""Keys that a producer (another engine) was heard to be making.

A store looks for them in the background until they come or their time is over. The scheduler thread
calls `add` and `awaits` through `Store.expect` and `Store.awaits`.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from typing import NamedTuple

from kvferry.store.backoff import Backoff
from kvferry.store.io_pool import IOPool, Job
from kvferry.types import ChunkKey

logger = logging.getLogger(__name__)

FIRST_PAUSE_SECONDS = 0.01
LAST_PAUSE_SECONDS = 0.25
"""Bounds of the pause between two looks, which doubles while the number of missing keys stays."""

MAX_PROMPTS = 1024
"""Most prompts expected at a time. Further ones are not expected: they miss."""

MAX_KEYS = 1 << 16
"""Once this many keys are expected, further prompts miss, and keys whose time is over are
forgotten."""


class _ExpectedPrompt(NamedTuple):
    keys: tuple[ChunkKey, ...]
    until: float


class ExpectedKeys:
    """The expected keys of one store, and the thread that looks for them while there are any.

    Thread-safe. `add` and `awaits` do no I/O.

    Args:
        has: whether the medium is known to have a key; None if that is being asked. Does no I/O.
        look: asks the medium for the keys of several prompts, each in order, so that `has` knows
            those that are there. Must not raise. A medium that fails has nothing new: its tier
            decides whether to go on waiting.
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
        self._prompts: dict[ChunkKey, _ExpectedPrompt] = {}  # by last key
        self._is_looking = False
        self._lock = threading.Lock()  # for the four above; never held across I/O
        self._ends = threading.Event()
        self._thread = IOPool(1, "kvferry-expect")

    def add(self, keys: Sequence[ChunkKey], until: float, *, final: bool = False) -> None:
        """See `Store.expect`. `final`: a key that the medium lacks never comes later; see `end`."""
        missing = self._missing(_ExpectedPrompt(tuple(keys), until))
        if missing is None or self._ends.is_set():
            return
        last = keys[-1]
        with self._lock:
            is_known = last in self._prompts
            if (is_known or len(self._prompts) < MAX_PROMPTS) and len(self._until) < MAX_KEYS:
                if final:
                    self._final.update(key for key in keys if not self.awaits(key))
                else:
                    self._final.difference_update(keys)
                for key in keys:
                    self._until[key] = max(until, self._until.get(key, until))
                self._prompts[last] = missing._replace(until=self._until[last])
            if not self._is_looking:
                # No thread may be left to the process now: the next `add` tries again.
                self._is_looking = self._thread.submit(self._run).error is None

    def awaits(self, key: ChunkKey) -> bool:
        """See `Store.awaits`. A key that came is awaited until its time is over. So a caller who
        asked `has` just before it came does not conclude that it never comes."""
        until = self._until.get(key)  # without a lock
        return until is not None and self._clock() < until

    def end(self, absent: Sequence[ChunkKey]) -> None:
        """Stop awaiting `absent` keys, which the medium lacks, if they were added as `final`."""
        for key in self._final.intersection(absent):
            self.gone(key)

    def gone(self, key: ChunkKey) -> None:
        """Stop awaiting a key that a read did not find."""
        with self._lock:
            self._final.discard(key)
            self._until.pop(key, None)

    def again(self, key: ChunkKey) -> None:
        """Look again for a key that seemed to be there, if it is awaited still."""
        until, prompt = self._until.get(key), self._prompts.get(key)
        if until is not None and (prompt is None or prompt.until < until):
            self.add((key,), until, final=key in self._final)

    def close(self) -> None:
        """Stop the thread, in bounded time. Idempotent."""
        self._ends.set()
        self._thread.close()

    def _missing(self, prompt: _ExpectedPrompt) -> _ExpectedPrompt | None:
        """The rest of a prompt from its first missing key on; None if all came or time is over."""
        for index, key in enumerate(prompt.keys):
            if not self._has(key):
                is_over = self._clock() >= prompt.until
                return None if is_over else prompt._replace(keys=prompt.keys[index:])
        return None

    def _forget_what_came(self) -> list[tuple[ChunkKey, ...]] | None:
        """Drop what came or is over. Return the keys of each prompt from the first missing one on;
        None if there are none, and the thread must end."""
        with self._lock:
            before = dict(self._prompts)
        rests = {last: self._missing(prompt) for last, prompt in before.items()}
        with self._lock:
            for last, rest in rests.items():
                if self._prompts[last] is not before[last]:  # it was added again meanwhile
                    continue
                if rest is None:
                    del self._prompts[last]
                else:
                    self._prompts[last] = rest
            self._is_looking = bool(self._prompts)
            prompts = [prompt.keys for prompt in self._prompts.values()]
        if len(self._until) >= MAX_KEYS:
            for key, _until in tuple(self._until.items()):
                with self._lock:
                    if not self.awaits(key):
                        self._until.pop(key, None)
                        self._final.discard(key)
        return prompts or None

    def _run(self, _job: Job[None]) -> None:
        """Runs in: the thread of this object."""
        looks, num_before = Backoff(self._clock, FIRST_PAUSE_SECONDS, LAST_PAUSE_SECONDS), 0
        looks.failed()
        while not self._ends.wait(looks.pause):
            prompts = self._forget_what_came()
            if prompts is None:
                return
            try:
                self._look(prompts)
            except BaseException:
                logger.exception("a look for expected keys failed; the next request begins again")
                self._is_looking = False
                raise
            num_missing = sum(map(len, prompts))
            if num_missing != num_before:
                looks.succeeded()
            looks.failed()
            num_before = num_missing

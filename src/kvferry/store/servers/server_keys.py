"""A cache of a server's keys, and the base of all stores on servers. The base answers look-ups from
the cache, so that they never block.

No engine lists a server's keys. When a request arrives, a probe asks on an I/O thread for the keys
of its prompt, and the cache keeps the answers for a limited time.
"""

from __future__ import annotations

import threading
from abc import abstractmethod
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import NamedTuple

from kvferry.errors import StoreError
from kvferry.observe import Observer
from kvferry.store.base import (
    ABSENT,
    ASKED,
    COMING,
    HERE,
    Address,
    SingleStore,
    StoreStat,
    Where,
)
from kvferry.store.io_pool import IOPool
from kvferry.store.kind import Opening
from kvferry.types import ChunkKey

FRESH_SECONDS = 300.0
"""How long a positive answer is valid. If the server evicts the key before that, the fetch
misses."""

ABSENT_SECONDS = 1.0
"""How long a negative answer is valid; probes skip the key until then."""

MAX_KNOWN = 1 << 18
"""Most keys remembered; those learnt longest ago are forgotten first."""

MAX_PROBES = 256
"""Most queued probes, one per prompt. Further probes are dropped, and their keys miss."""

FIRST_BATCH = 32
"""Keys of a prompt in the first question to the server. Each further question has twice as many. A
question without a hit is the last one."""

FIRST_AGAIN = 4
"""The same for keys that are asked for again. Fewer, as these are asked for again and again while
they are stored one by one, and a bucket needs a request for each key."""


class _Known(NamedTuple):
    until: float
    record_bytes: int
    """0 if unknown."""


_NEVER = _Known(0.0, 0)


Find = Callable[[Sequence[ChunkKey]], Sequence[Where]]
"""Asks a server which keys it has: each is HERE, ABSENT or COMING. Bounded in time. Raises
StoreError."""


class _Question(NamedTuple):
    keys: list[ChunkKey]
    """Of one prompt."""
    first_batch: int
    """How many of them are asked for first."""
    find: Find


class ServerKeys:
    """The known keys of one server, and the threads that ask for others.

    Thread-safe. `where` answers from memory and takes no lock.

    Args:
        learns: False if keys are never looked up; the cache then stays empty.
        clock: monotonic seconds, also of deadlines.

    Attributes:
        on_result: called on an I/O thread after each question: with None, or its error.
        after_answer: called on an I/O thread once the answers to queued prompts are known.
        is_closed: whether the store is.
    """

    def __init__(
        self,
        observer: Observer,
        *,
        learns: bool,
        clock: Callable[[], float],
    ) -> None:
        self._observer = observer
        self._learns = learns
        self._clock = clock
        self._known: OrderedDict[ChunkKey, _Known] = OrderedDict()
        self._asked: set[ChunkKey] = set()  # without an answer yet
        self._absent: dict[ChunkKey, float] = {}  # and until when the negative answer is valid
        self._coming: set[ChunkKey] = set()
        # For each server call in progress, the keys forgotten since it began.
        self._calls: dict[int, set[ChunkKey]] = {}
        self._lock = threading.Lock()  # of `_calls`; look-ups take none
        self._waiting: deque[_Question] = deque()
        self._threads = IOPool(2, "kvferry-probe")
        self.on_result: Callable[[StoreError | None], None] = lambda _fault: None
        self.after_answer: Callable[[], None] = lambda: None
        self.is_closed = False

    def where(self, key: ChunkKey) -> Where:
        """See `Store.where`."""
        # Read `_asked` before `_known`: an answer enters `_known` before its key leaves `_asked`.
        is_asked = key in self._asked
        known = self._known.get(key)
        if known is not None and self._clock() < known.until:
            return HERE
        if is_asked:
            return ASKED
        return COMING if key in self._coming else ABSENT

    def learn(self, key: ChunkKey, record_bytes: int = 0) -> None:
        """Note that the server has a key. 0 stands for an unknown size."""
        if not self._learns:
            return
        self._absent.pop(key, None)
        self._coming.discard(key)
        size = record_bytes or self._known.get(key, _NEVER).record_bytes
        self._known[key] = _Known(self._clock() + FRESH_SECONDS, size)
        with suppress(KeyError):  # another thread forgot it
            self._known.move_to_end(key)
            if len(self._known) > MAX_KNOWN:
                self._known.popitem(last=False)

    def forget(self, key: ChunkKey) -> None:
        """Remove a key that the server lacks or is about to delete. Calls in progress must not
        learn it again: their answers are stale."""
        with self._lock:
            for forgotten in self._calls.values():
                forgotten.add(key)
            self._known.pop(key, None)

    @contextmanager
    def call(self) -> Iterator[Callable[[ChunkKey, int], None]]:
        """Context of a call to the server. Yields a `learn` that ignores keys forgotten since the
        call began, such as that of a corrupt value which another thread removed meanwhile."""
        forgotten: set[ChunkKey] = set()
        with self._lock:
            self._calls[id(forgotten)] = forgotten

        def learn(key: ChunkKey, record_bytes: int) -> None:
            with self._lock:
                if key not in forgotten:
                    self.learn(key, record_bytes)

        try:
            yield learn
        finally:
            with self._lock:
                del self._calls[id(forgotten)]

    def totals(self) -> tuple[int, int]:
        """Number of the keys known, and their bytes."""
        known = list(self._known.values())
        return len(known), sum(each.record_bytes for each in known)

    def probe(self, keys: Sequence[ChunkKey], find: Find, *, again: bool) -> None:
        """See `Store.probe`. `find` asks in the namespace of the keys."""
        if not self._learns:
            return
        now = self._clock()
        # Skip keys that are being asked for, and those whose answer is known.
        unknown = [
            key
            for key in keys
            if key not in self._asked
            and (
                again
                or (self._known.get(key, _NEVER).until <= now and self._absent.get(key, 0.0) <= now)
            )
        ]
        if not unknown:
            return
        if len(self._waiting) >= MAX_PROBES:
            self._observer.count("store_probe_dropped")
            return
        question = _Question(unknown, FIRST_AGAIN if again else FIRST_BATCH, find)
        self._asked.update(unknown)
        self._waiting.append(question)
        if self._threads.submit(lambda _job: self._answer()).error is not None:
            # There is no thread for it: it must not keep the place of one that finds a thread.
            with suppress(ValueError, IndexError):  # another probe's thread has taken it
                self._waiting.remove(question)
            self._asked.difference_update(unknown)

    def _answer(self) -> None:
        """Ask for the keys of all queued prompts, with one question per range of chunks.
        Runs in: I/O thread."""
        questions: list[_Question] = []
        with suppress(IndexError):
            while True:
                questions.append(self._waiting.popleft())
        try:
            kinds = dict.fromkeys((each.find, each.first_batch) for each in questions)
            for find, count in sorted(kinds, key=lambda kind: -kind[1]):
                kind = find, count
                prompts = [q.keys for q in questions if (q.find, q.first_batch) == kind]
                self._ask(prompts, count, find)
        finally:
            self._asked.difference_update(*(each.keys for each in questions))
        self.after_answer()

    def _ask(self, prompts: Sequence[Sequence[ChunkKey]], count: int, find: Find) -> None:
        """Ask for the first `count` keys of each prompt, and for more keys of a prompt while the
        server has some of those just asked for. Blocks on I/O; outcomes go to `on_result`."""
        waiting, start = prompts, 0
        try:
            while waiting:
                batches = [keys[start : start + count] for keys in waiting]
                self._ask_for(list(dict.fromkeys(key for keys in batches for key in keys)), find)
                start, count = start + count, 2 * count
                # After a batch without a key, no later chunk can be part of a prefix hit.
                waiting = [
                    keys
                    for keys, batch in zip(waiting, batches, strict=True)
                    if len(keys) > start and any(key in self._known for key in batch)
                ]
        except StoreError as error:
            self._observer.count("store_probe_failed")
            self.on_result(error)

    def _ask_for(self, keys: Sequence[ChunkKey], find: Find) -> None:
        """Ask the server one question. Raises StoreError."""
        known = list(map(self._known.get, keys))
        with self.call() as learn:
            found = find(keys)
            self.on_result(None)
            for answers in (self._absent, self._coming):
                if len(answers) > MAX_KNOWN:
                    answers.clear()
            until = self._clock() + ABSENT_SECONDS
            for key, before, where in zip(keys, known, found, strict=True):
                if where is HERE:
                    learn(key, 0)
                    continue
                if where is COMING:  # it is asked for again
                    self._absent.pop(key, None)
                    self._coming.add(key)
                else:
                    self._absent[key] = until
                    self._coming.discard(key)
                if before is not None and self._known.get(key) is before:
                    self._known.pop(key, None)  # not if it was stored meanwhile

    def close(self) -> None:
        """Stop the threads; abandon a question that hangs."""
        self.is_closed = True
        self._threads.close()


class ServerStore(SingleStore):
    """A store on a server. Answers look-ups from what this process knows of the server's keys.

    Args:
        url: URL without credentials.
        clock: monotonic seconds, also of deadlines.
    """

    multi_process = True

    def __init__(self, url: str, opening: Opening, clock: Callable[[], float]) -> None:
        self.url = url
        self._observer = opening.observer
        self._bounds = opening.bounds
        self._clock = clock
        self._keys = ServerKeys(self._observer, learns=opening.index, clock=clock)

    @property
    def _closed(self) -> bool:
        return self._keys.is_closed

    @abstractmethod
    def _find(self, keys: Sequence[ChunkKey]) -> Sequence[Where]:
        """See `Find`."""

    def where(self, key: ChunkKey) -> Where:
        return ABSENT if self._keys.is_closed else self._keys.where(key)

    def touch(self, keys: Iterable[ChunkKey]) -> None:
        pass

    def stat(self) -> StoreStat:
        """Counts of the keys that this process knows, and of the bytes of their records: what these
        take on the server, only a listing says."""
        num_records, num_bytes = self._keys.totals()
        return StoreStat(self.url, num_records, num_bytes, None, index_complete=True)

    def probe(self, keys: Sequence[ChunkKey], *, again: bool = False) -> Where:
        if not self._closed:
            self._keys.probe(keys, self._find, again=again)
        return ABSENT if self._closed else ASKED

    def on_result(self, heard: Callable[[StoreError | None], None]) -> None:
        self._keys.on_result = heard

    def learn(self, keys: Sequence[ChunkKey], holder: Address | None = None) -> bool:
        is_here = self._is_of(holder) and not self._closed
        for key in keys if is_here else ():
            self._keys.learn(key)
        return is_here

    def _is_of(self, holder: Address | None) -> bool:
        """Whether what a `holder` has is read here; None: what other objects of the URL stored."""
        return holder is None

    def wait_indexed(self, timeout: float) -> bool:
        return not self._closed

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.url} {'closed' if self._closed else 'open'}>"

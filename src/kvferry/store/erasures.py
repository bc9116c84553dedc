"""What commands erased, and how the processes of engines learn it.

`kvferry rm` deletes records from the stores that it is given, and leaves a notice in each: what was
erased, and when. What it cannot reach is in processes: chunks in host memory, stores in memory,
writes under way, copies that wait for another tier. So each open store of an engine reads the
notices of its tiers every few seconds. For a minute it writes and reads nothing that was erased. It
takes back what it wrote since that store answered last, and in the minute before that, and drops
from stores in memory all that was erased. The scheduler role asks for the same names, and drops
what it holds in memory.

What was erased has a name: a namespace, the mark of a salt in a namespace, or a key.
"""

from __future__ import annotations

import json
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence, Set
from typing import NamedTuple

from kvferry.observe import Observer
from kvferry.processors import begin_io_thread
from kvferry.record.check import mark_of, namespace_of, whole_key_of
from kvferry.store.base import Value
from kvferry.types import ChunkKey

MAX_NAMES = 4096
"""Most names in a notice; the oldest are left out."""

LOOK_SECONDS = 2.0
"""How often a process reads the notices of its stores."""

HEED_SECONDS = 60.0
"""How long a process writes and reads nothing of what it heard was erased: longer than a write
takes."""

_CLOCKS_SECONDS = 600.0
"""More than the clocks of machines differ."""

_AGAIN_SECONDS = 600.0
"""How long after its write what a store could not delete is tried again, at each look."""

_NO_TIME = 1e12
"""Seconds since the epoch that no clock shows."""

_MAX_RECENT = 1 << 16
HEAD_BYTES = 1024
"""So much of a record says its names."""


def name_of_namespace(namespace: bytes) -> str:
    return f"namespace:{namespace.hex()}"


def name_of_mark(mark: bytes) -> str:
    return f"mark:{mark.hex()}"


def name_of_key(key: bytes) -> str:
    return f"key:{key.hex()}"


def names_of(namespace: bytes, key: bytes, mark: bytes) -> tuple[str, ...]:
    """The names under which a record may have been erased."""
    names = name_of_namespace(namespace), name_of_key(key)
    return (*names, name_of_mark(mark)) if mark else names


def parse_notice(text: str | None) -> dict[str, float]:
    """Return when what was erased, by name, in seconds since the epoch. Text that is no notice
    names nothing."""
    try:
        found = json.loads(text or "{}")
    except (ValueError, RecursionError):
        return {}
    if not isinstance(found, dict):
        return {}
    return {
        name: float(at)
        for name, at in found.items()
        if isinstance(at, int | float) and 0 <= at < _NO_TIME  # never true of NaN
    }


def add_to_notice(text: str | None, names: Iterable[str], at: float) -> str:
    """Return a notice with further names."""
    found = parse_notice(text) | dict.fromkeys(names, at)
    newest = sorted(found.items(), key=lambda each: each[1])[-MAX_NAMES:]
    return json.dumps(dict(newest))


Stores = Collection[object]


class _Written(NamedTuple):
    at: float
    key: ChunkKey
    namespace: bytes | None
    names: tuple[str, ...]


class Erasures:
    """What a process has heard of erasures, and what it wrote lately. Thread-safe.

    Args:
        read: reads the notices of the stores that answer now, by store. Blocks on I/O; raises
            nothing.
        delete: deletes the value of a key in all stores, or in those given, and returns the ones
            that may still have it; gets its namespace, too, if its head says one.
        drop: deletes what has one of these names from the stores that no command reaches.
        clock: monotonic seconds.
        wall: seconds since the epoch.
    """

    def __init__(
        self,
        read: Callable[[], Mapping[object, str | None]],
        delete: Callable[[bytes | None, ChunkKey, Stores | None], Stores],
        drop: Callable[[Set[str]], object],
        observer: Observer,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._read = read
        self._delete = delete
        self._drop = drop
        self._observer = observer
        self._clock = clock
        self._begun = wall()
        self._known: dict[object, Mapping[str, float]] | None = None  # by store
        self._until: dict[str, float] = {}  # by name, how long nothing of it is written
        self._heard: list[str] = []
        self._looked_at: dict[object, float] = {}  # by store, when the last look it answered began
        self._recent: deque[_Written] = deque(maxlen=_MAX_RECENT)
        # What could not be deleted, and where, by key.
        self._left: dict[ChunkKey, tuple[_Written, Stores]] = {}
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None

    # -- the thread -----------------------------------------------------------------------------

    def start(self) -> None:
        """Begin to read the notices every few seconds. Without a thread to be had, nothing is
        heard."""
        thread = threading.Thread(target=self._run, name="kvferry-erased", daemon=True)
        try:
            thread.start()
        except RuntimeError:
            return
        self._thread = thread

    def _run(self) -> None:
        begin_io_thread()
        self.look()
        while not self._closing.wait(LOOK_SECONDS):
            self.look()
        self.look()  # all writes have ended: takes back those that landed behind an erasure

    def look(self) -> None:
        """Read the notices once. What the first reading finds was erased before this process held
        anything, and so was, in a store that is opened later, what is older than this object."""
        is_first, known, began = self._known is None, self._known or {}, self._clock()
        heard: dict[str, float] = {}  # by name, when its stores were last known to be without it
        again: set[str] = set()
        for store, text in self._read().items():
            found = parse_notice(text)
            before = known.get(store)
            for name, at in found.items() if not is_first else ():
                if before is not None and before.get(name) == at:
                    continue
                since = self._looked_at.get(store, -math.inf)
                if name in heard:
                    heard[name] = min(heard[name], since)
                elif any(each.get(name) == at for each in known.values()):
                    again.add(name)
                elif at > self._begun - _CLOCKS_SECONDS or before is not None:
                    heard[name] = since
            known[store] = found or before or {}
            self._looked_at[store] = began
        self._known = known
        self._hear(heard)
        self._clear(again)
        for key, (written, stores) in list(self._left.items()):
            left = self._delete(written.namespace, key, stores)
            if left and self._clock() < written.at + _AGAIN_SECONDS:
                self._left[key] = written, left
            else:
                self._left.pop(key, None)

    def _hear(self, heard: Mapping[str, float]) -> None:
        """Heed names that are new since their stores answered last. That may be long ago: no store
        is asked while one hangs, and none that is away."""
        if not heard:
            return
        self._heed(heard)
        self._heard += heard
        self._drop(frozenset(heard))
        # A write that ends from here on finds the names itself.
        for written in list(self._recent):
            since = min((heard[name] for name in written.names if name in heard), default=math.inf)
            if written.at > since - HEED_SECONDS:
                self._take_back(written)
        self._heed(heard)  # it may have taken longer than the minute

    def _heed(self, names: Iterable[str]) -> None:
        now = self._clock()
        self._until = {
            **{name: until for name, until in self._until.items() if until > now - _AGAIN_SECONDS},
            **dict.fromkeys(names, now + HEED_SECONDS),
        }

    def _clear(self, names: set[str]) -> None:
        """A store says what another said before. It may not have answered when that was heard, and
        still hold what was written before."""
        last = {written.key: written for written in list(self._recent)} if names else {}
        for written in last.values():
            late = names.intersection(written.names)
            if any(written.at < self._until.get(name, -math.inf) for name in late):
                self._take_back(written)

    def _take_back(self, written: _Written) -> None:
        self._observer.count("erased_records")
        left = self._delete(written.namespace, written.key, None)
        if left and len(self._left) < _MAX_RECENT:
            self._left[written.key] = written, left

    def close(self, seconds: float) -> None:
        """Have the thread read the notices once more, and end; a read that hangs is abandoned after
        `seconds`. Idempotent."""
        self._closing.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(max(0.0, seconds))

    # -- what the scheduler role asks -----------------------------------------------------------

    def since(self, number: int) -> Sequence[str]:
        """The names that were heard, without the first `number`. Memory only."""
        return self._heard[number:] if len(self._heard) > number else ()

    # -- writes ---------------------------------------------------------------------------------

    def refuses(self, value: Value) -> bool:
        """Whether a value was erased a short while ago, or is still to be deleted somewhere, so
        that it must not be written or read: a tier would copy it to others."""
        if value[0] in self._left:
            return True
        return bool(self._until) and self._is_erased(names_in(value), self._clock())

    def wrote(self, value: Value, began: float) -> None:
        """Note that a value was written, or is there, and delete it if it was erased, also longer
        ago: a write that `began` before may hang."""
        written = _Written(self._clock(), value[0], _namespace_in(value), names_in(value))
        self._recent.append(written)
        if written.key in self._left or self._is_erased(written.names, began):
            self._take_back(written)

    def _is_erased(self, names: Iterable[str], at: float) -> bool:
        return any(self._until.get(name, at) > at for name in names)


def names_in(value: Value) -> tuple[str, ...]:
    """The names of a value, as its first bytes say, unchecked."""
    head = _head_of(value)
    names = names_of(namespace_of(head) or b"", value[0], mark_of(head))
    whole = whole_key_of(head)
    return (*names, name_of_key(whole)) if whole else names


def _namespace_in(value: Value) -> bytes | None:
    return namespace_of(_head_of(value))


def _head_of(value: Value) -> bytes:
    _, buffers = value
    return bytes(memoryview(buffers[0])[:HEAD_BYTES]) if buffers else b""

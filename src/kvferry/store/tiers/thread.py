"""The thread of a tier, while there is work for it: opens or tries its store when that is due, and
copies what waits.

`TieredStore` makes a `TierThread` for each tier, and gives it keys to copy from other tiers.
"""

from __future__ import annotations

import math
import threading
from collections import OrderedDict

from kvferry.errors import StoreError
from kvferry.observe import Observer
from kvferry.processors import begin_io_thread
from kvferry.store.base import PutResult, ValueCheck
from kvferry.store.tiers.tier import Tier
from kvferry.types import ChunkKey

_MAX_COPY_BYTES = 1 << 30
"""Bound of the values that are copied unchecked: a larger value is no record of ours."""

_LEAVE_SECONDS = 0.1
"""How long a close waits for a thread that opens or tries a store, because it may hang."""


class TierThread:
    """The thread of one tier, and the queue of values to copy to it. Values wait while the tier
    refuses writes; while it is away, none is added. A copy that fails is not tried again.

    The thread is a daemon: a mount that hangs for ever must not keep the process from ending.

    Args:
        check: tells which values are wrong; these are not copied.
    """

    def __init__(self, target: Tier, observer: Observer, check: ValueCheck | None = None) -> None:
        self._target = target
        self._observer = observer
        self._check = check
        # Keys that wait, oldest first, and the tier that has the value.
        self._waiting: OrderedDict[ChunkKey, Tier] = OrderedDict()
        self._copying: ChunkKey | None = None  # None, too, once the value is removed
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._is_busy = False
        self._is_trying = False
        self._thread: threading.Thread | None = None
        target.when_due = self.start

    def start(self) -> bool:
        """Start the thread, if there is none. False if the process can start none; a later call
        tries again."""
        with self._lock:
            if self._thread is None and not self._closing.is_set():
                thread = threading.Thread(target=self._run, name="kvferry-tier", daemon=True)
                try:
                    thread.start()
                except RuntimeError:
                    return False
                self._thread, self._is_busy = thread, True
        return True

    # -- what waits -----------------------------------------------------------------------------

    def add(self, key: ChunkKey, source: Tier) -> None:
        """Have a value copied from `source` later, if the tier is up. Never blocks."""
        if self._target.up is None:
            self._target.count("copies", "away")
            return
        with self._lock:
            if self._closing.is_set() or key in self._waiting or key == self._copying:
                return
            if len(self._waiting) >= self._target.patience.max_waiting:
                self._waiting.popitem(last=False)
                self._target.count("copies", "dropped")
            self._waiting[key] = source
        self.start()

    def cancel(self, key: ChunkKey) -> None:
        """Copy a value no more. It is about to be removed, and no copy may bring it back."""
        with self._lock:
            self._waiting.pop(key, None)
            if key == self._copying:
                self._copying = None

    # -- the thread -----------------------------------------------------------------------------

    def _run(self) -> None:
        begin_io_thread()
        while True:
            is_last, is_broken = self._closing.is_set(), False
            try:
                with self._target.faults.guard("copy"):
                    self.run_due()
            except StoreError:  # of a store that broke its contract; after a while, others go on
                is_broken = True
                self._closing.wait(self._target.patience.look_seconds)
            with self._lock:
                is_idle = not (is_broken or self._waiting or self._target.next_try < math.inf)
                if is_last or is_idle:
                    self._thread, self._is_busy = None, False
                    return
                if is_broken:
                    continue
                self._is_busy = False
            seconds = self._target.next_try - self._target.clock()
            self._closing.wait(max(0.0, min(seconds, self._target.patience.look_seconds)))
            self._is_busy = True

    def run_due(self) -> None:
        """Do all that is due now. Errors of a copy other than StoreError are raised."""
        while True:
            if not self._closing.is_set():
                self._is_trying = True
                self._target.try_if_due()
                self._is_trying = False
            with self._lock:
                if not self._can_copy:
                    return
                key, source = self._waiting.popitem(last=False)
                self._copying = key
            result = PutResult.FAILED
            try:
                result = self._copy(key, source)
            finally:
                self._target.count("copies", result)
                self._copying = None

    @property
    def _can_copy(self) -> bool:
        """Whether a value waits, the tier accepts writes, and the tier that has the value is up."""
        if not self._waiting or self._target.accepts() is not None:
            return False
        return next(iter(self._waiting.values())).up is not None

    def _copy(self, key: ChunkKey, source: Tier) -> PutResult:
        """Copy one value."""
        target = self._target.in_namespace(source.namespace)
        until = target.clock() + target.patience.write_seconds
        try:
            size = target.ask(key, (), until)  # costs less than reading and sending it
            if size is not None and (self._check is None or self._check.has_size(size)):
                return PutResult.EXISTS
            value = self._value(key, source, until)
            if value is None:
                return PutResult.FAILED
            result = target.put_all([(key, [value])], until)[0].result
        except StoreError:
            return PutResult.FAILED
        if result is PutResult.STORED and self._copying is None:  # it was removed meanwhile
            target.delete(key)
        return result

    def _value(self, key: ChunkKey, source: Tier, until: float) -> memoryview | None:
        """Read the value; None if it is gone, too large to copy unchecked, or wrong and so
        discarded. Raises StoreError."""
        check = self._check
        size = source.ask(key, (), until) if check is None else check.record_bytes
        if size is None or (check is None and size > _MAX_COPY_BYTES):
            return None
        value = memoryview(bytearray(size))
        found = source.ask(key, [(0, value)], until)
        if check is None or found is None:
            return value if found == size else None
        reason = check.why_wrong(key, value[:found], found)
        if reason is not None:  # read once more: another process may have replaced it
            found = source.ask(key, [(0, value)], until)
            reason = None if found is None else check.why_wrong(key, value[:found], found)
        if reason is not None:
            self._observer.count("records_corrupt")
            source.discard(key, reason)
        return None if reason is not None or found is None else value[:found]

    def close(self, until: float) -> None:
        """Go on until `until` (monotonic seconds); what is left then is not copied. Leave a thread
        behind that hangs in opening or trying a store. Idempotent."""
        with self._lock:
            if self._closing.is_set():
                return
            self._closing.set()
            is_trying = self._is_trying and not self._can_copy
            thread = self._thread
        if thread is not None:
            thread.join(max(0.0, _LEAVE_SECONDS if is_trying else until - self._target.clock()))
        with self._lock:
            self._waiting.clear()

    @property
    def num_waiting(self) -> int:
        """How many values wait, the one that is being copied included."""
        with self._lock:
            return len(self._waiting) + (self._copying is not None)

    @property
    def is_at_work(self) -> bool:
        """Whether it does something, or something is due."""
        with self._lock:
            is_due = self._can_copy or self._target.next_try <= self._target.clock()
        return is_due or self._is_busy

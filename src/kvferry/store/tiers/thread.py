"""The one thread of a tier: opens or tries its store when that is due, then copies what waits.

`TieredStore` starts a `TierThread` for each tier, and gives it keys to copy from other tiers.
"""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from collections.abc import Callable
from contextlib import suppress

from kvferry.errors import StoreError
from kvferry.observe import Observer
from kvferry.processors import leave_processor
from kvferry.store.base import PutResult, ValueCheck
from kvferry.store.tiers.tier import Tier
from kvferry.types import ChunkKey

logger = logging.getLogger(__name__)

_MAX_COPY_BYTES = 1 << 30
"""Bound of the values that are copied unchecked: a larger value is no record of ours."""

_LEAVE_SECONDS = 0.1
"""How long a close waits for a thread that opens or tries a store, because it may hang."""


def _started(work: Callable[[], None], name: str) -> threading.Thread | None:
    """Start a daemon thread that does `work`; None if the process can start none."""
    thread = threading.Thread(target=work, name=name, daemon=True)
    with suppress(RuntimeError):
        thread.start()
        return thread
    return None


class TierThread:
    """The thread of one tier, and the queue of values to copy to it. Values wait while the tier
    accepts no writes, and wait again if a tier did not answer.

    The thread is a daemon: a mount that hangs for ever must not keep the process from ending. While
    the thread is busy with a copy, which may hang, a second thread tries the target if a request
    asks for that.

    Args:
        check: tells which values are wrong; these are not copied.

    Attributes:
        is_at_work: whether the thread works, and so may hang in a store.
    """

    def __init__(self, target: Tier, observer: Observer, check: ValueCheck | None = None) -> None:
        self._target = target
        self._observer = observer
        self._check = check
        # Keys that wait, oldest first, and the tier that has the value.
        self._waiting: OrderedDict[ChunkKey, Tier] = OrderedDict()
        self._copying: ChunkKey | None = None  # None, too, once the value is removed
        self._lock = threading.Lock()
        self._wake = threading.Event()
        self._closed = False
        self.is_at_work = False
        self._is_trying = False
        self._is_tried_aside = False
        self._thread: threading.Thread | None = None

    def start(self) -> bool:
        """Start the thread. False if the process can start none; a later call tries again."""
        with self._lock:
            if self._thread is None:
                self._thread = _started(self._run, "kvferry-tier")
        return self._thread is not None

    def keep_trying(self) -> None:
        """A request found the tier away: have it tried, if that is due. Never blocks."""
        target = self._target
        if self._closed or target.next_try > target.calls.clock() or not self.start():
            return
        # The thread may hang in a copy.
        if self.is_at_work and not (self._is_trying or self._is_tried_aside):
            self._is_tried_aside = True
            if _started(self._try_aside, "kvferry-try") is None:
                self._is_tried_aside = False

    def _try_aside(self) -> None:
        try:
            self._target.try_if_due()  # only one thread at a time claims a try
        finally:
            self._is_tried_aside = False

    # -- what waits -----------------------------------------------------------------------------

    def add(self, key: ChunkKey, source: Tier) -> None:
        """Have a value copied from `source` later. Never blocks."""
        with self._lock:
            if self._closed or key in self._waiting or key == self._copying:
                return
            if len(self._waiting) >= self._target.calls.patience.max_waiting:
                self._waiting.popitem(last=False)
                self._target.count("copies", "dropped")
            self._waiting[key] = source
        self.start()
        self._wake.set()

    def cancel(self, key: ChunkKey) -> None:
        """Copy a value no more. It is about to be removed, and no copy may bring it back."""
        with self._lock:
            self._waiting.pop(key, None)
            if key == self._copying:
                self._copying = None

    # -- the thread -----------------------------------------------------------------------------

    def _run(self) -> None:
        leave_processor()
        while True:
            self._wake.clear()
            self.is_at_work = True
            is_last = self._closed
            try:
                self.run_due()
            except Exception:  # outermost loop of the thread: the next copies go on
                logger.exception("copying a value to another tier failed")
                continue
            self.is_at_work = False
            if is_last:
                return
            seconds = self._target.next_try - self._target.calls.clock()
            self._wake.wait(max(0.0, min(seconds, self._target.calls.patience.look_seconds)))

    def run_due(self) -> None:
        """Do all that is due now. Errors of a copy other than StoreError are raised."""
        while True:
            if not self._closed:
                self._target.find_overdue()
                self._is_trying = True
                self._target.try_if_due()
                self._is_trying = False
            taken = self._pop()
            if taken is None:
                return
            result: PutResult | None = PutResult.FAILED
            try:
                result = self._copy(*taken)
            finally:
                with self._lock:
                    self._copying = None
                if result is not None:
                    self._target.count("copies", result)
            if result is None:
                return

    def _pop(self) -> tuple[ChunkKey, Tier] | None:
        """Take the next value to copy; None if none waits, and while the tier accepts no writes or
        the tier that has the value is not up."""
        with self._lock:
            if not self._can_copy:
                return None
            self._copying, source = self._waiting.popitem(last=False)
            return self._copying, source

    @property
    def _can_copy(self) -> bool:
        if not self._waiting or not self._target.accepts_writes:
            return False
        return next(iter(self._waiting.values())).up is not None

    def _copy(self, key: ChunkKey, source: Tier) -> PutResult | None:
        """Copy one value; None if it waits again, as it does while a tier is away or full. Drop a
        value that fails twice though the tier answers, so that it does not block the queue."""
        for _ in range(2):
            result, asked = self._attempt(key, source)
            if result is PutResult.STORED and self._copying is None:  # it was removed meanwhile
                self._target.delete(key)
            if result is PutResult.NO_SPACE:
                return self._put_back(key, source)
            if result is not PutResult.FAILED or asked is None:
                return result
            if not asked.check_now():
                return self._put_back(key, source)
        return PutResult.FAILED

    def _attempt(self, key: ChunkKey, source: Tier) -> tuple[PutResult, Tier | None]:
        """Try to copy once. Return the result and the tier that it depended on; no tier if there is
        no right value to copy."""
        target, calls = self._target, self._target.calls
        until = calls.clock() + calls.patience.max_limit_seconds
        asked = target
        try:
            size = target.ask(key, (), until)  # costs less than reading and sending it
            if size is not None and (self._check is None or size == self._check.num_bytes):
                return PutResult.EXISTS, target
            asked = source
            value = self._value(key, source, until)
            if value is None:
                return PutResult.FAILED, None
            asked = target
            return target.put_all([(key, [value])], until)[0], target
        except StoreError:
            return PutResult.FAILED, asked

    def _value(self, key: ChunkKey, source: Tier, until: float) -> memoryview | None:
        """Read the value; None if it is gone, too large to copy unchecked, or wrong and so
        discarded. Raises StoreError."""
        check = self._check
        size = source.ask(key, (), until) if check is None else check.num_bytes
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
        return None if reason is not None or found is None else value

    def _put_back(self, key: ChunkKey, source: Tier) -> PutResult | None:
        """Let the value wait again, first in the queue. FAILED if closed or removed, else None."""
        with self._lock:
            if self._closed or self._copying is None:
                return PutResult.FAILED
            self._waiting[key] = source
            self._waiting.move_to_end(key, last=False)
        return None

    def close(self, until: float) -> None:
        """Go on until `until` (monotonic seconds); what is left then is not copied. Leave a thread
        behind that hangs in opening or trying a store. Idempotent."""
        was_closed, self._closed = self._closed, True
        self._wake.set()
        if self._thread is not None and not was_closed:
            with self._lock:
                is_trying = self._is_trying and not self._can_copy
            seconds = _LEAVE_SECONDS if is_trying else until - self._target.calls.clock()
            self._thread.join(max(0.0, seconds))
            with self._lock:
                self._waiting.clear()

    def __repr__(self) -> str:
        with self._lock:
            num_waiting = len(self._waiting) + (self._copying is not None)
            is_due = self._can_copy or self._target.next_try <= self._target.calls.clock()
        parts = [repr(self._target), f"{num_waiting} wait" if num_waiting else ""]
        parts.append("at work" if is_due or self.is_at_work else "")
        return ", ".join(filter(None, parts))

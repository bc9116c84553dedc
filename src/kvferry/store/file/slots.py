"""Slots that are made ahead: one write of the ledger, and one look at those of others, for several
records.

Who stores a prompt writes many records of one size, and each needs a temporary file and an entry in
the ledger that fits the quota (see `writing`). An entry counts whether its record is written or
not, and a recovery gives it back if it was not. So as many slots as were lately used at a stretch
are made at once, and what is not used soon is given back.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from kvferry.store.file.writer import Writer

MOST_AT_ONCE = 16
_MOST_SIZES = 256
"""A writer whose records all differ in size has no use for this, and must not grow by it."""


class Slot(NamedTuple):
    """An empty temporary file, with its entry in the ledger."""

    writer: Writer
    number: int
    num_bytes: int
    path: str


class Slots:
    """Those of one writer that are made and not yet used. Thread-safe; in memory, no I/O."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._ready: dict[int, list[Slot]] = {}
        self._used: Counter[int] = Counter()
        self._used_before: Counter[int] = Counter()
        self._num_seen = 0

    def take(self, num_bytes: int) -> Slot | None:
        """A slot for a record of this size, None if none is ready."""
        with self._lock:
            if len(self._used) >= _MOST_SIZES:
                self._used.clear()
            self._used[num_bytes] += 1
            ready = self._ready.get(num_bytes)
            if ready is None:
                return None
            slot = ready.pop()
            if not ready:
                del self._ready[num_bytes]
            return slot

    def num_to_make(self, num_bytes: int, room_bytes: int, num_free: int) -> int:
        """How many to make now that `take` had none: one, and those that are likely to be used.

        Args:
            num_bytes: of a record.
            room_bytes: what may be reserved for records to come.
            num_free: entries that the ledger has left. Half of them stay free for writes of other
                sizes, and of other threads.
        """
        with self._lock:
            num_before = self._used_before[num_bytes]
            num_used = self._used[num_bytes] - 1  # without the one that `take` has just counted
        # As many as the last stretch still had at this point. Beyond its end, and in the first one,
        # as many again as went beyond it.
        num_likely = num_before - num_used if num_used < num_before else num_used - num_before
        room = room_bytes // max(num_bytes, 1)
        return max(1, min(num_likely, room, num_free // 2, MOST_AT_ONCE))

    def keep(self, slots: Sequence[Slot]) -> None:
        """Have these ready."""
        with self._lock:
            for slot in slots:
                self._ready.setdefault(slot.num_bytes, []).append(slot)

    @property
    def num_bytes(self) -> int:
        """What those that are ready count for in the ledger."""
        with self._lock:
            return sum(num_bytes * len(ready) for num_bytes, ready in self._ready.items())

    def take_idle(self) -> list[Slot]:
        """All that are ready, unless some were used since the last call: to be given back."""
        with self._lock:
            num_used = self._used.total()
            if num_used != self._num_seen:
                self._num_seen = num_used
                return []
            if num_used:
                self._used, self._used_before, self._num_seen = Counter(), self._used, 0
        return self.take_all()

    def take_all(self) -> list[Slot]:
        """All that are ready: to be given back."""
        with self._lock:
            slots = [slot for ready in self._ready.values() for slot in ready]
            self._ready = {}
            return slots

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
    """Those that are made and not yet used. Thread-safe; in memory, no I/O."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._ready: dict[int, list[Slot]] = {}
        self._used: Counter[int] = Counter()
        self._used_before: Counter[int] = Counter()
        self._num_seen = 0

    def take(self, writer: Writer, num_bytes: int) -> Slot | None:
        """A slot for a record of this size, None if none is ready."""
        with self._lock:
            if len(self._used) >= _MOST_SIZES:
                self._used.clear()
            self._used[num_bytes] += 1
            ready = self._ready.get(num_bytes)
            while ready:
                slot = ready.pop()
                if slot.writer is writer:  # else it went with a directory that was taken over
                    return slot
        return None

    def num_to_make(self, writer: Writer, num_bytes: int, room_bytes: int) -> int:
        """How many to make now that `take` had none: one, and more while all that are ready fit
        into `room_bytes`. As many as the last stretch still had at this point; beyond its end, and
        in the first one, as many again as that makes already."""
        with self._lock:
            ready_bytes = sum(size * len(ready) for size, ready in self._ready.items())
            # Without the one that `take` has just counted.
            num_used = self._used[num_bytes] - 1
            num_likely = abs(self._used_before[num_bytes] - num_used)
        room = (room_bytes - ready_bytes) // max(num_bytes, 1)
        # Half of the entries stay free for writes of other sizes, and of other threads.
        return max(1, min(num_likely, room, writer.num_free // 2, MOST_AT_ONCE))

    def keep(self, slots: list[Slot]) -> None:
        """Have these ready."""
        with self._lock:
            for slot in slots:
                self._ready.setdefault(slot.num_bytes, []).append(slot)

    def num_bytes_of(self, writer: Writer) -> int:
        """What those that are ready count for in the ledger of `writer`."""
        with self._lock:
            return sum(slot.num_bytes for slot in self._all_of(writer))

    def take_idle(self, writer: Writer) -> list[Slot]:
        """All that are ready, unless some were used since the last call: to be given back."""
        with self._lock:
            num_used = self._used.total()
            if num_used != self._num_seen:
                self._num_seen = num_used
                return []
            if num_used:
                self._used, self._used_before, self._num_seen = Counter(), self._used, 0
        return self.take_all(writer)

    def take_all(self, writer: Writer) -> list[Slot]:
        """All that are ready: to be given back."""
        with self._lock:
            slots = self._all_of(writer)
            self._ready = {}
            return slots

    def _all_of(self, writer: Writer) -> list[Slot]:
        ready = [slot for slots in self._ready.values() for slot in slots]
        return [slot for slot in ready if slot.writer is writer]

"""Lends sealed slots by key to readers outside this engine, through `kvferry.transfer.server`.

A sealed slot is host memory that holds a record, byte for byte as it is stored: a save made its
head, or a fetch verified it. The host pool says what may be lent; threads of the server borrow.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from kvferry.cache.deciding.rank_slots import RankSlots
from kvferry.cache.messages import SlotRegion
from kvferry.store.base import Value
from kvferry.transfer.base import KeyState
from kvferry.types import ChunkKey


@dataclass(slots=True, eq=False)
class SlotLoan:
    """A record in host memory, for reading.

    Attributes:
        slot: index of its slot.
        until: monotonic seconds. The slot is not assigned again until then, or until
            `Loans.release` if that is earlier. Later, or if the slot was just being evicted when
            it was lent, the bytes may be another chunk's: a reader verifies what it has read.
        buffers: the record's bytes, in order; the first begins with its head.
    """

    key: ChunkKey
    slot: int
    until: float
    buffers: tuple[memoryview, ...] = ()


class Loans:
    """The slots that may be lent, and the loans. Thread-safe; the lock is held briefly.

    Args:
        ranks: opens the slots; None: nothing is lent.
        clock: monotonic seconds.

    Attributes:
        is_erased: whether a command erased a record that is still held.
    """

    def __init__(
        self,
        ranks: RankSlots | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._ranks = ranks
        self._clock = clock
        self.is_erased: Callable[[Value], bool] = lambda _: False
        self._lock = threading.Lock()
        self._slots: dict[ChunkKey, int | None] = {}  # None while the record is being brought
        self._parts: dict[ChunkKey, int] = {}  # of those that hold a part of a state: which one
        self._lent: dict[int, list[SlotLoan]] = {}

    # -- scheduler thread -----------------------------------------------------------------------

    def learn(self, region: SlotRegion) -> str:
        """Learn where a rank's slots are. See `RankSlots.learn`."""
        return "" if self._ranks is None else self._ranks.learn(region)

    def expect(self, key: ChunkKey) -> None:
        """Note that a save or a fetch has begun to bring a whole chunk. `lend` answers
        `KeyState.PENDING` until `offer` or `withdraw`."""
        with self._lock:
            self._slots[key] = None

    def offer(self, key: ChunkKey, slot: int, part: int = -1) -> None:
        """Let a chunk be lent from now on, or that part of a state: its slot is sealed."""
        with self._lock:
            self._slots[key] = slot
            if part >= 0:
                self._parts[key] = part

    def offers(self, key: ChunkKey) -> bool:
        """Whether the chunk is sealed and can be lent."""
        return self._slots.get(key) is not None

    def knows(self, key: ChunkKey) -> bool:
        """Whether the chunk is sealed, or `lend` answers PENDING."""
        return key in self._slots

    def withdraw(self, key: ChunkKey) -> None:
        """Lend a chunk no more: it is evicted, or its save failed. Running loans go on."""
        with self._lock:
            self._slots.pop(key, None)
            self._parts.pop(key, None)

    def is_lent(self, slot: int) -> bool:
        """Whether a loan of the slot is running, so that it must not be assigned again."""
        if slot not in self._lent:
            return False
        with self._lock:
            return bool(self._current(slot))

    # -- any thread -----------------------------------------------------------------------------

    @property
    def num_lent(self) -> int:
        """Number of slots with a loan: running, or expired and not looked at since."""
        return len(self._lent)

    def lend(self, key: ChunkKey, seconds: float) -> SlotLoan | Literal[KeyState.PENDING] | None:
        """Lend the record of a chunk, to be read for at most `seconds`. PENDING while it is being
        brought; None if no sealed slot has it, or the ranks' slots cannot be read as one."""
        with self._lock:
            if key not in self._slots:
                return None
            slot = self._slots[key]
            if slot is None:
                return KeyState.PENDING
            loan, part = SlotLoan(key, slot, self._clock() + seconds), self._parts.get(key, -1)
            self._lent[slot] = [*self._current(slot), loan]
        # From here on the slot is not assigned again, unless the scheduler is just evicting it.
        parts = None if self._ranks is None else self._ranks.whole_record(slot, part)
        loan.buffers = tuple(part.toreadonly() for part in parts or ())
        if loan.buffers and not self.is_erased((key, loan.buffers)):
            return loan
        self.release(loan)
        return None

    def release(self, loan: SlotLoan) -> None:
        """End a loan: its reader is done. Does nothing if the loan has expired."""
        with self._lock:
            loan.until = -math.inf
            self._current(loan.slot)

    def _current(self, slot: int) -> list[SlotLoan]:
        """Return the loans of a slot that have not expired. Forget the others. Needs the lock."""
        now = self._clock()
        current = [loan for loan in self._lent.get(slot, ()) if loan.until > now]
        if current:
            self._lent[slot] = current
        else:
            self._lent.pop(slot, None)
        return current

"""Keeping all processes together below the quota: reserve first, then look, then make room.

The bytes of a write are in our ledger before we add up the ledgers. Of two processes that reserve
at the same time at least one sees both, so the disk never holds more than the quota, without a
lock.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from kvferry.observe import Observer
from kvferry.store.file.eviction import Evictor
from kvferry.store.file.fileio import FileIO
from kvferry.store.file.layout import Layout
from kvferry.store.file.membership import Member
from kvferry.store.file.recovery import Recovery
from kvferry.store.file.removal import Removed
from kvferry.store.file.usage import Usage, read_usage

_MAX_SLACK_BYTES = 64 << 20


class Quota:
    """Room for writes of one store. Thread-safe.

    Args:
        io: system calls.
        layout: where the store is.
        max_bytes: the quota, None for none.
        evictor: chooses victims.
        recovery: asked when there is nothing left to evict: dead writers may hold reservations.
        on_removed: told what was evicted.
        observer: receives counts.
    """

    def __init__(
        self,
        io: FileIO,
        layout: Layout,
        max_bytes: int | None,
        *,
        evictor: Evictor,
        recovery: Recovery,
        on_removed: Callable[[Removed], None],
        observer: Observer,
    ) -> None:
        self.max_bytes = max_bytes
        self._last_usage = Usage(0, 0, frozenset(), quiet=True)
        self.is_stuck = False
        """Counts say full, but there was nothing to evict: they may be wrong."""
        self._io = io
        self._layout = layout
        self._evictor = evictor
        self._recovery = recovery
        self._on_removed = on_removed
        self._observer = observer
        self._lock = threading.Lock()

    def refresh(self) -> Usage:
        """Add up the ledgers now.

        Raises:
            OSError: the medium failed.
        """
        self._last_usage = read_usage(self._io, self._layout)
        return self._last_usage

    def used_bytes(self, member: Member | None) -> int:
        """What all processes hold, from memory: ours as of now, the others' as last read."""
        usage = self._last_usage
        if member is None:
            return usage.num_bytes
        return member.writer.num_bytes_with(usage.marks)

    def room_ahead(self, member: Member) -> int:
        """Bytes that may be reserved for writes to come, beside those that are, as far as known
        without a look."""
        num_ahead = member.slots.num_bytes
        if self.max_bytes is None:
            return _MAX_SLACK_BYTES - num_ahead
        num_free = self.max_bytes - self.used_bytes(member)
        return min(_slack_bytes(self.max_bytes) - num_ahead, num_free)

    def fits(self) -> bool:
        """Whether everything that is stored and reserved fits.

        Raises:
            OSError: the medium failed.
        """
        return self.max_bytes is None or self.refresh().num_bytes <= self.max_bytes

    def make_room(self, member: Member) -> bool:
        """Evict until everything that is stored and reserved fits. False if it cannot.

        Raises:
            OSError: the medium failed.
        """
        if self.max_bytes is None:
            return True
        # A little more than needed goes, so that not every write into a full store evicts.
        with self._lock:
            return self._shrink(member, self.max_bytes, _slack_bytes(self.max_bytes))

    def shrink_to(self, member: Member, max_bytes: int) -> bool:
        """Evict until at most `max_bytes` are stored. False if it cannot.

        Raises:
            OSError: the medium failed.
        """
        with self._lock:
            return self._shrink(member, max_bytes, 0)

    def _shrink(self, member: Member, max_bytes: int, slack: int) -> bool:
        recovered = False
        while (excess := self.refresh().num_bytes - max_bytes) > 0:
            removed = member.remover.remove(self._evictor.choose(excess + slack))
            self._on_removed(removed)
            self._observer.count("store_evicted_records", removed.num_records)
            self._observer.count("store_evicted_bytes", removed.num_bytes)
            if removed.num_records:
                continue
            if recovered or not self._recovery.run(member):
                self.is_stuck = True
                return False
            recovered = True
        return True


def _slack_bytes(max_bytes: int) -> int:
    """What one store may hold free, or reserved, for its next writes."""
    return min(max_bytes // 64, _MAX_SLACK_BYTES)

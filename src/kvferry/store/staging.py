"""Bounded memory of ours between a store and the engine: equal slots of one aligned region.

I/O lands here and only here, so an operation that outlives its deadline writes to a slot that
nobody else uses: a slot goes back to the pool when its operation ended, not when its caller gave
up. The operation may be a device's: then nobody waits, and the next one to need a slot looks.
"""

from __future__ import annotations

import contextlib
import mmap
import sys
import threading
from typing import Protocol

from kvferry.errors import ConfigError
from kvferry.record.schema import ALIGN

_MADV_POPULATE_WRITE = 23
"""Of Linux 5.14; Python has no name for it."""

_PREPARED_AT_ONCE = 4 << 20
"""The interpreter's lock is held for so many bytes at a time."""


class Reached(Protocol):
    """A moment that others wait for, such as a mark in a device's stream."""

    def poll(self) -> bool:
        """Whether it has come. Does not block."""


class Staging:
    """A pool of page-aligned slots.

    Args:
        total_bytes: bound of all slots together.
        slot_bytes: bytes one slot must hold; rounded up to the alignment of O_DIRECT.

    Raises:
        ConfigError: fewer than two slots would fit, or so much cannot be reserved.
    """

    def __init__(self, total_bytes: int, slot_bytes: int) -> None:
        self.slot_bytes = -(-slot_bytes // ALIGN) * ALIGN
        self.num_slots = total_bytes // self.slot_bytes
        if self.num_slots < 2:
            raise ConfigError(
                f"staging_bytes={total_bytes} holds {self.num_slots} chunk(s) of {slot_bytes} "
                f"bytes; set it to at least {2 * self.slot_bytes}"
            )
        self._lock = threading.Lock()
        # Reserved now, backed by memory when first touched. Private, since Linux gives large pages
        # to such memory only: touching it for the first time is then five times cheaper.
        try:
            self._region = mmap.mmap(
                -1, self.num_slots * self.slot_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
            )
        except (OSError, OverflowError) as error:
            raise ConfigError(
                f"staging_bytes={total_bytes} is more than this machine lets a process reserve; "
                "set it lower"
            ) from error
        self._returned: list[int] = []
        self._draining: list[tuple[int, Reached]] = []
        self._num_fresh = self.num_slots  # never used so far: the last ones of the region
        if hasattr(mmap, "MADV_HUGEPAGE"):
            with contextlib.suppress(OSError):  # a kernel built without it; only speed is lost
                self._region.madvise(mmap.MADV_HUGEPAGE)
        self._view = memoryview(self._region)

    def prepare(self, num_bytes: int) -> None:
        """Have the first slots to be used backed by memory now, so that no read or write waits for
        that. Does nothing where the system cannot do it beforehand."""
        stop = min(num_bytes, self.total_bytes)
        if sys.platform != "linux":
            return
        with contextlib.suppress(OSError):  # Linux before 5.14
            for start in range(0, stop, _PREPARED_AT_ONCE):
                length = min(_PREPARED_AT_ONCE, stop - start)
                self._region.madvise(_MADV_POPULATE_WRITE, start, length)

    @property
    def num_free(self) -> int:
        with self._lock:
            self._settle()
            return len(self._returned) + self._num_fresh

    @property
    def memory(self) -> memoryview:
        """All slots, page-aligned."""
        return self._view

    @property
    def total_bytes(self) -> int:
        return self.num_slots * self.slot_bytes

    def acquire(self, *, keep_free: int = 0) -> int | None:
        """Take a slot, or None if `keep_free` or fewer are left. Never blocks on I/O."""
        with self._lock:
            self._settle()
            if len(self._returned) + self._num_fresh <= keep_free:
                return None
            if self._returned:
                return self._returned.pop()
            self._num_fresh -= 1
            return self.num_slots - self._num_fresh - 1

    def release(self, slot: int, *, after: Reached | None = None) -> None:
        """Give a slot back. The last one freed is the next one used: it is warm in the cache.

        Args:
            slot: that was acquired.
            after: it stays taken until then.
        """
        with self._lock:
            if after is None or after.poll():
                self._returned.append(slot)
            else:
                self._draining.append((slot, after))

    def _settle(self) -> None:
        """Take back what devices are through with."""
        if self._draining:
            waiting = []
            for slot, after in self._draining:
                if after.poll():
                    self._returned.append(slot)
                else:
                    waiting.append((slot, after))
            self._draining = waiting

    def view(self, slot: int) -> memoryview:
        """The bytes of a slot, writable."""
        start = slot * self.slot_bytes
        return self._view[start : start + self.slot_bytes]

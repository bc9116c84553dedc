"""The memory of one rank's slots: equal parts of one page-aligned region.

I/O lands here and only here, never in the engine's memory, so an operation that outlives its
deadline writes to a slot that no one else uses.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import sys

from kvferry.errors import ConfigError
from kvferry.record.schema import ALIGN

_MADV_POPULATE_WRITE = 23
"""Of Linux 5.14; Python has no name for it."""

READY_BYTES = 64 << 20
"""How much of the region is backed by memory when an engine starts."""


class SlotMemory:
    """Reserved when it is made, backed by memory when first touched.

    Args:
        num_slots: how many slots.
        slot_bytes: bytes that one slot must hold; rounded up to the alignment of O_DIRECT.

    Raises:
        ConfigError: this machine does not let a process reserve so much.
    """

    def __init__(self, num_slots: int, slot_bytes: int) -> None:
        self.num_slots = num_slots
        self.slot_bytes = -(-slot_bytes // ALIGN) * ALIGN
        num_bytes = num_slots * self.slot_bytes
        # Private, since Linux gives large pages to such memory only.
        try:
            self._region = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except (OSError, OverflowError) as error:
            raise ConfigError(
                f"{num_slots} slots of {self.slot_bytes} bytes are more than this machine lets a "
                "process reserve; set memory_bytes lower"
            ) from error
        if hasattr(mmap, "MADV_HUGEPAGE"):
            with contextlib.suppress(OSError):  # a kernel built without it; only speed is lost
                self._region.madvise(mmap.MADV_HUGEPAGE)
        self.view = memoryview(self._region)
        """All slots."""

    def slot(self, index: int) -> memoryview:
        """The bytes of a slot, writable."""
        start = index * self.slot_bytes
        return self.view[start : start + self.slot_bytes]

    def make_ready(self) -> None:
        """Back the first slots with memory now, so that the first hits do not wait for the pages.
        Does nothing where the system cannot do it beforehand."""
        if sys.platform == "linux":
            address = ctypes.addressof(ctypes.c_char.from_buffer(self._region))
            length = min(READY_BYTES, len(self.view))
            # Not by the method of `mmap`, which holds the interpreter's lock.
            madvise = ctypes.CDLL(None).madvise
            madvise(ctypes.c_void_p(address), ctypes.c_size_t(length), _MADV_POPULATE_WRITE)

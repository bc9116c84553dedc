"""Bounded memory of ours between a store and the engine: equal slots of one aligned region.

I/O lands here and only here, so an operation that outlives its deadline writes to a slot that
nobody else uses: a slot goes back to the pool when its operation ended, not when its caller gave
up. The operation may be a device's: then nobody waits, and the next one to need a slot looks.

A free slot may still hold a record that is worth finding again. Such a slot is given out after all
others, the one longest unused first.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import sys
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from kvferry.errors import ConfigError
from kvferry.record.schema import ALIGN, RecordSchema
from kvferry.store.base import Stamp
from kvferry.types import ChunkKey

_MADV_POPULATE_WRITE = 23
"""Of Linux 5.14; Python has no name for it."""

_PREPARED_AT_ONCE = 2 << 20
"""Other threads that get or return memory wait for so many bytes at a time."""


class Reached(Protocol):
    """A moment that others wait for, such as a mark in a device's stream."""

    def poll(self) -> bool:
        """Whether it has come. Does not block."""


@dataclass(slots=True)
class Content:
    """What a slot holds: a record, or all that one rank needs of it, verified.

    Attributes:
        key: of the record.
        first_token: position of its chunk in the prompt.
        schema: by which it was verified.
        stamp: of the record in the store when it was read; None if it may have changed since.
    """

    key: ChunkKey
    first_token: int
    schema: RecordSchema
    stamp: Stamp | None


class Kept(NamedTuple):
    """A slot and what it holds."""

    slot: int
    content: Content


class Staging:
    """A pool of page-aligned slots.

    Args:
        total_bytes: bound of all slots together.
        slot_bytes: bytes one slot must hold; rounded up to the alignment of O_DIRECT.
        keep_bytes: bound of the free slots that go on holding something; half of all at most.

    Raises:
        ConfigError: fewer than two slots would fit, or so much cannot be reserved.
    """

    def __init__(self, total_bytes: int, slot_bytes: int, keep_bytes: int = 0) -> None:
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
        self.max_kept = min(keep_bytes // self.slot_bytes, self.num_slots // 2)
        # What is free: slots that hold nothing, those that hold something (used last at the end),
        # and the last ones of the region, never used so far.
        self._returned: list[int] = []
        self._kept: OrderedDict[ChunkKey, Kept] = OrderedDict()
        self._num_fresh = self.num_slots
        self._draining: list[tuple[Kept | int, Reached]] = []
        self._prepared = 0  # bytes from the start of the region
        if hasattr(mmap, "MADV_HUGEPAGE"):
            with contextlib.suppress(OSError):  # a kernel built without it; only speed is lost
                self._region.madvise(mmap.MADV_HUGEPAGE)
        self._view = memoryview(self._region)

    def prepare(self, num_bytes: int, go_on: Callable[[], bool] = lambda: True) -> None:
        """Have the next slots that will be used backed by memory now, `num_bytes` of them, so that
        no read or write waits for that. Does nothing where the system cannot do it beforehand. One
        thread at a time.

        Args:
            num_bytes: how much.
            go_on: asked every few milliseconds as long as there is something to do; may wait.
                False: the rest is left for another call.
        """
        if sys.platform != "linux":
            return
        # Not by the method of `mmap`, which holds the interpreter's lock: 20 ms for 4 MiB where a
        # virtual machine gets its memory page by page. Failure (Linux before 5.14) costs only time.
        madvise = ctypes.CDLL(None).madvise
        region = ctypes.addressof(ctypes.c_char.from_buffer(self._region))
        while self._next_to_prepare(num_bytes) and go_on():
            if piece := self._next_to_prepare(num_bytes):  # by now
                self._prepared = piece.stop
                address = ctypes.c_void_p(region + piece.start)
                madvise(address, ctypes.c_size_t(len(piece)), _MADV_POPULATE_WRITE)

    def _next_to_prepare(self, num_bytes: int) -> range:
        """Bytes of the region; none if `num_bytes` are ready."""
        with self._lock:
            used = (self.num_slots - self._num_fresh) * self.slot_bytes
            missing = num_bytes - len(self._returned) * self.slot_bytes
        start, stop = max(used, self._prepared), min(used + missing, self.total_bytes)
        return range(start, min(stop, start + _PREPARED_AT_ONCE))

    @property
    def num_free(self) -> int:
        with self._lock:
            self._settle()
            return self._count_free()

    def _count_free(self) -> int:
        return len(self._returned) + len(self._kept) + self._num_fresh

    @property
    def num_kept(self) -> int:
        """How many free slots hold something."""
        with self._lock:
            return len(self._kept)

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
            if self._count_free() <= keep_free:
                return None
            if self._returned:
                return self._returned.pop()
            if self._num_fresh == 0:
                return self._kept.popitem(last=False)[1].slot
            self._num_fresh -= 1
            return self.num_slots - self._num_fresh - 1

    def take_all(self, keys: Sequence[ChunkKey]) -> list[Kept | None]:
        """For each key, take the free slot that holds it, if there is one."""
        with self._lock:
            self._settle()
            return [self._kept.pop(key, None) for key in keys]

    def release(
        self, slot: int, *, after: Reached | None = None, content: Content | None = None
    ) -> None:
        """Give a slot back. Of those that hold nothing, the last one freed is the next one used: it
        is warm in the cache.

        Args:
            slot: that was acquired or taken.
            after: it stays taken until then.
            content: what it holds, kept for as long as there is room for it.
        """
        freed = slot if content is None else Kept(slot, content)
        with self._lock:
            if after is None or after.poll():
                self._free(freed)
            else:
                self._draining.append((freed, after))

    def release_oldest(self, kept: Kept) -> None:
        """Give a slot back, kept if there is room, as if it had been used before all others."""
        key = kept.content.key
        with self._lock:
            if key in self._kept or len(self._kept) >= self.max_kept:
                self._returned.append(kept.slot)
            else:
                self._kept[key] = kept
                self._kept.move_to_end(key, last=False)

    def _free(self, freed: Kept | int) -> None:
        if isinstance(freed, int):
            self._returned.append(freed)
            return
        key = freed.content.key
        twin = self._kept.pop(key, None)
        self._kept[key] = freed
        if twin is None and len(self._kept) > self.max_kept:
            twin = self._kept.popitem(last=False)[1]
        if twin is not None:
            self._returned.append(twin.slot)

    def _settle(self) -> None:
        """Take back what devices are through with."""
        index = 0
        while index < len(self._draining):
            freed, after = self._draining[index]
            if after.poll():  # or it raises: then this one stays
                del self._draining[index]
                self._free(freed)
            else:
                index += 1

    def view(self, slot: int) -> memoryview:
        """The bytes of a slot, writable."""
        start = slot * self.slot_bytes
        return self._view[start : start + self.slot_bytes]

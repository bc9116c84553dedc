"""One rank's slots: their memory, reads from the store into them, and writes to the store.

Runs in: worker, on the model runner's thread; reads and writes run on I/O threads. The scheduler
role assigns the slots. It assigns a slot to another chunk only when every rank has reported the end
of every operation on it.

I/O writes to slots only, never to the engine's memory, so a read that outlives its deadline writes
to a slot that no other operation uses.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import mmap
import sys
import time
from dataclasses import dataclass

from kvferry.blocks.copies import Gathered
from kvferry.blocks.rows import RankRows
from kvferry.cache.config import RoleContext
from kvferry.cache.messages import Fetch, Filled, Saved, SlotChunk
from kvferry.errors import ConfigError, TransferError
from kvferry.layout.streams import Mark
from kvferry.record.check import MissReason
from kvferry.record.schema import ALIGN, RecordSchema
from kvferry.store.base import PutResult, SupportsShardedWrite
from kvferry.store.io_pool import IOPool, Job
from kvferry.store.recordio import RecordRead, put_record, read_record
from kvferry.types import ChunkKey

logger = logging.getLogger(__name__)

DEVICE_SECONDS = 60.0
"""How long a thread of ours waits for the device, which works on the engine's steps first."""

WRITE_SECONDS = 30.0
"""Deadline for writing one chunk. Only its slot is held until then."""

WRITES_CLOSE_SECONDS = 10.0
"""How long `close` lets writes that are under way finish before it leaves them behind."""

READS_CLOSE_SECONDS = 0.5
"""How long `close` waits for cancelled reads, which no request needs. A stalled read is left."""

READY_BYTES = 64 << 20
"""How much of the slots' memory is backed by pages when an engine starts."""

_MADV_POPULATE_WRITE = 23
"""Of Linux 5.14; Python has no name for it."""


class SlotMemory:
    """The slots: equal parts of one page-aligned region, reserved now, backed by memory when first
    touched.

    Args:
        slot_bytes: bytes that one slot must hold; rounded up to the alignment of O_DIRECT.

    Raises:
        ConfigError: this machine does not let a process reserve so much.
    """

    def __init__(self, num_slots: int, slot_bytes: int) -> None:
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


@dataclass(frozen=True, slots=True, eq=False)
class SavedChunk:
    """A chunk that is in its slot, or will be when the device reached a mark."""

    chunk: SlotChunk
    gathered: Gathered
    schema: RecordSchema
    """Of the epoch in which it was copied."""


class SlotIO:
    """All reads and writes of one rank, and what its slots hold.

    Args:
        rows: which bytes of a record this rank holds.
        context: store, observer and options.
    """

    def __init__(self, rows: RankRows, memory: SlotMemory, context: RoleContext) -> None:
        self._rows = rows
        self._memory = memory
        self._context = context
        self._observer = context.observer
        # By slot: the chunk's key, and the groups of it that the slot holds verified.
        self._contents: dict[int, tuple[bytes, frozenset[int]]] = {}
        self._read_by_device: dict[int, Mark] = {}
        self._reads: dict[int, tuple[Fetch, Job[Filled]]] = {}
        self._copying: list[SavedChunk] = []
        self._unwritten: dict[int, SavedChunk] = {}
        self._writes: list[tuple[int, Job[Saved]]] = []
        io_threads = context.config.io_threads
        self.read_pool = IOPool(io_threads, "kvferry-load")
        self._write_pool = IOPool(-(-io_threads // 2), "kvferry-save")

    # -- contents -------------------------------------------------------------------------------

    def groups_held(self, chunk: SlotChunk) -> frozenset[int]:
        """The groups of a chunk that its slot holds; none if the slot holds another chunk."""
        key, groups = self._contents.get(chunk.slot, (b"", frozenset[int]()))
        return groups if key == chunk.key else frozenset()

    def overwrite(self, slot: int) -> None:
        """Forget what a slot held; it is about to be overwritten."""
        self._contents.pop(slot, None)

    def busy_until(self, slot: int, mark: Mark) -> None:
        """A device reads a slot until a mark."""
        self._read_by_device[slot] = mark

    # -- reads ----------------------------------------------------------------------------------

    def fetch(self, fetch: Fetch) -> None:
        """Start to read a chunk. Never blocks."""
        started = time.monotonic()
        chunk, schema = fetch.chunk, self._rows.schema
        # Groups that are read again are not held until they are verified.
        held = self.groups_held(chunk) - frozenset(fetch.groups)
        self._contents[chunk.slot] = chunk.key, held
        memory = self._memory.slot(chunk.slot)
        mark = self._read_by_device.get(chunk.slot)
        record = RecordRead(
            key=ChunkKey(chunk.key),
            first_token=chunk.first_token,
            head=self._rows.head_of(memory),
            rows=self._rows.rows_of(memory, fetch.groups),
        )

        def run(job: Job[Filled]) -> Filled:
            if mark is not None and not mark.wait(DEVICE_SECONDS):
                raise TransferError(f"the device read a slot for more than {DEVICE_SECONDS} s")
            if job.cancelled:
                self._observer.count(f"miss_{MissReason.CANCELLED}")
                return Filled(chunk.slot, MissReason.CANCELLED)
            deadline = started + self._context.config.load_timeout_seconds
            missed = read_record(self._context.store, schema, record, self._observer, deadline)
            seconds = 0.0 if missed else time.monotonic() - started
            return Filled(chunk.slot, missed, seconds)

        self._reads[chunk.slot] = (fetch, self.read_pool.submit(run))

    def cancel(self, slot: int) -> None:
        """Let a read end early. Its end is reported nevertheless."""
        if slot in self._reads:
            _, job = self._reads[slot]
            job.cancel()

    def wait(self, seconds: float) -> None:
        """Return when the reads that are under way now have ended, or after `seconds`."""
        deadline = time.monotonic() + seconds
        # The last one first: it disturbs a thread once, not at the end of each read.
        for _, job in reversed(self._reads.values()):
            if not job.wait(max(0.0, deadline - time.monotonic())):
                return

    # -- writes ---------------------------------------------------------------------------------

    def save(self, saved: SavedChunk, *, write: bool) -> None:
        """Hold a chunk that was copied out of the blocks into its slot. Never blocks.

        Args:
            saved: the chunk.
            write: now, as a whole record; else a later plan names the file to write it to.
        """
        slot = saved.chunk.slot
        self.overwrite(slot)
        self._unwritten[slot] = saved
        self._copying.append(saved)
        if write:
            self.write(slot, None)

    def write(self, slot: int, session: str | None) -> None:
        """Start to write a saved chunk: a whole record, or this rank's part of a shared one."""
        saved = self._unwritten.pop(slot, None)

        def run(_job: Job[Saved]) -> Saved:
            if saved is None:
                return Saved(slot, PutResult.FAILED)
            return self._store_chunk(saved, session)

        self._writes.append((slot, self._write_pool.submit(run)))

    def _store_chunk(self, saved: SavedChunk, session: str | None) -> Saved:
        """Hash and write one chunk. Runs in: I/O thread."""
        started = time.monotonic()
        chunk, store = saved.chunk, self._context.store
        if not saved.gathered.mark.wait(DEVICE_SECONDS):
            raise TransferError(f"a chunk was not copied out in {DEVICE_SECONDS} s")
        if session is None and not store.takes_values:
            self._observer.count(f"put_{PutResult.FAILED}")
            self._observer.count("save_failed")
            return Saved(chunk.slot, PutResult.FAILED)  # hashing would be in vain
        deadline = time.monotonic() + WRITE_SECONDS
        image = self._rows.image_of(self._memory.slot(chunk.slot))
        digests = self._rows.digests(image, saved.gathered.digests)
        if session is not None:
            is_written = self._write_part(session, image, deadline)
            result = PutResult.STORED if is_written else PutResult.FAILED
        else:
            key = ChunkKey(chunk.key)
            result = put_record(
                store, saved.schema, key, chunk.first_token, digests, image, deadline
            )
            self._observer.count(f"put_{result}")
            if result not in (PutResult.STORED, PutResult.EXISTS):
                self._observer.count("save_failed")
        if result is PutResult.STORED:
            self._observer.count("saved_bytes", len(image))
        seconds = time.monotonic() - started
        self._observer.observe("save", seconds)
        if session is None:
            return Saved(chunk.slot, result, seconds=seconds)
        return Saved(chunk.slot, result, self._rows.written, digests, seconds)

    def _write_part(self, session: str, image: memoryview, deadline: float) -> bool:
        store = self._context.store
        if not isinstance(store, SupportsShardedWrite):
            return False
        return all(
            store.write_at(session, offset, [part], deadline)
            for offset, part in self._rows.file_ranges(image)
        )

    # -- reports --------------------------------------------------------------------------------

    @property
    def is_busy(self) -> bool:
        """Whether something is under way that will be reported."""
        return bool(self._reads or self._copying or self._writes)

    def collect(self, filled: list[Filled], saved: list[Saved]) -> None:
        """Append the operations that ended since the last call."""
        if not self.is_busy:
            return
        for slot, (fetch, read) in list(self._reads.items()):
            if read.poll():
                del self._reads[slot]
                filled.append(self._end_read(fetch, read))
        for copied in [one for one in self._copying if one.gathered.mark.poll()]:
            self._copying.remove(copied)
            self._contents[copied.chunk.slot] = copied.chunk.key, self._rows.all_groups
            filled.append(Filled(copied.chunk.slot))
        pending = []
        for slot, write in self._writes:
            if not write.poll():
                pending.append((slot, write))
                continue
            if write.result is None:
                self._observer.count("save_failed")
                logger.error("saving a chunk failed", exc_info=write.error)
            saved.append(write.result or Saved(slot, PutResult.FAILED))
        self._writes = pending

    def _end_read(self, fetch: Fetch, read: Job[Filled]) -> Filled:
        ended = read.result
        if ended is None:
            logger.error("reading a chunk failed", exc_info=read.error)
            return Filled(fetch.chunk.slot, MissReason.IO_ERROR)
        if ended.missed is None:
            groups = self.groups_held(fetch.chunk) | frozenset(fetch.groups)
            self._contents[ended.slot] = fetch.chunk.key, groups
            self._observer.observe("fetch", ended.seconds)
        return ended

    def close(self) -> None:
        """End all threads, in bounded time. Idempotent."""
        for _, read in self._reads.values():
            read.cancel()
        has_read = self.read_pool.close(READS_CLOSE_SECONDS)
        has_written = self._write_pool.close(WRITES_CLOSE_SECONDS)
        if not (has_read and has_written):
            logger.warning("a store operation did not end in time; left behind at close")

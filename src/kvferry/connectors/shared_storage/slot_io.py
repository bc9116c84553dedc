"""One rank's reads from the store into slots, and writes from slots to the store.

Runs in: worker, on the model runner's thread; the reads and writes on I/O threads. There is no
policy here: the scheduler role assigns slots and gives none to another chunk before the end of
every operation on it was reported.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from kvferry.connectors.shared_storage.messages import (
    Fetch,
    Held,
    Missed,
    RankReport,
    Saved,
    SharedStorageMeta,
    SlotChunk,
)
from kvferry.contract.messages import WorkerOutput
from kvferry.errors import TransferError
from kvferry.record.check import MissReason
from kvferry.store.base import PutResult, SupportsShardedWrite
from kvferry.store.io_pool import IOPool, Job
from kvferry.store.recordio import RecordRead, put_record, read_record
from kvferry.types import ChunkKey

if TYPE_CHECKING:
    from kvferry.blocks.copies import Gathered
    from kvferry.blocks.rows import RankRows
    from kvferry.connectors.shared_storage.slot_memory import SlotMemory
    from kvferry.layout.streams import Mark
    from kvferry.observe import Observer
    from kvferry.record.schema import RecordSchema
    from kvferry.store.base import Store

logger = logging.getLogger(__name__)

DEVICE_SECONDS = 60.0
"""How long a thread of ours waits for the device, which works on the engine's steps first."""

WRITES_CLOSE_SECONDS = 10.0
"""How long `close` lets writes that are under way finish before it leaves them behind."""

READS_CLOSE_SECONDS = 0.5
"""No request waits for what is still being read: time for threads to notice, not for a stalled
read."""


@dataclass(slots=True)
class Report:
    """What ended on one rank since the last report.

    Attributes:
        held: slots that were filled.
        missed: slots that were not.
        saved: writes that ended.
        failed_requests: requests whose load failed after it was promised.
        failed_keys: chunks whose load failed after they were promised.
        invalid: ids of blocks that hold nothing right.
        failures: steps so far in which a load failed; never reset.
        pool: which host pool the plans so far were of.
        timed: number of the step under way, if it is timed.
    """

    held: list[Held] = field(default_factory=list)
    missed: list[Missed] = field(default_factory=list)
    saved: list[Saved] = field(default_factory=list)
    failed_requests: set[str] = field(default_factory=set)
    failed_keys: list[bytes] = field(default_factory=list)
    invalid: set[int] = field(default_factory=set)
    failures: int = 0
    pool: int = 0
    timed: int = 0

    def any(self) -> bool:
        """Whether there is something to report."""
        ended = self.held or self.missed or self.saved
        return bool(ended or self.failed_keys or self.invalid or self.timed)

    def take(self, rank: int) -> WorkerOutput:
        """The output of this step; the report is empty afterwards."""
        report = RankReport(
            rank=rank,
            pool=self.pool,
            timed=self.timed,
            held=tuple(self.held),
            missed=tuple(self.missed),
            saved=tuple(self.saved),
            failures=self.failures,
            failed_requests=tuple(self.failed_requests),
            failed_keys=tuple(self.failed_keys),
        )
        output = WorkerOutput(
            invalid_block_ids=frozenset(self.invalid), meta=SharedStorageMeta(reports=(report,))
        )
        for ended in (self.held, self.missed, self.saved, self.failed_keys):
            ended.clear()
        self.failed_requests.clear()
        self.invalid.clear()
        self.timed = 0
        return output


class Content(NamedTuple):
    """What a slot holds, verified."""

    key: bytes
    groups: frozenset[int]


class ReadEnd(NamedTuple):
    """How a read ended."""

    missed: MissReason | None
    seconds: float


@dataclass(slots=True)
class _Read:
    fetch: Fetch
    job: Job[ReadEnd]


@dataclass(frozen=True, slots=True, eq=False)
class Copied:
    """A chunk that is in its slot, or will be when the device reached a mark."""

    chunk: SlotChunk
    gathered: Gathered
    schema: RecordSchema
    """Of the epoch in which it was copied."""


class SlotIO:
    """All reads and writes of one rank, and what its slots hold.

    Args:
        rows: which bytes of a record this rank holds.
        memory: of the slots.
        store: from where and to where; not closed here.
        io_threads: reads at once, and twice as many as writes at once.
        observer: receives counts.
    """

    def __init__(
        self, rows: RankRows, memory: SlotMemory, store: Store, io_threads: int, observer: Observer
    ) -> None:
        self._rows = rows
        self._memory = memory
        self._store = store
        self._observer = observer
        self._contents: dict[int, Content] = {}
        self._read_by_device: dict[int, Mark] = {}
        self._reads: dict[int, _Read] = {}
        self._copying: list[Copied] = []
        self._copied: dict[int, Copied] = {}
        self._writes: list[tuple[int, Job[Saved]]] = []
        self.read_pool = IOPool(io_threads, "kvferry-load")
        self._write_pool = IOPool(-(-io_threads // 2), "kvferry-save")

    # -- contents -------------------------------------------------------------------------------

    def groups_held(self, chunk: SlotChunk) -> frozenset[int]:
        """The groups of a chunk that its slot holds; none if the slot holds another chunk."""
        content = self._contents.get(chunk.slot)
        return content.groups if content is not None and content.key == chunk.key else frozenset()

    def read_until(self, slot: int, mark: Mark) -> None:
        """A device reads a slot until a mark."""
        self._read_by_device[slot] = mark

    # -- reads ----------------------------------------------------------------------------------

    def fetch(self, fetch: Fetch) -> None:
        """Start to read a chunk. Never blocks."""
        slot = fetch.chunk.slot
        # Groups that are read again are not held until they are verified.
        held = self.groups_held(fetch.chunk) - frozenset(fetch.groups)
        if held:
            self._contents[slot] = Content(fetch.chunk.key, held)
        else:
            self._contents.pop(slot, None)
        self._reads[slot] = _Read(fetch, self.read_pool.submit(self._read(fetch)))

    def _read(self, fetch: Fetch) -> Callable[[Job[ReadEnd]], ReadEnd]:
        started = time.monotonic()
        chunk, schema = fetch.chunk, self._rows.schema
        slot = self._memory.slot(chunk.slot)
        mark = self._read_by_device.get(chunk.slot)
        record = RecordRead(
            key=ChunkKey(chunk.key),
            first_token=chunk.first_token,
            head=self._rows.head_of(slot),
            buffer_for=lambda piece: self._rows.piece_of(slot, piece),
            parts=self._rows.parts_of(frozenset(fetch.groups)),
        )

        def run(job: Job[ReadEnd]) -> ReadEnd:
            if mark is not None and not mark.wait(DEVICE_SECONDS):
                raise TransferError(f"the device read a slot for more than {DEVICE_SECONDS} s")
            missed = read_record(self._store, schema, record, self._observer, lambda: job.cancelled)
            return ReadEnd(missed, time.monotonic() - started)

        return run

    def cancel(self, slot: int) -> None:
        """Let a read end early; its end is reported all the same."""
        read = self._reads.get(slot)
        if read is not None:
            read.job.cancel()

    def wait(self, seconds: float) -> None:
        """Return when the reads that are under way now have ended, or after `seconds`."""
        deadline = time.monotonic() + seconds
        # The last one first: it disturbs a thread once, not at the end of each read.
        for read in reversed(self._reads.values()):
            if not read.job.wait(max(0.0, deadline - time.monotonic())):
                return

    # -- writes ---------------------------------------------------------------------------------

    def copied(self, copied: Copied, *, write: bool) -> None:
        """A chunk was copied out of the blocks into its slot. Never blocks.

        Args:
            copied: the chunk.
            write: now, as a whole record; else a later plan says where to write it.
        """
        slot = copied.chunk.slot
        self._contents.pop(slot, None)
        self._copied[slot] = copied
        self._copying.append(copied)
        if write:
            self.write(slot, None)

    def write(self, slot: int, session: str | None) -> None:
        """Start to write what was copied: a whole record, or this rank's part of a shared one."""
        copied = self._copied.pop(slot, None)

        def run(_job: Job[Saved]) -> Saved:
            if copied is None:
                return Saved(slot, PutResult.FAILED)
            started = time.perf_counter()
            if not copied.gathered.mark.wait(DEVICE_SECONDS):
                raise TransferError(f"a chunk was not copied out in {DEVICE_SECONDS} s")
            saved = self._store_chunk(copied, session)
            self._observer.observe("save", time.perf_counter() - started)
            return saved

        self._writes.append((slot, self._write_pool.submit(run)))

    def _store_chunk(self, copied: Copied, session: str | None) -> Saved:
        """Hash and write one chunk. Runs in: I/O thread."""
        started = time.perf_counter()
        chunk = copied.chunk
        image = self._rows.image_of(self._memory.slot(chunk.slot))
        digests = self._rows.digests(image, copied.gathered.digests)
        if session is not None:
            is_written = self._write_part(session, image)
            result = PutResult.STORED if is_written else PutResult.FAILED
        else:
            key = ChunkKey(chunk.key)
            result = put_record(self._store, copied.schema, key, chunk.first_token, digests, image)
            self._observer.count(f"put_{result}")
            if result not in (PutResult.STORED, PutResult.EXISTS):
                self._observer.count("save_failed")
        if result is PutResult.STORED:
            self._observer.count("saved_bytes", len(image))
        seconds = time.perf_counter() - started
        if session is None:
            return Saved(chunk.slot, result, seconds=seconds)
        return Saved(chunk.slot, result, self._rows.written, digests, seconds)

    def _write_part(self, session: str, image: memoryview) -> bool:
        if not isinstance(self._store, SupportsShardedWrite):
            return False
        return all(
            self._store.write_at(session, offset, [part])
            for offset, part in self._rows.file_ranges(image)
        )

    # -- reports --------------------------------------------------------------------------------

    def collect(self, report: Report) -> None:
        """Report what ended since the last call."""
        for slot, read in list(self._reads.items()):
            if read.job.poll():
                del self._reads[slot]
                self._end_read(slot, read, report)
        for copied in [one for one in self._copying if one.gathered.mark.poll()]:
            self._copying.remove(copied)
            content = Content(copied.chunk.key, self._rows.all_groups)
            self._contents[copied.chunk.slot] = content
            report.held.append(Held(copied.chunk.slot))
        pending = []
        for slot, write in self._writes:
            if not write.poll():
                pending.append((slot, write))
                continue
            if write.result is None:
                self._observer.count("save_failed")
                logger.error("saving a chunk failed", exc_info=write.error)
            report.saved.append(write.result or Saved(slot, PutResult.FAILED))
        self._writes = pending

    def _end_read(self, slot: int, read: _Read, report: Report) -> None:
        end = read.job.result
        if end is None:
            logger.error("reading a chunk failed", exc_info=read.job.error)
            report.missed.append(Missed(slot, MissReason.IO_ERROR))
        elif end.missed is not None:
            report.missed.append(Missed(slot, end.missed))
        else:
            chunk = read.fetch.chunk
            groups = self.groups_held(chunk) | frozenset(read.fetch.groups)
            self._contents[slot] = Content(chunk.key, groups)
            report.held.append(Held(slot, end.seconds))
            self._observer.observe("fetch", end.seconds)

    @property
    def under_way(self) -> bool:
        """Whether the end of a read, copy or write is still to be reported."""
        return bool(self._reads or self._copying or self._writes)

    def close(self) -> None:
        """End all threads, in bounded time. Idempotent."""
        for read in self._reads.values():
            read.job.cancel()
        has_read = self.read_pool.close(READS_CLOSE_SECONDS)
        has_written = self._write_pool.close(WRITES_CLOSE_SECONDS)
        if not (has_read and has_written):
            logger.warning("a store operation did not end in time; left behind at close")

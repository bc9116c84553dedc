"""Seals and writes records that several ranks hold together, in the scheduler role's process.

Ranks on several machines write shards themselves. Then this only has them begin once the last one
has hashed its rows, and waits for the last of them.

Every rank copies its part of a chunk into its slot (host memory for one chunk), hashes the part and
reports the digests. After the last report a background thread here makes the head and writes the
record, with one `put` of the ranks' memory. `Saves` passes the digests on and polls.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field

from kvferry.cache.config import RoleContext
from kvferry.cache.deciding.host_pool import HostPool, Slot
from kvferry.cache.deciding.rank_slots import RankSlots
from kvferry.cache.messages import SlotChunk
from kvferry.errors import Fault
from kvferry.record.schema import RecordSchema
from kvferry.store.base import EXISTS, STORED, UNWRITTEN, Put, PutResult
from kvferry.store.io_pool import IOPool, Job
from kvferry.store.recordio import write_sealed

logger = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class _SharedRecord:
    slot: Slot
    namespace: bytes
    """Namespace of the record, as it was when the save began."""
    digests: dict[int, bytes] = field(default_factory=dict)
    is_sealed: bool = False
    """Set by the job, before it writes."""
    job: Job[Put] | None = None
    is_ordered: bool = False
    """Whether ranks write shards of it."""
    answers: dict[int, Put] = field(default_factory=dict)
    """By rank, of shards."""


class SharedWrites:
    """The records that are being saved. Runs in: scheduler thread, except for the jobs.

    Args:
        context: holds the store.
        pool: knows which record is in which slot.
        ranks: opens the slots of all ranks.
        schemas: layouts of the records, as `ranks` has them; each has its own namespace.

    Attributes:
        ranks: as given.
        orders: chunks whose shards the next plan has the ranks write; it clears them.
    """

    def __init__(
        self,
        context: RoleContext,
        pool: HostPool,
        ranks: RankSlots,
        schemas: Sequence[RecordSchema],
    ) -> None:
        self._store = context.store
        self._close_seconds = context.bounds.writes_close_seconds
        self._observer = context.observer
        self._world_size = context.spec.shard.world_size
        self._pool = pool
        self.ranks = ranks
        self._schemas = tuple(schemas)
        self._records: dict[int, _SharedRecord] = {}
        self.orders: list[SlotChunk] = []
        self._threads = IOPool(-(-context.config.io_threads // 2), "kvferry-save")

    def begin(self, slot: Slot, namespace: bytes) -> None:
        """Expect the digests of a chunk that is about to be saved."""
        self._records[slot.index] = _SharedRecord(slot, namespace)

    def report(self, rank: int, slot: Slot, digests: bytes) -> None:
        """Learn a rank's digests. After those of the last rank, write the record, or have the next
        plan order the shards. Never blocks."""
        record = self._records.get(slot.index)
        if record is not None and record.slot is slot:
            record.digests[rank] = digests
            if len(record.digests) < self._world_size:
                return
            if self.ranks.are_apart:
                record.is_ordered = True
                self.orders.append(SlotChunk(slot.index, slot.key, slot.first_token))
            else:
                record.job = self._threads.submit(lambda _job: self._write(record))

    def report_shard(self, rank: int, index: int, answer: Put) -> Put | None:
        """Learn that a rank wrote its shard, or could not. After the last one, return the answer
        of all: the chunk is stored if every rank's shard is. Else None."""
        record = self._records.get(index)
        if record is None:
            return None
        record.answers[rank] = answer
        if len(record.answers) < self._world_size:
            return None
        del self._records[index]
        for number, each in sorted(record.answers.items()):
            if not each.is_there:
                kind, why = each.fault or UNWRITTEN
                return Put(each.result, Fault(kind, f"rank {number}: {why}"))
        is_new = any(each.result is PutResult.STORED for each in record.answers.values())
        return STORED if is_new else EXISTS

    def abort_all(self) -> list[Slot]:
        """Drop all records whose write has not begun; return their slots."""
        slots = [record.slot for record in self._records.values()]
        return [slot for slot in slots if self.abort(slot)]

    def abort(self, slot: Slot) -> bool:
        """Drop a record whose write has not begun. Whether there was one."""
        record = self._records.get(slot.index)
        is_early = record is not None and record.job is None and not record.is_ordered
        if is_early:
            del self._records[slot.index]
        return is_early

    def poll(self) -> list[tuple[Slot, Put]]:
        """Seal the slots that have their head. Return the writes that ended since the last call."""
        ended = []
        for record in list(self._records.values()):
            job = record.job
            if job is None:
                continue
            has_ended = job.poll()
            if record.is_sealed:
                self._pool.seal(record.slot)
            if has_ended:
                del self._records[record.slot.index]
                ended.append((record.slot, self._answer_of(job)))
        return ended

    def close(self) -> None:
        """Wait for writes under way, up to `writes_close_seconds` of the bounds."""
        self._records.clear()
        if not self._threads.close(self._close_seconds):
            logger.warning("a store operation did not end in time; it is abandoned at close")

    def _answer_of(self, job: Job[Put]) -> Put:
        if job.result is None:
            logger.error("saving a chunk failed", exc_info=job.error)
            self._observer.count("save_failed")
        return job.result or Put.failed(UNWRITTEN)

    def _write(self, record: _SharedRecord) -> Put:
        """Seal and write a record. Runs in: I/O thread."""
        slot = record.slot
        number = slot.part
        parts = self.ranks.record(slot.index, number)
        table = self.ranks.leaf_table(record.digests, number)
        if parts is None or table is None:
            self._observer.count("save_failed")
            return Put.failed(UNWRITTEN)
        schema = self._schemas[number].with_namespace(record.namespace)
        head = schema.encode_head(slot.key, slot.first_token, table, slot.mark)
        self.ranks.seal(slot.index, head, number)
        record.is_sealed = True
        return write_sealed(self._store, record.namespace, slot.key, parts, self._observer)

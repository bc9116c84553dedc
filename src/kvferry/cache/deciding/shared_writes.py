"""Records that several ranks write together: begun and committed by the scheduler's process.

While every rank copies its part of a chunk into its slot, the hidden file is created. When both are
done, a plan names the file to the ranks. Each rank writes its part and reports its leaf digests.
After the last report the head is written, and the record becomes visible. The I/O runs on one
background thread; the scheduler thread only polls.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field

from kvferry.cache.deciding.host_pool import HostPool, Slot
from kvferry.cache.messages import Saved, Write
from kvferry.observe import Observer
from kvferry.record.schema import DIGEST_BYTES, RecordSchema
from kvferry.store.base import PutResult, SupportsShardedWrite
from kvferry.store.io_pool import IOPool, Job

logger = logging.getLogger(__name__)

CLOSE_SECONDS = 5.0


@dataclass(slots=True)
class _SharedRecord:
    slot: Slot
    schema: RecordSchema
    """Of the epoch in which it was begun."""
    begun: Job[str | PutResult]
    is_named: bool = False
    """A plan named the hidden file to the ranks."""
    reports: dict[int, Saved] = field(default_factory=dict)

    @property
    def session(self) -> str | None:
        """Name of the hidden file; None if there is none (yet): `begun` has the reason."""
        result = self.begun.result
        return None if isinstance(result, PutResult) else result


class SharedWrites:
    """All records under way. Runs in: scheduler thread, but for the jobs.

    Args:
        pool: where the ranks' parts are.
        store: creates the hidden files and commits them.
        world_size: ranks that each report once.
    """

    def __init__(
        self,
        pool: HostPool,
        store: SupportsShardedWrite,
        schema: RecordSchema,
        world_size: int,
        observer: Observer,
    ) -> None:
        self._pool = pool
        self._store = store
        self._schema = schema
        self._world_size = world_size
        self._observer = observer
        self._records: dict[int, _SharedRecord] = {}
        self._thread = IOPool(1, "kvferry-commit")

    def begin(self, slot: Slot) -> None:
        """Start to create the file of a slot's record. Never blocks."""
        schema = self._schema
        begun: Job[str | PutResult] = self._thread.submit(
            lambda _job: self._store.begin(slot.key, schema.record_bytes)
        )
        self._records[slot.index] = _SharedRecord(slot, schema, begun)

    def ready(self) -> tuple[Write, ...]:
        """The parts that the ranks can write now: all ranks copied theirs, and the file exists. The
        chunk of a record that the store refused stays in its slot."""
        writes = []
        for index, record in list(self._records.items()):
            if record.is_named or record.slot.filling or not record.begun.poll():
                continue
            if record.session is not None:
                record.is_named = True
                writes.append(Write(index, record.session))
            else:
                del self._records[index]
                refusal = record.begun.result
                self._count(refusal if isinstance(refusal, PutResult) else PutResult.FAILED)
                self._pool.cancel_writes(record.slot)
        return tuple(writes)

    def report(self, rank: int, slot: Slot, saved: Saved) -> bool:
        """A rank wrote its part, or could not. True with the last report, if every rank wrote its
        part: the commit is then under way."""
        record = self._records.get(slot.index)
        if record is None or record.slot is not slot:
            return False
        record.reports.setdefault(rank, saved)
        if len(record.reports) < self._world_size:
            return False
        del self._records[slot.index]
        self._thread.submit(lambda _job: self._settle(record))
        return all(each.result == PutResult.STORED for each in record.reports.values())

    def abort(self, slot: Slot) -> None:
        """Give a record up of which a rank could not copy its part: no rank is asked to write."""
        record = self._records.pop(slot.index, None)
        if record is not None:
            self._abort_later(record)

    def switch_namespace(self, namespace: bytes) -> None:
        """Commit records of another namespace from now on; those under way are given up."""
        self._schema = self._schema.with_namespace(namespace)
        self._give_up()

    def close(self) -> None:
        """Give up what is not complete. Bounded in time."""
        self._give_up()
        if not self._thread.close(CLOSE_SECONDS):
            logger.warning("some records were still being committed at close and may be missing")

    def _give_up(self) -> None:
        for record in self._records.values():
            self._abort_later(record)
            if not record.is_named:  # the ranks will report no write
                self._pool.cancel_writes(record.slot)
        self._records.clear()

    def _abort_later(self, record: _SharedRecord) -> None:
        self._thread.submit(lambda _job: self._abort(record))

    def _abort(self, record: _SharedRecord) -> None:
        """Runs in: I/O thread, after the record's own `begin`."""
        if record.session is not None:
            self._store.abort(record.session)

    def _settle(self, record: _SharedRecord) -> None:
        """Commit or abort. Runs in: I/O thread, after the record's own `begin`."""
        table = self._leaf_table(record)
        if record.session is None or table is None:
            self._abort(record)
            self._observer.count("save_failed")
            return
        head = record.schema.encode_head(record.slot.key, record.slot.first_token, table)
        self._count(self._store.commit(record.session, head))

    def _count(self, result: PutResult) -> None:
        self._observer.count(f"put_{result}")
        if result not in (PutResult.STORED, PutResult.EXISTS):
            self._observer.count("save_failed")

    def _leaf_table(self, record: _SharedRecord) -> bytes | None:
        """The table made of all ranks' parts; None unless every row was written."""
        table = bytearray(DIGEST_BYTES * record.schema.num_leaves)
        missing = set(range(record.schema.num_leaves))
        for saved in record.reports.values():
            if saved.result != PutResult.STORED:
                return None
            at = 0
            for rows in saved.ranges:
                where = record.schema.leaf_slice(rows)
                size = where.stop - where.start
                table[where] = saved.leaf_digests[at : at + size]
                missing.difference_update(
                    range(where.start // DIGEST_BYTES, where.stop // DIGEST_BYTES)
                )
                at += size
        return bytes(table) if not missing else None

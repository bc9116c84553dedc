"""Bringing the chunks of a hit into staging, read and verified, before anybody is promised them.

Runs in: worker, on the model runner's thread; the reads on I/O threads.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvferry.connectors.shared_storage.load_memory import LoadSlot, read_chunk
from kvferry.connectors.shared_storage.messages import ChunkRef, Prefetch, Prefetched
from kvferry.connectors.shared_storage.rank_device import REACHED
from kvferry.layout.streams import Mark
from kvferry.record.check import MissReason
from kvferry.store.io_pool import IOPool, Job

if TYPE_CHECKING:
    from kvferry.connectors.shared_storage.kept import KeptRecords
    from kvferry.connectors.shared_storage.rank_rows import RankRows
    from kvferry.connectors.shared_storage.report import Report
    from kvferry.connectors.shared_storage.reservations import Reservations
    from kvferry.observe import Observer
    from kvferry.record.schema import RecordSchema, RowRange
    from kvferry.store.base import Store
    from kvferry.store.staging import Kept, Staging

ReadJob = Job[MissReason | None]
"""A read under way; its result is the reason why it is a miss."""

Read = Callable[[ReadJob], MissReason | None]


@dataclass(slots=True)
class Fetch:
    """A prefetch under way: one slot and one job per chunk, in order."""

    op: Prefetch
    started: float
    ended: float = 0.0
    """When the last read so far ended; written by the reads."""
    slots: list[LoadSlot] = field(default_factory=list)
    jobs: list[ReadJob] = field(default_factory=list)
    told: int = 0
    """Leading chunks in hand, as last reported."""
    done: bool = False
    from_memory: bool = False
    """Some of it was in staging from before; written by the reads."""

    def in_hand(self) -> dict[bytes, LoadSlot]:
        """The slots of the chunks that were read and verified, by key."""
        held = zip(self.op.chunks, self.slots, self.jobs, strict=False)
        return {chunk.key: slot for chunk, slot, job in held if succeeded(job)}


class Fetches:
    """All prefetches of one rank.

    Args:
        rows: what this rank moves.
        store: where from.
        staging: memory for chunks in hand.
        kept: what is in staging from before.
        reservations: what of it was promised already; None if that cannot be.
        pool: threads that read.
        report: receives news.
        observer: receives counts.
    """

    def __init__(
        self,
        rows: RankRows,
        store: Store,
        staging: Staging,
        kept: KeptRecords,
        reservations: Reservations | None,
        pool: IOPool,
        report: Report,
        observer: Observer,
    ) -> None:
        self._rows = rows
        self._store = store
        self._staging = staging
        self._kept = kept
        self._reservations = reservations
        self._pool = pool
        self._report = report
        self._observer = observer
        self._fetches: dict[int, Fetch] = {}

    def begin(self, op: Prefetch) -> None:
        """Start to bring chunks into staging. Never blocks."""
        fetch = Fetch(op, time.monotonic())
        self._fetches[op.ticket] = fetch
        if self._reservations is not None:
            reserved = self._reservations.claim(op.ticket, op.chunks)
            if reserved is not None:
                self._hold(fetch, reserved)
                return
        # Before slots are taken for others, since those may be the ones that hold them.
        kept = deque(self._kept.take_all(op.chunks))
        for chunk in op.chunks:
            held = kept.popleft()
            index = self._staging.acquire() if held is None else held.slot
            if index is None:
                index = _last_of(kept)
            if index is None:
                # What fits is still a hit; the scheduler role learns how much did.
                self._observer.count(f"miss_{MissReason.NO_STAGING}")
                break
            slot = LoadSlot(self._staging, index)
            if held is not None:
                slot.content = held.content
            job = self._pool.submit(self._prefetch_job(fetch, chunk, slot))
            fetch.slots.append(slot)
            fetch.jobs.append(job)

    def _hold(self, fetch: Fetch, reserved: Sequence[Kept]) -> None:
        """Have a prefetch of which everything is in hand."""
        self._observer.count("kept_used", len(reserved))
        fetch.from_memory = True
        for one in reserved:
            slot = LoadSlot(self._staging, one.slot)
            slot.content = one.content
            slot.drop()  # no read holds it
            fetch.slots.append(slot)
            fetch.jobs.append(Job.ended())
        self._kept.check_later([one.content for one in reserved])

    def _prefetch_job(self, fetch: Fetch, chunk: ChunkRef, slot: LoadSlot) -> Read:
        rows, schema = self._rows, self._rows.schema
        wanted = rows.pieces_of(rows.groups_of(fetch.op, chunk.first_token))

        def run(job: ReadJob) -> MissReason | None:
            try:
                return self._bring(fetch, job, chunk, slot, schema, wanted)
            finally:
                fetch.ended = time.monotonic()
                slot.drop()

        return run

    def _bring(
        self,
        fetch: Fetch,
        job: ReadJob,
        chunk: ChunkRef,
        slot: LoadSlot,
        schema: RecordSchema,
        wanted: tuple[RowRange, ...],
    ) -> MissReason | None:
        if job.cancelled:
            return MissReason.CANCELLED
        if slot.content is not None and self._kept.confirm(slot.content):
            fetch.from_memory = True
            return None
        slot.content = None
        read = read_chunk(
            *(self._store, self._rows, schema, chunk, slot.view, self._observer),
            cancelled=lambda: job.cancelled,
            wanted=wanted,
        )
        if isinstance(read, MissReason):
            return read
        if wanted == self._rows.pieces:
            slot.content = read
        return None

    def collect(self) -> None:
        """Report what came in hand since the last call."""
        for fetch in self._fetches.values():
            if fetch.done:
                continue
            # First: what ends while the good ones are counted is counted by the next call.
            fetch.done = all(job.poll() for job in fetch.jobs)
            good = 0
            for job in fetch.jobs:
                if not succeeded(job):
                    break
                good += 1
            if fetch.done:
                broken = tuple(
                    chunk.key
                    for chunk, job in zip(fetch.op.chunks, fetch.jobs, strict=False)
                    if not succeeded(job)
                )
                seconds = max(0.0, fetch.ended - fetch.started)
                # Of a store, this says nothing if only a part was read from it.
                measured = 0.0 if fetch.from_memory else seconds
                self._report.prefetched.append(
                    Prefetched(fetch.op.ticket, good, True, measured, broken)
                )
                self._observer.observe("prefetch", seconds)
            elif good > fetch.told:
                fetch.told = good
                self._report.prefetched.append(Prefetched(fetch.op.ticket, good, False))

    def wait(self, seconds: float) -> None:
        """Return when the oldest prefetch that has not ended does, or after `seconds`."""
        deadline = time.monotonic() + seconds
        fetch = next((fetch for fetch in self._fetches.values() if not fetch.done), None)
        if fetch is not None:
            # The last one first: a thread of theirs is disturbed once, not at each end.
            for job in reversed(fetch.jobs):
                if not job.wait(max(0.0, deadline - time.monotonic())):
                    return

    @property
    def under_way(self) -> bool:
        """Whether a prefetch is kept, in hand or not."""
        return bool(self._fetches)

    def release(self, ticket: int, after: Mark = REACHED) -> None:
        """Drop a prefetch. A slot whose read still runs is freed when the read ends, and none
        before `after`."""
        fetch = self._fetches.pop(ticket, None)
        if fetch is None:
            if self._reservations is not None:
                self._reservations.cancel(ticket)  # of a step that failed before it was begun
            return
        # The last one first: what is kept goes in the order in which it came, and a chunk whose
        # prefix is gone is worth nothing.
        for slot, job in zip(reversed(fetch.slots), reversed(fetch.jobs), strict=True):
            job.cancel()
            slot.drop(after)
        self._kept.used()

    def find(self, ticket: int | None) -> Fetch | None:
        """A prefetch that was not released."""
        return None if ticket is None else self._fetches.get(ticket)

    def close(self) -> None:
        """Drop all."""
        for ticket in list(self._fetches):
            self.release(ticket)


def _last_of(kept: deque[Kept | None]) -> int | None:
    """The slot of the last chunk that is held, which must then be read again if there is room: the
    end of a hit is worth the least."""
    for index in reversed(range(len(kept))):
        held = kept[index]
        if held is not None:
            kept[index] = None
            return held.slot
    return None


def succeeded(job: ReadJob) -> bool:
    """Whether a read ended with everything verified. Its result is the reason why not."""
    return job.poll() and job.error is None and job.result is None and not job.cancelled

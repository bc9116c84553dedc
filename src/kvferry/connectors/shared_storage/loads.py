"""Bringing chunks in: prefetches into staging, copies from staging, direct loads.

Runs in: worker, on the model runner's thread; the jobs on I/O threads.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvferry.connectors.shared_storage.load_memory import DirectMemory, LoadSlot
from kvferry.connectors.shared_storage.messages import ChunkRef, Load, Prefetch, Prefetched
from kvferry.connectors.shared_storage.rank_device import (
    REACHED,
    ChunkCopy,
    RankDevice,
)
from kvferry.errors import LayoutError, TransferError
from kvferry.layout.streams import Mark
from kvferry.record.check import MissReason
from kvferry.record.schema import RowRange
from kvferry.store.io_pool import IOPool, Job
from kvferry.store.recordio import RecordRead, read_record
from kvferry.types import ChunkKey

if TYPE_CHECKING:
    from kvferry.connectors.shared_storage.rank_rows import RankRows
    from kvferry.connectors.shared_storage.report import Report
    from kvferry.observe import Observer
    from kvferry.store.base import Store
    from kvferry.store.staging import Staging

logger = logging.getLogger(__name__)

_Run = Callable[[Job[MissReason | None]], MissReason | None]


STALLED_SECONDS = 30.0
"""How long direct loads do not wait for a store that missed a deadline."""


SPREAD_BYTES = 1 << 20
"""Copies of fewer bytes are over before another thread has woken up."""


@dataclass(slots=True)
class _Fetch:
    """A prefetch under way: one slot and one job per chunk, in order."""

    op: Prefetch
    started: float
    ended: float = 0.0
    """When the last read so far ended; written by the reads."""
    slots: list[LoadSlot] = field(default_factory=list)
    jobs: list[Job[MissReason | None]] = field(default_factory=list)
    told: int = 0
    """Leading chunks in hand, as last reported."""
    done: bool = False

    def in_hand(self) -> dict[bytes, LoadSlot]:
        """The slots of the chunks that were read and verified, by key."""
        held = zip(self.op.chunks, self.slots, self.jobs, strict=False)
        return {chunk.key: slot for chunk, slot, job in held if _succeeded(job)}


class Loads:
    """All loads of one rank.

    Args:
        rows: what this rank moves.
        device: copies it.
        store: where from.
        staging: memory for chunks in hand.
        num_threads: reads at once.
        timeout_seconds: bound of a direct load.
        report: receives news and failures.
        observer: receives counts.
    """

    def __init__(
        self,
        rows: RankRows,
        device: RankDevice,
        store: Store,
        staging: Staging,
        *,
        num_threads: int,
        timeout_seconds: float,
        report: Report,
        observer: Observer,
    ) -> None:
        self._rows = rows
        self._device = device
        self._store = store
        self._staging = staging
        self._timeout = timeout_seconds
        self._report = report
        self._observer = observer
        self._fetches: dict[int, _Fetch] = {}
        self._stalled_until = 0.0
        self._pool = IOPool(num_threads, "kvferry-load")

    def prefetch(self, op: Prefetch) -> None:
        """Start to bring chunks into staging. Never blocks."""
        fetch = _Fetch(op, time.monotonic())
        self._fetches[op.ticket] = fetch
        for chunk in op.chunks:
            index = self._staging.acquire()
            if index is None:
                # What fits is still a hit; the scheduler role learns how much did.
                self._observer.count(f"miss_{MissReason.NO_STAGING}")
                break
            slot = LoadSlot(self._staging, index)
            job = self._pool.submit(self._prefetch_job(fetch, chunk, slot))
            fetch.slots.append(slot)
            fetch.jobs.append(job)

    def _prefetch_job(self, fetch: _Fetch, chunk: ChunkRef, slot: LoadSlot) -> _Run:
        rows, view = self._rows, slot.view
        wanted = rows.pieces_of(rows.groups_of(fetch.op, chunk.first_token))
        read = RecordRead(
            key=ChunkKey(chunk.key),
            first_token=chunk.first_token,
            head=rows.head_of(view),
            buffer_for=lambda piece: rows.piece_of(view, piece),
            parts=lambda _record: wanted,
        )

        schema = rows.schema

        def run(job: Job[MissReason | None]) -> MissReason | None:
            try:
                return read_record(self._store, schema, read, self._observer, lambda: job.cancelled)
            finally:
                fetch.ended = time.monotonic()
                slot.drop()

        return run

    def collect(self) -> None:
        """Report what came in hand since the last call."""
        for fetch in self._fetches.values():
            if fetch.done:
                continue
            # First: what ends while the good ones are counted is counted by the next call.
            fetch.done = all(job.poll() for job in fetch.jobs)
            good = 0
            for job in fetch.jobs:
                if not _succeeded(job):
                    break
                good += 1
            if fetch.done:
                broken = tuple(
                    chunk.key
                    for chunk, job in zip(fetch.op.chunks, fetch.jobs, strict=False)
                    if not _succeeded(job)
                )
                seconds = max(0.0, fetch.ended - fetch.started)
                self._report.prefetched.append(
                    Prefetched(fetch.op.ticket, good, True, seconds, broken)
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
            return
        for slot, job in zip(fetch.slots, fetch.jobs, strict=True):
            job.cancel()
            slot.drop(after)

    def from_staging(self, load: Load, ticket: int) -> None:
        """Copy a prefetched hit into the blocks and let its staging go. On a device, what the
        engine submits from here on comes after the copies."""
        fetch = self._fetches.get(ticket)
        started = time.perf_counter()
        try:
            staged = self._staged(load, fetch)
            for (chunk, _copy), error in zip(staged, self._bring_in(staged), strict=True):
                if isinstance(error, LayoutError | TransferError):
                    logger.error("load of %s refused: %s", load.request_id, error)
                    self._fail(load, chunk)
                elif error is not None:
                    raise error
        finally:
            # Also if one failed: the engine computes its blocks anew, after what was on its way.
            self._device.hold()
            self.release(ticket, self._device.done())
        self._observer.observe("load_copy", time.perf_counter() - started)
        self._observer.count("loaded_tokens", load.stop - load.start)

    def _staged(self, load: Load, fetch: _Fetch | None) -> list[tuple[ChunkRef, ChunkCopy]]:
        """From where to where, for the chunks that are in hand and fit; the others have failed."""
        staged = []
        held = {} if fetch is None else fetch.in_hand()
        for chunk in load.chunks:
            slot = held.get(chunk.key)
            if fetch is None or slot is None:
                self._fail(load, chunk)
                continue
            try:
                groups = self._rows.groups_of(fetch.op, chunk.first_token)
                runs = self._rows.staged_runs(load, chunk.first_token, groups)
            except LayoutError as error:
                logger.error("load of %s refused: %s", load.request_id, error)
                self._fail(load, chunk)
            else:
                staged.append((chunk, ChunkCopy(slot.view, runs, chunk.first_token)))
        return staged

    def _bring_in(self, staged: list[tuple[ChunkRef, ChunkCopy]]) -> list[Exception | None]:
        """Copy all; what was raised, for each."""
        before = self._device.mark()

        def copy(one: tuple[ChunkRef, ChunkCopy]) -> None:
            self._device.bring_in(one[1], after=before)

        small = len(staged) * self._rows.slot_bytes < SPREAD_BYTES
        return self._pool.spread(staged, copy, alone=small or self._device.overlaps)

    def from_store(self, loads: Sequence[Load]) -> None:
        """Read, verify and copy now, bounded by one deadline for all `loads` of a step. When this
        returns or raises, no read writes to the blocks any more.

        The step waits for this, so a store that was late once is not waited for again for a while:
        until then only what is there at once is used.
        """
        now = time.monotonic()
        waits = now >= self._stalled_until
        deadline = now + (self._timeout if waits else 0.0)
        under_way: list[tuple[Load, ChunkRef, Job[MissReason | None]]] = []
        before = self._device.mark()
        try:
            for load in loads:
                for chunk, run in self._direct_jobs(load, before):
                    under_way.append((load, chunk, self._pool.submit(run)))
            for load, chunk, job in under_way:
                if not job.wait(max(0.0, deadline - time.monotonic())):
                    self._observer.count(f"miss_{MissReason.DEADLINE}")
                    if waits:
                        self._stalled_until = now + STALLED_SECONDS
                    self._fail(load, chunk)
                elif not _succeeded(job):
                    self._fail(load, chunk)
        finally:
            for _load, _chunk, job in under_way:
                job.cancel()
            self._device.hold()
        self._observer.count("loaded_tokens", sum(load.stop - load.start for load in loads))

    def _direct_jobs(self, load: Load, before: Mark) -> list[tuple[ChunkRef, _Run]]:
        """One per chunk; none, and all of them failed, if its blocks are not all of this cache."""
        try:
            return [(chunk, self._direct_job(load, chunk, before)) for chunk in load.chunks]
        except LayoutError as error:
            logger.error("load of %s refused: %s", load.request_id, error)
            for chunk in load.chunks:
                self._fail(load, chunk)
            return []

    def _direct_job(self, load: Load, chunk: ChunkRef, before: Mark) -> _Run:
        schema = self._rows.schema
        runs = self._rows.runs_of(load, chunk.first_token)

        def run(job: Job[MissReason | None]) -> MissReason | None:
            memory = DirectMemory(self._rows, self._device, self._staging)

            def deliver(piece: RowRange) -> bool:
                if not job.claim():
                    return False
                try:
                    part = ChunkCopy(memory.buffer_for(piece), runs, chunk.first_token)
                    memory.delivered(self._device.bring_in_piece(piece, part, after=before))
                finally:
                    job.release()
                return True

            read = RecordRead(
                key=ChunkKey(chunk.key),
                first_token=chunk.first_token,
                head=memory.head,
                buffer_for=memory.buffer_for,
                parts=memory.parts,
                deliver=deliver,
            )
            try:
                return read_record(self._store, schema, read, self._observer, lambda: job.cancelled)
            finally:
                memory.close()

        return run

    def _fail(self, load: Load, chunk: ChunkRef) -> None:
        self._observer.count("load_failed_chunks")
        self._report.failed_requests.add(load.request_id)
        self._report.broken.append(chunk.key)
        self._report.invalid.update(self._rows.blocks_of(load, chunk.first_token))

    def close(self, timeout: float) -> bool:
        """Cancel everything; True if every thread ended in time."""
        for ticket in list(self._fetches):
            self.release(ticket)
        return self._pool.close(timeout)


def _succeeded(job: Job[MissReason | None]) -> bool:
    """Whether a read ended with everything verified. Its result is the reason why not."""
    return job.poll() and job.error is None and job.result is None and not job.cancelled

"""The worker role of the shared-storage connector: chunks between store, staging and blocks.

Two ways in. In hand: `Prefetch` reads and verifies chunks into staging on I/O threads; a later
`Load` is a copy from our own memory. From the index: a `Load` without a ticket reads piece by piece
through small scratch buffers and copies each verified piece into the blocks, until the load's
deadline. One way out: `save` copies the chunk out of the blocks at once, so that blocks are never
held, and I/O threads hash and write it.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvferry.connectors.shared_storage.messages import (
    EMPTY_PLAN,
    ChunkRef,
    Load,
    Prefetch,
    Prefetched,
    RankReport,
    Save,
    Saved,
    SharedStorageMeta,
    SharedStoragePlan,
)
from kvferry.connectors.shared_storage.rank_rows import RankRows
from kvferry.contract.messages import EMPTY_OUTPUT, Plan, WorkerOutput
from kvferry.contract.worker import WorkerRole
from kvferry.errors import ContractError, LayoutError
from kvferry.record.check import MissReason
from kvferry.record.schema import RecordSchema, RowRange
from kvferry.store.base import PutResult, Store, SupportsShardedWrite
from kvferry.store.io_pool import IOPool, Job
from kvferry.store.recordio import RecordRead, put_record, read_record
from kvferry.types import ChunkKey

if TYPE_CHECKING:
    import torch

    from kvferry.connectors.registry import EngineSpec
    from kvferry.connectors.shared_storage.config import SharedStorageConfig
    from kvferry.observe import Observer
    from kvferry.store.staging import Staging

logger = logging.getLogger(__name__)

CLOSE_SECONDS = 10.0
"""How long `close` lets writes that are under way finish before it leaves them behind."""


class _Slot:
    """A staging slot shared by an operation and whoever asked for it: free when both are through,
    so that a read that outlives its deadline writes to memory that nobody else has."""

    __slots__ = ("_holders", "_lock", "_staging", "index")

    def __init__(self, staging: Staging, index: int) -> None:
        self._staging = staging
        self._lock = threading.Lock()
        self._holders = 2
        self.index = index

    def drop(self) -> None:
        """One of the two holders is through."""
        with self._lock:
            self._holders -= 1
            last = self._holders == 0
        if last:
            self._staging.release(self.index)

    @property
    def view(self) -> memoryview:
        return self._staging.view(self.index)


@dataclass(slots=True)
class _Fetch:
    """A prefetch under way: one slot and one job per chunk, in order."""

    op: Prefetch
    started: float
    slots: list[_Slot] = field(default_factory=list)
    jobs: list[Job[MissReason | None]] = field(default_factory=list)
    told: int = 0
    """Leading chunks in hand, as last reported."""
    done: bool = False

    def in_hand(self, key: bytes) -> _Slot | None:
        """The slot of a chunk that was read and verified."""
        for chunk, slot, job in zip(self.op.chunks, self.slots, self.jobs, strict=False):
            if chunk.key == key:
                return slot if _succeeded(job) else None
        return None


class SharedStorageWorker(WorkerRole):
    """One rank's half. Runs in: worker, on the model runner's thread.

    Args:
        spec: the engine and what this rank holds of it.
        config: options.
        schema: of the namespace's records.
        store: owned by the caller of the constructor's factory; not closed here.
        staging: slots of `RankRows.slot_bytes` each.
        observer: receives counts.
    """

    def __init__(
        self,
        spec: EngineSpec,
        config: SharedStorageConfig,
        schema: RecordSchema,
        store: Store,
        staging: Staging,
        observer: Observer,
    ) -> None:
        self._spec = spec
        self._config = config
        self._store = store
        self._staging = staging
        self._observer = observer
        self._rows = RankRows(spec, schema)
        self._plan = EMPTY_PLAN
        self._fetches: dict[int, _Fetch] = {}
        self._saves: list[tuple[Save, Job[Saved]]] = []
        self._report = _Report()
        self._failures = 0
        self._loads_pool = IOPool(config.io_threads, "kvferry-load")
        self._saves_pool = IOPool(config.io_threads, "kvferry-save")
        # Loads may take what saves leave, saves at most a quarter: a store that writes slowly must
        # not keep prompts from being read.
        self._keep_free = staging.num_slots - max(1, staging.num_slots // 4)

    def register_kv_caches(self, kv_caches: Mapping[str, torch.Tensor]) -> None:
        self._rows.register(kv_caches)

    # -- one step -------------------------------------------------------------------------------

    def begin_step(self, plan: Plan) -> None:
        if plan is EMPTY_PLAN:
            return
        if not isinstance(plan, SharedStoragePlan):
            raise ContractError(
                f"plan is a {type(plan).__name__}, this worker needs SharedStoragePlan"
            )
        self._plan = plan
        if plan.namespace is not None:
            self._rows.switch_namespace(plan.namespace)
        for ticket in plan.releases:
            self._release(ticket)
        for prefetch in plan.prefetches:
            self._start_prefetch(prefetch)

    def start_load(self) -> None:
        if not self._plan.loads:
            return
        # Counted before, taken back after: an error in between must stop this step's saves too.
        self._failures += 1
        failed = len(self._report.broken)
        for load in self._plan.loads:
            if load.ticket is None:
                self._load_from_store(load)
            else:
                self._load_from_staging(load, load.ticket)
        if len(self._report.broken) == failed:
            self._failures -= 1

    def save(self) -> None:
        for save in self._plan.saves:
            if self._plan.failures_known < self._failures:
                # A load failed and this plan was made without knowing it: what the step computed
                # may rest on blocks never filled. Offered again once the host recomputed.
                self._report.saved.append(Saved(save.chunk.key, stored=False, retry=True))
            else:
                self._start_save(save)

    def collect(self, finished_request_ids: Collection[str]) -> WorkerOutput:
        report = self._report
        if self._fetches:
            self._collect_prefetched(report)
        if self._saves:
            self._collect_saved(report)
        if not report.any():
            return EMPTY_OUTPUT
        self._report = _Report()
        meta = SharedStorageMeta(
            reports=(
                RankReport(
                    rank=self._spec.shard.rank,
                    prefetched=tuple(report.prefetched),
                    saved=tuple(report.saved),
                    failures=self._failures,
                    broken=tuple(report.broken),
                ),
            )
        )
        return WorkerOutput(invalid_block_ids=frozenset(report.invalid), meta=meta)

    def end_step(self) -> None:
        self._plan = EMPTY_PLAN

    def close(self) -> None:
        for ticket in list(self._fetches):
            self._release(ticket)
        deadline = time.monotonic() + CLOSE_SECONDS
        self._saves_pool.close(CLOSE_SECONDS)
        if not self._loads_pool.close(max(0.1, deadline - time.monotonic())):
            logger.warning("a store operation did not end in time; left behind at close")

    # -- loads ----------------------------------------------------------------------------------

    def _start_prefetch(self, op: Prefetch) -> None:
        fetch = _Fetch(op, time.monotonic())
        self._fetches[op.ticket] = fetch
        for chunk in op.chunks:
            index = self._staging.acquire()
            if index is None:
                # What fits is still a hit; the scheduler role learns how much did.
                self._observer.count(f"miss_{MissReason.NO_STAGING}")
                break
            slot = _Slot(self._staging, index)
            fetch.slots.append(slot)
            fetch.jobs.append(self._loads_pool.submit(self._prefetch_job(chunk, slot)))

    def _prefetch_job(
        self, chunk: ChunkRef, slot: _Slot
    ) -> Callable[[Job[MissReason | None]], MissReason | None]:
        rows, view = self._rows, slot.view
        read = RecordRead(
            key=_key(chunk),
            first_token=chunk.first_token,
            head=rows.head_of(view),
            buffer_for=lambda piece: rows.piece_of(view, piece),
        )

        schema = rows.schema

        def run(job: Job[MissReason | None]) -> MissReason | None:
            try:
                return read_record(
                    self._store, schema, read, rows.pieces, self._observer, lambda: job.cancelled
                )
            finally:
                slot.drop()

        return run

    def _collect_prefetched(self, report: _Report) -> None:
        for fetch in self._fetches.values():
            if fetch.done:
                continue
            good = 0
            for job in fetch.jobs:
                if not _succeeded(job):
                    break
                good += 1
            fetch.done = all(job.poll() for job in fetch.jobs)
            if fetch.done:
                broken = tuple(
                    chunk.key
                    for chunk, job in zip(fetch.op.chunks, fetch.jobs, strict=False)
                    if not _succeeded(job)
                )
                report.prefetched.append(Prefetched(fetch.op.ticket, good, True, broken))
                self._observer.observe("prefetch", time.monotonic() - fetch.started)
            elif good > fetch.told:
                fetch.told = good
                report.prefetched.append(Prefetched(fetch.op.ticket, good, False))

    def _release(self, ticket: int) -> None:
        fetch = self._fetches.pop(ticket, None)
        if fetch is None:
            return
        for slot, job in zip(fetch.slots, fetch.jobs, strict=True):
            job.cancel()
            slot.drop()

    def _load_from_staging(self, load: Load, ticket: int) -> None:
        fetch = self._fetches.get(ticket)
        started = time.perf_counter()
        for chunk in load.chunks:
            slot = None if fetch is None else fetch.in_hand(chunk.key)
            if slot is None:
                self._fail(load, chunk)
                continue
            try:
                self._rows.scatter_chunk(slot.view, load, chunk.first_token)
            except LayoutError as error:
                logger.error("load of %s refused: %s", load.request_id, error)
                self._fail(load, chunk)
        self._observer.observe("load_copy", time.perf_counter() - started)
        self._observer.count("loaded_tokens", load.stop - load.start)
        self._release(ticket)

    def _load_from_store(self, load: Load) -> None:
        """Read, verify and copy now, bounded by the load's deadline."""
        deadline = time.monotonic() + self._config.load_timeout_seconds
        try:
            jobs = [
                (chunk, self._loads_pool.submit(self._direct_job(load, chunk)))
                for chunk in load.chunks
            ]
        except LayoutError as error:
            logger.error("load of %s refused: %s", load.request_id, error)
            jobs = []
            for chunk in load.chunks:
                self._fail(load, chunk)
        for chunk, job in jobs:
            if not job.wait(max(0.0, deadline - time.monotonic())):
                job.cancel()
                self._observer.count(f"miss_{MissReason.DEADLINE}")
            if not (job.poll() and _succeeded(job)):
                self._fail(load, chunk)
        self._observer.count("loaded_tokens", load.stop - load.start)

    def _direct_job(
        self, load: Load, chunk: ChunkRef
    ) -> Callable[[Job[MissReason | None]], MissReason | None]:
        rows, schema = self._rows, self._rows.schema
        runs = rows.runs_of(load, chunk.first_token)

        def run(job: Job[MissReason | None]) -> MissReason | None:
            scratch = rows.scratch()

            def deliver(piece: RowRange) -> bool:
                if not job.claim():
                    return False
                try:
                    rows.scatter_piece(scratch, piece, runs, chunk.first_token)
                finally:
                    job.release()
                return True

            read = RecordRead(
                key=_key(chunk),
                first_token=chunk.first_token,
                head=rows.head_of(scratch),
                buffer_for=lambda piece: rows.scratch_piece(scratch, piece),
                deliver=deliver,
            )
            return read_record(
                self._store, schema, read, rows.pieces, self._observer, lambda: job.cancelled
            )

        return run

    def _fail(self, load: Load, chunk: ChunkRef) -> None:
        self._observer.count("load_failed_chunks")
        self._report.broken.append(chunk.key)
        self._report.invalid.update(self._rows.blocks_of(load, chunk.first_token))

    # -- saves ----------------------------------------------------------------------------------

    def _start_save(self, save: Save) -> None:
        slot = self._staging.acquire(keep_free=self._keep_free)
        if slot is None:
            self._observer.count("save_no_staging")
            self._report.saved.append(Saved(save.chunk.key, stored=False, retry=True))
            return
        view = self._staging.view(slot)
        try:
            self._rows.gather_chunk(view, save)
        except LayoutError as error:
            logger.error("save refused: %s", error)
            self._staging.release(slot)
            self._report.saved.append(Saved(save.chunk.key, stored=False))
            return
        schema = self._rows.schema

        def run(_job: Job[Saved]) -> Saved:
            try:
                return self._store_chunk(schema, save, view)
            finally:
                self._staging.release(slot)

        self._saves.append((save, self._saves_pool.submit(run)))

    def _store_chunk(self, schema: RecordSchema, save: Save, slot: memoryview) -> Saved:
        """Hash and write one chunk. Runs in: I/O thread."""
        started = time.perf_counter()
        image = self._rows.image_of(slot)
        digests = self._rows.digests(image)
        if save.session is not None:
            stored = self._write_shard(save.session, image)
            self._observer.observe("save", time.perf_counter() - started)
            return Saved(
                save.chunk.key, stored=stored, ranges=self._rows.ranges, leaf_digests=digests
            )
        result = put_record(
            self._store, schema, _key(save.chunk), save.chunk.first_token, digests, image
        )
        self._observer.count(f"put_{result}")
        self._observer.observe("save", time.perf_counter() - started)
        if result is PutResult.STORED:
            self._observer.count("saved_bytes", len(image))
        return Saved(
            save.chunk.key,
            stored=result in (PutResult.STORED, PutResult.EXISTS),
            existed=result is PutResult.EXISTS,
        )

    def _write_shard(self, session: str, image: memoryview) -> bool:
        if not self._spec.shard.writes:
            return True
        if not isinstance(self._store, SupportsShardedWrite):
            return False
        return all(
            self._store.write_at(session, offset, [part])
            for offset, part in self._rows.file_ranges(image)
        )

    def _collect_saved(self, report: _Report) -> None:
        pending = []
        for save, job in self._saves:
            if not job.poll():
                pending.append((save, job))
            elif job.result is not None:
                report.saved.append(job.result)
            else:
                self._observer.count("save_failed")
                logger.error("saving a chunk failed", exc_info=job.error)
                report.saved.append(Saved(save.chunk.key, stored=False))
        self._saves = pending


@dataclass(slots=True)
class _Report:
    """What the next `collect` tells."""

    prefetched: list[Prefetched] = field(default_factory=list)
    saved: list[Saved] = field(default_factory=list)
    broken: list[bytes] = field(default_factory=list)
    invalid: set[int] = field(default_factory=set)

    def any(self) -> bool:
        return bool(self.prefetched or self.saved or self.broken or self.invalid)


def _key(chunk: ChunkRef) -> ChunkKey:
    return ChunkKey(chunk.key)


def _succeeded(job: Job[MissReason | None]) -> bool:
    """Whether a read ended with everything verified. Its result is the reason why not."""
    return job.poll() and job.error is None and job.result is None and not job.cancelled

"""Bringing hits into the blocks: from staging, where a prefetch put them, or from the store.

Runs in: worker, on the model runner's thread; the jobs on I/O threads.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch

from kvferry.connectors.shared_storage.fetches import Fetches, Read, ReadJob, succeeded
from kvferry.connectors.shared_storage.layer_copies import LayerCopies, LayerHooks
from kvferry.connectors.shared_storage.load_memory import DirectMemory
from kvferry.connectors.shared_storage.messages import ChunkRef, Load
from kvferry.connectors.shared_storage.rank_device import ChunkCopy, RankDevice
from kvferry.errors import LayoutError, TransferError
from kvferry.layout.streams import Mark
from kvferry.record.check import MissReason
from kvferry.record.schema import RowRange
from kvferry.store.cpus import process_cpus
from kvferry.store.io_pool import IOPool
from kvferry.store.recordio import RecordRead, read_record
from kvferry.types import ChunkKey

if TYPE_CHECKING:
    from kvferry.connectors.shared_storage.rank_rows import RankRows
    from kvferry.connectors.shared_storage.report import Report
    from kvferry.observe import Observer
    from kvferry.store.base import Store
    from kvferry.store.staging import Staging

logger = logging.getLogger(__name__)

STALLED_SECONDS = 30.0
"""How long direct loads do not wait for a store that missed a deadline."""


SPREAD_BYTES = 1 << 20
"""Copies of fewer bytes are over before another thread has woken up."""


class _Staged(NamedTuple):
    """A chunk in hand and where it goes."""

    load: Load
    chunk: ChunkRef
    copy: ChunkCopy


class _UnderWay(NamedTuple):
    """Hits that are copied while the forward runs."""

    copies: LayerCopies
    loads: tuple[Load, ...]
    staged: Sequence[_Staged]


class Loads:
    """All loads of one rank.

    Attributes:
        in_forward: the forward under way uses hits.

    Args:
        rows: what this rank moves.
        device: copies it.
        store: where direct loads read.
        staging: memory for those.
        fetches: what is in hand.
        pool: threads that read and copy.
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
        fetches: Fetches,
        pool: IOPool,
        *,
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
        self._fetches = fetches
        self._pool = pool
        self._stalled_until = 0.0
        self._under_way: _UnderWay | None = None
        self._seconds = 0.0  # that copies held up this step
        self._spare_cores = 0
        self._hooks = LayerHooks()
        self.in_forward = False

    def register(self) -> None:
        """Called once the engine's threads and tensors are what they will be."""
        # A core that computes is slowed down by a copy as much as one that waits for it.
        self._spare_cores = min(
            self._pool.num_threads, len(process_cpus()) - torch.get_num_threads()
        )

    def from_staging(self, loads: Sequence[Load], *, beside_forward: bool) -> None:
        """Copy prefetched hits into the blocks and let their staging go. On a device, what the
        engine submits from here on comes after the copies.

        Args:
            loads: the hits of a step.
            beside_forward: there is a forward, so layers whose hook is relied on may still be under
                way when this returns: `wait_for_layer` and `end_forward` have them complete.
        """
        started = time.perf_counter()
        self.in_forward = True
        self._observer.count("loaded_tokens", sum(load.stop - load.start for load in loads))
        staged: list[_Staged] = []
        under_way: LayerCopies | None = None
        try:
            for load in loads:
                staged += self._staged(load)
            under_way = self._begin_layers(staged) if beside_forward else None
            if under_way is None:
                self._bring_in(staged)
        finally:
            # Also if one failed: the engine computes its blocks anew, after what was on its way.
            self._device.hold()
            if under_way is None:
                self._release_all(loads)
        if under_way is not None:
            self._under_way = _UnderWay(under_way, tuple(loads), staged)
        self._seconds = time.perf_counter() - started
        if under_way is None:
            self._observer.observe("load_copy", self._seconds)

    def _staged(self, load: Load) -> list[_Staged]:
        """From where to where, for the chunks that are in hand and fit; the others have failed."""
        fetch = self._fetches.find(load.ticket)
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
                self._refuse(load, chunk, error)
            else:
                copy = ChunkCopy(slot.view, runs, chunk.first_token)
                staged.append(_Staged(load, chunk, copy))
        return staged

    def _begin_layers(self, staged: Sequence[_Staged]) -> LayerCopies | None:
        """Copies that go on while the forward runs; None if there are to be none."""
        if self._spare_cores <= 0 or self._device.overlaps or self._are_small(staged):
            return None
        # A hook that stays out is a failed load: not for an engine that cannot live with one.
        if self._rows.device.type != "cpu" or not self._rows.can_fail_by_block:
            return None
        hooked = [name for name in self._hooks.relied_on if name in self._rows.layers]
        if not hooked:
            return None
        self._observer.count("loads_beside_forward")
        copies = [one.copy for one in staged]
        return LayerCopies(self._rows, self._pool, self._spare_cores, copies, hooked)

    def _are_small(self, staged: Sequence[_Staged]) -> bool:
        return len(staged) * self._rows.slot_bytes < SPREAD_BYTES

    def _bring_in(self, staged: Sequence[_Staged]) -> None:
        """Copy all."""
        before = self._device.mark()

        def copy(one: _Staged) -> None:
            self._device.bring_in(one.copy, after=before)

        alone = self._device.overlaps or self._are_small(staged)
        errors = self._pool.spread(staged, copy, alone=alone)
        for one, error in zip(staged, errors, strict=True):
            if isinstance(error, LayoutError | TransferError):
                self._refuse(one.load, one.chunk, error)
            elif error is not None:
                raise error

    def _refuse(self, load: Load, chunk: ChunkRef, error: Exception) -> None:
        logger.error("load of %s refused: %s", load.request_id, error)
        self._fail(load, chunk)

    def _release_all(self, loads: Sequence[Load]) -> None:
        done = self._device.done()
        for load in loads:
            if load.ticket is not None:
                self._fetches.release(load.ticket, done)

    def begin_step(self) -> None:
        """Before any other call in a step."""
        self.abandon()  # what a step that was never ended left
        self._hooks.begin_step()

    @property
    def needs_layers(self) -> bool:
        """Whether copies are under way, or it is not known yet which hooks there are."""
        return self._under_way is not None or self._hooks.learns

    def wait_for_layer(self, layer_name: str) -> None:
        """Return when a layer's copies are complete."""
        self._hooks.saw(layer_name)
        if self._under_way is not None:
            started = time.perf_counter()
            self._under_way.copies.wait(layer_name)
            self._seconds += time.perf_counter() - started

    def end_forward(self) -> None:
        """Have all copies complete, and those fail that a layer may not have waited for."""
        self._hooks.end_forward()
        self.in_forward = False
        under_way, self._under_way = self._under_way, None
        if under_way is None:
            return
        missed = under_way.copies.missed
        errors = under_way.copies.end()
        self._release_all(under_way.loads)
        self._observer.observe("load_copy", self._seconds)
        if missed:
            self._hooks.give_up()
            self._observer.count("layer_hooks_missed")
            logger.error(
                "the host ran a forward without the hook of layer %s, which it called before: the "
                "hits of this step are failed, later ones are copied before the forward",
                missed[0],
            )
        for one, error in zip(under_way.staged, errors, strict=True):
            if error is not None:
                self._refuse(one.load, one.chunk, error)
            elif missed:
                self._fail(one.load, one.chunk)

    def abandon(self) -> None:
        """Write to no block any more: the step is over."""
        self.in_forward = False
        under_way, self._under_way = self._under_way, None
        if under_way is not None:
            under_way.copies.abandon()
            self._release_all(under_way.loads)

    def from_store(self, loads: Sequence[Load]) -> None:
        """Read, verify and copy now, bounded by one deadline for all `loads` of a step. When this
        returns or raises, no read writes to the blocks any more.

        The step waits for this, so a store that was late once is not waited for again for a while:
        until then only what is there at once is used.
        """
        self.in_forward = True
        now = time.monotonic()
        waits = now >= self._stalled_until
        deadline = now + (self._timeout if waits else 0.0)
        under_way: list[tuple[Load, ChunkRef, ReadJob]] = []
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
                elif not succeeded(job):
                    self._fail(load, chunk)
        finally:
            for _load, _chunk, job in under_way:
                job.cancel()
            self._device.hold()
        self._observer.count("loaded_tokens", sum(load.stop - load.start for load in loads))

    def _direct_jobs(self, load: Load, before: Mark) -> list[tuple[ChunkRef, Read]]:
        """One per chunk; none, and all of them failed, if its blocks are not all of this cache."""
        try:
            return [(chunk, self._direct_job(load, chunk, before)) for chunk in load.chunks]
        except LayoutError as error:
            logger.error("load of %s refused: %s", load.request_id, error)
            for chunk in load.chunks:
                self._fail(load, chunk)
            return []

    def _direct_job(self, load: Load, chunk: ChunkRef, before: Mark) -> Read:
        schema = self._rows.schema
        runs = self._rows.runs_of(load, chunk.first_token)

        def run(job: ReadJob) -> MissReason | None:
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

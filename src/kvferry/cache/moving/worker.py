"""The worker role of the shared-storage connector: carries out the plan, in the plan's order.

In: for a `Fetch`, I/O threads read a chunk into its slot (host memory for one chunk) and verify it;
a later `Load` copies it from the slot into the engine's blocks. Out: a `Save` copies a chunk out of
the blocks into its slot at once, so that blocks are never held back. The device or an I/O thread
then hashes the chunk. An I/O thread writes it: with several ranks, the scheduler role's.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import msgspec
import torch

from kvferry.blocks.copies import BlockCopies, ChunkCopy, DeviceSetup, Gathered, StateCopy
from kvferry.blocks.rows import RankRecords
from kvferry.blocks.states import PagedStates
from kvferry.blocks.tables import BlockSlice
from kvferry.cache.config import RoleContext
from kvferry.cache.epoch import CacheState
from kvferry.cache.messages import (
    EMPTY_PLAN,
    CachePlan,
    Fetch,
    Filled,
    Load,
    Save,
    Saved,
    Sealed,
    SlotChunk,
    SlotRegion,
)
from kvferry.cache.moving.comparisons import Comparisons
from kvferry.cache.moving.drafts import Drafts
from kvferry.cache.moving.ended import Ended
from kvferry.cache.moving.slot_io import SlotIO
from kvferry.cache.replicas import Replicas
from kvferry.contract.asynchronous import AsyncReports
from kvferry.contract.messages import EMPTY_OUTPUT, Plan, WorkerOutput
from kvferry.contract.worker import WorkerRole
from kvferry.errors import ContractError, LayoutError, TransferError
from kvferry.layout.streams import Mark
from kvferry.record.check import ReadFault
from kvferry.store.base import PutResult
from kvferry.types import NULL_BLOCK, ChunkKey

logger = logging.getLogger(__name__)


class _Loaded(NamedTuple):
    """A chunk of a load, and its copy from the slot to the blocks."""

    load: Load
    chunk: SlotChunk
    copy: ChunkCopy | StateCopy


class CacheWorker(WorkerRole):
    """The worker role of one rank; the host calls its hooks in every step. Runs in: worker, on the
    model runner's thread.

    Args:
        records: which bytes of records this rank holds.
        num_slots: number of slots, the same on every rank.
        setup: how the device of the engine's tensors is used.
        states: the engine's pages of recurrent states, if it has any.

    Attributes:
        io: what the slots hold, and the reads and writes under way.

    Raises:
        ConfigError: the slots are more than this machine lets a process have.
    """

    def __init__(
        self,
        context: RoleContext,
        records: RankRecords,
        num_slots: int,
        setup: DeviceSetup,
        states: PagedStates | None = None,
    ) -> None:
        if states is not None:
            self.rules = AsyncReports
        self._records = records
        self._rows = rows = records.rows
        self._observer = context.observer
        self._replicas = Replicas(context.spec, num_slots, records.slot_bytes)
        self._memory = self._replicas.memory
        self._region = SlotRegion(
            self._memory.name,
            self._memory.process,
            self._memory.fd,
            context.spec.shard,
            context.identity.first,
            self._replicas.loads_only,
            num_slots,
            self._memory.slot_bytes,
        )
        self._loading: deque[tuple[int, Mark]] = deque()
        self._bounds = context.bounds
        self._copies = BlockCopies(context.spec, rows, setup, states)
        self._drafts: Drafts | None = None
        drafts = context.spec.of_drafts
        if drafts is not None and records.drafts is not None:
            self._drafts = Drafts(drafts, records.drafts, self._memory, context, self._copies)
        self.io = SlotIO(records, self._replicas, context, self._drafts)
        self._comparisons = Comparisons(rows, self._memory, context, self.io.hash_pool)
        self._ended = Ended()
        self._plan = EMPTY_PLAN
        self._saved = False
        self._to_begin: deque[Fetch] = deque()
        self._to_write: deque[SlotChunk] = deque()
        self._identity = context.identity
        self._is_warned = False  # of another namespace
        self._state: CacheState | None = None  # the last that was seen
        self._has_told = False  # why it is off

    def _follow_identity(self) -> None:
        """Take a name of the weights that came late. The next report tells the scheduler role why
        this rank is off, if it is for good."""
        state = self._identity.state
        if state is self._state:
            return
        self._state = state
        if self._region.namespace != self._identity.first:
            self._region = msgspec.structs.replace(self._region, namespace=self._identity.first)
        if state.is_final and not self._has_told:
            self._has_told, self._ended.off = True, state.why

    @property
    def _is_off(self) -> bool:
        # The report tells the scheduler role of another namespace, but only after this step.
        is_other = self._plan.first_namespace != self._region.namespace
        if is_other and self._region.namespace and not self._is_warned:
            self._is_warned = True
            logger.warning(
                "rank %d describes the model in another way than the scheduler's process: it loads "
                "and saves nothing",
                self._rows.rank,
            )
        return is_other or self._identity.state.is_final

    @property
    def region(self) -> SlotRegion:
        """Where this rank's slots are."""
        self._follow_identity()
        return self._region

    def register_kv_caches(self, kv_caches: Mapping[str, torch.Tensor]) -> None:
        try:
            self._copies.register(kv_caches, self._memory.view, self._replicas.own_slot())
            if self._drafts is not None:
                self._drafts.register(kv_caches, self._replicas.own_slot())
        except TransferError as error:
            # The engine starts all the same. The scheduler role plans nothing more once it knows.
            logger.error("kvferry is off: %s", error)
            self._identity.stop(str(error))
        self._memory.make_ready()

    def unregister_kv_caches(self) -> None:
        # Comparisons may go on: they read slots only.
        self._copies.unregister(self._bounds.device_seconds)
        if self._drafts is not None:
            self._drafts.unregister(self._bounds.device_seconds)

    # -- step -----------------------------------------------------------------------------------

    def begin_step(self, plan: Plan) -> None:
        if plan is EMPTY_PLAN:
            self._follow_identity()
            self._tell_of_loads()
            return
        if not isinstance(plan, CachePlan):
            raise ContractError(f"plan is a {type(plan).__name__}, this worker needs CachePlan")
        # First: after a fault below, `end_step` ends what is left.
        self._plan, self._saved = plan, False
        self._to_begin.extend(plan.fetches)
        self._to_write.extend(plan.writes)
        self._follow_identity()
        self._tell_of_loads()
        for load in plan.loads:
            for chunk in load.chunks:
                self.io.loaded(chunk.slot, plan.number)
        if plan.pool:  # not set in an empty plan that was copied to this process
            self._ended.pool = plan.pool
        self._ended.timed = plan.timed
        if plan.namespace not in (None, self._rows.schema.namespace):
            self._records.switch_namespace(plan.namespace)
        for load in plan.unchecked:
            self._take_back(load)
        if plan.are_apart:
            self._begin_apart(plan)
        for slot in plan.cancels:
            self.io.cancel(slot)
        while self._to_begin:
            self._fetch(self._to_begin[0])
            self._to_begin.popleft()

    def _fetch(self, fetch: Fetch) -> None:
        if self._is_off:
            self._ended.filled.append(Filled(fetch.chunk.slot, ReadFault.IO_ERROR))
        elif self._replicas.loads_only:
            self.io.hold(fetch.chunk, fetch.groups)
            self._ended.filled.append(Filled(fetch.chunk.slot))
        else:
            self.io.fetch(fetch)

    def _begin_apart(self, plan: CachePlan) -> None:
        """Do what a plan has only ranks do that are on several machines."""
        if not self.io.are_apart:
            self.io.be_apart()
        while self._to_write:
            self._write_shard(self._to_write[0])
            self._to_write.popleft()
        for key, why, namespace in plan.discards:
            self.io.discard(ChunkKey(key), why, namespace)
        if plan.touches:
            self.io.touch(plan.touches)
        for keys, until in plan.pins:
            self.io.pin(keys, until)

    def _write_shard(self, chunk: SlotChunk) -> None:
        if self._replicas.loads_only:  # the first rank that holds the same writes it
            self._ended.saved.append(Saved(chunk.slot, PutResult.EXISTS))
        elif (ended := self.io.write_shard(chunk)) is not None:
            self._ended.saved.append(ended)

    def start_load(self) -> None:
        if not self._plan.loads:
            return
        # Count the failure up front and undo it on success, so an exception in `_load` also stops
        # this step's saves.
        self._ended.failures += 1
        num_failed = len(self._ended.failed_keys)
        self._load(self._plan.loads)
        if len(self._ended.failed_keys) == num_failed:
            self._ended.failures -= 1

    def note_failed_loads(self) -> None:
        self._ended.failures += 1  # without keys, which stands for loads of any request

    def save(self) -> None:
        self._saved = True
        if not self._plan.saves:
            return
        if self._is_off:
            for save in self._plan.saves:
                self._end_early(save, ReadFault.IO_ERROR)
            return
        known = self._plan.failures_known
        failures_known = known[self._rows.rank] if known else 0
        if failures_known >= self._ended.failures:
            (self._leave if self._replicas.loads_only else self._save)(self._plan.saves)
        else:
            # A load failed, and the scheduler role made this plan before it knew: the step may have
            # computed on blocks that were never filled. The chunks are offered again when the host
            # has recomputed them.
            self._put_off(self._plan.saves)

    def wait(self, seconds: float) -> None:
        self.io.wait(seconds)

    def collect(self, finished_request_ids: Collection[str]) -> WorkerOutput:
        if not self._saved and any(save.checks for save in self._plan.saves):
            # Nothing is compared in this step, so its tokens must not rest on the audited loads.
            self._put_off(self._plan.saves)
            self._saved = True
        ended = self._ended
        self.io.collect(ended.filled, ended.sealed, ended.saved)
        for load in self._comparisons.collect(ended.filled):
            self._take_back(load)
        if ended.is_empty:
            return EMPTY_OUTPUT
        self._ended = Ended(ended.pool, ended.failures, num_known=ended.failures)
        return ended.output(self._region)

    @property
    def is_idle(self) -> bool:
        self._follow_identity()
        has_ended = self._ended.is_empty and not self._loading
        return has_ended and self.io.is_idle and self._comparisons.is_idle

    def end_step(self) -> None:
        if not self._saved:
            # The forward failed: the scheduler role must not go on waiting for these saves.
            self._put_off(self._plan.saves)
        # These are left only if `begin_step` failed. None was begun; the pool awaits their end.
        for fetch in self._to_begin:
            self._ended.filled.append(Filled(fetch.chunk.slot, ReadFault.IO_ERROR))
        self._to_begin.clear()
        for chunk in self._to_write:
            self._ended.saved.append(Saved(chunk.slot, PutResult.FAILED))
        self._to_write.clear()
        if self._plan.loads and self._replicas.loads_only:
            self._loading.append((self._plan.number, self._copies.slots_read()))
        self._plan = EMPTY_PLAN
        self._tell_of_loads()

    def _tell_of_loads(self) -> None:
        """Tell the first rank that holds the same when the device has read its slots."""
        while self._loading and self._loading[0][1].poll():
            number, _mark = self._loading.popleft()
            self._replicas.move_past(number)

    def close(self) -> None:
        self.io.close()
        if not self._copies.close(self._bounds.device_close_seconds):
            logger.warning(
                "copies of the device did not end in time; the host memory stays page-locked"
            )

    # -- loads ----------------------------------------------------------------------------------

    def _load(self, loads: Sequence[Load]) -> None:
        """Copy hits from slots into the blocks. On a device, work that the engine submits after
        this call runs after the copies."""
        started = time.perf_counter()
        self._observer.count("loaded_tokens", sum(load.stop - load.start for load in loads))
        try:
            loaded = [one for load in loads for one in self._copies_of(load)]
            errors = self.io.pool.spread(
                loaded,
                lambda one: self._scatter(one.copy),
                alone=self._copies.overlaps,
            )
            for one, error in zip(loaded, errors, strict=True):
                if error is not None:
                    self._fail(one.load, one.chunk, error)
            if self._drafts is not None:
                self._drafts.load(loads, self.io.pool)
            self._ended.received.update(load.request_id for load in loads if load.is_async)
        finally:
            if self._copies.overlaps:
                done = self._copies.slots_read()
                for load in loads:
                    for chunk in load.chunks:
                        self.io.busy_until(chunk.slot, done)
        self._observer.observe("load_copy", time.perf_counter() - started)

    def _scatter(self, copy: ChunkCopy | StateCopy) -> None:
        if isinstance(copy, StateCopy):
            self._copies.scatter_state(copy)
        else:
            self._copies.scatter(copy)

    def _copies_of(self, load: Load) -> Iterator[_Loaded]:
        """Yield the copy of each chunk that is held and has valid blocks. Report the others as
        failed."""
        for chunk in load.chunks:
            held = self.io.groups_held(chunk)
            try:
                if not held:
                    raise LayoutError(f"slot {chunk.slot} does not hold the chunk it was to hold")
                slot = self._memory.slot(chunk.slot)
                if chunk.part >= 0:
                    yield _Loaded(load, chunk, self._state_copy(chunk, load.blocks))
                    continue
                hit = (load.start, load.stop)
                runs = self._copies.paged.load_runs(load.blocks, hit, chunk.first_token, held)
            except LayoutError as error:
                self._fail(load, chunk, error)
            else:
                yield _Loaded(load, chunk, ChunkCopy(slot, runs, chunk.first_token))

    def _state_copy(self, chunk: SlotChunk, blocks: Sequence[BlockSlice]) -> StateCopy:
        """Return the copy of a part of a state, whose blocks the copy checks."""
        found = {table: part.ids[0] for table, part in enumerate(blocks) if len(part.ids) == 1}
        return StateCopy(self._memory.slot(chunk.slot), chunk.part, found)

    def _fail(self, load: Load, chunk: SlotChunk, error: Exception) -> None:
        logger.error("load of %s failed, its blocks are computed: %s", load.request_id, error)
        self._observer.count("load_failed_chunks")
        self._ended.failed_requests.add(load.request_id)
        self._ended.failed_keys.append(chunk.key)
        if load.is_async:
            return  # nothing of it is right without its state, so the request is reported
        hit = (load.start, load.stop)
        self._ended.invalid_block_ids |= self._copies.paged.block_ids(
            load.blocks, hit, chunk.first_token
        )

    # -- saves ----------------------------------------------------------------------------------

    def _save(self, saves: Sequence[Save]) -> None:
        """Copy chunks out of the blocks; other threads then write or compare them. Never blocks on
        I/O."""
        left = iter([save for save in saves if save.chunk.part < 0])
        waiting: deque[Save] = deque()
        copied = self._states_out([save for save in saves if save.chunk.part >= 0])
        try:
            copied.extend(
                (waiting.popleft(), gathered)
                for gathered in self._copies.gather(self._copies_out(left, waiting))
            )
        except TransferError as error:
            logger.warning("saves put off: %s", error)
            self._observer.count("save_no_device_memory")
        finally:
            # After any error, a chunk that was not yielded may still be on its way to its slot.
            for save in waiting:
                self.io.busy_until(save.chunk.slot, self._copies.slots_written())
            self._put_off([*waiting, *left])
            # Only after all copies: hashing and writing take memory bandwidth from them.
            self._take_over(copied)

    def _take_over(self, copied: Iterable[tuple[Save, Gathered]]) -> None:
        """Have other threads write or compare chunks whose copy to their slots has begun."""
        drafts: Mapping[int, Gathered] = {}
        try:
            if self._drafts is not None:
                drafts = self._drafts.gather(
                    [save for save, _ in copied if save.compare_with is None]
                )
        finally:  # the chunks are on their way, whatever comes of their drafts
            for save, gathered in copied:
                if save.compare_with is None:
                    self.io.save(save.chunk, gathered, drafts.get(save.chunk.slot))
                else:
                    self.io.overwrite(save.chunk.slot)
                    is_held = self.io.groups_held(save.compare_with) == self._rows.all_groups
                    self._comparisons.begin(save, gathered, is_held=is_held)

    def _copies_out(self, left: Iterator[Save], waiting: deque[Save]) -> Iterator[ChunkCopy]:
        """Yield the copy of each chunk that has valid blocks, and append its save to `waiting`.
        Report the others as refused."""
        for save in left:
            chunk = save.chunk
            if not self.io.is_read(chunk.slot):
                self._put_off((save,))
                continue
            try:
                runs = self._copies.paged.chunk_runs(save.blocks, chunk.first_token)
            except LayoutError as error:
                logger.error("chunk at token %d is not copied: %s", chunk.first_token, error)
                self._end_early(save, ReadFault.IO_ERROR)
                continue
            waiting.append(save)
            yield ChunkCopy(self._memory.slot(chunk.slot), runs, chunk.first_token)

    def _states_out(self, saves: Sequence[Save]) -> list[tuple[Save, Gathered]]:
        """Copy parts of states out of the blocks; report those that cannot be copied as refused or
        put off."""
        copied = []
        for save in saves:
            if not self.io.is_read(save.chunk.slot):
                self._put_off((save,))
                continue
            try:
                gathered = self._copies.gather_state(self._state_copy(save.chunk, save.blocks))
            except LayoutError as error:
                logger.error("the state at token %d is lost: %s", save.chunk.first_token, error)
                self._end_early(save, ReadFault.IO_ERROR)
            except TransferError as error:
                logger.warning("a state is not saved: %s", error)
                self._observer.count("save_no_device_memory")
                self._end_early(save, ReadFault.IO_ERROR)
            else:
                copied.append((save, gathered))
        return copied

    def _leave(self, saves: Sequence[Save]) -> None:
        """Leave copies and comparisons to the first rank that holds the same."""
        for save in saves:
            self._ended.filled.append(Filled(save.chunk.slot))
            if save.compare_with is None:
                self.io.hold(save.chunk, self._rows.all_groups)
                self._ended.sealed.append(Sealed(save.chunk.slot))

    def _put_off(self, saves: Iterable[Save]) -> None:
        for save in saves:
            self._end_early(save, ReadFault.CANCELLED)

    def _end_early(self, save: Save, why: str) -> None:
        """Report that a chunk was not copied into its slot; take back the load it was to check."""
        self._ended.filled.append(Filled(save.chunk.slot, why))
        self._take_back(save.checks)

    def _take_back(self, load: Load | None) -> None:
        """Report the blocks of a load as failed: its audit has not shown them to be right."""
        if load is not None:
            ids = {block for part in load.blocks for block in part.ids}
            self._ended.invalid_block_ids |= ids - {NULL_BLOCK}

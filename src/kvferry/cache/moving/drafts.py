"""The KV of draft layers on one rank, which goes wherever that of the model goes: out of the blocks
with a save, into the store beside the chunk's record, back with a fetch, and into the blocks with a
load.

It is a gift: what lacks or fails costs a request the drafts that it would have had accepted, and
nothing else. So the scheduler role knows nothing of it, and no failure here is one of a chunk.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch

from kvferry.blocks.copies import BlockCopies, ChunkCopy, Gathered
from kvferry.blocks.rows import DraftRows
from kvferry.cache.config import RoleContext
from kvferry.cache.memory import SlotMemory
from kvferry.cache.messages import Load, Save, SlotChunk
from kvferry.contract.spec import EngineSpec
from kvferry.errors import LayoutError, TransferError
from kvferry.keys import ShardKeys
from kvferry.observe import Observer
from kvferry.record.schema import RecordSchema
from kvferry.store.base import PutResult
from kvferry.store.io_pool import IOPool, Job
from kvferry.store.recordio import WRITE_SECONDS, RecordRead, read_record
from kvferry.types import ChunkKey

logger = logging.getLogger(__name__)

LEAST_SECONDS = 0.1
"""How long a chunk whose record was read waits for its drafts at least; at most as long again as
for the record. They come from the same store, and are smaller."""

MOST_SECONDS = 0.4
"""How long it waits at most: a read that had longer and ends late has a tier taken for away
(`Patience.long_seconds`), which would cost hits."""

PAUSE_SECONDS = 5.0
"""How long none are read after one that was late: each holds up a read of chunks."""

MAX_WAITING_BYTES = 256 << 20
"""Most bytes of drafts that wait to be written out of memory of their own, where the slot may be
assigned again before: of a step's chunks, whose hashing is faster than their writes. What finds no
room is not stored, and with its chunk stored, never will be."""


class Drafts:
    """The draft layers of one rank. Runs in: worker; I/O where a method says so.

    Args:
        spec: the engine as if its draft layers were the model.
        rows: where their KV lies in a slot.
        memory: the slots.
        beside: copies the model's own layers.

    Attributes:
        waiting: room for writes that wait.
    """

    def __init__(
        self,
        spec: EngineSpec,
        rows: DraftRows,
        memory: SlotMemory,
        context: RoleContext,
        beside: BlockCopies,
    ) -> None:
        self._spec = spec
        self._rows = rows
        self._memory = memory
        self._store = context.store
        self._observer = context.observer
        self._bounds = context.bounds
        self._beside = beside
        self._keys = ShardKeys(rows.own.shard, rows.own.drafter)
        self._copies: BlockCopies | None = None  # None: they cannot be copied
        self._paused_until = 0.0
        self.waiting = threading.Semaphore(max(1, MAX_WAITING_BYTES // rows.rows.slot_bytes))

    # -- the engine's thread --------------------------------------------------------------------

    def register(self, kv_caches: Mapping[str, torch.Tensor], slot: memoryview) -> None:
        """Bind the engine's tensors, after those of the model were; without drafts if that
        fails."""
        copies = self._copies or BlockCopies(
            self._spec, self._rows.rows, self._beside.setup_beside()
        )
        try:
            copies.register(kv_caches, self._memory.view, self._rows.memory(slot))
        except (LayoutError, TransferError) as error:
            self._copies = None
            logger.warning("the KV of draft layers is neither stored nor loaded: %s", error)
        else:
            self._copies = copies

    def unregister(self, timeout: float) -> None:
        """As `BlockCopies.unregister`."""
        if self._copies is not None:
            self._copies.unregister(timeout)

    def gather(self, saves: Sequence[Save]) -> dict[int, Gathered]:
        """Begin to copy the drafts of chunks out of the blocks; return those that were, by slot."""
        if self._copies is None:
            return {}
        begun: dict[int, Gathered] = {}
        chunks: list[SlotChunk] = []
        try:
            for gathered in self._copies.gather(self._out(saves, chunks)):
                chunk = chunks[len(begun)]
                begun[chunk.slot] = gathered
                if gathered.mark.poll():
                    self._rows.set_key(self._memory.slot(chunk.slot), chunk.key)
        except (LayoutError, TransferError) as error:
            self._note("copied out", error)
        return begun

    def _out(self, saves: Sequence[Save], chunks: list[SlotChunk]) -> Iterator[ChunkCopy]:
        assert self._copies is not None
        for save in saves:
            chunk, slot = save.chunk, self._memory.slot(save.chunk.slot)
            runs = self._copies.paged.chunk_runs(save.blocks, chunk.first_token)
            self._rows.set_key(slot)
            chunks.append(chunk)
            yield ChunkCopy(self._rows.memory(slot), runs, chunk.first_token)

    def load(self, loads: Sequence[Load], pool: IOPool) -> None:
        """Copy the drafts that the slots of loads have into the blocks, on all free threads; count
        those that they lack. Their records are as used as the chunks'."""
        if self._copies is None:
            return
        found = [each for load in loads for each in self._of_load(load)]
        used = [self._keys.of(ChunkKey(key)) for key, _ in found]
        errors = pool.spread(
            [copy for _, copy in found], self._copies.scatter, alone=self._copies.overlaps
        )
        for error in errors:
            if error is not None:
                self._note("loaded", error)
        self._observer.count("loaded_drafts", len(found))
        self._observer.count("lacking_drafts", sum(len(load.chunks) for load in loads) - len(found))
        if used:
            pool.submit(lambda _job: self._store.touch(used), can_wait=True)

    def _of_load(self, load: Load) -> Iterator[tuple[bytes, ChunkCopy]]:
        """Yield the key and the copy of each chunk whose drafts are in its slot."""
        assert self._copies is not None
        for chunk in load.chunks:
            slot, hit = self._memory.slot(chunk.slot), (load.start, load.stop)
            if not self._rows.are_of(slot, chunk.key):
                continue
            try:
                runs = self._copies.paged.load_runs(
                    load.blocks, hit, chunk.first_token, self._rows.rows.all_groups
                )
            except LayoutError as error:
                self._note("loaded", error)
            else:
                yield chunk.key, ChunkCopy(self._rows.memory(slot), runs, chunk.first_token)

    def count_failed(self) -> None:
        """Count drafts that were neither copied nor stored."""
        self._observer.count("drafts_failed")

    def _note(self, what: str, error: Exception) -> None:
        self.count_failed()
        logger.warning("the KV of draft layers was not %s: %s", what, error)

    # -- the store ------------------------------------------------------------------------------

    def reader(self, chunk: SlotChunk) -> Callable[[float, float], None]:
        """Return what reads the drafts of a chunk into its slot, on an I/O thread, once its record
        was read: it gets how long that took, and until when a read may last."""
        own, rows, slot = self._rows.own, self._rows, self._memory.slot(chunk.slot)
        read = RecordRead(
            key=self._keys.of(ChunkKey(chunk.key)),
            first_token=chunk.first_token,
            head=memoryview(bytearray(own.head_bytes)),
            rows=rows.rows.rows_of(rows.memory(slot), rows.rows.all_groups, of_shard=True),
            of=chunk.key,
        )

        def run(seconds: float, deadline: float) -> None:
            rows.set_key(slot)
            now = time.monotonic()
            if now < self._paused_until:
                return
            until = min(deadline, now + min(max(seconds, LEAST_SECONDS), MOST_SECONDS))
            # Not counted as a chunk's: it is none that lacks.
            if read_record(self._store, own, read, Observer(), until) is None:
                rows.set_key(slot, chunk.key)
            elif time.monotonic() >= until:
                self._paused_until = time.monotonic() + PAUSE_SECONDS

        return run

    def writer(self, chunk: SlotChunk, gathered: Gathered) -> DraftWrite:
        """Return what writes the drafts of a chunk out of its slot."""
        return DraftWrite(self, self._rows.own, chunk, gathered)

    def sealed(
        self, own: RecordSchema, chunk: SlotChunk, gathered: Gathered
    ) -> list[memoryview] | None:
        """Hash the drafts of a chunk. Return the parts of their record; None if they are not to be
        stored. Any thread."""
        slot = self._memory.slot(chunk.slot)
        memory, rows = self._rows.memory(slot), self._rows.rows
        if not gathered.mark.wait(self._bounds.device_seconds):
            return None
        found = rows.leaves(memory, gathered.leaves, of_shard=True)
        self._rows.set_key(slot, chunk.key if found.are_finite else b"")
        if not found.are_finite:
            return None
        key = self._keys.of(ChunkKey(chunk.key))
        head = own.encode_head(key, chunk.first_token, found.digests, chunk.mark, chunk.key)
        return [memoryview(head), memory[rows.schema.head_bytes :]]

    def put(self, own: RecordSchema, chunk: SlotChunk, parts: Sequence[memoryview]) -> None:
        """Write a record. Blocks."""
        if self._store.accepts() is not None:
            return  # the chunk's own record says why
        key = self._keys.of(ChunkKey(chunk.key))
        until = time.monotonic() + WRITE_SECONDS
        answer = self._store.in_namespace(own.namespace).put(key, parts, until)
        if answer.result is PutResult.STORED:
            self._observer.count("saved_drafts")
            self._observer.count("saved_bytes", sum(len(part) for part in parts))


class DraftWrite(NamedTuple):
    """The write of a chunk's drafts."""

    drafts: Drafts
    own: RecordSchema  # a later epoch has another
    chunk: SlotChunk
    gathered: Gathered

    def run(self) -> None:
        """Write them out of their slot, which must not be assigned again before. Blocks."""
        parts = self.drafts.sealed(self.own, self.chunk, self.gathered)
        if parts is not None:
            self.drafts.put(self.own, self.chunk, parts)

    def run_later(self, pool: IOPool) -> None:
        """Hash them now, and write them out of memory of their own, unless too much waits."""
        parts = self.drafts.sealed(self.own, self.chunk, self.gathered)
        waiting = self.drafts.waiting
        if parts is None:
            return
        if not waiting.acquire(blocking=False):
            self.drafts.count_failed()
            return
        copied = [parts[0], memoryview(bytes(parts[1]))]

        def run(_job: Job[None]) -> None:
            try:
                self.drafts.put(self.own, self.chunk, copied)
            finally:
                waiting.release()

        pool.submit(run, can_wait=True)

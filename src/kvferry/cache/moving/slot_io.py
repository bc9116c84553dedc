"""One rank's slots: their memory, reads from the store into them, and writes to the store.

The worker role calls it on the model runner's thread; reads and writes run on I/O threads. The
scheduler role assigns the slots. It assigns a slot to another chunk only when every rank has
reported the end of every operation on it.

I/O writes to slots only, never to the engine's memory, so a read that outlives its deadline writes
to a slot that no other operation uses.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from kvferry.blocks.copies import Gathered
from kvferry.blocks.rows import RankRecords, RankRows
from kvferry.cache.config import RoleContext
from kvferry.cache.messages import Fetch, Filled, Saved, Sealed, SlotChunk
from kvferry.cache.moving.drafts import Drafts, DraftWrite
from kvferry.cache.replicas import Replicas
from kvferry.cache.shards import shard_keys
from kvferry.errors import StoreError, TransferError
from kvferry.layout.streams import REACHED, Mark
from kvferry.record.check import ReadFault
from kvferry.record.schema import RecordSchema
from kvferry.record.shards import shard_text
from kvferry.store.base import UNWRITTEN, PutResult
from kvferry.store.catalogue import pin_for_client
from kvferry.store.io_pool import IOPool, Job
from kvferry.store.recordio import RecordRead, read_record, seal_record, write_sealed
from kvferry.types import ChunkKey

logger = logging.getLogger(__name__)

READERS_POLL_SECONDS = 1e-3
"""How often a read looks whether other ranks have ended their loads from its slot."""


@dataclass(slots=True)
class _Save:
    """A save under way: its copy, hash and write, each until it is reported."""

    chunk: SlotChunk
    copy: Gathered | None
    hash: Job[Sealed] | None = None
    write: Job[Saved] | None = None  # the hash thread sets it
    shard: Callable[[Job[Saved]], Saved] | None = None  # so it does this: writes it, on order
    drafts: DraftWrite | None = None  # before the chunk's: who finds that finds them, too


class SlotIO:
    """All reads and writes of one rank, and what its slots hold.

    Args:
        records: which bytes of records this rank holds.
        context: store, observer and options.
        drafts: read and written beside chunks; None: there are none.

    Attributes:
        pool: threads for reads, writes, and copies into blocks. Writes take half of them at most.
        hash_pool: a thread that reads and writes memory only: a slow store does not delay it.
        are_apart: whether ranks are on several machines, so that each reads and writes shards.
    """

    def __init__(
        self,
        records: RankRecords,
        replicas: Replicas,
        context: RoleContext,
        drafts: Drafts | None = None,
    ) -> None:
        self._drafts = drafts
        self._records = records
        self._replicas = replicas
        self._memory = replicas.memory
        self._store = context.store
        self._observer = context.observer
        self._bounds = context.bounds
        self._read_seconds = context.config.load_timeout_seconds
        # A single rank holds whole records and writes them. The scheduler role writes those of
        # several ranks, unless they are apart.
        self._is_alone = context.spec.shard.world_size == 1
        self.are_apart = False
        self._names = shard_keys(records)
        # With several tables, a host ends at a load that failed.
        self._loads_may_fail = len(context.tables.tables) == 1
        # By slot: the chunk's key, and the groups of it that the slot holds verified.
        self._contents: dict[int, tuple[bytes, frozenset[int]]] = {}
        self._used_by_device: dict[int, Mark] = {}
        self._last_load: dict[int, int] = {}  # number of the plan, by slot
        self._reads: dict[int, tuple[Fetch, Job[Filled]]] = {}
        self._saves: dict[int, _Save] = {}
        self._sealed: dict[int, _Save] = {}  # shards to be written once every rank has sealed its
        # With one thread, a write that hangs would keep hits from being read.
        self.pool = IOPool(max(2, context.config.io_threads), "kvferry-io")
        self.hash_pool = IOPool(1, "kvferry-seal")

    def be_apart(self) -> None:
        """Read and write shards from now on: ranks are on several machines."""
        self.are_apart = True
        own = self._records.rows.own
        logger.info(
            "rank %d stores what it holds of each record (layers, heads): %s; ranks that hold the "
            "same read it",
            self._records.rows.rank,
            "nothing" if own is None else shard_text(own.shard) or "all",
        )

    # -- contents -------------------------------------------------------------------------------

    def groups_held(self, chunk: SlotChunk) -> frozenset[int]:
        """The groups of a chunk that its slot holds; none if the slot holds another chunk."""
        key, groups = self._contents.get(chunk.slot, (b"", frozenset[int]()))
        return groups if key == chunk.key else frozenset()

    def overwrite(self, slot: int) -> None:
        """Forget what a slot held; it is about to be overwritten."""
        self._contents.pop(slot, None)
        self._sealed.pop(slot, None)

    def busy_until(self, slot: int, mark: Mark) -> None:
        """Note that the device reads or fills a slot until it has reached a mark."""
        self._used_by_device[slot] = mark

    def hold(self, chunk: SlotChunk, groups: Iterable[int]) -> None:
        """Note that another rank fills a slot. It is loaded from once that has ended."""
        self._contents[chunk.slot] = chunk.key, self.groups_held(chunk) | frozenset(groups)

    def loaded(self, slot: int, number: int) -> None:
        """Note that the loads of a plan read a slot, on all ranks that share it."""
        self._last_load[slot] = number

    def is_read(self, slot: int) -> bool:
        """Whether no other rank still loads from a slot."""
        return self._replicas.are_past(self._last_load.get(slot, 0))

    # -- reads ----------------------------------------------------------------------------------

    def fetch(self, fetch: Fetch) -> None:
        """Start to read a chunk. Never blocks."""
        started = time.monotonic()
        chunk = fetch.chunk
        rows = self._records.of(chunk.part)
        # A part of a state is read whole: for it, groups only say that it is held.
        groups = frozenset(fetch.groups) if chunk.part < 0 else rows.all_groups
        # Groups that are read again are not held until they are verified.
        held = self.groups_held(chunk) - frozenset(fetch.groups)
        self._sealed.pop(chunk.slot, None)
        self._contents[chunk.slot] = chunk.key, held
        memory = self._memory.slot(chunk.slot)
        mark = self._used_by_device.get(chunk.slot, REACHED)
        is_whole = self._is_alone and rows.all_groups <= groups
        record = RecordRead(
            key=ChunkKey(chunk.key),
            first_token=chunk.first_token,
            head=rows.head_of(memory),
            rows=rows.rows_of(memory, groups),
            image=rows.image_of(memory) if is_whole else None,
            looks_at_values=fetch.looks_at_values,
        )
        tries = self._tries(record, chunk.part, memory, groups)
        drafts = self._drafts if chunk.part < 0 else None
        read_drafts = None if drafts is None else drafts.reader(chunk)

        def run(job: Job[Filled]) -> Filled:
            if not mark.wait(self._bounds.device_seconds):
                limit = self._bounds.device_seconds
                raise TransferError(f"the device used a slot for more than {limit} s")
            self._await_readers(chunk.slot)
            if job.cancelled:
                self._observer.count(f"miss_{ReadFault.CANCELLED}")
                return Filled(chunk.slot, ReadFault.CANCELLED)
            deadline = started + self._read_seconds
            faults: list[StoreError] = []
            missed: ReadFault | None = None
            for schema, record in tries:
                found = read_record(
                    self._store, schema, record, self._observer, deadline, faults=faults
                )
                if found is None or missed in (None, ReadFault.ABSENT):
                    missed = found  # what is wrong with one says more than that the other lacks
                if found is None or found is ReadFault.IO_ERROR:
                    break
            if missed is not None:
                self._observer.count(f"miss_{missed}")
            seconds = 0.0 if missed else time.monotonic() - started
            if missed is None and read_drafts is not None:
                read_drafts(seconds, deadline)
            said, kind = "; ".join(map(str, faults)), faults[0].fault.kind if faults else ""
            return Filled(chunk.slot, missed, seconds, detail=said, kind=kind)

        self._reads[chunk.slot] = (fetch, self.pool.submit(run))

    def _tries(
        self, whole: RecordRead, part: int, memory: memoryview, groups: frozenset[int]
    ) -> list[tuple[RecordSchema, RecordRead]]:
        """Return which records have a rank's rows of a chunk, in the order in which to try them:
        the shard first, as ranks that are apart write those."""
        rows = self._records.of(part)
        own, tries = rows.own, [(rows.schema, whole)]
        if not self.are_apart or own is rows.schema:
            return tries
        if own is None:
            return []  # it holds none
        shard = replace(
            whole,
            key=self._names[part].of(whole.key),
            head=memoryview(bytearray(own.head_bytes)),
            rows=rows.rows_of(memory, groups, of_shard=True),
            of=whole.key,
        )
        return [(own, shard), *tries]

    def _await_readers(self, slot: int) -> None:
        deadline = time.monotonic() + self._bounds.device_seconds
        while not self.is_read(slot):
            if time.monotonic() > deadline:
                raise TransferError("another rank does not end its loads from a slot")
            time.sleep(READERS_POLL_SECONDS)

    def cancel(self, slot: int) -> None:
        """Ask a read to end early. Its end is still reported."""
        if slot in self._reads:
            _, job = self._reads[slot]
            job.cancel()

    def wait(self, seconds: float) -> None:
        """Return when the reads that are under way now have ended, or after `seconds`."""
        deadline = time.monotonic() + seconds
        # The last one first: this thread then wakes once, not at the end of each read.
        for _, job in reversed(self._reads.values()):
            if not job.wait(max(0.0, deadline - time.monotonic())):
                return

    # -- writes ---------------------------------------------------------------------------------

    def save(self, chunk: SlotChunk, gathered: Gathered, drafts: Gathered | None = None) -> None:
        """Take over a chunk whose copy from the blocks to its slot has begun, as that of its drafts
        may have. After the copy, hash the chunk; if this rank holds whole records, write it. Never
        blocks."""
        rows = self._records.of(chunk.part)
        schema = rows.schema  # a later epoch has another
        self.overwrite(chunk.slot)
        save = self._saves[chunk.slot] = _Save(chunk, gathered)
        if self._drafts is not None and drafts is not None:
            save.drafts = self._drafts.writer(chunk, drafts)
        seal = partial(self._seal_shard, own=rows.own) if self.are_apart else self._seal
        # A step may wait for a comparison, so that goes before the seals that wait.
        save.hash = self.hash_pool.submit(
            lambda _job: seal(save, gathered, rows, schema), can_wait=True
        )

    def _seal(
        self, save: _Save, gathered: Gathered, rows: RankRows, schema: RecordSchema
    ) -> Sealed:
        """Hash a chunk, and queue the write of a record that is whole. Runs in: hash thread."""
        chunk = save.chunk
        if not gathered.mark.wait(self._bounds.device_seconds):
            raise TransferError(f"a chunk was not copied out in {self._bounds.device_seconds} s")
        image = rows.image_of(self._memory.slot(chunk.slot))
        digests, are_finite = rows.leaves(image, gathered.leaves)
        if not are_finite:
            return Sealed(chunk.slot, None, is_finite=False)
        if not self._is_alone:
            if save.drafts is not None:
                save.drafts.run_later(self.pool)
            return Sealed(chunk.slot, digests)
        key = ChunkKey(chunk.key)
        seal_record(schema, key, chunk.first_token, digests, image, chunk.mark)

        def write(_job: Job[Saved]) -> Saved:
            if save.drafts is not None:
                save.drafts.run()
            answer = write_sealed(self._store, schema.namespace, key, [image], self._observer)
            return Saved(chunk.slot, *answer)

        save.write = self.pool.submit(write, can_wait=True)
        return Sealed(chunk.slot)

    def _seal_shard(
        self,
        save: _Save,
        gathered: Gathered,
        rows: RankRows,
        schema: RecordSchema,
        *,
        own: RecordSchema | None,
    ) -> Sealed:
        """Hash what this rank holds of a chunk, and prepare the write of that. Runs in: hash
        thread."""
        chunk, image = save.chunk, rows.image_of(self._memory.slot(save.chunk.slot))
        if not gathered.mark.wait(self._bounds.device_seconds):
            raise TransferError(f"a chunk was not copied out in {self._bounds.device_seconds} s")
        found = rows.leaves(image, gathered.leaves, of_shard=True)
        if not found.are_finite:
            return Sealed(chunk.slot, None, is_finite=False)
        whole = ChunkKey(chunk.key)
        key, head, of = whole, b"", b""
        if own is not None:
            key = self._names[chunk.part].of(whole)
            of = whole if own.shard else b""
            head = own.encode_head(key, chunk.first_token, found.digests, chunk.mark, of)

        def write(_job: Job[Saved]) -> Saved:
            if own is None:  # it holds nothing
                return Saved(chunk.slot, PutResult.EXISTS)
            if save.drafts is not None:
                save.drafts.run()
            parts = [memoryview(head), image[schema.head_bytes :]]
            answer = write_sealed(self._store, schema.namespace, key, parts, self._observer)
            return Saved(chunk.slot, *answer)

        save.shard = write
        return Sealed(chunk.slot)

    def write_shard(self, chunk: SlotChunk) -> Saved | None:
        """Begin to write the shard of a chunk that was hashed. Return the end of that, if there is
        nothing to write. Never blocks."""
        save = self._sealed.pop(chunk.slot, None)
        if save is None or save.shard is None or save.chunk.key != chunk.key:
            return Saved(chunk.slot, PutResult.FAILED, UNWRITTEN)
        save.write = self.pool.submit(save.shard, can_wait=True)
        self._saves[chunk.slot] = save
        return None

    def discard(self, key: ChunkKey, why: str, namespace: bytes) -> None:
        """Take this rank's shard of a record, and the record itself, out of the store. Never
        blocks."""

        def discard(_job: Job[None]) -> None:
            store = self._store.in_namespace(namespace)
            for name in dict.fromkeys((*self._shards_of(key), key)):
                store.discard(name, why)

        self.pool.submit(discard, can_wait=True)

    def touch(self, keys: Sequence[bytes]) -> None:
        """Touch this rank's shards of some chunks. Never blocks."""
        self.pool.submit(lambda _job: self._store.touch(self._shards_of(*keys)), can_wait=True)

    def pin(self, keys: Sequence[bytes], until: float) -> None:
        """Pin this rank's shards of some chunks for a client. Never blocks."""

        def pin(_job: Job[None]) -> None:
            if not pin_for_client(self._store.catalogues(), self._shards_of(*keys), until):
                self._observer.count("pins_refused")

        self.pool.submit(pin, can_wait=True)

    def _shards_of(self, *keys: bytes) -> list[ChunkKey]:
        """Return the names that this rank's shards of some records may have: a key does not say of
        which part it is."""
        names = dict.fromkeys(self._names.values())
        return [each.of(ChunkKey(key)) for key in keys for each in names]

    # -- reports --------------------------------------------------------------------------------

    @property
    def is_idle(self) -> bool:
        """Whether nothing is under way that will be reported."""
        return not (self._reads or self._saves)

    def collect(self, filled: list[Filled], sealed: list[Sealed], saved: list[Saved]) -> None:
        """Append what ended since the last call."""
        for slot, save in list(self._saves.items()):
            if self._has_ended(save, filled, sealed, saved):
                del self._saves[slot]
        for slot, (fetch, read) in list(self._reads.items()):
            if read.poll():
                del self._reads[slot]
                filled.append(self._end_read(fetch, read))

    def _has_ended(
        self, save: _Save, filled: list[Filled], sealed: list[Sealed], saved: list[Saved]
    ) -> bool:
        """Append the stages of a save that ended, one after the other. Whether the last one has."""
        slot = save.chunk.slot
        if save.copy is not None:
            if not save.copy.mark.poll():
                return False
            save.copy = None
            self._contents[slot] = save.chunk.key, self._records.rows.all_groups
            filled.append(Filled(slot))
        if save.hash is not None:
            if not save.hash.poll():
                return False
            if save.hash.result is None:
                logger.error("hashing a chunk failed", exc_info=save.hash.error)
            found = save.hash.result or Sealed(slot, None)
            if not found.is_finite and self._loads_may_fail:
                self.overwrite(slot)  # a load that was promised meanwhile fails
            sealed.append(found)
            save.hash = None
            if save.shard is not None:
                self._sealed[slot] = save
        if save.write is None:
            return True
        if not save.write.poll():
            return False
        if save.write.result is None:
            self._observer.count("save_failed")
            logger.error("saving a chunk failed", exc_info=save.write.error)
        saved.append(save.write.result or Saved(slot, PutResult.FAILED, UNWRITTEN))
        return True

    def _end_read(self, fetch: Fetch, read: Job[Filled]) -> Filled:
        ended = read.result
        if ended is None:
            logger.error("reading a chunk failed", exc_info=read.error)
            return Filled(fetch.chunk.slot, ReadFault.IO_ERROR)
        if ended.missed is None:
            groups = self.groups_held(fetch.chunk) | frozenset(fetch.groups)
            self._contents[ended.slot] = fetch.chunk.key, groups
            self._observer.observe("fetch", ended.seconds)
        return ended

    def close(self) -> None:
        """End the threads; one that does not end in time is abandoned. Idempotent."""
        for _, read in self._reads.values():
            read.cancel()
        until = time.monotonic() + self._bounds.writes_close_seconds
        has_hashed = self.hash_pool.close(self._bounds.writes_close_seconds)  # it submits writes
        writes = [save.write for save in self._saves.values() if save.write is not None]
        has_written = all(write.wait(max(0.0, until - time.monotonic())) for write in writes)
        has_read = self.pool.close(self._bounds.reads_close_seconds)
        if not (has_read and has_hashed and has_written):
            logger.warning("a store operation did not end in time; it is abandoned at close")

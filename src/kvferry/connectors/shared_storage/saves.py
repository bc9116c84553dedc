"""Taking chunks out: a copy at once, then hash and write on I/O threads.

Runs in: worker, on the model runner's thread; the jobs on I/O threads.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

from kvferry.connectors.shared_storage.messages import Save, Saved, Session
from kvferry.connectors.shared_storage.rank_device import (
    DEVICE_SECONDS,
    ChunkCopy,
    RankDevice,
    TakenOut,
)
from kvferry.errors import LayoutError, TransferError
from kvferry.record.schema import RecordSchema
from kvferry.store.base import PutResult, Store, SupportsShardedWrite
from kvferry.store.io_pool import IOPool, Job
from kvferry.store.recordio import put_record
from kvferry.types import ChunkKey

if TYPE_CHECKING:
    from kvferry.connectors.shared_storage.rank_rows import RankRows
    from kvferry.connectors.shared_storage.report import Report
    from kvferry.observe import Observer
    from kvferry.store.staging import Staging

logger = logging.getLogger(__name__)

HELD_BYTES = 64 << 20
"""What is hashed and written takes processors and memory's time from the copies that a step waits
for: so many bytes are copied first."""

NAME_SECONDS = 60.0
"""How long a chunk that was taken out waits for the name of its record. The scheduler role answers
as soon as the store has; only a plan that was lost leaves it without."""


class _Taken(NamedTuple):
    """A part of a chunk in staging, to be written once its record has a name."""

    save: Save
    slot: int
    schema: RecordSchema
    until: float
    out: TakenOut


class Saves:
    """All saves of one rank.

    Args:
        rows: what this rank moves.
        device: copies it.
        store: where to.
        staging: memory for chunks on their way; saves use at most a quarter of it.
        num_threads: writes at once.
        report: receives results.
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
        report: Report,
        observer: Observer,
    ) -> None:
        self._rows = rows
        self._device = device
        self._store = store
        self._staging = staging
        self._report = report
        self._observer = observer
        self._saves: list[tuple[Save, Job[Saved]]] = []
        self._unnamed: dict[bytes, _Taken] = {}
        self._pool = IOPool(num_threads, "kvferry-save")
        # A store that writes slowly must not keep prompts from being read.
        self._keep_free = staging.num_slots - max(1, staging.num_slots // 4)

    def start(self, saves: Sequence[Save]) -> None:
        """Copy chunks out of the blocks; what follows happens behind, for a shared record from
        `write` on. Never blocks on I/O."""
        left = iter(saves)
        waiting: deque[tuple[Save, int]] = deque()
        held: deque[_Taken] = deque()
        try:
            for out in self._device.take_out(self._copies_of(left, waiting)):
                save, slot = waiting.popleft()
                until = time.monotonic() + NAME_SECONDS
                taken = _Taken(save, slot, self._rows.schema, until, out)
                if save.shared:
                    self._unnamed[save.chunk.key] = taken
                else:
                    held.append(taken)
                if len(held) * self._staging.slot_bytes >= HELD_BYTES:
                    self._submit_all(held)
        except TransferError as error:
            logger.warning("saves put off: %s", error)
            self._observer.count("save_no_device_memory")
        finally:
            # What was not taken out, by whatever error: some of it may still be on its way.
            for save, slot in waiting:
                self._staging.release(slot, after=self._device.done())
                self._put_off(save)
            for save in left:
                self._put_off(save)
            self._submit_all(held)

    def _submit_all(self, held: deque[_Taken]) -> None:
        while held:
            self._submit(held.popleft(), None)

    def _put_off(self, save: Save) -> None:
        self._report.saved.append(Saved(save.chunk.key, stored=False, retry=True))

    def _copies_of(
        self, saves: Iterator[Save], waiting: deque[tuple[Save, int]]
    ) -> Iterator[ChunkCopy]:
        """The copies of those chunks whose blocks are right and for which there is a slot; the
        others are reported.

        Args:
            saves: chunks that are wanted.
            waiting: receives chunk and slot for each.
        """
        for save in saves:
            try:
                runs = self._rows.saved_runs(save)
            except LayoutError as error:
                logger.error("save refused: %s", error)
                self._report.saved.append(Saved(save.chunk.key, stored=False))
                continue
            slot = self._staging.acquire(keep_free=self._keep_free)
            if slot is None:
                self._observer.count("save_no_staging")
                self._put_off(save)
                continue
            waiting.append((save, slot))
            yield ChunkCopy(self._staging.view(slot), runs, save.chunk.first_token)

    def write(self, session: Session) -> None:
        """Write what was taken out for a shared record, or let it go if that is refused. Never
        blocks."""
        taken = self._unnamed.pop(session.key, None)
        if taken is None:
            return  # it found no staging here, and that was reported
        if session.name is None:
            self._staging.release(taken.slot, after=taken.out.mark)
        else:
            self._submit(taken, session.name)

    def _submit(self, taken: _Taken, session: str | None) -> None:
        view = self._staging.view(taken.slot)

        def run(_job: Job[Saved]) -> Saved:
            try:
                if not taken.out.mark.wait(DEVICE_SECONDS):
                    raise TransferError(f"a chunk was not copied out in {DEVICE_SECONDS} s")
                return self._store_chunk(taken, view, session)
            finally:
                self._staging.release(taken.slot, after=taken.out.mark)

        try:
            job = self._pool.submit(run)
        except RuntimeError as error:  # the process has as many threads as it may have
            logger.warning("save put off: %s", error)
            self._observer.count("save_no_thread")
            self._staging.release(taken.slot, after=taken.out.mark)
            self._put_off(taken.save)
        else:
            self._saves.append((taken.save, job))

    def _store_chunk(self, taken: _Taken, slot: memoryview, session: str | None) -> Saved:
        """Hash and write one chunk. Runs in: I/O thread."""
        started = time.perf_counter()
        save, schema = taken.save, taken.schema
        image = self._rows.image_of(slot)
        digests = self._rows.digests(image, taken.out.digests)
        if session is not None:
            stored = self._write_shard(session, image)
            if stored:
                self._observer.count("saved_bytes", len(image))
            self._observer.observe("save", time.perf_counter() - started)
            return Saved(
                save.chunk.key, stored=stored, ranges=self._rows.written, leaf_digests=digests
            )
        result = put_record(
            self._store, schema, ChunkKey(save.chunk.key), save.chunk.first_token, digests, image
        )
        self._observer.count(f"put_{result}")
        self._observer.observe("save", time.perf_counter() - started)
        if result is PutResult.STORED:
            self._observer.count("saved_bytes", len(image))
        elif result is not PutResult.EXISTS:
            self._observer.count("save_failed")
        return Saved(
            save.chunk.key,
            stored=result in (PutResult.STORED, PutResult.EXISTS),
            existed=result is PutResult.EXISTS,
        )

    def _write_shard(self, session: str, image: memoryview) -> bool:
        if not isinstance(self._store, SupportsShardedWrite):
            return False
        return all(
            self._store.write_at(session, offset, [part])
            for offset, part in self._rows.file_ranges(image)
        )

    def collect(self) -> None:
        """Report the saves that ended since the last call."""
        if self._unnamed:
            self._give_up_unnamed(time.monotonic())
        pending = []
        for save, job in self._saves:
            if not job.poll():
                pending.append((save, job))
            elif job.result is not None:
                self._report.saved.append(job.result)
            else:
                self._observer.count("save_failed")
                logger.error("saving a chunk failed", exc_info=job.error)
                self._report.saved.append(Saved(save.chunk.key, stored=False))
        self._saves = pending

    def _give_up_unnamed(self, now: float) -> None:
        for key, taken in list(self._unnamed.items()):
            if now >= taken.until:
                del self._unnamed[key]
                self._staging.release(taken.slot, after=taken.out.mark)
                self._report.saved.append(Saved(key, stored=False))

    @property
    def under_way(self) -> bool:
        """Whether a chunk that was taken out is not reported yet."""
        return bool(self._saves or self._unnamed)

    def close(self, timeout: float) -> bool:
        """Let writes under way finish; True if every thread ended in time."""
        return self._pool.close(timeout)

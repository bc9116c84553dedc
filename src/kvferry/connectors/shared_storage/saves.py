"""Taking chunks out: a copy at once, then hash and write on I/O threads.

Runs in: worker, on the model runner's thread; the jobs on I/O threads.
"""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING

from kvferry.connectors.shared_storage.messages import Save, Saved
from kvferry.errors import LayoutError
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


class Saves:
    """All saves of one rank.

    Args:
        rows: what this rank moves.
        store: where to.
        staging: memory for chunks on their way; saves use at most a quarter of it.
        num_threads: writes at once.
        report: receives results.
        observer: receives counts.
    """

    def __init__(
        self,
        rows: RankRows,
        store: Store,
        staging: Staging,
        *,
        num_threads: int,
        report: Report,
        observer: Observer,
    ) -> None:
        self._rows = rows
        self._store = store
        self._staging = staging
        self._report = report
        self._observer = observer
        self._saves: list[tuple[Save, Job[Saved]]] = []
        self._pool = IOPool(num_threads, "kvferry-save")
        # A store that writes slowly must not keep prompts from being read.
        self._keep_free = staging.num_slots - max(1, staging.num_slots // 4)

    def start(self, save: Save) -> None:
        """Copy a chunk out of the blocks; what follows happens behind. Never blocks on I/O."""
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

        self._saves.append((save, self._pool.submit(run)))

    def _store_chunk(self, schema: RecordSchema, save: Save, slot: memoryview) -> Saved:
        """Hash and write one chunk. Runs in: I/O thread."""
        started = time.perf_counter()
        image = self._rows.image_of(slot)
        digests = self._rows.digests(image)
        if save.session is not None:
            stored = self._write_shard(save.session, image)
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

    def close(self, timeout: float) -> bool:
        """Let writes under way finish; True if every thread ended in time."""
        return self._pool.close(timeout)

"""Reads and writes of whole records on I/O threads, bounded in time and memory.

Every operation has memory of its own, so one that outlives its deadline harms nobody.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence

from kvferry.adapters.transformers.config import StoredKVConfig
from kvferry.adapters.transformers.rows import Image
from kvferry.blocks.rows import RankRows
from kvferry.observe import Observer
from kvferry.record.check import MissReason
from kvferry.store.base import PutResult, Store
from kvferry.store.io_pool import IOPool, Job
from kvferry.store.recordio import RecordRead, put_record, read_record
from kvferry.types import ChunkKey

logger = logging.getLogger(__name__)

STALLED_SECONDS = 30.0
"""How long a store that brought nothing before the deadline is not asked again."""


class RecordReads:
    """The leading chunks of a prompt, out of a store. One thread at a time."""

    def __init__(
        self, store: Store, rows: RankRows, config: StoredKVConfig, observer: Observer
    ) -> None:
        self._store = store
        self._rows = rows
        self._config = config
        self._observer = observer
        self._pool = IOPool(config.io_threads, "kvferry-load")
        self._stalled_until = 0.0

    def read(self, keys: Sequence[ChunkKey]) -> list[Image]:
        """The leading chunks that are there, right, and in time."""
        now = time.monotonic()
        if now < self._stalled_until:
            self._observer.count("loads_skipped")
            return []
        deadline = now + self._config.load_timeout_seconds
        images: list[Image] = []
        under_way: deque[Job[Image | MissReason]] = deque()
        try:
            while len(images) < len(keys):
                self._read_ahead(under_way, keys, len(images))
                if not under_way[0].wait(max(0.0, deadline - time.monotonic())):
                    self._observer.count(f"miss_{MissReason.DEADLINE}")
                    if not images:
                        self._stalled_until = now + STALLED_SECONDS
                    break
                job = under_way.popleft()
                if not isinstance(job.result, Image):
                    self._tell(job.error)
                    break
                images.append(job.result)
        finally:
            for job in under_way:
                job.cancel()
        return images

    def _tell(self, error: BaseException | None) -> None:
        if error is not None:
            self._observer.count("load_failed")
            logger.error("reading a chunk failed", exc_info=error)

    def _read_ahead(
        self, under_way: deque[Job[Image | MissReason]], keys: Sequence[ChunkKey], done: int
    ) -> None:
        """Keep every thread busy with chunks that are known to be there. The next one is asked for
        in any case: the index may not know yet what another process stored."""
        while len(under_way) < 2 * self._config.io_threads:
            chunk = done + len(under_way)
            if chunk == len(keys) or (under_way and not self._store.contains(keys[chunk])):
                return
            under_way.append(self._pool.submit(self._reader(keys[chunk], chunk)))

    def _reader(
        self, key: ChunkKey, chunk: int
    ) -> Callable[[Job[Image | MissReason]], Image | MissReason]:
        rows, schema = self._rows, self._rows.schema

        def run(job: Job[Image | MissReason]) -> Image | MissReason:
            if job.cancelled:
                return MissReason.CANCELLED
            image = Image(rows)
            read = RecordRead(
                key=key,
                first_token=chunk * schema.chunk_tokens,
                head=image.head,
                buffer_for=image.part,
                parts=rows.parts_of(rows.all_groups),
            )
            reason = read_record(self._store, schema, read, self._observer, lambda: job.cancelled)
            return image if reason is None else reason

        return run

    def close(self, timeout: float) -> bool:
        """True if every thread ended in time."""
        return self._pool.close(timeout)


class RecordWrites:
    """Chunks into a store. One thread at a time."""

    def __init__(
        self, store: Store, rows: RankRows, config: StoredKVConfig, observer: Observer
    ) -> None:
        self._store = store
        self._rows = rows
        self._config = config
        self._observer = observer
        self._pool = IOPool(config.io_threads, "kvferry-save")
        self._under_way: deque[Job[PutResult]] = deque()
        self._num_stored = 0

    def write(self, images: Iterable[tuple[ChunkKey, int, Image]]) -> int:
        """Hash and store chunks; how many were stored before the deadline.

        Args:
            images: key, first token and payload of each. Taken one by one, so that few are in
                memory, and no more after the deadline.
        """
        deadline = time.monotonic() + self._config.save_timeout_seconds
        before = self._num_stored
        limit = self._config.io_threads
        source = iter(images)
        # The first wait is for writes that a call before gave up on: they still hold their images.
        while self._drained(deadline, limit):
            image = next(source, None)
            if image is None:
                self._drained(deadline, 0)
                break
            self._under_way.append(self._pool.submit(self._writer(*image)))
        return self._num_stored - before

    def _drained(self, deadline: float, limit: int) -> bool:
        """Wait until no more than `limit` writes are under way; False if the deadline is over."""
        while len(self._under_way) > limit:
            if not self._under_way[0].wait(max(0.0, deadline - time.monotonic())):
                self._observer.count("save_deadline")
                return False
            job = self._under_way.popleft()
            self._num_stored += job.result is PutResult.STORED
            if job.error is not None:
                self._observer.count("save_failed")
                logger.error("storing a chunk failed", exc_info=job.error)
        return True

    def _writer(
        self, key: ChunkKey, first_token: int, image: Image
    ) -> Callable[[Job[PutResult]], PutResult]:
        schema = self._rows.schema

        def run(_job: Job[PutResult]) -> PutResult:
            digests = image.digests()
            result = put_record(self._store, schema, key, first_token, digests, image.view)
            self._observer.count(f"put_{result}")
            if result is PutResult.STORED:
                self._observer.count("saved_bytes", len(image.view))
            return result

        return run

    def close(self, timeout: float) -> bool:
        """Let writes under way finish; True if every thread ended in time."""
        return self._pool.close(timeout)

"""Finds the records used last; the scheduler role fetches them into memory as an engine starts."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from typing import NamedTuple

from kvferry.errors import StoreError
from kvferry.record.check import MissReason, parse_head
from kvferry.record.schema import RecordSchema
from kvferry.store.base import Catalogue
from kvferry.store.io_pool import IOPool, Job
from kvferry.types import ChunkKey

FILL_SECONDS = 10.0
"""How long listing may take. For so long, an idle engine is kept stepping for the fetches."""

AT_ONCE = 4
"""Records that are fetched together. A hit that comes meanwhile waits for these at most."""


class RecentRecord(NamedTuple):
    """A record of this engine's namespace."""

    key: ChunkKey
    first_token: int


class RecentRecords:
    """Lists recent records once, on a thread of its own; then hands them out, the newest first.

    Args:
        store: store to list.
        schema: layout and namespace of this engine's records.
        count: number of records at most.
        clock: monotonic seconds.

    Attributes:
        is_engine_in_use: whether a request came. The records left are then fetched only in steps
            that requests cause, so that a run of one request does not wait for them.
    """

    def __init__(
        self, store: Catalogue, schema: RecordSchema, count: int, clock: Callable[[], float]
    ) -> None:
        self._store = store
        self._schema = schema
        self._count = count
        self._clock = clock
        self._until = clock() + FILL_SECONDS
        self._left: list[RecentRecord] | None = None
        self.is_engine_in_use = False
        self._thread = IOPool(1, "kvferry-recent")
        self._job: Job[list[RecentRecord]] = self._thread.submit(lambda _job: self._find())

    @property
    def is_done(self) -> bool:
        """Whether all records are handed out, or the time is over."""
        return (self._left is not None and not self._left) or self._clock() > self._until

    @property
    def keeps_host_awake(self) -> bool:
        """Whether a host without requests should step for the fetches."""
        return not self.is_engine_in_use and self._clock() <= self._until

    def pop(self) -> list[RecentRecord]:
        """The next records. Never blocks."""
        if self._left is None:
            if not self._job.poll():
                return []
            self._left = self._job.result or []
        taken, self._left = self._left[:AT_ONCE], self._left[AT_ONCE:]
        return taken

    def close(self, timeout: float) -> None:
        """Hand out nothing more, and wait up to `timeout` seconds for the thread. If its listing
        hangs, it stays behind as a daemon. Idempotent."""
        self._left = []
        self._thread.close(timeout)

    def _find(self) -> list[RecentRecord]:
        """List the records to hand out. Runs in: I/O thread."""
        found: list[RecentRecord] = []
        with suppress(StoreError):
            # Four times as many: some may be of other models that share the store. All at once:
            # what is used while others are read may not be listed any more.
            for entry in list(self._store.recent(4 * self._count)):
                if len(found) == self._count or self.is_done:
                    break
                has_size = entry.num_bytes == self._schema.record_bytes
                is_ours = has_size and entry.namespace in (b"", self._schema.namespace)
                first_token = self._first_token(entry.key) if is_ours else None
                if first_token is not None:
                    found.append(RecentRecord(entry.key, first_token))
        return found

    def _first_token(self, key: ChunkKey) -> int | None:
        """Where a record's chunk begins; None if unreadable, or of another namespace."""
        head = memoryview(bytearray(self._schema.header_bytes))
        with suppress(StoreError):
            size = self._store.read(key, [(0, head)], time.monotonic() + FILL_SECONDS)
            if size is None:
                return None
            info = parse_head(head[:size], size)
            if not isinstance(info, MissReason) and info.schema.namespace == self._schema.namespace:
                return info.first_token
        return None

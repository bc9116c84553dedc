"""A store that may take long to open: a miss until it is there.

Opening a directory is I/O, and a network mount that hangs would hang whoever starts. So it happens
on a thread, start-up waits for it only so long, and what comes later is used from then on.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Sequence

from kvferry.errors import StoreError
from kvferry.store.base import (
    Buffer,
    PutResult,
    Source,
    Store,
    StoreStat,
    SupportsProbe,
    SupportsShardedWrite,
)
from kvferry.types import ChunkKey

logger = logging.getLogger(__name__)


class LateStore(Store):
    """Stands for the store that `open_store` returns; absent until then.

    Has every optional ability that scheduler and worker roles ask for. While there is no store, or
    where it lacks one, they answer as a closed store does.

    Args:
        url: what is opened, for messages.
        open_store: opens it; runs on a thread of its own.
        timeout_seconds: how long the constructor waits.

    Raises:
        Exception: whatever `open_store` raised within the time; later, it is logged.
    """

    multi_process = True

    def __init__(self, url: str, open_store: Callable[[], Store], timeout_seconds: float) -> None:
        self.url = url
        self._lock = threading.Lock()
        self._store: Store | None = None
        self._error: Exception | None = None
        self._waited_for = True
        self._closed = False
        self._opened = threading.Event()
        # A daemon: a mount that hangs for good must not keep the process from ending.
        threading.Thread(
            target=self._open, args=(open_store,), name="kvferry-open", daemon=True
        ).start()
        in_time = self._opened.wait(timeout_seconds)
        with self._lock:
            self._waited_for = False
            error = self._error
        if error is not None:
            raise error
        if not in_time:
            logger.warning(
                "store %s did not open within %g s: serving without it until it does",
                url,
                timeout_seconds,
            )

    def _open(self, open_store: Callable[[], Store]) -> None:
        store: Store | None = None
        try:
            store = open_store()
        except Exception as error:
            with self._lock:
                self._error = error
                if not self._waited_for:
                    logger.warning("store %s cannot be opened: %s", self.url, error)
        with self._lock:
            late = self._closed
            if not late:
                self._store = store
        if late and store is not None:
            store.close()
        self._opened.set()

    @property
    def opened(self) -> Store | None:
        """The store itself, if it opened in time: a stand-in is then no longer needed."""
        return self._store

    def contains(self, key: ChunkKey) -> bool:
        return self._store is not None and self._store.contains(key)

    def open_read(self, key: ChunkKey) -> Source | None:
        if self._store is None:
            raise StoreError(f"store {self.url} is not open yet")
        return self._store.open_read(key)

    def put(self, key: ChunkKey, buffers: Sequence[Buffer]) -> PutResult:
        return PutResult.FAILED if self._store is None else self._store.put(key, buffers)

    def discard(self, key: ChunkKey, reason: str) -> None:
        if self._store is not None:
            self._store.discard(key, reason)

    def delete(self, key: ChunkKey) -> bool:
        return self._store is not None and self._store.delete(key)

    def touch(self, keys: Iterable[ChunkKey]) -> None:
        if self._store is not None:
            self._store.touch(keys)

    def stat(self) -> StoreStat:
        if self._store is None:
            return StoreStat(self.url, 0, 0, None, False)
        return self._store.stat()

    def close(self) -> None:
        with self._lock:
            self._closed = True
            store = self._store
        if store is not None:
            store.close()

    def probe(self, keys: Sequence[ChunkKey]) -> None:
        store: object = self._store
        if isinstance(store, SupportsProbe):
            store.probe(keys)

    def note_stored(self, key: ChunkKey) -> None:
        store: object = self._store
        if isinstance(store, SupportsProbe):
            store.note_stored(key)

    def wait_indexed(self, timeout: float) -> bool:
        store: object = self._store
        return isinstance(store, SupportsProbe) and store.wait_indexed(timeout)

    def begin(self, key: ChunkKey, num_bytes: int) -> str | PutResult:
        store = self._sharded
        return PutResult.FAILED if store is None else store.begin(key, num_bytes)

    def write_at(self, session: str, offset: int, buffers: Sequence[Buffer]) -> bool:
        store = self._sharded
        return store is not None and store.write_at(session, offset, buffers)

    def commit(self, session: str, head: Buffer) -> PutResult:
        store = self._sharded
        return PutResult.FAILED if store is None else store.commit(session, head)

    def abort(self, session: str) -> None:
        store = self._sharded
        if store is not None:
            store.abort(session)

    @property
    def _sharded(self) -> SupportsShardedWrite | None:
        store: object = self._store
        return store if isinstance(store, SupportsShardedWrite) else None

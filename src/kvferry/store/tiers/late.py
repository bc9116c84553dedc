"""A store that may take long to open, or cannot be opened yet: a miss until it is there.

Opening a directory is I/O, and a network mount that hangs would hang the start of an engine. So a
thread opens it, and start-up waits for that thread for a limited time. Where the medium does not
answer, as a mount whose server is away, the thread tries again.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence

from kvferry.errors import ConfigError, StoreError
from kvferry.store.base import (
    NO_DEADLINE,
    Buffer,
    Entry,
    PutResult,
    ReadRange,
    Store,
    StoreStat,
    SupportsShardedWrite,
)
from kvferry.store.kind import shown_url
from kvferry.types import ChunkKey

logger = logging.getLogger(__name__)

RETRY_SECONDS = 5.0
"""After the medium did not answer."""


class LateStore(Store):
    """Stands for the store that `open_store` returns; absent until then.

    Has what scheduler and worker roles ask of a store. While there is none, it answers as a closed
    store does.

    Args:
        url: what is opened, for messages, which show it without credentials.
        open_store: opens it; runs on a thread of its own. StoreError: the medium does not answer.
            Gets False when it must not make a store where there is none: where a mount was away,
            the directory below may be empty.
        timeout_seconds: how long the constructor waits.

    Attributes:
        opened: the store itself, None until then.

    Raises:
        Exception: what `open_store` raised within the time; later, it is logged.
    """

    multi_process = True

    def __init__(
        self, url: str, open_store: Callable[[bool], Store], timeout_seconds: float
    ) -> None:
        self.url = shown_url(url)
        self.opened: Store | None = None
        self._error: Exception | None = None
        self._is_late = False
        self._heard: Callable[[StoreError | None], None] | None = None
        self._closed = threading.Event()
        self._tried = threading.Event()
        # A daemon: a mount that hangs for ever must not keep the process from ending.
        threading.Thread(
            target=self._open, args=(open_store,), name="kvferry-open", daemon=True
        ).start()
        self._is_late = not self._tried.wait(timeout_seconds)
        if self._error is not None:
            raise self._error
        if self._is_late:
            logger.warning(
                "store %s did not open within %g s: serving without it until it does",
                self.url,
                timeout_seconds,
            )

    def _open(self, open_store: Callable[[bool], Store]) -> None:
        started, is_away = time.monotonic(), False
        while not self._closed.is_set():
            try:
                self.opened = open_store(not is_away)
                break
            except Exception as error:
                is_away_still = is_away and isinstance(error, ConfigError)
                if not is_away_still and not isinstance(error, StoreError):
                    self._error = error
                    if self._is_late or is_away:
                        logger.warning("store %s cannot be opened: %s", self.url, error)
                    break
                if not is_away and not self._is_late:
                    logger.warning(
                        "store %s cannot be opened: %s: serving without it until it can",
                        self.url,
                        error,
                    )
                is_away = True
                self._tried.set()
                self._closed.wait(RETRY_SECONDS)
        if self.opened is not None:
            if self._heard is not None:
                self.opened.on_result(self._heard)
            if self._is_late or is_away:
                seconds = time.monotonic() - started
                logger.warning("store %s: opened after %.1f s", self.url, seconds)
        if self._closed.is_set():
            self.close()
        self._tried.set()

    @property
    def takes_values(self) -> bool:
        return self.opened is not None and self.opened.takes_values

    @property
    def refusal(self) -> str:
        return "" if self.opened is None else self.opened.refusal

    def on_result(self, heard: Callable[[StoreError | None], None]) -> None:
        self._heard = heard
        if self.opened is not None:  # meanwhile
            self.opened.on_result(heard)

    def contains(self, key: ChunkKey) -> bool | None:
        return self.opened is not None and self.opened.contains(key)

    def read(
        self, key: ChunkKey, ranges: Sequence[ReadRange], deadline: float = NO_DEADLINE
    ) -> int | None:
        if self.opened is None and self._closed.is_set():
            return None
        if self.opened is None:
            raise StoreError(f"store {self.url} is not open yet")
        return self.opened.read(key, ranges, deadline)

    def put(
        self, key: ChunkKey, buffers: Sequence[Buffer], deadline: float = NO_DEADLINE
    ) -> PutResult:
        return PutResult.FAILED if self.opened is None else self.opened.put(key, buffers, deadline)

    def discard(self, key: ChunkKey, reason: str) -> None:
        if self.opened is not None:
            self.opened.discard(key, reason)

    def delete(self, key: ChunkKey) -> bool:
        return self.opened is not None and self.opened.delete(key)

    def touch(self, keys: Iterable[ChunkKey]) -> None:
        if self.opened is not None:
            self.opened.touch(keys)

    def stat(self) -> StoreStat:
        if self.opened is None:
            return StoreStat(self.url, 0, 0, None, False)
        return self.opened.stat()

    def close(self) -> None:
        self._closed.set()  # first: a store that opens from now on is closed by its thread
        if self.opened is not None:
            self.opened.close()

    def probe(self, keys: Sequence[ChunkKey]) -> None:
        if self.opened is not None:
            self.opened.probe(keys)

    def note_stored(self, key: ChunkKey) -> None:
        if self.opened is not None:
            self.opened.note_stored(key)

    def wait_indexed(self, timeout: float) -> bool:
        return self.opened is not None and self.opened.wait_indexed(timeout)

    def recent(self, limit: int) -> Iterator[Entry]:
        return iter(()) if self.opened is None else self.opened.recent(limit)

    def describe(self, namespace: bytes, description: str | None = None) -> str | None:
        return None if self.opened is None else self.opened.describe(namespace, description)

    def begin(
        self, key: ChunkKey, num_bytes: int, deadline: float = NO_DEADLINE
    ) -> str | PutResult:
        store = self._sharded
        return PutResult.FAILED if store is None else store.begin(key, num_bytes, deadline)

    def write_at(
        self,
        session: str,
        offset: int,
        buffers: Sequence[Buffer],
        deadline: float = NO_DEADLINE,
    ) -> bool:
        store = self._sharded
        return store is not None and store.write_at(session, offset, buffers, deadline)

    def commit(self, session: str, head: Buffer, deadline: float = NO_DEADLINE) -> PutResult:
        store = self._sharded
        return PutResult.FAILED if store is None else store.commit(session, head, deadline)

    def abort(self, session: str) -> None:
        store = self._sharded
        if store is not None:
            store.abort(session)

    @property
    def _sharded(self) -> SupportsShardedWrite | None:
        store: object = self.opened
        return store if isinstance(store, SupportsShardedWrite) else None

"""Pages of SGLang's host pools: as bytes, and as records of a store. Imports no type of SGLang.

`KVFerryStorage` calls this on SGLang's threads; I/O threads copy between pages and records.
"""

# ruff: noqa: ANN401 - pools are the host's

from __future__ import annotations

import ctypes
import logging
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import takewhile
from typing import Any, ClassVar

import numpy as np
import torch

from kvferry.adapters.row_cache import STORE_SECONDS, Copy, RowCache
from kvferry.errors import ConfigError, StoreError
from kvferry.observe import Observer
from kvferry.record.check import RecordInfo
from kvferry.record.schema import RecordSchema
from kvferry.store.base import (
    ASK_SECONDS,
    PutResult,
    Store,
    Where,
)
from kvferry.store.catalogue import Entry
from kvferry.store.io_pool import IOPool, Job
from kvferry.store.maintenance import clear, inspect
from kvferry.store.record_client import Batch
from kvferry.types import ChunkKey

logger = logging.getLogger("sglang.kvferry")

CLEAR_SECONDS = 30.0
"""How long `clear` waits; the rest is deleted in the background."""

_POLL_SECONDS = 0.001


def pages_of(pool: Any) -> Pages:
    """Return a pool's pages. Raise ConfigError for a layout without pages for storage back ends."""
    try:
        # Preferred, because calls that carry tensors can read and write only flat pages.
        return FlatPages(pool)
    except (NotImplementedError, ValueError):
        pass
    try:
        return PiecePages(pool)
    except (NotImplementedError, ValueError) as error:
        raise ConfigError(
            f"{type(pool).__name__} in layout {pool.layout!r} has no pages that storage can keep "
            f"({error}); set --hicache-mem-layout page_first"
        ) from error


def tokens_of(pool: Any) -> int:
    """Return the number of tokens of a page; SGLang gives one index for each."""
    return int(getattr(pool, "logical_page_size", 0) or getattr(pool, "page_size", 0) or 1)


class FlatPages:
    """Pages that the pool shows as one tensor each.

    Attributes:
        order: name of the order of a page's bytes in a record.
        num_bytes: bytes of a page; 0 for a pool that only counts places.
        tokens: tokens of a page.
        values: dtype of all values of a page; empty if a page may hold anything else.
    """

    order: ClassVar[str] = "flat"

    def __init__(self, pool: Any) -> None:
        """Raises NotImplementedError or ValueError if the pool shows none."""
        self._pool = pool
        self.tokens = tokens_of(pool)
        value = pool.get_dummy_flat_data_page()
        self._dtype = value.dtype
        self.values = str(value.dtype).removeprefix("torch.")
        self.num_bytes = value.nbytes
        found = pool.get_data_page(0, flat=False).nbytes
        if found != self.num_bytes:
            raise ValueError(f"a page of {found} bytes is read as one of {self.num_bytes}")

    def read(self, index: int, payload: memoryview) -> None:
        """Copy the page that begins at `index` of the pool to `payload`."""
        if self.num_bytes:
            copy_to(payload, self._pool.get_data_page(index, flat=False))

    def write(self, index: int, payload: memoryview) -> None:
        """Copy `payload` to the page that begins at `index` of the pool."""
        if self.num_bytes:
            self._pool.set_from_flat_data_page(index, torch.frombuffer(payload, dtype=self._dtype))


class PiecePages:
    """Pages in pieces, of which the pool shows only addresses and sizes. As `FlatPages`."""

    order: ClassVar[str] = "pieces"
    values: ClassVar[str] = ""

    def __init__(self, pool: Any) -> None:
        """Raises the pool's NotImplementedError or ValueError if the pool shows none."""
        self._pool = pool
        self.tokens = tokens_of(pool)
        self.num_bytes = sum(map(len, self._pieces(0)))

    def read(self, index: int, payload: memoryview) -> None:
        at = 0
        for piece in self._pieces(index):
            np.copyto(np.frombuffer(payload, np.uint8)[at : at + len(piece)], piece)
            at += len(piece)

    def write(self, index: int, payload: memoryview) -> None:
        at = 0
        for piece in self._pieces(index):
            np.copyto(piece, np.frombuffer(payload, np.uint8)[at : at + len(piece)])
            at += len(piece)

    def _pieces(self, index: int) -> list[np.ndarray]:
        pointers, sizes = self._pool.get_page_buffer_meta(torch.arange(index, index + self.tokens))
        return [
            np.frombuffer((ctypes.c_uint8 * size).from_address(pointer), np.uint8)
            for pointer, size in zip(pointers, sizes, strict=True)
        ]


Pages = FlatPages | PiecePages


def copy_to(payload: memoryview, value: torch.Tensor) -> None:
    """Copy a tensor of any strides to `payload`, in C order."""
    target = torch.frombuffer(payload, dtype=torch.uint8)
    target.view(value.dtype).view(value.shape).copy_(value)


def copy_from(payload: memoryview, target: torch.Tensor) -> None:
    """The reverse of `copy_to`."""
    source = torch.frombuffer(payload, dtype=torch.uint8)
    target.copy_(source.view(target.dtype).view(target.shape))


class PageRecords:
    """The records of the pages of one pool, by SGLang's keys. Thread-safe; every call blocks, for a
    bounded time.

    Args:
        store: the store, which `close` closes.
        schema: schema from `RecordSchema.for_rows`.
        load_seconds: time after which pages that have not arrived are misses.
    """

    def __init__(
        self,
        store: Store,
        schema: RecordSchema,
        observer: Observer,
        *,
        io_threads: int,
        load_seconds: float,
    ) -> None:
        self._store = store
        self._observer = observer
        self._load_seconds = load_seconds
        self._cache = RowCache(
            store, schema, observer, io_threads=io_threads, threads="kvferry-pages"
        )
        self._clearing = IOPool(1, "kvferry-clear")
        self._under_way: dict[Batch[Any], Callable[[Batch[Any]], None]] = {}  # what gives it up
        self._beginning = threading.Lock()  # so that `close` sees all that began before

    def exists(self, keys: Sequence[str]) -> list[bool]:
        """Return for each page whether the store says within `ASK_SECONDS` that it is there."""
        if self._cache.is_stalled:
            return [False] * len(keys)
        records = self._records(keys)
        until = time.monotonic() + ASK_SECONDS
        self._cache.values.probe(records)
        found = [self._cache.values.where(record) for record in records]
        # Only leading pages are of use, so do not wait for answers behind the first absent page.
        while Where.ASKED in takewhile(lambda each: each in (Where.HERE, Where.ASKED), found):
            if time.monotonic() >= until:
                self._observer.count("lookup_deadline")
                break
            time.sleep(_POLL_SECONDS)
            found = [self._cache.values.where(record) for record in records]
        return [each is Where.HERE for each in found]

    def load(self, keys: Sequence[str], land: Copy) -> list[bool]:
        """Read pages, and give verified ones to `land`. Return for each whether it was right."""
        if self._cache.is_stalled:
            self._observer.count("loads_skipped")
            return [False] * len(keys)
        records = self._records(keys)
        deadline = time.monotonic() + self._load_seconds
        with self._beginning:
            batch = self._cache.load(records, land, deadline)
            self._under_way[batch] = self._cache.give_up_load
        self._wait(batch, deadline)
        right = [reason is None for reason in batch.results]
        if not all(right):
            self._observer.count("loads_failed", right.count(False))
        self._cache.values.touch(
            [each for each, is_right in zip(records, right, strict=True) if is_right]
        )
        return right

    def store(self, keys: Sequence[str], fill: Copy) -> list[bool]:
        """Store the pages that are not there; `fill` copies them. Return for each whether it is now
        there."""
        records = self._records(keys)
        done = [self._cache.values.where(record) is Where.HERE for record in records]
        wanted = [place for place, is_there in enumerate(done) if not is_there]
        self._cache.values.touch(
            [record for record, is_there in zip(records, done, strict=True) if is_there]
        )

        def filled(number: int, payload: memoryview) -> None:
            fill(wanted[number], payload)

        deadline = time.monotonic() + STORE_SECONDS
        with self._beginning:
            batch = self._cache.store([records[place] for place in wanted], filled, deadline)
            self._under_way[batch] = self._cache.give_up_store
        self._wait(batch, deadline)
        for place, result in zip(wanted, batch.results, strict=True):
            done[place] = result in (PutResult.STORED, PutResult.EXISTS)
        return done

    def _wait(self, batch: Batch[Any], deadline: float) -> None:
        """Wait for a batch under way, and give it up at its deadline."""
        try:
            if not batch.wait(max(0.0, deadline - time.monotonic())):
                _end(batch, self._under_way[batch])
        finally:
            del self._under_way[batch]

    def _records(self, keys: Sequence[str]) -> list[ChunkKey]:
        return [self._cache.record(key.encode()) for key in keys]

    def begin_epoch(self, namespace: bytes | None = None) -> None:
        """Switch to another namespace. To a random one because weights changed: nothing stored
        before is read from now on, and no other process reads what is stored from now on."""
        self._cache.begin_epoch(namespace or secrets.token_bytes(32))

    def clear(self) -> None:
        """Delete all pages of this namespace; after `CLEAR_SECONDS`, the rest in the background.
        What fails is logged. Raises RuntimeError if the process can start no thread for it."""
        namespace = self._cache.namespace

        def run(_job: Job[None]) -> None:
            try:
                clear(self._store, self._pages_of(namespace))
            except Exception as error:  # logged here, as the caller may not wait any more
                logger.warning(
                    "kvferry: pages of namespace %s are not deleted: %s",
                    namespace.hex()[:16],
                    error,
                    exc_info=not isinstance(error, StoreError),
                )

        job = self._clearing.submit(run)
        if job.wait(CLEAR_SECONDS) and job.error is not None:
            raise job.error

    def _pages_of(self, namespace: bytes) -> Iterator[Entry]:
        """Yield the pages of a namespace. The head of a page says it where an index does not."""
        for entry in self._store.catalogue().scan():
            found = entry.namespace
            if not found:
                head = inspect(self._store, entry)
                found = head.schema.namespace if isinstance(head, RecordInfo) else found
            if found == namespace:
                yield entry

    def close(self, seconds: float) -> None:
        """Wait up to `seconds` for threads, give up what other threads still load or store, and
        close the store."""
        self._clearing.close(0.0)
        try:
            self._cache.close(seconds)
            with self._beginning:
                under_way = self._under_way.copy()
            for batch, give_up in under_way.items():
                _end(batch, give_up)
        finally:
            self._store.close()


def _end(batch: Batch[Any], give_up: Callable[[Batch[Any]], None]) -> None:
    """Give a batch up: once this returns, no thread of it touches the host's memory."""
    give_up(batch)
    batch.wait(STORE_SECONDS)  # a copy under way; memory only

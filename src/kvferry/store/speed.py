"""Measures how fast a local store is, for the log of an engine's start."""

from __future__ import annotations

import os
import time
from contextlib import closing
from typing import NamedTuple

from kvferry.errors import StoreError
from kvferry.store.base import Store
from kvferry.store.file.directory import Directory
from kvferry.store.file.fileio import write_all
from kvferry.store.file.writing import Writing
from kvferry.store.kind import StoreUrl
from kvferry.store.url import MODULES, kind_of, parse_store_url
from kvferry.types import ChunkKey

SAMPLE_BYTES = 4 << 20


class StoreSpeed(NamedTuple):
    """Bytes per second; None if not measured."""

    write: float | None
    read: float | None


def measure(store: Store, num_bytes: int = SAMPLE_BYTES) -> StoreSpeed:
    """Time one write of `num_bytes` that never becomes visible, and one read of a stored value.

    Blocks on I/O. Leaves nothing behind and evicts nothing: a store without room for the sample is
    not written. Servers are not measured, as a write there is visible. A read that the page cache
    answers is as fast as the page cache.
    """
    stat = store.stat()
    scheme = stat.url.partition(":")[0]
    if scheme in MODULES and kind_of(scheme).hosts:
        return StoreSpeed(None, None)
    has_room = stat.max_bytes is None or stat.used_bytes + 2 * num_bytes <= stat.max_bytes
    write = None
    # A tier that is not open may be a directory of somebody else's.
    is_open = all(tier.state == "up" for tier in store.tiers()[:1])
    if has_room and is_open and store.takes_values:
        write = _measure_write(parse_store_url(stat.url.partition(", ")[0]), num_bytes)
    return StoreSpeed(write, _measure_read(store, num_bytes))


def _measure_write(url: StoreUrl, num_bytes: int) -> float | None:
    if url.scheme != "file":
        return None
    data = memoryview(bytearray(os.urandom(1 << 16)) * (num_bytes >> 16))
    try:
        with closing(Writing(Directory(url.path), ChunkKey(os.urandom(32)))) as writing:
            fd = writing.begin()
            started = time.perf_counter()
            write_all(fd, [data], 0)
            return len(data) / (time.perf_counter() - started)
    except OSError:
        return None


def _measure_read(store: Store, num_bytes: int) -> float | None:
    try:
        entry = next(store.scan(), None)
        if entry is None:
            return None
        buffer = memoryview(bytearray(min(entry.num_bytes, num_bytes)))
        started = time.perf_counter()
        size = store.read(entry.key, [(0, buffer)])
        seconds = time.perf_counter() - started
        return None if size is None else min(size, len(buffer)) / seconds
    except StoreError:
        return None

"""How fast a store is from here: one write that is taken back, one read of what is there."""

from __future__ import annotations

import os
import time
from typing import NamedTuple

from kvferry.errors import StoreError
from kvferry.store.base import PutResult, Store, SupportsShardedWrite
from kvferry.store.url import MODULES, kind_of_scheme
from kvferry.types import ChunkKey

SAMPLE_BYTES = 4 << 20


class StoreSpeed(NamedTuple):
    """Bytes per second; None where there was no way to measure."""

    write: float | None
    read: float | None


def measure(store: Store, num_bytes: int = SAMPLE_BYTES) -> StoreSpeed:
    """Time one write of `num_bytes` that never becomes visible, and one read of a stored value.

    Blocks on I/O; leaves nothing behind and evicts nothing: a store without room for the sample is
    not written, nor is a server, where nothing is hidden. What comes from the page cache is as fast
    as that is.
    """
    stat = store.stat()
    scheme = stat.url.partition(":")[0]
    if scheme in MODULES and kind_of_scheme(scheme).hosts:
        return StoreSpeed(None, None)
    has_room = stat.max_bytes is None or stat.used_bytes + 2 * num_bytes <= stat.max_bytes
    write = _measure_write(store, num_bytes) if has_room else None
    return StoreSpeed(write, _measure_read(store, num_bytes))


def _measure_write(store: object, num_bytes: int) -> float | None:
    if not isinstance(store, SupportsShardedWrite):
        return None
    data = memoryview(bytearray(os.urandom(1 << 16)) * (num_bytes >> 16))
    session = store.begin(ChunkKey(os.urandom(32)), len(data))
    if isinstance(session, PutResult):
        return None
    started = time.perf_counter()
    written = store.write_at(session, 0, [data])
    seconds = time.perf_counter() - started
    store.abort(session)
    return len(data) / seconds if written else None


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

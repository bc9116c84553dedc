"""Simulated hosts with several block tables and windows, over stores that outlive them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

from kvferry.store.base import Where
from kvferry.store.memory import MemoryStore
from kvferry.testing.clock import FakeClock
from kvferry.testing.wrappers import WrapperStore
from kvferry.types import KVGroup
from tests.cache.hosts import OF_HOSTS, CacheHost, make_shared_storage_host
from tests.cache.keeping import wait_for
from tests.host_tables import HostTable


def group(
    num_layers: int = 2,
    window: int | None = None,
    heads: int = 1,
    block_size: int = 4,
    chunk: int | None = None,
) -> KVGroup:
    return KVGroup(
        num_layers=num_layers,
        num_kv_heads=heads,
        content_size=4,
        dtype="float32",
        block_size=block_size,
        window=window,
        chunk=chunk,
    )


LIMIT = 60.0
"""Load timeout. A machine that stalls costs no hit."""

MIXED = (group(2, None), group(3, 12))
"""Full attention, and a window whose start lies inside a chunk and inside a block."""


@contextlib.contextmanager
def opened(groups: Sequence[KVGroup], store: Any, **options: Any) -> Iterator[CacheHost]:
    """Open a host over a store, given as a URL or an object. A store object stays open. Only a test
    moves its clock."""
    shape = {name: options.pop(name) for name in OF_HOSTS & options.keys()}
    shape.setdefault("clock", FakeClock())
    stores = () if isinstance(store, str) else (store,)
    url = store if isinstance(store, str) else store.url
    host = make_shared_storage_host(
        {"store": url, "memory_bytes": 4 << 20, "chunk_tokens": 8, "load_timeout_seconds": LIMIT}
        | options,
        groups=tuple(groups),
        num_blocks=1500,
        stores=stores,
        **shape,
    )
    try:
        yield host
    finally:
        if stores:
            host.close()
        else:
            host.stop()


def split(
    groups: Sequence[KVGroup], ways: int, block_sizes: Sequence[int], *, keeps_all: bool = False
) -> tuple[HostTable, ...]:
    """Split each group into up to `ways` tables, and deal its layers out to them in turn."""
    tables = []
    for index, each in enumerate(groups):
        for way in range(min(ways, each.num_layers)):
            tables.append(
                HostTable(
                    block_size=block_sizes[len(tables) % len(block_sizes)],
                    window=None if keeps_all else each.window,
                    chunk=None if keeps_all else each.chunk,
                    layers=((index, tuple(range(way, each.num_layers, ways))),),
                )
            )
    return tuple(tables)


def stored(groups: Sequence[KVGroup], prompt: Sequence[int]) -> tuple[MemoryStore, list[bytes]]:
    """Return a store that holds every chunk of 8 tokens of a prompt, and the chunks' keys."""
    store = MemoryStore("windows")
    with opened(groups, store) as host:
        request = host.add("writer", prompt)
        keys = list(host.scheduler.requests.track(request).keys.keys)
        host.admit(request)
        host.complete(request)
        host.settle()
    assert all(store.where(key) is Where.HERE for key in keys)
    return store, keys


class Vanishing(WrapperStore):
    """A store that claims to have a record but has nothing to read under its key."""

    def __init__(self, store: MemoryStore, key: bytes) -> None:
        super().__init__(store)
        self._key = key

    def read(self, key: Any, *args: Any) -> Any:
        return None if key == self._key else super().read(key, *args)


def wait_stored(host: CacheHost, num_records: int) -> None:
    """Step until the ranks have stored `num_records` records."""
    wait_for(lambda: (host.settle(), host.observer["put_stored"] == num_records)[1])

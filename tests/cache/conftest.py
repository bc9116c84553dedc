"""Fixtures: simulated hosts with the connector, over a store in memory or in a directory."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from kvferry.observe import Counters
from tests.cache.hosts import make_groups, make_shared_storage_host
from tests.simulated_host import SimulatedHost

from .keeping import NUM_CHUNKS, PROMPT, open_store
from .pools import held_keys


class Host(SimulatedHost):
    """A simulated host with the connector's parts as attributes."""

    parts: Any
    pool: Any
    observer: Counters

    def forget_memory(self) -> None:
        """Drop all chunks from memory, so that the next hit reads the store."""
        self.pool.clear()

    def forget_unpinned(self) -> None:
        """Drop the chunks that no request counts on."""
        for key in held_keys(self.pool):
            self.pool.drop(key)


@pytest.fixture
def make_host() -> Iterator[Any]:
    """Factory of hosts, closed at the end; other keywords are options of the connector."""
    hosts: list[Any] = []

    def make(
        *,
        store: Any = "memory://test",
        groups: Any = None,
        tables: Any = None,
        world_size: int = 1,
        num_blocks: int = 256,
        num_slots: int = 256,
        weights: bytes = b"w" * 32,
        config: Any = None,
        carries_worker_meta: bool = True,
        recomputes: bool = False,
        fills: bool = False,
        multi_process: bool = False,
        data_parallel_index: int = 0,
        loads: bool = True,
        saves: bool = True,
        clock: Callable[[], float] = time.monotonic,
        draw: Callable[[], float] = lambda: 0.5,
        observer: Counters | None = None,
        rank_stores: Sequence[Any] = (),
        engine_id: str | None = None,
        **options: Any,
    ) -> Any:
        groups = groups or make_groups()
        observer = observer or Counters()
        options.setdefault("chunk_tokens", 8)
        options.setdefault(
            "memory_bytes", num_slots * record_bytes(groups, options["chunk_tokens"])
        )
        are_urls = isinstance(store, str | list)
        stores = rank_stores or (() if are_urls else (store,))
        url = store if are_urls else store.url
        host, parts = make_shared_storage_host(
            {"store": url, **options},
            groups=groups,
            tables=tables,
            world_size=world_size,
            num_blocks=num_blocks,
            weights=weights,
            config=config,
            observer=observer,
            carries_worker_meta=carries_worker_meta,
            recomputes=recomputes,
            fills=fills,
            multi_process=multi_process,
            data_parallel_index=data_parallel_index,
            loads=loads,
            saves=saves,
            stores=stores,
            clock=clock,
            draw=draw,
            engine_id=engine_id,
        )
        host.__class__ = Host
        host.parts, host.pool, host.observer = parts, host.scheduler.pool, observer
        hosts.append(host)
        return host

    yield make
    for host in hosts:
        host.close()
        for part in host.parts:
            part.store.close()


@pytest.fixture
def directory(tmp_path: Path, make_host) -> Path:
    """The directory of a store that holds a prompt of five chunks."""
    host = make_host(store=open_store(tmp_path / "store"))
    host.run("writer", PROMPT)
    host.settle()
    assert host.observer["put_stored"] == NUM_CHUNKS
    return tmp_path / "store"


def record_bytes(groups: Any, chunk_tokens: int) -> int:
    """Return the bytes of a slot, which holds one aligned record."""
    from kvferry.record.schema import ALIGN, RecordSchema

    schema = RecordSchema.for_groups(namespace=bytes(32), chunk_tokens=chunk_tokens, groups=groups)
    return -(-schema.record_bytes // ALIGN) * ALIGN

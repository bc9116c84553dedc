"""Hosts with the connector over a store in memory or in a directory."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvferry.observe import Counters
from kvferry.testing.host import SimulatedHost, make_groups, make_shared_storage_host

from .keeping import NUM_CHUNKS, PROMPT, open_store


class Host(SimulatedHost):
    """A simulated host that keeps its parts at hand."""

    parts: Any
    observer: Counters


@pytest.fixture
def make_host() -> Iterator[Any]:
    """Factory of hosts; options of the connector by keyword, closed at the end."""
    hosts: list[Any] = []

    def make(
        *,
        store: Any = "memory://test",
        groups: Any = None,
        tables: Any = None,
        world_size: int = 1,
        num_blocks: int = 256,
        num_staging_chunks: int = 256,
        weights: bytes = b"w" * 32,
        carries_worker_meta: bool = True,
        **options: Any,
    ) -> Any:
        groups = groups or make_groups()
        observer = Counters()
        options.setdefault("chunk_tokens", 8)
        staging = options.pop("staging_bytes", None)
        if staging is None:
            # Small chunks take one head and one page of payload at least.
            staging = num_staging_chunks * slot_bytes(groups, options["chunk_tokens"], world_size)
        stores = () if isinstance(store, str) else (store,)
        url = store if isinstance(store, str) else store.url
        host, parts = make_shared_storage_host(
            {"store": url, "staging_bytes": staging, **options},
            groups=groups,
            tables=tables,
            world_size=world_size,
            num_blocks=num_blocks,
            weights=weights,
            observer=observer,
            carries_worker_meta=carries_worker_meta,
            stores=stores,
        )
        host.parts, host.observer = parts, observer
        hosts.append(host)
        return host

    yield make
    for host in hosts:
        host.close()
        for part in host.parts:
            part.store.close()


@pytest.fixture
def directory(tmp_path: Path, make_host) -> Path:
    """A store with a prompt of five chunks."""
    host = make_host(store=open_store(tmp_path / "store"))
    host.run("writer", PROMPT)
    host.settle()
    assert host.observer["put_stored"] == NUM_CHUNKS
    return tmp_path / "store"


def slot_bytes(groups: Any, chunk_tokens: int, world_size: int) -> int:
    """Bytes of one staging slot of such a host."""
    from kvferry.record.schema import ALIGN, RecordSchema

    schema = RecordSchema.for_groups(namespace=bytes(32), chunk_tokens=chunk_tokens, groups=groups)
    payload = schema.payload_bytes // world_size
    return -(-(schema.head_bytes + payload) // ALIGN) * ALIGN

"""Fixtures: simulated hosts with the connector, over a store in memory or in a directory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from kvferry.store.file.store import FileStore
from kvferry.testing.clock import FakeClock
from tests.cache.hosts import OF_HOSTS, CacheHost, make_groups, make_shared_storage_host
from tests.store.file.settings import PATIENT

from .keeping import NUM_CHUNKS, PROMPT, open_store


@pytest.fixture
def make_host(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Factory of hosts, closed at the end; what a directory holds is known. Keywords are those of
    `make_shared_storage_host`; all others are options of the connector. Without a clock or a load
    timeout, no time passes for a host."""
    # By default, a thread that waits 2 s for the index of a directory gives its chunk up.
    monkeypatch.setitem(FileStore.__init__.__kwdefaults__, "settings", PATIENT)
    hosts: list[CacheHost] = []

    def make(
        *,
        store: Any = "memory://test",
        num_slots: int = 256,
        rank_stores: Sequence[Any] = (),
        **given: Any,
    ) -> Any:
        of_host = {name: given.pop(name) for name in OF_HOSTS & given.keys()}
        groups = of_host["groups"] = of_host.get("groups") or make_groups()
        options = {"chunk_tokens": 8, **given}
        if "clock" not in of_host and "load_timeout_seconds" not in given:
            # A machine that stalls costs no hit.
            of_host["clock"], options["load_timeout_seconds"] = FakeClock(), 60.0
        options.setdefault(
            "memory_bytes", num_slots * record_bytes(groups, options["chunk_tokens"])
        )
        are_urls = isinstance(store, str | list)
        host = make_shared_storage_host(
            {"store": store if are_urls else store.url, **options},
            stores=rank_stores or (() if are_urls else (store,)),
            **{"num_blocks": 256, **of_host},
        )
        for part in host.parts if str(store).startswith("file://") else ():
            assert part.store.wait_indexed(60)
        hosts.append(host)
        return host

    yield make
    for host in hosts:
        host.stop()


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

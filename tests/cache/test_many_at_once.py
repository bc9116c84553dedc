"""Many requests with one prefix at once: each record is read once, whoever waits for it."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from kvferry.testing.clock import FakeClock
from kvferry.testing.faults import FailingStore
from kvferry.testing.wrappers import WrapperStore

from .keeping import assert_settles, keys_of, open_store, run_until_stored

NUM_REQUESTS = 16
CHUNK = 128
PREFIX = [(7 * token) % 5003 for token in range(1500)]
NUM_CHUNKS = 1500 // CHUNK
"""Chunks that all of them share."""
HIT = NUM_CHUNKS * CHUNK
RANKS = pytest.mark.parametrize("world_size", [1, 2])
OPTIONS: dict[str, Any] = {"chunk_tokens": CHUNK, "num_blocks": 1 << 15, "num_slots": 64}


def prompt(number: int) -> list[int]:
    """The prefix, and an end of its own."""
    return [*PREFIX, *range(10_000 + 50 * number, 10_013 + 50 * number)]


def write(make_host, directory: Path, world_size: int) -> Any:
    """A host that has stored the prefix."""
    url = f"file://{directory}"
    host = make_host(store=url, world_size=world_size, **OPTIONS)
    run_until_stored(host, PREFIX)
    return host


def new_process(
    make_host, directory: Path, world_size: int, wrap: type[WrapperStore] | Any = None, **options
) -> Any:
    """Another host over the same directory; its stores count what is opened on each rank."""
    stores = [open_store(directory) for _ in range(world_size)]
    wrapped = stores if wrap is None else [wrap(store) for store in stores]
    host = make_host(
        store=stores[0].url,
        rank_stores=wrapped,
        world_size=world_size,
        **(OPTIONS | options),
    )
    host.stores = stores
    return host


def opened(host: Any) -> list[Counter]:
    return [store.opened for store in host.stores]


def arrive(host: Any, number: int = NUM_REQUESTS) -> list[Any]:
    """Requests that all arrive before the first step; the host asks for each."""
    requests = [host.add(f"r{index}", prompt(index)) for index in range(number)]
    for request in requests:
        assert host.scheduler.lookup(request, 0).num_tokens is None
    return requests


@RANKS
def test_each_record_is_read_once(make_host, tmp_path: Path, world_size: int):
    write(make_host, tmp_path, world_size)
    host = new_process(make_host, tmp_path, world_size)
    once = dict.fromkeys(keys_of(host, PREFIX), 1)
    requests = arrive(host)
    assert [host.admit(request) for request in requests] == [HIT] * NUM_REQUESTS
    host.step(requests, tokens=1)
    for request in requests:
        host.complete(request)
    assert opened(host) == [once] * world_size
    assert host.observer["hit_tokens/file"] == NUM_REQUESTS * HIT
    assert_settles(host)


@RANKS
def test_a_record_that_fails_is_read_once_too(make_host, tmp_path: Path, world_size: int):
    write(make_host, tmp_path, world_size)
    host = new_process(
        make_host,
        tmp_path,
        world_size,
        lambda store: FailingStore(store, operations={"read"}, num_failures=1),
        clock=FakeClock(),  # the record is not tried again while requests are admitted
    )
    requests = arrive(host)
    hits = [host.admit(request) for request in requests]
    assert max(hits) < HIT
    assert len(set(hits)) == 1
    host.step(requests, tokens=1)
    for request in requests:
        host.complete(request)
    assert all(max(counts.values()) == 1 for counts in opened(host))
    assert_settles(host)

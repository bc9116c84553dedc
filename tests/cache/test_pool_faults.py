"""A pool of one slot, and steps that fail: no hang, no slot lost.

The pool's accounts are checked after every step of the simulated host, and every byte of every
request's KV after it is computed.
"""

from __future__ import annotations

import threading
from collections.abc import Collection
from pathlib import Path
from typing import Any

import pytest

from benchmarks.host import HostStep
from kvferry.cache.messages import SlotChunk
from kvferry.contract.fold import WorkerOutputFold
from kvferry.store.memory import MemoryStore
from tests.cache.pools import check_pool
from tests.simulated_host import prefix_seeds

from .keeping import (
    NUM_CHUNKS,
    PROMPT,
    CountingStore,
    assert_settles,
    keys_of,
    open_store,
    run_until_stored,
    wait_for,
)

OTHER = list(range(700, 741))
RANKS = pytest.mark.parametrize("world_size", [1, 2])


# -- one slot -----------------------------------------------------------------------------------


@RANKS
def test_a_pool_of_one_slot_stores_and_hits(make_host, tmp_path: Path, world_size: int):
    url = f"file://{tmp_path}"
    writer = make_host(store=url, world_size=world_size, num_slots=1)
    run_until_stored(writer, PROMPT)
    assert_settles(writer)
    host = make_host(store=url, world_size=world_size, num_slots=1)
    for number in range(2):
        assert host.run(f"reads {number}", PROMPT).num_external_tokens == 8
    first, second = host.add("first", PROMPT), host.add("second", PROMPT)
    assert [host.admit(first), host.admit(second)] == [8, 8]
    host.step([first, second], tokens=1)
    for each in (first, second):
        host.complete(each)
    assert host.observer["miss_tokens/no_memory"] == 4 * 32
    assert_settles(host)


# -- steps that fail ----------------------------------------------------------------------------


class ForwardFailed(Exception):
    """The engine's own trouble."""


def fail_step(host: Any, request: Any, tokens: int, failing: Collection[int]) -> None:
    """A step whose forward fails on some ranks. The host computes its tokens again later."""
    request.num_scheduled_tokens = tokens
    host.grow(request, request.num_computed_tokens + tokens)
    plan = host.scheduler.build_plan(HostStep([request], set(), set()))
    outputs = []
    for number, rank in enumerate(host.ranks):
        driver = rank.driver
        try:
            with driver.step(plan, set()) as step:
                if number in failing:
                    raise ForwardFailed
                start = request.num_computed_tokens
                rank.compute(request, prefix_seeds(request), start, start + tokens)
        except ForwardFailed:
            pass
        outputs.append(step.output)
    host.scheduler.update_output(WorkerOutputFold(len(outputs)).fold(outputs))
    check_pool(host.pool)


@pytest.mark.parametrize(
    ("world_size", "failing"), [(1, {0}), (2, {0}), (2, {1}), (2, {0, 1})], ids=str
)
def test_chunks_of_a_forward_that_failed_are_put_off_and_saved_by_the_next_step(
    make_host, tmp_path: Path, world_size: int, failing: set[int]
):
    host = make_host(store=f"file://{tmp_path}", world_size=world_size)
    request = host.admitted("writer", PROMPT)
    fail_step(host, request, len(PROMPT), failing)
    assert host.pool.num_taken == NUM_CHUNKS
    host.step([])
    assert not any(host.pool.holds(key, frozenset([0])) for key in keys_of(host))
    host.prefill(request)
    wait_for(lambda: (host.run_for(0.5), host.observer["put_stored"] == NUM_CHUNKS)[1])
    host.finish(request)
    assert_settles(host)
    assert host.run("again", PROMPT).num_external_tokens == 40
    host.forget_memory()
    assert host.run("from the store", PROMPT).num_external_tokens == 40


def test_loads_of_a_forward_that_failed_are_not_lost(make_host, directory: Path):
    host = make_host(store=open_store(directory))
    request = host.add("reader", PROMPT)
    assert host.admit(request) == 40
    fail_step(host, request, 1, {0})
    assert host.pool.num_taken == 0
    host.complete(request)


# -- faults below -------------------------------------------------------------------------------


def test_a_process_that_may_have_no_more_threads_serves_all_the_same(
    make_host, directory: Path, monkeypatch
):
    host = make_host(store=open_store(directory))

    def start(_self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", start)
        assert host.run("reader", PROMPT).num_external_tokens == 0
        assert host.run("writer", OTHER).num_external_tokens == 0
        assert_settles(host)
    assert host.observer["save_failed"] >= NUM_CHUNKS
    assert host.run("of memory", OTHER).num_external_tokens == 40


def test_a_slot_that_is_read_over_holds_nothing_until_it_was_verified(make_host):
    store = CountingStore(MemoryStore("x"))
    host = make_host(store=store)
    host.run("writer", PROMPT)
    host.settle()
    io = host.ranks[0].worker.io
    key = keys_of(host)[-1]
    index = host.pool.find(key).index
    chunk = SlotChunk(index, key, 32)
    assert io.groups_held(chunk)
    # The scheduler role gave the slot up, and fetches the same chunk into it, in vain.
    host.forget_memory()
    store.delete(key)
    slot = host.pool.fetch(key, 0, frozenset([0]))
    assert slot.index == index
    host.step([])
    host.ranks[0].worker.wait(60)
    host.step([])
    assert host.pool.find(key) is None
    assert not io.groups_held(chunk)
    assert_settles(host)

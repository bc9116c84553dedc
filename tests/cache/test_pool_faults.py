"""Reads that never end, pools without a slot to spare, steps that fail: no hang, no slot lost.

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
from kvferry.testing.clock import FakeClock
from kvferry.testing.faults import Gate
from tests.cache.pools import check_pool
from tests.simulated_host import prefix_seeds

from .keeping import (
    NUM_CHUNKS,
    PROMPT,
    CountingStore,
    StallsFor,
    assert_settles,
    keys_of,
    lose_chunk,
    open_store,
    wait_for,
)

OTHER = list(range(700, 741))
RANKS = pytest.mark.parametrize("world_size", [1, 2])


@pytest.fixture
def two_prompts(directory: Path, make_host) -> Path:
    """A store with both prompts."""
    host = make_host(store=open_store(directory))
    host.run("writer of another", OTHER)
    host.settle()
    assert host.observer["put_stored"] == NUM_CHUNKS
    return directory


class Stalled:
    """A host whose reads of the first prompt never end, on its last rank, until released."""

    def __init__(self, make_host, directory: Path, world_size: int = 1, **options: Any) -> None:
        self.gate, self.clock = Gate(), FakeClock()
        keys = keys_of(make_host())
        stores: list[Any] = [open_store(directory) for _ in range(world_size)]
        stores[-1] = StallsFor(stores[-1], self.gate, keys)
        self.host = make_host(
            store=stores[0].url,
            rank_stores=stores,
            world_size=world_size,
            clock=self.clock,
            io_threads=8,  # some for the reads that do end
            **options,
        )

    def give_up(self, name: str = "stalls") -> Any:
        """A request whose hit did not come in time; admitted without it."""
        request = self.host.add(name, PROMPT)
        assert self.host.scheduler.lookup(request, 0).num_tokens is None
        self.host.step([])
        for _ in range(NUM_CHUNKS):
            assert self.gate.wait_for_arrival()
        for rank in self.host.ranks[:-1]:
            rank.worker.wait(60)
        self.host.step([])
        assert self.host.scheduler.lookup(request, 0).num_tokens is None
        self.clock.advance(5.0)
        assert self.host.scheduler.lookup(request, 0) == (0, False, "deadline")
        assert self.host.admit(request) == 0
        return request


# -- reads that never end -----------------------------------------------------------------------


@RANKS
def test_late_bytes_are_not_held_and_meet_no_other_chunk(
    make_host, two_prompts: Path, world_size: int
):
    stalled = Stalled(make_host, two_prompts, world_size)
    host = stalled.host
    request = stalled.give_up()
    host.step([])  # carries the cancels
    stalled.gate.release()
    assert_settles(host)
    assert not any(host.pool.find(key) for key in keys_of(host))
    assert host.run("other", OTHER).num_external_tokens == 40
    host.complete(request)
    assert host.run("again", PROMPT).num_external_tokens == 40


def test_a_pool_full_of_unfinished_reads_hangs_no_request_and_recovers(
    make_host, two_prompts: Path
):
    stalled = Stalled(make_host, two_prompts, num_slots=NUM_CHUNKS)
    host = stalled.host
    request = stalled.give_up()
    assert host.pool.num_taken == host.pool.num_slots
    host.prefill(request)
    other = host.add("other", OTHER)
    assert host.scheduler.lookup(other, 0).num_tokens is None
    host.step([])
    stalled.clock.advance(5.0)
    assert host.scheduler.lookup(other, 0) == (0, False, "no_memory")
    host.admit(other)
    host.prefill(other)
    new = host.add("new", list(range(900, 941)))
    assert host.admit(new) == 0
    host.prefill(new, budget=8)
    assert host.observer["save_no_slot"] > 0
    stalled.gate.release()
    for token in range(40):  # what found no slot is saved with the next tokens
        host.settle(timeout=1.0)
        if host.observer["put_stored"] == NUM_CHUNKS:
            break
        new.all_token_ids.append(token)
        host.prefill(new)
    assert host.observer["put_stored"] == NUM_CHUNKS
    for each in (request, other, new):
        host.finish(each)
    assert_settles(host)
    assert host.run("again", PROMPT).num_external_tokens == 40
    assert host.run("other again", OTHER).num_external_tokens == 40


# -- one slot -----------------------------------------------------------------------------------


@RANKS
def test_a_pool_of_one_slot_stores_and_hits(make_host, tmp_path: Path, world_size: int):
    url = f"file://{tmp_path}"
    writer = make_host(store=url, world_size=world_size, num_slots=1)
    request = writer.admitted("writer", PROMPT)
    writer.prefill(request)
    for token in range(60):
        writer.settle(timeout=1.0)
        if writer.observer["put_stored"] == NUM_CHUNKS:
            break
        request.all_token_ids.append(token)
        writer.prefill(request)
    assert writer.observer["put_stored"] == NUM_CHUNKS
    writer.finish(request)
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
    wait_for(lambda: (host.settle(0.5), host.observer["put_stored"] == NUM_CHUNKS)[1])
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


@RANKS
def test_a_rank_that_does_not_hold_what_was_promised_says_so_and_nothing_wrong_is_served(
    make_host, directory: Path, world_size: int
):
    host = make_host(store=f"file://{directory}", world_size=world_size)
    request = host.add("reader", PROMPT)
    assert host.admit(request) == 40
    lose_chunk(host, keys_of(host)[2], rank=world_size - 1)
    host.prefill(request)
    assert host.observer["load_failed_chunks"] == 1
    assert set(request.block_ids[0][4:6]) <= host.invalid_block_ids
    host.finish(request)
    assert_settles(host)
    assert host.run("again", PROMPT).num_external_tokens == 40
    assert host.observer["load_failed_chunks"] == 1


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

"""What the host pool holds hits without a read, at the first look-up, and is right.

The simulated host checks every byte of every request's KV, so a run proves that it was right.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvferry.store.memory import MemoryStore
from kvferry.testing.faults import Gate

from .keeping import (
    NUM_CHUNKS,
    PROMPT,
    CountingStore,
    HangsLater,
    assert_settles,
    keys_of,
    open_store,
    records,
    wait_for,
)
from .windowed import group, opened


@pytest.fixture
def host(directory: Path, make_host) -> Any:
    """A host in a new process that has read the prompt."""
    host = make_host(store=open_store(directory))
    host.store = host.parts[0].store
    assert host.run("reads", PROMPT).num_external_tokens == 40
    assert host.store.num_opened == NUM_CHUNKS
    host.num_steps = 0
    return host


def promise(host: Any, name: str, prompt: Any = PROMPT) -> int | None:
    """The first answer to a new request, which then ends."""
    request = host.add(name, prompt)
    answer: int | None = host.scheduler.lookup(request, 0).num_tokens
    host.finish(request)
    host.step([])
    return answer


# -- hits ---------------------------------------------------------------------------------------


def test_a_hit_in_memory_is_promised_by_the_first_look_up_and_loaded_by_one_step(host):
    request = host.add("warm", PROMPT)
    assert host.scheduler.lookup(request, 0).num_tokens == 40
    assert host.admit(request) == 40
    host.prefill(request)
    assert host.num_steps == 1
    host.finish(request)
    assert host.store.num_opened == NUM_CHUNKS
    assert host.observer["hit_tokens/memory"] == 40
    assert host.observer["loaded_tokens"] == 2 * 40
    assert host.pool.num_taken == 0


def test_what_was_saved_hits_without_a_read_even_before_it_is_stored(make_host):
    gate = Gate()
    store = HangsLater(CountingStore(MemoryStore("x")), operations=("put",))
    store.gate = gate
    host = make_host(store=store)
    host.run("writer", PROMPT)
    host.step([])
    assert promise(host, "reader") == 40
    assert host.run("again", PROMPT).num_external_tokens == 40
    assert store.inner.num_opened == 0
    assert host.observer["put_stored"] == 0
    gate.release()
    assert_settles(host)
    assert host.observer["put_stored"] == 5


def test_of_a_hit_that_is_partly_held_only_the_rest_is_read(host):
    keys = keys_of(host)
    host.pool.drop(keys[1])
    host.pool.drop(keys[3])
    request = host.add("warm", PROMPT)
    assert host.scheduler.lookup(request, 0).num_tokens is None
    assert host.admit(request) == 40
    host.complete(request)
    assert [host.store.opened[key] for key in keys] == [1, 2, 1, 2, 1]
    assert host.observer["hit_tokens/memory"] == 24
    assert host.observer["hit_tokens/file"] == 40 + 16


def test_what_was_not_read_from_the_store_says_nothing_of_its_speed(host):
    measured = host.scheduler.policy.tiers["file"].rate
    assert measured is not None
    host.run("of memory", PROMPT)
    assert host.scheduler.policy.tiers["file"].rate == measured


def test_a_slow_store_does_not_keep_memory_from_being_used(host):
    policy = host.scheduler.policy
    policy.saw_compute(1000, 0.001)
    for _ in range(40):
        policy.saw_load("file", 40, 100.0)
    assert policy.worth_loading(["file"], 40).num_chunks == 0
    assert host.run("warm", PROMPT).num_external_tokens == 40
    host.pool.drop(keys_of(host)[2])
    assert host.run("warm but for one", PROMPT).num_external_tokens == 16
    assert host.observer["miss_tokens/slower"] == 24


def test_each_rank_holds_its_own_part(tmp_path: Path, make_host):
    url = f"file://{tmp_path}"
    writer = make_host(store=url, world_size=2)
    writer.run("writer", PROMPT)
    wait_for(lambda: (writer.settle(), writer.observer["put_stored"] == 5)[1])
    stores = [open_store(tmp_path) for _ in range(2)]
    host = make_host(store=url, rank_stores=stores, world_size=2)
    assert host.run("reads", PROMPT).num_external_tokens == 40
    assert [store.num_opened for store in stores] == [NUM_CHUNKS] * 2
    assert promise(host, "warm") == 40
    assert host.run("warm again", PROMPT).num_external_tokens == 40
    assert [store.num_opened for store in stores] == [NUM_CHUNKS] * 2


def test_a_part_of_a_record_is_not_taken_for_all_of_it():
    groups = (group(2, None), group(3, 12))
    prompt = list(range(65))
    store = CountingStore(MemoryStore("windows"))
    with opened(groups, store) as host:
        host.run("writer", prompt)
        host.settle()
    with opened(groups, store) as host:
        assert host.run("reads", prompt).num_external_tokens == 64
        assert store.num_opened == 8
        assert host.run("again", prompt).num_external_tokens == 64
        assert store.num_opened == 8
        # Of the first chunks, nothing was read of the layers with a window.
        assert host.run("shorter", prompt[:33]).num_external_tokens == 32
        assert 8 < store.num_opened <= 8 + 4
        read_by_now = store.num_opened
        assert host.run("shorter again", prompt[:33]).num_external_tokens == 32
        assert host.run("all again", prompt).num_external_tokens == 64
        assert store.num_opened == read_by_now


# -- bounds -------------------------------------------------------------------------------------


def prompts_in_a_store(make_host, number: int) -> tuple[CountingStore, list[list[int]]]:
    store = CountingStore(MemoryStore("several prompts"))
    prompts = [[1000 * (i + 1) + token for token in range(41)] for i in range(number)]
    writer = make_host(store=store, num_blocks=4096)
    for i, prompt in enumerate(prompts):
        writer.run(f"writer {i}", prompt)
    writer.settle()
    assert writer.observer["put_stored"] == NUM_CHUNKS * number
    return store, prompts


def test_what_is_nearest_to_the_root_is_held_longest(make_host):
    store, prompts = prompts_in_a_store(make_host, 2)
    host = make_host(store=store, num_slots=NUM_CHUNKS)
    host.run("reads", prompts[0])
    host.run("needs two slots", prompts[1][:17])
    everything = frozenset([0])
    held = [host.pool.holds(key, everything) for key in keys_of(host, prompts[0])]
    assert held == [True, True, True, False, False]
    assert promise(host, "a shorter one", prompts[0][:25]) == 24


# -- promises that come to nothing --------------------------------------------------------------


def test_a_request_that_waits_for_blocks_keeps_its_promise(host):
    request = host.add("warm", PROMPT)
    for _ in range(3):
        assert host.scheduler.lookup(request, 0).num_tokens == 40
        host.step([])
    assert host.pool.num_taken == NUM_CHUNKS
    assert host.admit(request) == 40
    host.complete(request)
    assert host.pool.num_taken == 0


def test_a_host_may_take_less_than_it_was_promised(host):
    request = host.add("warm", PROMPT)
    assert host.scheduler.lookup(request, 0).num_tokens == 40
    before = host.observer["loaded_tokens"]
    request.num_computed_tokens = request.num_external_tokens = 12
    host.grow(request, 64)
    host.scheduler.update_after_alloc(request, request.block_ids, 12)
    host.prefill(request)
    assert host.observer["loaded_tokens"] - before == 12
    assert host.pool.num_taken == 0


# -- what became of the store meanwhile ---------------------------------------------------------


def test_what_was_deleted_from_the_store_is_held_on(host):
    for key in keys_of(host):
        host.store.delete(key)
    assert host.run("warm", PROMPT).num_external_tokens == 40
    host.forget_memory()
    assert host.run("cold", PROMPT).num_external_tokens == 0
    host.settle()
    assert host.observer["put_stored"] == NUM_CHUNKS


def test_a_store_that_hangs_holds_up_no_hit_in_memory(directory: Path, make_host):
    store = HangsLater(open_store(directory), operations=("read", "put"))
    host = make_host(store=store)
    host.run("reads", PROMPT)
    store.gate = gate = Gate()
    host.num_steps = 0
    for number in range(3):
        assert host.run(f"warm {number}", PROMPT).num_external_tokens == 40
    assert host.num_steps == 3
    gate.release()


def test_records_of_other_models_are_left_alone(directory: Path, make_host):
    before = records(directory)
    host = make_host(store=open_store(directory), weights=b"v" * 32)
    assert host.run("cold", PROMPT).num_external_tokens == 0
    assert host.parts[0].store.num_opened == 0
    assert host.observer["records_corrupt"] == 0
    assert all(path.exists() for path in before)

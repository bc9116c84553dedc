"""Wrong bytes, slow and failing stores: a miss, counted, never wrong KV, never a hang.

The simulated host checks every byte of every request's KV, so a test that only runs requests proves
that nothing wrong was served.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable

import pytest

from benchmarks.host import HostStep
from kvferry.blocks.copies import BlockCopies
from kvferry.cache.config import CacheBounds
from kvferry.cache.deciding.failed_keys import RETRY_SECONDS, UNREADABLE_SECONDS
from kvferry.cache.deciding.policy import MIN_WAIT_SECONDS
from kvferry.cache.messages import CacheMeta, Filled, RankReport, Saved, Sealed
from kvferry.contract.guard_scheduler import GuardedScheduler
from kvferry.contract.messages import RepairedPlan, WorkerOutput
from kvferry.errors import TransferError
from kvferry.store.base import Where
from kvferry.store.memory import MemoryStore
from kvferry.testing.clock import FakeClock
from kvferry.testing.faults import (
    CorruptingStore,
    FailingStore,
    Gate,
    StallingStore,
    flip_bit,
    truncate,
    zero,
)
from kvferry.testing.wrappers import WrapperStore
from kvferry.types import ExtraKeys
from tests.cache.hosts import make_groups
from tests.simulated_host import prefix_seeds

from .keeping import NUM_CHUNKS, PROMPT, assert_settles, keys_of, lose_chunk, wait_for


def store_prompt(make_host, prompt=PROMPT):
    """A store that holds a prompt of five chunks, and its keys in order."""
    store = MemoryStore("faults")
    host = make_host(store=store)
    request = host.add("writer", prompt)
    keys = keys_of(host, prompt)
    host.admit(request)
    host.complete(request)
    host.settle()
    assert host.observer["put_stored"] == len(keys) == len(prompt) // 8
    return store, keys


DAMAGES = {
    "flipped bit in the payload": flip_bit(8 * 4200),
    "flipped bit in the header": flip_bit(8 * 40),
    "flipped bit in the leaf table": flip_bit(8 * 4090),
    "zeroed rows": zero(4096, 4200),
    "truncated": truncate(-1),
    "truncated to the head": truncate(4096),
    "truncated in the head": truncate(100),
    "empty": truncate(0),
    "trailing bytes": lambda content: content + b"x",
    "zeroed whole": zero(0, 1 << 20),
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES.keys())
def test_a_damaged_chunk_is_a_miss_and_is_taken_out(make_host, damage: Callable):
    store, keys = store_prompt(make_host)
    damaged = CorruptingStore(store, damage=damage, keys={keys[2]})
    host = make_host(store=damaged)
    request = host.run("reader", PROMPT)
    assert request.num_external_tokens == 16
    assert host.observer["records_corrupt"] == 1
    assert host.observer["store_quarantined"] + store.stat().num_records >= 4
    # What was computed again was stored again, so the next one hits all of it.
    host.settle()
    assert store.where(keys[2]) is Where.HERE


def test_a_failing_medium_is_a_miss_and_is_not_asked_for_the_same_chunk_again(make_host):
    store, _keys = store_prompt(make_host)
    clock = FakeClock()
    failing = FailingStore(store, operations={"read"})
    host = make_host(store=failing, clock=clock)
    assert host.run("first", PROMPT).num_external_tokens == 0
    host.settle()
    assert host.observer["miss_io_error"] == failing.num_failed == 5
    # What was computed is held, whatever the store says of it.
    assert host.run("second", PROMPT).num_external_tokens == 40
    host.forget_memory()
    assert host.run("third", PROMPT).num_external_tokens == 0
    host.settle()
    assert failing.num_failed == 5
    host.forget_memory()
    clock.advance(RETRY_SECONDS)
    host.run("soon", PROMPT)
    assert failing.num_failed == 10


def test_a_wrong_record_is_not_offered_for_long(make_host):
    store, keys = store_prompt(make_host)
    clock = FakeClock()
    corrupting = CorruptingStore(store, damage=flip_bit(-1))
    host = make_host(store=FailingStore(corrupting, operations={"put"}), clock=clock)
    assert host.run("first", PROMPT).num_external_tokens == 0
    host.settle()
    unreadable = host.scheduler.requests.unreadable
    clock.advance(RETRY_SECONDS)
    assert keys[0] in unreadable
    clock.advance(UNREADABLE_SECONDS)
    assert keys[0] not in unreadable


class Gone(WrapperStore):
    """Seems to have records that are not there."""

    def read(self, key, *args):
        return None


class Broken(WrapperStore):
    """Raises what no store may."""

    def read(self, key, *args):
        raise ValueError(f"{key.hex()} is too much")


@pytest.mark.parametrize(
    ("hide", "counter", "miss"),
    [
        pytest.param(Gone, "miss_absent", "vanished", id="not there"),
        pytest.param(
            lambda store: FailingStore(store, operations={"read"}),
            "miss_io_error",
            "away",
            id="cannot be opened",
        ),
        pytest.param(Broken, "miss_tokens/away", "away", id="raises what it must not"),
    ],
)
def test_a_record_that_cannot_be_read_is_a_miss(make_host, hide: Callable, counter: str, miss: str):
    store, _keys = store_prompt(make_host)
    host = make_host(store=hide(store))
    assert host.run("reader", PROMPT).num_external_tokens == 0
    assert host.observer[counter] in (5, 40)  # chunks, or tokens
    assert_settles(host)
    host.forget_memory()
    assert host.scheduler.lookup(host.add("again", PROMPT), 0) == (0, False, miss)


def test_a_worker_waits_for_its_reads_and_not_for_ever(make_host):
    store, _keys = store_prompt(make_host)
    gate = Gate()
    host = make_host(store=StallingStore(store, gate=gate, operations={"read"}))
    worker = host.ranks[0].worker
    host.scheduler.lookup(host.add("reader", PROMPT), 0)
    host.step([])  # starts the reads
    started = time.monotonic()
    worker.wait(0.05)
    assert 0.05 <= time.monotonic() - started < 30
    assert host.step([])  # no news
    gate.release()
    worker.wait(60)
    assert time.monotonic() - started < 30
    assert not host.step([])
    started = time.monotonic()
    worker.wait(60)  # nothing is read any more
    assert time.monotonic() - started < 30


@pytest.mark.parametrize("cacheable", [True, False])
def test_tokens_that_were_not_promised_are_reported_as_failed(make_host, cacheable: bool):
    """A host that counts on them would compute on blocks that nobody fills."""
    host = make_host()
    request = host.add("reader", PROMPT)
    if not cacheable:
        request.extra_keys = ExtraKeys(cacheable=False)
    guarded = GuardedScheduler(host.scheduler, block_size=4)
    guarded.update_after_alloc(request, ((5, 6, 7),), 8)
    plan = guarded.build_plan(HostStep())
    assert isinstance(plan, RepairedPlan)
    assert plan.lost_block_ids == {5, 6}


def test_nothing_computed_on_a_failed_load_is_saved(make_host):
    """The step that finds the load broken also completes a later chunk."""
    prompt = list(range(60))
    store, keys = store_prompt(make_host, prompt=prompt[:41])
    host = make_host(store=store)
    request = host.add("reader", prompt)
    hit = host.admit(request)
    assert hit == 40
    lose_chunk(host, keys[1])
    host.step([request], tokens=20)
    assert host.invalid_block_ids
    host.settle()
    assert host.observer["put_stored"] == 0
    assert request.num_computed_tokens == 8
    host.prefill(request)
    host.settle()
    host.finish(request)
    assert make_host(store=store).run("later", prompt).num_external_tokens == 56


@pytest.mark.parametrize("bad", [[9999] * 11, [1, 2, 3, 4, 5, 6, 7, 8, 9, 9999]])
def test_blocks_outside_the_cache_never_reach_a_copy(make_host, bad: list[int]):
    store, _keys = store_prompt(make_host)
    host = make_host(store=store)
    request = host.add("bad blocks", PROMPT)
    while (answer := host.scheduler.lookup(request, 0)).num_tokens is None:
        host.step([])
    host.scheduler.update_after_alloc(request, (bad,), answer.num_tokens)
    host.step([])
    assert 9999 in host.invalid_block_ids
    assert host.invalid_block_ids <= set(bad)
    assert host.observer["load_failed_chunks"] >= 1
    host.finish(request)
    assert_settles(host)


def test_no_thread_survives_close(make_host):
    store, _keys = store_prompt(make_host)
    before = set(threading.enumerate())
    host = make_host(store=store)
    host.run("reader", PROMPT)
    assert set(threading.enumerate()) > before
    host.close()
    assert set(threading.enumerate()) <= before


def test_a_slow_store_is_cut_short_and_then_left_alone(make_host, monkeypatch):
    """Promise 4: a store slower than computing costs one deadline, not one per prompt."""
    prompt = list(range(400))
    store, _keys = store_prompt(make_host, prompt=prompt)
    gate, clock = Gate(), FakeClock()
    host = make_host(store=StallingStore(store, gate=gate, operations={"read"}), clock=clock)
    compute = host.ranks[0].compute

    def compute_in_time(*given):
        clock.advance(0.01)
        compute(*given)

    monkeypatch.setattr(host.ranks[0], "compute", compute_in_time)
    host.run("teaches the speed of prefill", list(range(5000, 5400)), budget=200)
    stalls = host.add("stalls", prompt)
    assert host.scheduler.lookup(stalls, 0).num_tokens is None
    clock.advance(MIN_WAIT_SECONDS)
    assert host.admit(stalls) == 0
    host.complete(stalls)
    assert host.observer["miss_tokens/deadline"] == 396
    host.run("does not wait again", prompt)
    assert host.observer["miss_tokens/slower"] == 396
    gate.release()


def test_time_spent_in_the_engine_is_not_held_against_the_store(make_host):
    """The step that carries a fetch may compute for seconds: the store did not take them."""
    store, _keys = store_prompt(make_host)
    clock = FakeClock()
    host = make_host(store=store, clock=clock)
    request = host.add("reader", PROMPT)
    assert host.scheduler.lookup(request, 0).num_tokens is None
    host.step([])
    host.ranks[0].worker.wait(60)
    clock.advance(100.0)
    host.step([])
    assert host.scheduler.lookup(request, 0).num_tokens == 40
    assert host.scheduler.policy.tiers["memory"].rate > 40 / 50


def test_a_request_preempted_and_admitted_in_one_step_gets_its_load(make_host):
    """A host that preempts everything (a cache reset) admits again before it builds the plan."""
    store, _keys = store_prompt(make_host)
    host = make_host(store=store)
    request = host.add("reader", PROMPT)
    assert host.admit(request) == 40
    host.prefill(request)
    assert host.observer["loaded_tokens"] == 40
    host.lose(request)
    assert host.admit(request) == 40
    host.prefill(request)
    assert host.observer["loaded_tokens"] == 80


def test_an_idle_host_is_kept_stepping_until_saves_are_reported_but_not_for_ever(make_host):
    gate = Gate()
    store = StallingStore(MemoryStore("x"), gate=gate, operations={"put"})
    clock = FakeClock()
    host = make_host(store=store, clock=clock)
    host.run("writer", PROMPT)
    assert host.scheduler.has_work()
    clock.advance(CacheBounds().saves_seconds)
    assert not host.scheduler.has_work()
    host.run("another writer", list(range(700, 741)))
    assert host.scheduler.has_work()
    gate.release()
    host.settle()
    assert not host.scheduler.has_work()


def test_a_step_longer_than_the_wait_for_saves_does_not_use_it_up(make_host):
    """The saves were planned before the prompt was computed, and run on when its request ends."""
    gate, clock = Gate(), FakeClock()
    store = StallingStore(MemoryStore("x"), gate=gate, operations={"put"})
    host = make_host(store=store, clock=clock)
    request = host.admitted("writer", PROMPT)
    host.prefill(request)
    clock.advance(CacheBounds().saves_seconds + 1)
    host.finish(request)
    assert host.scheduler.has_work()
    clock.advance(CacheBounds().saves_seconds)
    assert not host.scheduler.has_work()
    gate.release()


SAVE_STAGES = ("filled", "sealed", "saved")


@pytest.mark.parametrize("stage", SAVE_STAGES)
def test_each_stage_of_a_save_gives_an_idle_host_as_much_time_again(make_host, stage):
    clock = FakeClock()
    host = make_host(clock=clock)
    request = host.admitted("writer", PROMPT)
    request.num_scheduled_tokens = len(PROMPT)
    save, *_ = host.scheduler.build_plan(HostStep([request])).saves
    slot = save.chunk.slot
    ended = {"filled": Filled(slot), "sealed": Sealed(slot), "saved": Saved(slot, "stored")}
    report = RankReport(rank=0, pool=host.pool.pool_id, **{stage: (ended[stage],)})
    clock.advance(CacheBounds().saves_seconds - 1)
    host.scheduler.update_output(WorkerOutput(meta=CacheMeta(reports=(report,))))
    clock.advance(2)
    assert host.scheduler.has_work()
    clock.advance(CacheBounds().saves_seconds)
    assert not host.scheduler.has_work()


@pytest.mark.parametrize("world_size", [1, 2])
def test_each_stage_of_a_save_is_told_once(make_host, monkeypatch, world_size):
    gate, told = Gate(), Counter()
    store = StallingStore(MemoryStore("x"), gate=gate, operations={"put"})
    groups = make_groups(num_kv_heads=4)
    host = make_host(
        store=store, rank_stores=[store] * world_size, groups=groups, world_size=world_size
    )
    learn = host.scheduler.update_output

    def noting(output):
        for report in getattr(output.meta, "reports", ()):
            told.update({stage: len(getattr(report, stage)) for stage in SAVE_STAGES})
        learn(output)

    monkeypatch.setattr(host.scheduler, "update_output", noting)
    host.run("writer", PROMPT)
    slots = [host.pool.find(key) for key in keys_of(host)]
    wait_for(lambda: host.step([]) and not any(slot.num_sealing for slot in slots))
    host.step([])
    gate.release()
    host.settle()
    num_parts = NUM_CHUNKS * world_size
    saved = NUM_CHUNKS if world_size == 1 else 0  # the scheduler role writes for several ranks
    assert told == {"filled": num_parts, "sealed": num_parts, "saved": saved}
    assert all(rank.worker.is_idle for rank in host.ranks)


def store_prompts(make_host, number: int) -> tuple[MemoryStore, list[list[int]]]:
    """A store that holds prompts of five chunks each."""
    prompts = [list(range(100 * i, 100 * i + 41)) for i in range(number)]
    store = MemoryStore("faults")
    writer = make_host(store=store)
    for i, prompt in enumerate(prompts):
        writer.run(f"w{i}", prompt)
    writer.settle()
    return store, prompts


@pytest.mark.parametrize("error", [TransferError, RuntimeError])
@pytest.mark.parametrize("broken_from", [0, 8])
def test_a_copy_that_fails_in_any_way_fails_its_chunks_alone(
    make_host, monkeypatch, error: type[Exception], broken_from: int
):
    store, keys = store_prompt(make_host)
    host = make_host(store=store)
    request = host.add("reader", PROMPT)
    assert host.admit(request) == 40
    scatter = BlockCopies.scatter

    def broken(copies, chunk):
        if chunk.first_token >= broken_from:
            raise error("no memory left on the device")
        scatter(copies, chunk)

    with monkeypatch.context() as patch:
        patch.setattr(BlockCopies, "scatter", broken)
        host.step([request], tokens=1)
    assert host.invalid_block_ids == set(request.block_ids[0][broken_from // 4 : 10])
    unreadable = host.scheduler.requests.unreadable
    assert [key in unreadable for key in keys] == [at >= broken_from for at in range(0, 40, 8)]
    assert request.num_computed_tokens == broken_from
    host.complete(request)
    assert_settles(host)
    assert host.run("next", PROMPT).num_external_tokens == 40


def test_hits_admitted_in_a_row_are_whole_though_only_one_fits_into_the_pool(make_host):
    store, prompts = store_prompts(make_host, 4)
    host = make_host(store=store, num_slots=7)
    requests = [host.add(f"r{index}", prompt) for index, prompt in enumerate(prompts)]
    for request, following in zip(requests, [*requests[1:], None], strict=True):
        assert host.admit(request) == 40
        if following is not None:
            host.scheduler.lookup(following, 0)  # in the step that loads
        host.step([request], tokens=1)
        assert host.ranks[0].wrong_tokens(request, prefix_seeds(request), 40) == 0


def test_a_host_that_carries_no_reports_loads_and_saves_nothing(make_host):
    """Nothing would say what the slots hold."""
    store, _keys = store_prompt(make_host)
    host = make_host(store=store, carries_worker_meta=False)
    assert host.run("reader", PROMPT).num_external_tokens == 0
    assert host.run("writer", list(range(300, 341))).num_external_tokens == 0
    host.settle()
    assert host.observer["put_stored"] == 0
    assert host.observer["miss_tokens/not_loading"] == 2 * 40
    assert store.stat().num_records == 5
    assert host.pool.num_taken == 0

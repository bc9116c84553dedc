"""Wrong bytes, slow and failing stores: a miss, counted, never wrong KV, never a hang.

The simulated host checks every byte of every request's KV, so a test that only runs requests proves
that nothing wrong was served.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import msgspec
import pytest

from kvferry.connectors.shared_storage.rank_rows import RankRows
from kvferry.connectors.shared_storage.scheduler import SAVES_SECONDS
from kvferry.contract.guard import GuardedScheduler, RepairedPlan
from kvferry.store.memory import MemoryStore
from kvferry.store.wrappers import WrapperStore
from kvferry.testing.faults import (
    CorruptingStore,
    FailingStore,
    Gate,
    StallingStore,
    flip_bit,
    truncate,
    zero,
)
from kvferry.testing.host import HostStep
from kvferry.types import ExtraKeys

PROMPT = list(range(41))
BOTH_PROMISES = pytest.mark.parametrize("promise", ["in_hand", "index"])


def store_prompt(make_host, promise: str = "in_hand", prompt=PROMPT):
    """A store that holds a prompt of five chunks, and its keys in order."""
    store = MemoryStore("faults")
    host = make_host(store=store, promise=promise, num_staging_chunks=256)
    request = host.add("writer", prompt)
    keys = host.scheduler._track(request).keys.keys
    host.admit(request)
    host.prefill(request)
    host.finish(request)
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


@BOTH_PROMISES
@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES.keys())
def test_a_damaged_chunk_is_a_miss_and_is_taken_out(make_host, damage: Callable, promise: str):
    store, keys = store_prompt(make_host)
    damaged = CorruptingStore(store, damage=damage, keys={keys[2]})
    host = make_host(store=damaged, promise=promise)
    request = host.run("reader", PROMPT)
    if promise == "in_hand":
        assert request.num_external_tokens == 16
    assert host.observer["records_corrupt"] == 1
    assert host.observer["store_quarantined"] + store.stat().num_records >= 4
    # What was computed again was stored again, so the next one hits all of it.
    host.settle()
    assert store.contains(keys[2])


@BOTH_PROMISES
def test_records_under_each_others_names_are_misses(make_host, promise: str):
    store, keys = store_prompt(make_host)
    contents = []
    for key in keys[:2]:
        with store.open_read(key) as source:
            contents.append(bytearray(source.size))
            source.read_into(memoryview(contents[-1]), 0)
    for key, content in zip(keys[:2], reversed(contents), strict=True):
        store.delete(key)
        store.put(key, [content])
    host = make_host(store=store, promise=promise)
    host.run("reader", PROMPT)
    assert host.observer["miss_wrong_key"] >= 1
    assert host.observer["records_corrupt"] >= 1


@BOTH_PROMISES
def test_a_failing_medium_is_a_miss_and_is_not_asked_for_the_same_chunk_again(
    make_host, promise: str
):
    store, _keys = store_prompt(make_host)
    host = make_host(store=FailingStore(store, operations={"read_into"}), promise=promise)
    host.run("first", PROMPT)
    misses = host.observer["miss_io_error"]
    assert misses >= 1
    again = host.run("second", PROMPT)
    assert again.num_external_tokens == 0
    assert host.observer["miss_io_error"] == misses


@BOTH_PROMISES
def test_a_record_deleted_behind_the_index_is_a_miss(make_host, promise: str):
    store, _keys = store_prompt(make_host)
    host = make_host(store=FailingStore(store, operations={"open_read"}), promise=promise)
    request = host.run("reader", PROMPT)
    assert host.scheduler.lookup(request, 0).num_tokens == 0


def test_a_store_that_cannot_write_stops_nothing(make_host):
    host = make_host(store=FailingStore(MemoryStore("x"), operations={"put"}))
    host.run("a", PROMPT)
    host.settle()
    assert host.run("b", PROMPT).num_external_tokens == 0
    assert host.observer["put_failed"] == host.observer["save_failed"] >= 5
    assert host.observer["saved_bytes"] == 0


@BOTH_PROMISES
def test_a_stalled_read_is_given_up_at_the_deadline_and_lands_only_in_staging(
    make_host, promise: str
):
    store, _keys = store_prompt(make_host)
    gate = Gate()
    stalled = StallingStore(store, gate=gate, operations={"read_into"})
    host = make_host(store=stalled, promise=promise, load_timeout_seconds=0.2)
    started = time.monotonic()
    request = host.add("reader", PROMPT)
    host.admit(request)
    host.prefill(request)
    assert time.monotonic() - started < 5
    # The reads come back now, long after their deadline; `finish` poisons the blocks and a new
    # request gets them: a late write into either would be seen.
    host.finish(request)
    second = host.add("second", list(range(500, 541)))
    host.admit(second)
    host.prefill(second)
    gate.release()
    host.settle()
    host.prefill(second)
    for rank in host.ranks:
        from kvferry.testing.host import prefix_seeds

        assert rank.wrong_tokens(second, prefix_seeds(second), 41) == 0
    staging = host.parts[0].staging
    deadline = time.monotonic() + 5
    while staging.num_free < staging.num_slots and time.monotonic() < deadline:
        host.step([])
        time.sleep(0.005)
    assert staging.num_free == staging.num_slots


def test_a_worker_waits_for_its_reads_and_not_for_ever(make_host):
    store, _keys = store_prompt(make_host)
    gate = Gate()
    host = make_host(store=StallingStore(store, gate=gate, operations={"read_into"}))
    worker = host.ranks[0].worker
    host.scheduler.lookup(host.add("reader", PROMPT), 0)
    host.step([])  # starts the reads
    started = time.monotonic()
    worker.wait(0.05)
    assert 0.05 <= time.monotonic() - started < 2
    assert host.step([])  # no news
    gate.release()
    worker.wait(10)
    assert time.monotonic() - started < 5
    assert not host.step([])
    started = time.monotonic()
    worker.wait(10)  # nothing is read any more
    assert time.monotonic() - started < 5


def test_close_does_not_wait_for_a_stalled_read(make_host):
    store, _keys = store_prompt(make_host)
    gate = Gate()
    host = make_host(
        store=StallingStore(store, gate=gate, operations={"read_into"}), load_timeout_seconds=0.05
    )
    host.run("reader", PROMPT)
    started = time.monotonic()
    host.close()
    assert time.monotonic() - started < 3
    gate.release()


@pytest.mark.parametrize("when", ["before the plan", "after the plan"])
def test_an_abort_while_a_hit_is_fetched_gives_the_staging_back(make_host, when: str):
    store, _keys = store_prompt(make_host)
    gate = Gate()
    host = make_host(store=StallingStore(store, gate=gate, operations={"read_into"}))
    request = host.add("aborted", PROMPT)
    assert host.scheduler.lookup(request, 0).num_tokens is None
    if when == "after the plan":
        host.step([])
        assert gate.wait_for_arrival()
    host.finish(request)
    host.step([])
    gate.release()
    host.settle()
    staging = host.parts[0].staging
    assert staging.num_free == staging.num_slots


def test_an_abort_between_allocation_and_plan_gives_the_staging_back(make_host):
    store, _keys = store_prompt(make_host)
    host = make_host(store=store)
    request = host.add("aborted", PROMPT)
    host.admit(request)
    host.finish(request)
    host.step([])
    host.settle()
    staging = host.parts[0].staging
    assert staging.num_free == staging.num_slots
    assert host.run("next", PROMPT).num_external_tokens == 40


@pytest.mark.parametrize("cacheable", [True, False])
def test_tokens_that_nobody_promised_are_reported_as_failed(make_host, cacheable: bool):
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
    """Index mode: the step that finds the load broken also completes a later chunk."""
    prompt = list(range(60))
    store, keys = store_prompt(make_host, prompt=prompt[:41])
    damaged = CorruptingStore(store, damage=flip_bit(8 * 4200), keys={keys[1]})
    host = make_host(store=damaged, promise="index")
    request = host.add("reader", prompt)
    hit = host.admit(request)
    assert hit == 40
    host.step([request], tokens=20)
    assert host.invalid_block_ids
    host.settle()
    assert host.observer["put_stored"] == 0
    assert request.num_computed_tokens == 8
    host.prefill(request)
    host.settle()
    host.finish(request)
    assert make_host(store=store).run("later", prompt).num_external_tokens == 56


def test_blocks_outside_the_cache_never_reach_a_copy(make_host):
    store, _keys = store_prompt(make_host)
    host = make_host(store=store)
    request = host.add("bad blocks", PROMPT)
    while (answer := host.scheduler.lookup(request, 0)).num_tokens is None:
        host.step([])
    host.scheduler.update_after_alloc(request, ([9999] * 11,), answer.num_tokens)
    host.step([])
    assert host.invalid_block_ids == {9999}


def test_no_thread_survives_close(make_host):
    store, _keys = store_prompt(make_host)
    before = set(threading.enumerate())
    host = make_host(store=store)
    host.run("reader", PROMPT)
    assert set(threading.enumerate()) > before
    host.close()
    assert set(threading.enumerate()) <= before


def test_a_slow_store_is_cut_short_and_then_left_alone(make_host):
    """Promise 4: a store slower than computing costs one deadline, not one per prompt."""
    prompt = list(range(400))
    store, _keys = store_prompt(make_host, prompt=prompt)
    gate = Gate()
    host = make_host(
        store=StallingStore(store, gate=gate, operations={"read_into"}), load_timeout_seconds=0.3
    )
    host.run("teaches the speed of prefill", list(range(5000, 5400)), budget=200)
    host.run("stalls", prompt)
    assert host.observer["miss_deadline"] == 1
    started = time.monotonic()
    host.run("does not wait again", prompt)
    assert host.observer["hits_recomputed"] == 1
    assert time.monotonic() - started < 2
    gate.release()


def test_time_spent_in_the_engine_is_not_held_against_the_store(make_host):
    """The step that carries a prefetch may compute for seconds: the store did not take them."""
    store, _keys = store_prompt(make_host)
    host = make_host(store=store)
    request = host.add("reader", PROMPT)
    assert host.scheduler.lookup(request, 0).num_tokens is None
    clock = host.scheduler._clock
    host.scheduler._lookups._clock = lambda: clock() + 100.0
    while (ticket := host.scheduler._tickets.get(1)) is not None and not ticket.complete:
        host.step([])
    assert ticket is not None
    assert ticket.seconds < 50


def test_a_request_preempted_and_admitted_in_one_step_gets_its_load(make_host):
    """A host that preempts everything (a cache reset) admits again before it builds the plan."""
    store, _keys = store_prompt(make_host)
    host = make_host(store=store, promise="index")
    request = host.add("reader", PROMPT)
    assert host.admit(request) == 40
    host.prefill(request)
    host._release(request)
    request.num_computed_tokens = 0
    assert host.admit(request) == 40
    host.step([request], tokens=1, preempted={"reader"})
    host.prefill(request)


def test_a_load_of_a_request_that_lost_its_blocks_is_dropped(make_host):
    store, _keys = store_prompt(make_host)
    host = make_host(store=store)
    request = host.add("reader", PROMPT)
    assert host.admit(request) == 40
    host.preempt(request)
    host.settle()
    assert host.observer["loaded_tokens"] == 0
    staging = host.parts[0].staging
    assert staging.num_free == staging.num_slots


def test_chunks_of_a_step_whose_forward_failed_are_stored_by_the_next_request(make_host):
    host = make_host()
    request = host.add("fails", PROMPT)
    host.admit(request)
    request.num_scheduled_tokens = len(PROMPT)
    plan = host.scheduler.build_plan(HostStep([request], set(), set()))
    assert len(plan.saves) == 5
    with (
        pytest.raises(RuntimeError, match="no memory"),
        host.ranks[0].lifecycle.step(plan, set()),
    ):
        raise RuntimeError("no memory")
    host.finish(request)
    host.step([])
    host.run("succeeds", PROMPT)
    host.settle()
    assert host.observer["put_stored"] == 5


def test_an_idle_host_is_kept_stepping_until_saves_are_reported_but_not_for_ever(make_host):
    gate = Gate()
    store = StallingStore(MemoryStore("x"), gate=gate, operations={"put"})
    host = make_host(store=store)
    host.run("writer", PROMPT)
    assert host.scheduler.has_pending_work()
    clock = host.scheduler._clock
    host.scheduler._clock = lambda: clock() + SAVES_SECONDS
    assert not host.scheduler.has_pending_work()
    host.scheduler._clock = clock
    gate.release()
    host.settle()
    assert not host.scheduler.has_pending_work()


def test_a_copy_that_breaks_gives_its_staging_back(make_host, monkeypatch):
    store, _keys = store_prompt(make_host)
    host = make_host(store=store)
    request = host.add("reader", PROMPT)
    host.admit(request)

    def broken(*args):
        raise ValueError("a tensor that nobody expected")

    monkeypatch.setattr(RankRows, "scatter_chunk", broken)
    with pytest.raises(ValueError, match="nobody expected"):
        host.step([request], tokens=1)
    staging = host.parts[0].staging
    assert staging.num_free == staging.num_slots


def test_a_hit_waits_for_staging_that_others_are_about_to_leave(make_host):
    prompts = [list(range(100 * i, 100 * i + 41)) for i in range(3)]
    store = MemoryStore("faults")
    writer = make_host(store=store)
    for i, prompt in enumerate(prompts):
        writer.run(f"w{i}", prompt)
    writer.settle()
    # Loads may use six of these eight slots: one prompt's five chunks at a time.
    host = make_host(store=store, num_staging_chunks=8)
    requests = [host.add(f"r{i}", prompt) for i, prompt in enumerate(prompts)]
    assert [host.scheduler.lookup(request, 0).num_tokens for request in requests] == [None] * 3
    for request in requests:
        assert host.admit(request) == 40
        host.prefill(request)
        host.finish(request)
    assert host.observer["hits_without_staging"] == 0


def test_a_hit_does_not_wait_for_staging_for_ever(make_host):
    prompts = [list(range(100 * i, 100 * i + 41)) for i in range(2)]
    store = MemoryStore("faults")
    writer = make_host(store=store)
    for i, prompt in enumerate(prompts):
        writer.run(f"w{i}", prompt)
    writer.settle()
    host = make_host(store=store, num_staging_chunks=8)
    holder, waiting = (host.add(f"r{i}", prompt) for i, prompt in enumerate(prompts))
    assert host.scheduler.lookup(holder, 0).num_tokens is None  # and is never admitted
    assert host.scheduler.lookup(waiting, 0).num_tokens is None
    clock = host.scheduler._clock
    host.scheduler._lookups._clock = lambda: clock() + 6.0
    assert host.scheduler.lookup(waiting, 0).num_tokens is None  # a prefetch of what has room
    host.step([])
    host.settle()
    assert host.scheduler.lookup(waiting, 0).num_tokens == 8


def test_several_direct_loads_of_a_step_share_one_deadline(make_host):
    prompts = [list(range(100 * i, 100 * i + 41)) for i in range(4)]
    store = MemoryStore("faults")
    writer = make_host(store=store)
    for i, prompt in enumerate(prompts):
        writer.run(f"w{i}", prompt)
    writer.settle()
    gate = Gate()
    stalled = StallingStore(store, gate=gate, operations={"read_into"})
    host = make_host(store=stalled, promise="index", load_timeout_seconds=0.3)
    requests = [host.add(f"r{i}", prompt) for i, prompt in enumerate(prompts)]
    assert [host.admit(request) for request in requests] == [40] * 4
    started = time.monotonic()
    host.step(requests, tokens=1)
    assert time.monotonic() - started < 0.9
    assert host.observer["load_failed_chunks"] == 20
    gate.release()
    for request in requests:
        host.prefill(request)


def test_a_refused_direct_load_starts_no_read(make_host):
    """One bad block among good ones: what was read for the others would come late."""
    store, _keys = store_prompt(make_host)
    gate = Gate()
    stalled = StallingStore(store, gate=gate, operations={"read_into"})
    host = make_host(store=stalled, promise="index")
    request = host.add("bad blocks", PROMPT)
    assert host.scheduler.lookup(request, 0).num_tokens == 40
    host.scheduler.update_after_alloc(request, ([1, 2, 3, 4, 5, 6, 7, 8, 9, 9999],), 40)
    host.step([])
    assert host.invalid_block_ids == {1, 2, 3, 4, 5, 6, 7, 8, 9, 9999}
    gate.release()
    host.close()
    assert host.ranks[0].caches["0.0"].isnan().all()


def test_a_stalled_store_holds_up_one_step_not_every_step(make_host):
    store, _keys = store_prompt(make_host)
    other = list(range(700, 741))
    writer = make_host(store=store)
    writer.run("other", other)
    writer.settle()
    gate = Gate()
    host = make_host(
        store=StallingStore(store, gate=gate, operations={"read_into"}),
        promise="index",
        load_timeout_seconds=0.5,
    )
    host.run("waits", PROMPT)
    started = time.monotonic()
    host.run("does not", other)
    assert time.monotonic() - started < 0.4
    assert host.observer["miss_deadline"] == 10
    gate.release()


def test_a_bystander_of_a_failed_load_saves_nothing_more(make_host):
    """It may share the failed blocks by the host's own prefix cache, and not be computed again."""
    store, keys = store_prompt(make_host)
    damaged = CorruptingStore(store, damage=flip_bit(8 * 4200), keys={keys[1]})
    host = make_host(store=damaged, promise="index")
    bystander = host.add("bystander", list(range(300, 341)))
    host.admit(bystander)
    host.step([bystander], tokens=4)
    failing = host.add("failing", PROMPT)
    host.admit(failing)
    host.step([failing, bystander], tokens=1)
    host.prefill(bystander)
    host.prefill(failing)
    host.settle()
    assert host.observer["put_stored"] == 1, "the failed chunk, by the request that computed it"
    host.finish(bystander)
    host.run("afterwards", list(range(300, 341)))
    host.settle()
    assert host.observer["put_stored"] == 6


def test_a_host_without_reports_goes_on_saving_after_a_failed_load(make_host):
    store, keys = store_prompt(make_host)
    damaged = CorruptingStore(store, damage=flip_bit(8 * 4200), keys={keys[1]})
    host = make_host(store=damaged, carries_worker_meta=False)
    drop_meta(host)
    host.run("fails", PROMPT)
    assert host.invalid_block_ids
    host.run("another", list(range(300, 341)))
    host.settle()
    stored = host.observer["put_stored"]
    assert stored >= 5
    for key in list(store._values):
        store.delete(key)
    host.run("evicted since", list(range(300, 341)))
    host.settle()
    assert host.observer["put_stored"] == stored + 5, "nothing is thought to be under way for ever"


class ColdStore(WrapperStore):
    """Says of every record that it is not in memory."""

    def open_read(self, key):
        source = super().open_read(key)
        if source is not None:
            source.is_cached = lambda: False
        return source


@pytest.mark.parametrize("num_staging_chunks", [64, 2])
def test_a_record_on_a_medium_is_read_whole_and_its_staging_given_back(
    make_host, num_staging_chunks: int
):
    store, keys = store_prompt(make_host)
    host = make_host(store=ColdStore(store), promise="index", num_staging_chunks=num_staging_chunks)
    assert host.run("reader", PROMPT).num_external_tokens == 40
    damaged = CorruptingStore(ColdStore(store), damage=flip_bit(-1), keys={keys[3]})
    again = make_host(store=damaged, promise="index", num_staging_chunks=num_staging_chunks)
    again.run("reader", PROMPT)
    assert again.observer["miss_bad_leaf"] == 1
    for tried in (host, again):
        tried.settle()
        staging = tried.parts[0].staging
        assert staging.num_free == staging.num_slots


def drop_meta(host) -> None:
    """Make a host forget what workers say, as hosts before vLLM 0.32 do."""
    learn = host.scheduler.update_output

    def update_output(output):
        learn(msgspec.structs.replace(output, meta=None))

    host.scheduler.update_output = update_output

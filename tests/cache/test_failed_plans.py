"""Plans that fail, and reports in an unusual order: no slot is lost, and no KV is wrong."""

from __future__ import annotations

import gc
import weakref
from dataclasses import replace
from typing import Any

import pytest

from benchmarks.host import HostStep
from kvferry.blocks.copies import BlockCopies
from kvferry.cache.deciding.lookup import Fetching
from kvferry.cache.deciding.policy import LoadPolicy
from kvferry.cache.messages import (
    PUT_OFF,
    Filled,
    RankReport,
    SharedStorageMeta,
)
from kvferry.contract.guard_scheduler import GuardedScheduler
from kvferry.contract.messages import WorkerOutput
from kvferry.errors import ConfigError, ContractError
from kvferry.observe import Counters
from kvferry.store.file.store import FileStore
from kvferry.store.io_pool import IOPool, Job
from kvferry.store.memory import MemoryStore
from kvferry.testing.clock import FakeClock
from kvferry.testing.faults import Gate, StallingStore
from tests.cache.hosts import make_groups
from tests.cache.moving.simulated_device import job_without_a_thread
from tests.cache.pools import check_pool

from .keeping import NUM_CHUNKS, PROMPT, assert_settles, keys_of, open_store, wait_for


def build_plan(host: Any, *requests: Any) -> Any:
    return host.scheduler.build_plan(HostStep(list(requests), set(), set()))


@pytest.fixture
def stored(make_host) -> MemoryStore:
    """A store that holds the prompt."""
    store = MemoryStore("review")
    host = make_host(store=store)
    host.run("writer", PROMPT)
    host.settle()
    return store


def test_a_request_with_wrong_tables_takes_no_slots_and_stops_no_saves_of_others(make_host, caplog):
    host = make_host()
    good, bad = host.add("good", PROMPT), host.add("bad", range(500, 541))
    for request in (good, bad):
        host.admit(request)
        request.num_scheduled_tokens = 41
    bad.block_ids = ()
    plan = build_plan(host, good, bad)
    assert [save.chunk.key for save in plan.saves] == keys_of(host)
    assert host.pool.num_taken == NUM_CHUNKS
    assert host.observer["save_refused"] == 1
    assert "nothing more of bad is saved" in caplog.text
    assert not build_plan(host, bad).saves


@pytest.mark.parametrize("part", ["plan", "poll_writes"])
def test_loads_of_a_plan_that_failed_are_in_no_later_plan(make_host, stored, monkeypatch, part):
    host = make_host(store=stored)
    role = host.scheduler
    host.scheduler = GuardedScheduler(role, Counters(), block_size=host.block_size)
    request = host.add("reader", [*PROMPT, *range(50)])
    host.admit(request)
    with monkeypatch.context() as patch:
        patch.setattr(role.saves, part, lambda *_: 1 / 0)
        plan = build_plan(host, request)
    assert plan.lost_block_ids
    check_pool(host.pool)
    assert host.pool.num_taken == 0
    assert not build_plan(host, request).plan.loads


@pytest.mark.parametrize("putting_off", [0, 1])
def test_a_part_that_was_put_off_is_saved_again_though_a_plan_came_between(
    make_host, tmp_path, putting_off: int
):
    host = make_host(
        store=f"file://{tmp_path}/store", groups=make_groups(num_kv_heads=4), world_size=2
    )
    request = host.add("writer", PROMPT)
    host.admit(request)
    request.num_scheduled_tokens = len(PROMPT)
    (first, *_) = build_plan(host, request).saves
    for rank in (putting_off, 1 - putting_off):
        slot = first.chunk.slot
        ended = Filled(slot, PUT_OFF if rank == putting_off else None)
        report = RankReport(rank=rank, pool=host.pool.pool_id, filled=(ended,))
        host.scheduler.update_output(WorkerOutput(meta=SharedStorageMeta(reports=(report,))))
        again = build_plan(host, request).saves
    assert [save.chunk.key for save in again] == [first.chunk.key]


def test_what_was_written_before_a_reset_keeps_its_namespace(make_host, tmp_path):
    gate = Gate()
    store = StallingStore(FileStore(tmp_path / "store"), gate=gate, operations={"put"})
    stores = (store, store)
    host = make_host(
        store=store, rank_stores=stores, groups=make_groups(num_kv_heads=4), world_size=2
    )
    request = host.add("writer", PROMPT)
    host.admit(request)
    host.prefill(request)
    slots = [host.pool.find(key) for key in keys_of(host)]
    # All ranks have hashed them, so each has a thread that writes it, or waits for one.
    wait_for(lambda: host.step([]) and not any(slot.num_sealing for slot in slots))
    assert gate.wait_for_arrival()
    assert host.scheduler.reset()
    gate.release()
    wait_for(lambda: host.step([]) and host.observer["put_stored"] == NUM_CHUNKS)
    reader = make_host(store=open_store(tmp_path / "store"), groups=make_groups(num_kv_heads=4))
    assert reader.run("reader", PROMPT).num_external_tokens == 40
    assert not reader.observer["records_corrupt"]


def test_a_request_of_which_the_host_takes_more_than_promised_is_a_failed_load(make_host, stored):
    host = make_host(store=stored)
    request = host.add("reader", [*PROMPT, *range(50)])
    host.admit(request)  # its load is not planned
    other = host.add("other", [*PROMPT, *range(50)])
    hit = host.scheduler.lookup(other, 0).num_tokens
    with pytest.raises(ContractError, match="never promised"):
        host.scheduler.update_after_alloc(other, request.block_ids, hit + host.block_size)


def test_nothing_is_saved_of_a_request_whose_load_was_not_planned(make_host):
    """Also by plans that were made before its failure was reported."""
    host = make_host()
    host.scheduler = GuardedScheduler(host.scheduler, Counters(), block_size=host.block_size)
    request = host.add("reader", PROMPT)
    host.admit(request)
    host.scheduler.update_after_alloc(request, request.block_ids, 24)
    request.num_computed_tokens, request.num_scheduled_tokens = 24, 8
    assert build_plan(host, request).lost_block_ids
    request.num_computed_tokens = 32
    assert not getattr(build_plan(host, request), "saves", ())


def test_a_load_that_fails_in_any_way_names_its_chunks(make_host, stored, monkeypatch):
    host = make_host(store=stored)
    request = host.add("reader", [*PROMPT, *range(50)])
    assert host.admit(request) == 40

    def scatter(*_args: object, **_kwargs: object) -> None:
        raise RuntimeError("out of something")

    with monkeypatch.context() as patch:
        patch.setattr(BlockCopies, "scatter", scatter)
        host.step([request], tokens=0)
    assert host.invalid_block_ids == set(request.block_ids[0][:10])
    assert all(key in host.scheduler.requests.unreadable for key in keys_of(host))
    assert host.pool.num_taken == 0
    host.prefill(request)
    host.finish(request)
    assert host.run("next", PROMPT).num_external_tokens == 40


def test_a_hit_cut_short_for_want_of_windows_is_looked_for_in_linear_time(make_host, monkeypatch):
    (full,) = make_groups()
    host = make_host(groups=(full, replace(full, window=9)))
    request = host.add("reader", range(8 * 100 + 1))
    state = host.scheduler.requests.by_id["reader"]
    for number, key in enumerate(state.keys.keys):
        slot = host.pool.fetch(key, number * 8, frozenset([0]))
        host.pool.pop_orders()
        host.pool.report_filled(slot.index)
    search = host.scheduler._search(request, state)
    search.state = Fetching(until=0.0, since=0.0)
    looks = []
    holds = host.pool.holds
    monkeypatch.setattr(host.pool, "holds", lambda *args: looks.append(1) or holds(*args))
    assert host.scheduler.lookup(request, 0).num_tokens == 0
    assert len(looks) < 3 * 100


def test_a_record_without_a_thread_to_begin_it_is_held_and_its_slot_comes_free(
    make_host, tmp_path, monkeypatch
):
    url, groups = f"file://{tmp_path}/store", make_groups(num_kv_heads=4)
    host = make_host(store=url, groups=groups, world_size=2)

    def refuse(_pool: object, _run: object) -> Job[object]:
        return job_without_a_thread()

    request = host.add("writer", PROMPT)
    host.admit(request)
    with monkeypatch.context() as patch:
        patch.setattr(IOPool, "submit", refuse)
        host.prefill(request)
    assert_settles(host)
    assert host.observer["save_failed"] == NUM_CHUNKS
    host.finish(request)
    assert host.run("reader", PROMPT).num_external_tokens == 40


def test_more_memory_than_there_are_addresses_is_refused_in_one_line(make_host):
    with pytest.raises(ConfigError, match="set memory_bytes lower"):
        make_host(memory_bytes="1000000TiB")


def test_work_in_memory_is_let_go_of_although_threads_hang():
    pool, gate = IOPool(2, "test"), Gate()
    jobs = [pool.submit(lambda _job: gate.pass_through()) for _ in range(2)]

    class Item:
        pass

    items = [Item(), Item()]
    let_go = [weakref.ref(item) for item in items]
    assert pool.spread(items, lambda _item: None) == [None, None]
    items.clear()
    gc.collect()
    assert [item() for item in let_go] == [None, None]
    gate.release()
    assert all(job.wait(10) for job in jobs)
    assert pool.close(10)


def test_the_speed_of_prefill_is_measured_right_where_steps_overlap():
    """The plan of a prefill is built while a decode step runs, whose output comes first."""
    clock = FakeClock()
    policy = LoadPolicy(5.0, clock)
    assert policy.begin_step(32, loads=False) == 0
    clock.advance(0.001)
    prefill = policy.begin_step(8192, loads=False)
    clock.advance(0.004)
    policy.end_step(0)  # of the decode step
    clock.advance(0.8)
    policy.end_step(prefill)
    assert policy.wait_seconds(8192) > 0.5

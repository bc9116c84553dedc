"""Plans that fail, and reports in an unusual order: no slot is lost, and no KV is wrong."""

from __future__ import annotations

import gc
import weakref
from dataclasses import replace
from functools import reduce
from typing import Any

import pytest

from benchmarks.host import HostStep
from kvferry.cache.deciding.search import Fetching
from kvferry.contract.driver import StepDriver
from kvferry.contract.guard_scheduler import GuardedScheduler
from kvferry.contract.messages import Plan
from kvferry.errors import ConfigError, ContractError
from kvferry.observe import Counters
from kvferry.store.io_pool import IOPool
from kvferry.store.memory import MemoryStore
from kvferry.testing.faults import Gate
from tests.cache.hosts import make_groups
from tests.cache.pools import check_pool, slots_of

from .keeping import NUM_CHUNKS, PROMPT, keys_of


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
    host.scheduler = GuardedScheduler(
        role, Counters(), block_size=host.block_size, checks_host=False
    )
    request = host.admitted("reader", [*PROMPT, *range(50)])
    with monkeypatch.context() as patch:
        patch.setattr(role.saves, part, lambda *_: 1 / 0)
        plan = build_plan(host, request)
    assert plan.lost_block_ids
    check_pool(host.pool, role.holds())
    assert host.pool.num_taken == 0
    assert not build_plan(host, request).plan.loads


@pytest.mark.parametrize("hook", ["plan", "_follow_identity", "start_load", "collect"])
def test_a_step_that_was_planned_before_the_host_heard_of_a_failed_load_saves_nothing(
    make_host, stored, monkeypatch, hook
):
    """As on a host with two steps in flight: the second computes on blocks that were not filled."""
    host = make_host(store=stored)
    role, worker = host.scheduler, host.ranks[0].worker
    guard = host.scheduler = GuardedScheduler(role, Counters(), block_size=host.block_size)
    driver = StepDriver(worker)
    before = set(stored.catalogue().scan())
    request = host.admitted("reader", [*PROMPT, *range(50)])
    assert request.num_external_tokens == 40

    def planned() -> Plan:
        plan = build_plan(host, request)
        request.num_computed_tokens += 24
        return plan

    request.num_scheduled_tokens = 24
    raise_once(monkeypatch, role.saves if hook == "plan" else worker, hook)
    plans, outputs = [planned(), planned()], []
    for plan in plans:
        with driver.step(plan, set()):
            pass
        outputs.append(driver.output)
    assert outputs[0].invalid_block_ids
    assert getattr(plans[1], "plan", plans[1]).saves
    for output in outputs:
        guard.update_output(output)
    assert role.requests.by_id["reader"].saves_blocked
    host.settle()
    assert set(stored.catalogue().scan()) == before


@pytest.mark.parametrize("name", ["_follow_identity", "_tell_of_loads", "io.loaded", "io.fetch"])
def test_a_fault_anywhere_in_beginning_a_step_keeps_no_slot(make_host, stored, monkeypatch, name):
    """The plan has a load, saves, and a fetch for another request."""
    host = make_host(store=stored)
    other = list(range(200, 241))
    host.run("writer", other)
    host.settle()
    role = host.scheduler
    role.pool.clear()
    request, waiting = host.admitted("reader", [*PROMPT, *range(50)]), host.add("other", other)
    while not role.pool.has_work:
        assert role.lookup(waiting, 0).num_tokens is None
    *path, last = name.split(".")
    (rank,) = host.ranks
    rank.driver = StepDriver(rank.worker)  # that of an engine, which goes on
    raise_once(monkeypatch, reduce(getattr, path, rank.worker), last)
    host.step([request], tokens=24)
    assert host.invalid_block_ids
    host.settle()
    assert all(slot.is_idle for slot in slots_of(host.pool).values())
    assert not role.has_work()


def raise_once(patch: pytest.MonkeyPatch, part: Any, name: str) -> None:
    real, left = getattr(part, name), [ZeroDivisionError()]

    def call(*args: Any) -> Any:
        if left:
            raise left.pop()
        return real(*args)

    patch.setattr(part, name, call)


def test_a_promise_that_a_reset_dropped_before_its_plan_is_a_failed_load(make_host, stored):
    """The host preempted nothing: it computes on the blocks."""
    host = make_host(store=stored)
    role = host.scheduler
    host.scheduler = GuardedScheduler(role, Counters(), block_size=host.block_size)
    request = host.admitted("reader", PROMPT)
    (promised,) = (set(table[: NUM_CHUNKS * 8 // host.block_size]) for table in request.block_ids)
    assert host.scheduler.reset()
    host.step([request], tokens=1)
    assert host.invalid_block_ids == promised
    host.complete(request)  # the host checks what it computed
    check_pool(host.pool, role.holds())


def test_a_request_of_which_the_host_takes_more_than_promised_is_a_failed_load(make_host, stored):
    host = make_host(store=stored)
    first = host.add("first", [*PROMPT, *range(50)])
    host.admit(first)  # memory has its chunks now
    request = host.add("reader", [*PROMPT, *range(50)])
    hit = host.scheduler.lookup(request, 0).num_tokens
    with pytest.raises(ContractError, match="never promised"):
        host.scheduler.update_after_alloc(request, first.block_ids, hit + host.block_size)


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
    looks, rules = [], host.scheduler._searches.rules
    groups = rules.groups
    monkeypatch.setattr(rules, "groups", lambda *args: looks.append(1) or groups(*args))
    assert host.scheduler.lookup(request, 0).num_tokens == 0
    assert 100 <= len(looks) < 3 * 100


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

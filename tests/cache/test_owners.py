"""Pins, loads, records and reasons keep their owner when something unforeseen comes between."""

from __future__ import annotations

import threading
from functools import reduce
from typing import Any

import pytest

from benchmarks.host import HostStep
from kvferry.cache.deciding.host_pool import NO_KEY
from kvferry.cache.deciding.scheduler import CacheScheduler
from kvferry.cache.messages import CacheMeta, Filled, RankReport
from kvferry.contract.guard_scheduler import GuardedScheduler
from kvferry.contract.handover import STAMP
from kvferry.contract.messages import WorkerOutput
from kvferry.observe import Counters
from kvferry.record.check import ReadFault
from kvferry.store.base import ABSENT
from kvferry.store.kind import Opening
from kvferry.store.servers.remote import RemoteStore
from kvferry.types import RequestOptions
from tests.cache.keeping import PROMPT, keys_of, wait_for
from tests.cache.pools import check_pool
from tests.cache.test_failed_plans import stored
from tests.store.servers.remote_client import DictClient

__all__ = ["stored"]

HIT = 40


def guard(host) -> None:
    """Let faults of the role end in the guard, as in an engine."""
    host.scheduler = GuardedScheduler(
        host.scheduler, Counters(), block_size=host.block_size, checks_host=False
    )
    for rank in host.ranks:
        rank.driver._faults._strict = False


def test_a_promise_ends_with_the_verdict_on_its_record(make_host, stored):
    host = make_host(store=stored)
    host.run("warm", PROMPT)
    host.settle()
    request = host.add("r", PROMPT)
    assert host.scheduler.lookup(request, 0).num_tokens == HIT  # and no blocks are free
    wrong, namespace = keys_of(host)[2:], host.scheduler.requests.namespace
    host.scheduler.audits.take_out(wrong, ReadFault.NOT_FINITE, namespace)
    wait_for(lambda: all(stored.where(key) is ABSENT for key in wrong))
    answer = host.scheduler.lookup(request, 0)
    while answer.num_tokens is None:
        host.step([])
        answer = host.scheduler.lookup(request, 0)
    assert answer.num_tokens < HIT


class SlowPuts(DictClient):
    """Writes only while `gate_of_puts` is open."""

    def __init__(self, values) -> None:
        super().__init__(values)
        self.gate_of_puts = threading.Event()

    def put(self, *arguments, **options):
        assert self.gate_of_puts.wait(60.0)
        return super().put(*arguments, **options)


@pytest.mark.parametrize("resets", [False, True])
def test_a_record_that_is_refused_while_it_is_written_goes_also_after_a_reset(make_host, resets):
    values: dict = {}
    client = SlowPuts(values)
    store = RemoteStore("dict://x", client, Opening(namespace=b"\1" * 32))
    host = make_host(store=store, load_timeout_seconds=60.0)
    request = host.admitted("w", PROMPT)
    while left := len(PROMPT) - request.num_computed_tokens:
        host.step([request], tokens=left)

    def written():
        host.step([])
        return [slot for slot in host.pool._slots.values() if slot.is_writing]

    wait_for(lambda: len(written()) == len(keys_of(host)))
    slots = written()
    host.scheduler.saves._refuse(slots[2])  # a rank said: not finite
    refused = {slot.key.hex() for slot in slots[2:]}
    if resets:
        host.scheduler.reset()
    client.gate_of_puts.set()
    wait_for(lambda: not written())
    wait_for(lambda: not any(name.split("/")[-1] in refused for name in values))
    assert values  # those before stay


def test_a_request_that_waits_again_after_a_reset_is_explained_by_what_it_got(make_host, stored):
    host = make_host(store=stored)
    request = host.admitted("r", PROMPT, options=RequestOptions(explain=True))
    host.step([request])
    host.preempt(request)
    host.scheduler.reset()
    host.scheduler.lookup(request, 0)
    assert STAMP in host.finish(request)


def fault_once(patch: Any, part: Any, name: str) -> None:
    """The next call raises; those after it do what they do."""
    real, faults = getattr(part, name), iter([True])

    def call(*arguments: Any, **options: Any) -> Any:
        if next(faults, False):
            raise ZeroDivisionError
        return real(*arguments, **options)

    patch.setattr(part, name, call)


@pytest.mark.parametrize("by", ["the host", "another part"])
@pytest.mark.parametrize(
    "part", ["requests.begin_epoch", "_searches.begin_epoch", "pool.clear", "saves.begin_epoch"]
)
def test_an_epoch_that_began_half_begins_again(make_host, stored, monkeypatch, part, by):
    host = make_host(store=stored)
    role = host.scheduler
    guard(host)
    host.run("before", PROMPT)
    *path, name = part.split(".")
    with monkeypatch.context() as patch:
        if by == "the host":
            fault_once(patch, reduce(getattr, path, role), name)
            assert host.scheduler.reset() is False
        else:
            role.identity.reset()
            fault_once(patch, reduce(getattr, path, role), name)
            host.scheduler.on_new_request(host.add("met the fault", PROMPT))
        # The records of before are of other weights.
        assert host.run("reader", PROMPT).num_external_tokens == 0
    host.settle()
    namespace = role.identity.state.namespace
    assert role.requests.namespace == role.pool.namespace == namespace
    slots = [slot for slot in host.pool._slots.values() if slot.key != NO_KEY]
    assert {slot.namespace for slot in slots} == {namespace}
    check_pool(host.pool, role.holds())


@pytest.mark.parametrize("part", ["policy.end_step", "pool.report_filled", "saves.learn"])
def test_after_a_lost_report_of_failed_loads_nothing_is_saved_that_computed_on_them(
    make_host, stored, monkeypatch, part
):
    host = make_host(store=stored)
    role = host.scheduler
    guard(host)
    first = host.admitted("first", [*PROMPT, *range(50)])
    other = host.admitted("other", [9] * 60)
    host.step([first, other])
    key, told = (
        role.requests.by_id["first"].keys.keys[0],
        {"pool": role.pool.pool_id, "rank": 0, "failures": 1},
    )
    report = RankReport(
        timed=5, filled=(Filled(0),), failed_keys=(key,), failed_requests=frozenset(["first"]),
        **told,
    )  # fmt: skip
    *path, name = part.split(".")
    with monkeypatch.context() as patch:
        fault_once(patch, reduce(getattr, path, role), name)
        host.scheduler.update_output(WorkerOutput(meta=CacheMeta(reports=(report,))))
    assert role.requests.by_id["other"].saves_blocked
    host.scheduler.update_output(WorkerOutput(meta=CacheMeta(reports=(RankReport(**told),))))
    assert role.requests.by_id["other"].saves_blocked


def test_failures_whose_report_was_lost_may_be_of_any_request(make_host, stored):
    host = make_host(store=stored)
    role = host.scheduler
    host.step([host.admitted("a", [9] * 60)])
    report = RankReport(pool=role.pool.pool_id, rank=0, failures=1)
    role.update_output(WorkerOutput(meta=CacheMeta(reports=(report,))))
    assert role.requests.by_id["a"].saves_blocked
    assert role.saves.failures_known == (1,)


@pytest.mark.parametrize(
    "part", ["saves.await_reports", "_refusal", "_follow_identity", "_accounts.ended"]
)
@pytest.mark.parametrize("has_run", [False, True], ids=["before its plan", "after it"])
def test_nothing_stays_of_a_request_whose_end_met_a_fault(
    make_host, stored, monkeypatch, part, has_run
):
    host = make_host(store=stored, audit=1.0)
    role = host.scheduler
    guard(host)
    host.run("warm", PROMPT)
    host.settle()
    request = host.admitted("ends", [*PROMPT, *range(50)])
    if has_run:
        host.scheduler.build_plan(HostStep([], set(), set()))
    state = role.requests.by_id["ends"]
    *path, name = part.split(".")
    with monkeypatch.context() as patch:
        fault_once(patch, reduce(getattr, path, role), name)
        host.scheduler.request_finished(request, request.block_ids)
    assert state not in role.requests.at_work
    plan = host.scheduler.build_plan(HostStep([], set(), set()))
    assert not getattr(getattr(plan, "plan", plan), "loads", ())
    assert host.pool.num_pins == 0
    check_pool(host.pool, role.holds())


def test_a_load_that_is_not_audited_is_reported_in_the_next_plan_after_a_fault(
    make_host, stored, monkeypatch
):
    host = make_host(store=stored)
    role = host.scheduler
    guard(host)
    request = host.admitted("r", [*PROMPT, *range(50)])
    load = role.requests.by_id["r"].load[0]
    host.step([request])
    role.audits._unchecked.append(load)
    with monkeypatch.context() as patch:
        fault_once(patch, role.requests, "planned")
        host.scheduler.build_plan(HostStep([], set(), set()))
    plan = host.scheduler.build_plan(HostStep([], set(), set()))
    assert getattr(plan, "plan", plan).unchecked == (load,)


def test_each_hook_that_changes_something_lets_go_of_what_has_no_owner():
    hooks = {name: each for name, each in vars(CacheScheduler).items() if name[0] != "_"}
    unwrapped = {
        name for name, each in hooks.items() if callable(each) and not hasattr(each, "__wrapped__")
    }
    # They read, or the role is at its end.
    assert unwrapped == {"advertise", "empty_plan", "holds", "has_work", "take_events", "close"}

"""Steps that bring nothing new: an idle role is left out of them, and of no others."""

from __future__ import annotations

import pickle
from types import SimpleNamespace

import pytest

from kvferry.contract.asynchronous import AsyncPromises
from kvferry.contract.driver import StepDriver
from kvferry.contract.guard_scheduler import GuardedScheduler
from kvferry.contract.messages import LookupResult, Plan, WorkerOutput
from kvferry.contract.scheduler import SchedulerRole
from kvferry.contract.worker import IDLE_WAIT_SECONDS
from kvferry.observe import Counters
from kvferry.v1.facade import RolesAsV1
from kvferry.v1.types import KVConnectorOutput, KVConnectorRole, PlanMetadata
from tests.contract.recording import RecordingWorker
from tests.v1.test_driven import make_config

EMPTY_PLAN = Plan()


class IdleScheduler(SchedulerRole):
    is_idle = True
    rules = AsyncPromises

    def __init__(self):
        self.calls = []

    def empty_plan(self):
        return EMPTY_PLAN

    def lookup(self, request, num_local_tokens):
        return LookupResult(8, True)

    def update_after_alloc(self, request, block_ids, num_external_tokens):
        pass

    def build_plan(self, step):
        self.calls.append("plan")
        assert step.scheduled is not None  # raises if the step cannot be read
        return EMPTY_PLAN

    def update_output(self, output):
        self.calls.append("output")


STEP = ["begin_step", "start_load", "save", "collect", "end_step"]


class IdleWorker(RecordingWorker):
    is_idle = True

    def wait(self, seconds):
        assert seconds == IDLE_WAIT_SECONDS
        self._note("wait")


@pytest.fixture
def scheduling():
    role = IdleScheduler()
    facade = RolesAsV1(make_config(), KVConnectorRole.SCHEDULER, scheduler=role)
    facade.on_new_request(request())
    facade.build_connector_meta(step(new=["r"]))
    role.calls.clear()
    return facade, role


def request(request_id="r"):
    return SimpleNamespace(
        request_id=request_id, all_token_ids=list(range(20)), num_prompt_tokens=20
    )


def step(*, new=(), added=None, finished=(), preempted=(), resumed=(), tokens=1):
    """A step in which "r" goes on, and what else is said."""
    return SimpleNamespace(
        scheduled_new_reqs=[
            SimpleNamespace(req_id=name, block_ids=([1],), num_computed_tokens=0) for name in new
        ],
        scheduled_cached_reqs=SimpleNamespace(
            req_ids=["r"],
            new_block_ids=[added],
            num_computed_tokens=[20],
            resumed_req_ids=set(resumed),
        ),
        num_scheduled_tokens={"r": tokens, **dict.fromkeys(new, 2)},
        total_num_scheduled_tokens=tokens,
        finished_req_ids=set(finished),
        preempted_req_ids=set(preempted),
    )


def blocks():
    return SimpleNamespace(get_block_ids=lambda: ([1],))


def run_step(facade, metadata, finished=()):
    facade.bind_connector_metadata(metadata)
    facade.start_load_kv(None)
    facade.wait_for_save()
    results = facade.get_transfer_results(set(finished))
    assert facade.get_block_ids_with_load_errors() == set()
    assert facade.get_kv_connector_stats() is None
    assert facade.build_connector_worker_meta() is None
    facade.clear_connector_metadata()
    return results


def test_a_quiet_step_gets_the_empty_plan_and_says_so(scheduling):
    facade, role = scheduling
    metadata = pickle.loads(pickle.dumps(facade.build_connector_meta(step())))
    assert metadata == PlanMetadata(EMPTY_PLAN, has_tokens=True, is_empty=True)
    facade.update_connector_output(KVConnectorOutput())
    assert role.calls == []


@pytest.mark.parametrize(
    "news",
    [
        {"new": ["s"]},
        {"added": ([7],)},
        {"finished": ["r"]},
        {"preempted": ["r"]},
        {"resumed": ["r"], "added": ([7],)},
        {"tokens": 0},
    ],
)
def test_news_in_a_step_reach_the_role(scheduling, news):
    facade, role = scheduling
    assert not facade.build_connector_meta(step(**news)).is_empty
    assert role.calls == ["plan"]


@pytest.mark.parametrize(
    "report",
    [
        {"finished_sending": {"r"}},
        {"finished_recving": {"r"}},
        {"invalid_block_ids": {3}},
        {"kv_connector_worker_meta": object()},
    ],
)
def test_what_workers_report_reaches_the_role(scheduling, report):
    facade, role = scheduling
    facade.update_connector_output(KVConnectorOutput(**report))
    assert role.calls == ["output"]


def test_a_role_that_is_not_idle_is_asked_in_every_step(scheduling):
    facade, role = scheduling
    role.is_idle = False
    for _ in range(3):
        assert not facade.build_connector_meta(step()).is_empty
    assert role.calls == ["plan"] * 3


@pytest.mark.parametrize(
    "hook",
    [
        lambda facade: facade.on_new_request(request()),
        lambda facade: facade.get_num_new_matched_tokens(request(), 0),
        lambda facade: facade.update_state_after_alloc(request(), blocks(), 0),
        lambda facade: facade.build_connector_meta(step(added=([7],))),
        lambda facade: facade.update_connector_output(KVConnectorOutput(invalid_block_ids={3})),
        lambda facade: facade.request_finished(request(), [1]),
        lambda facade: facade.reset_cache(),
    ],
    ids=["new", "lookup", "alloc", "step", "output", "finished", "reset"],
)
def test_an_idle_role_is_asked_whether_it_still_is_once_a_hook_was_called(scheduling, hook):
    facade, role = scheduling
    for _ in range(3):
        assert facade.build_connector_meta(step()).is_empty
    role.is_idle = False
    hook(facade)
    role.calls.clear()
    assert not facade.build_connector_meta(step()).is_empty
    assert role.calls == ["plan"]


@pytest.mark.parametrize("hook", ["take_events", "has_pending_push_work", "get_kv_connector_stats"])
def test_what_a_host_asks_in_each_step_does_not_wake_an_idle_role(scheduling, hook):
    facade, role = scheduling
    assert facade.build_connector_meta(step()).is_empty
    role.is_idle = False  # not by a hook: only asking would show it
    getattr(facade, hook)()
    assert facade.build_connector_meta(step()).is_empty
    assert role.calls == []


def test_an_outstanding_load_keeps_the_guard_awake():
    guard = GuardedScheduler(IdleScheduler(), block_size=4, checks_host=False)
    assert guard.is_idle
    assert guard.lookup(request(), 0).is_async
    guard.update_after_alloc(request(), ((1, 2),), 8)
    guard.build_plan(SimpleNamespace(scheduled=()))
    assert not guard.is_idle
    guard.update_output(WorkerOutput(finished_recving=frozenset(["r"])))
    assert guard.is_idle


QUIET = PlanMetadata(EMPTY_PLAN, has_tokens=True, is_empty=True)
LOUD = PlanMetadata(EMPTY_PLAN, has_tokens=True)


@pytest.fixture
def working():
    role = IdleWorker()
    return RolesAsV1(make_config(), KVConnectorRole.WORKER, worker=role), role


def test_an_idle_worker_is_left_out_of_quiet_steps_and_asked_again_once_a_plan_came(working):
    facade, role = working
    for _ in range(3):
        assert run_step(facade, QUIET).is_empty()
    assert role.calls == []
    run_step(facade, LOUD)
    assert role.calls == STEP
    role.is_idle = False
    run_step(facade, LOUD)
    role.calls.clear()
    run_step(facade, QUIET)
    assert role.calls == STEP


def test_a_report_that_came_early_is_passed_on_when_its_request_ends(working):
    facade, role = working
    role.outputs = [WorkerOutput(finished_sending=frozenset(["r"]))]
    assert not run_step(facade, LOUD).finished_sending
    run_step(facade, QUIET)
    assert run_step(facade, LOUD, finished=["r"]).finished_sending == {"r"}


@pytest.mark.parametrize("waits", ["well", "not at all"])
def test_a_worker_waits_for_its_work_in_steps_without_tokens(waits):
    counters, role = Counters(), IdleWorker(fail=() if waits == "well" else ("wait",))
    facade = RolesAsV1(make_config(), KVConnectorRole.WORKER, worker=role, observer=counters)
    run_step(facade, PlanMetadata(EMPTY_PLAN, has_tokens=False))
    assert role.calls == [*STEP[:3], "wait", *STEP[3:]]
    assert counters["hook_failed_wait"] == (waits != "well")
    role.calls.clear()
    driver = StepDriver(role, counters)
    driver.no_forward(EMPTY_PLAN, ())
    assert role.calls == [*STEP[:3], "wait", *STEP[3:]]


@pytest.mark.parametrize("kind", ["scheduler", "worker"])
def test_a_role_that_cannot_say_is_called(kind):
    counters = Counters()

    def fail(_role):
        raise OSError("broken")

    base = IdleScheduler if kind == "scheduler" else IdleWorker
    role = type("Broken", (base,), {"is_idle": property(fail)})()
    guard = (GuardedScheduler if kind == "scheduler" else StepDriver)(role, counters)
    assert guard.is_idle is False
    assert counters["hook_failed_is_idle"] == 1

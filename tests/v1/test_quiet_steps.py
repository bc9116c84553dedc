"""Steps without news: an idle role is left out of them, and of no others."""

from __future__ import annotations

import pickle
import time
from types import SimpleNamespace

import pytest
import torch

from kvferry.bench.step import FacadeHost
from kvferry.connectors.registry import create_roles
from kvferry.contract.guard import GuardedScheduler, GuardedWorker
from kvferry.contract.messages import EMPTY_OUTPUT, LookupResult, Plan, WorkerOutput
from kvferry.contract.scheduler import SchedulerRole
from kvferry.contract.spec import EngineSpec
from kvferry.contract.worker import IDLE_WAIT_SECONDS, WorkerRole
from kvferry.errors import ContractError
from kvferry.keys import ModelIdentity
from kvferry.observe import Counters
from kvferry.runner.lifecycle import StepLifecycle
from kvferry.testing.host_tables import HostRequest
from kvferry.topology import tensor_parallel_shard
from kvferry.types import KVGroup
from kvferry.v1.base import KVConnectorMetadata, KVConnectorOutput, KVConnectorRole, PlanMetadata
from kvferry.v1.facade import RolesAsV1
from tests.v1.test_driven import make_config

EMPTY_PLAN = Plan()


class IdleScheduler(SchedulerRole):
    """Records the hooks in which something may be decided or learnt."""

    is_idle = True

    def __init__(self):
        self.calls, self.plan = [], EMPTY_PLAN

    def empty_plan(self):
        return EMPTY_PLAN

    def lookup(self, request, num_local_tokens):
        return LookupResult(8, True)

    def update_after_alloc(self, request, block_ids, num_external_tokens):
        pass

    def build_plan(self, step):
        self.calls.append("plan")
        assert list(step.scheduled) is not None  # raises if the step cannot be read
        return self.plan

    def update_output(self, output):
        self.calls.append("output")


class IdleWorker(WorkerRole):
    is_idle = True

    def __init__(self):
        self.calls = []

    def register_kv_caches(self, kv_caches):
        pass

    def planned_blocks(self, plan):
        return frozenset()

    def begin_step(self, plan):
        self.calls.append("begin")

    def start_load(self):
        self.calls.append("load")

    def save(self):
        self.calls.append("save")

    def collect(self, finished_request_ids):
        self.calls.append("collect")
        return EMPTY_OUTPUT

    def end_step(self):
        self.calls.append("end")

    def close(self):
        pass


def scheduler_facade(role=None):
    role = role or IdleScheduler()
    facade = RolesAsV1(make_config(), KVConnectorRole.SCHEDULER, scheduler=role)
    return facade, role


def worker_facade(role=None):
    role = role or IdleWorker()
    return RolesAsV1(make_config(), KVConnectorRole.WORKER, worker=role), role


def request(request_id="r"):
    return SimpleNamespace(
        request_id=request_id, all_token_ids=list(range(20)), num_prompt_tokens=20,
        num_computed_tokens=0,
    )  # fmt: skip


def step(*, new=(), added=None, finished=(), preempted=(), tokens=1):
    """A step in which "r" goes on decoding, and what else is said."""
    return SimpleNamespace(
        scheduled_new_reqs=[
            SimpleNamespace(
                req_id=name, prompt_token_ids=[1, 2], block_ids=([1],), num_computed_tokens=0
            )
            for name in new
        ],
        scheduled_cached_reqs=SimpleNamespace(
            req_ids=["r"], new_block_ids=[added], num_computed_tokens=[20], resumed_req_ids=set()
        ),
        num_scheduled_tokens={"r": tokens, **dict.fromkeys(new, 2)},
        total_num_scheduled_tokens=tokens,
        finished_req_ids=set(finished),
        preempted_req_ids=set(preempted),
    )


@pytest.fixture
def decoding():
    """A façade whose request decodes, after its first quiet step."""
    facade, role = scheduler_facade()
    facade.build_connector_meta(step(new=["r"]))
    facade.update_connector_output(KVConnectorOutput())
    facade.build_connector_meta(step())
    role.calls.clear()
    assert facade.build_connector_meta(step()).is_quiet
    assert role.calls == []
    return facade, role


def test_a_quiet_step_gets_the_empty_plan_and_says_so(decoding):
    facade, role = decoding
    for tokens in (1, 0):
        metadata = pickle.loads(pickle.dumps(facade.build_connector_meta(step(tokens=tokens))))
        assert metadata == PlanMetadata(EMPTY_PLAN, has_tokens=tokens > 0, is_quiet=True)
    facade.update_connector_output(KVConnectorOutput())
    assert role.calls == []


@pytest.mark.parametrize(
    "news", [{"new": ["s"]}, {"added": ([7],)}, {"finished": ["r"]}, {"preempted": ["r"]}]
)
def test_news_in_a_step_reach_the_role(decoding, news):
    facade, role = decoding
    assert not facade.build_connector_meta(step(**news)).is_quiet
    assert role.calls == ["plan"]


@pytest.mark.parametrize(
    "call",
    [
        lambda facade: facade.on_new_request(request()),
        lambda facade: facade.get_num_new_matched_tokens(request(), 0),
        lambda facade: facade.update_state_after_alloc(
            request(), SimpleNamespace(get_block_ids=lambda: ([1],)), 0
        ),
        lambda facade: facade.request_finished(request(), [1]),
        lambda facade: facade.reset_cache(),
    ],
)
def test_after_any_other_hook_the_next_plan_is_the_roles_own(decoding, call):
    facade, role = decoding
    call(facade)
    assert not facade.build_connector_meta(step()).is_quiet
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
def test_what_workers_report_reaches_the_role_and_wakes_it(decoding, report):
    facade, role = decoding
    facade.update_connector_output(KVConnectorOutput(**report))
    facade.build_connector_meta(step())
    assert role.calls == ["output", "plan"]


def test_a_role_that_is_not_idle_is_asked_in_every_step():
    facade, role = scheduler_facade()
    role.is_idle = False
    facade.build_connector_meta(step(new=["r"]))
    for _ in range(3):
        assert not facade.build_connector_meta(step()).is_quiet
        facade.update_connector_output(KVConnectorOutput())
    assert role.calls.count("plan") == 4
    assert role.calls.count("output") == 3


def test_a_plan_that_asks_for_something_is_followed_by_no_quiet_step(decoding):
    facade, role = decoding
    role.plan = Plan()  # equal to the empty one, and not it
    facade.build_connector_meta(step(finished=["s"]))
    facade.build_connector_meta(step())
    assert role.calls == ["plan", "plan"]


def test_an_outstanding_load_keeps_the_guard_awake():
    role = IdleScheduler()
    guard = GuardedScheduler(role, block_size=4)
    assert guard.is_idle
    view = request()
    assert guard.lookup(view, 0).is_async
    guard.update_after_alloc(view, ((1, 2),), 8)
    guard.build_plan(SimpleNamespace(scheduled=()))
    assert not guard.is_idle
    guard.update_output(WorkerOutput(finished_recving=frozenset(["r"])))
    assert guard.is_idle


def test_a_step_that_cannot_be_read_keeps_the_role_awake(decoding):
    facade, role = decoding
    facade.on_new_request(request("s"))
    facade.build_connector_meta(
        SimpleNamespace(total_num_scheduled_tokens=1, finished_req_ids=set())
    )
    facade.build_connector_meta(step())
    assert role.calls == ["plan", "plan"]


def run_step(facade, metadata):
    facade.bind_connector_metadata(metadata)
    bound = facade.has_connector_metadata()
    facade.start_load_kv(None)
    facade.wait_for_save()
    results = facade.get_transfer_results(set())
    assert not any((results.finished_sending, results.finished_recving, results.failed_recving))
    assert facade.get_block_ids_with_load_errors() == set()
    assert facade.get_kv_connector_stats() is None
    assert facade.build_connector_worker_meta() is None
    facade.clear_connector_metadata()
    assert not facade.has_connector_metadata()
    return bound


WHOLE_STEP = ["begin", "load", "save", "collect", "end"]
QUIET = PlanMetadata(EMPTY_PLAN, has_tokens=True, is_quiet=True)


def test_an_idle_worker_sits_out_quiet_steps_only():
    facade, role = worker_facade()
    assert run_step(facade, QUIET)  # nobody asked yet whether it is idle
    assert role.calls == WHOLE_STEP
    role.calls.clear()
    assert not run_step(facade, QUIET)  # and the host leaves the layers' hooks out
    assert role.calls == []
    assert run_step(facade, PlanMetadata(Plan(), has_tokens=True))
    assert role.calls == WHOLE_STEP


def test_a_step_that_never_ended_is_ended_before_a_quiet_one():
    facade, role = worker_facade()
    run_step(facade, QUIET)
    role.calls.clear()
    facade.bind_connector_metadata(PlanMetadata(Plan(), has_tokens=True))
    facade.start_load_kv(None)
    assert run_step(facade, QUIET)
    assert role.calls == ["begin", "load", "end", *WHOLE_STEP]
    assert not run_step(facade, QUIET)


def test_a_foreign_plan_wakes_an_idle_worker_and_leaves_nothing_bound():
    facade, role = worker_facade()
    run_step(facade, QUIET)
    role.calls.clear()
    assert run_step(facade, KVConnectorMetadata())
    assert role.calls == []
    assert run_step(facade, QUIET)
    assert role.calls == WHOLE_STEP


@pytest.mark.parametrize("kind", [KVConnectorRole.SCHEDULER, KVConnectorRole.WORKER])
def test_an_idle_half_refuses_the_hooks_of_the_other_one(kind, decoding):
    if kind is KVConnectorRole.SCHEDULER:
        facade, _role = decoding
        facade.build_connector_meta(step())
        with pytest.raises(ContractError, match="worker-side method"):
            facade.bind_connector_metadata(QUIET)
        return
    facade, _role = worker_facade()
    run_step(facade, QUIET)
    for call in (facade.build_connector_meta, facade.update_connector_output):
        with pytest.raises(ContractError, match="scheduler-side method"):
            call(step())


def test_a_worker_with_something_under_way_takes_part_in_quiet_steps():
    facade, role = worker_facade()
    role.is_idle = False
    for _ in range(2):
        assert run_step(facade, QUIET)
    assert role.calls == WHOLE_STEP * 2


def test_a_fault_while_asking_is_counted_and_means_awake():
    class Broken(IdleWorker):
        @property
        def is_idle(self):
            raise RuntimeError("lost")

    observer = Counters()
    guard = GuardedWorker(Broken(), observer)
    assert not guard.is_idle
    assert observer["hook_failed_is_idle"] == 1


def test_decoding_asks_nothing_of_the_shared_storage_roles(tmp_path):
    """And as long as saves are under way, it does."""
    group = KVGroup(
        num_layers=2, num_kv_heads=1, content_size=8, dtype="float32", block_size=16
    )  # fmt: skip
    spec = EngineSpec(
        identity=ModelIdentity(weights=bytes(32), config={"model_type": "test"}),
        groups=(group,), shard=tensor_parallel_shard((group,), 0, 1),
    )  # fmt: skip
    roles = create_roles("shared_storage", spec, {"store": f"file://{tmp_path}/s"}, Counters())
    layers = {f"layers.{index}": torch.zeros(32, 1, 16, 8) for index in range(2)}
    roles.worker.register_kv_caches(layers)
    host = FacadeHost(roles, layers)
    decoding = HostRequest("r", list(range(256)), 256, block_ids=(list(range(1, 25)),))
    host.admit(decoding)
    assert not roles.scheduler.is_idle
    decoding.num_scheduled_tokens = 256
    host.step(decoding)
    assert not roles.scheduler.is_idle  # two chunks are being stored
    decoding.num_computed_tokens, decoding.num_scheduled_tokens = 256, 1
    deadline = time.monotonic() + 20
    while not (roles.scheduler.is_idle and roles.worker.is_idle) and time.monotonic() < deadline:
        host.step(decoding)
        time.sleep(0.001)
    plans = []
    build_plan = roles.scheduler.build_plan
    roles.scheduler.build_plan = lambda step: plans.append(step) or build_plan(step)
    for _ in range(5):
        host.step(decoding)
    assert len(plans) <= 1
    assert len(list(tmp_path.glob("s/records/*/*.safetensors"))) == 2
    roles.scheduler.close()
    roles.worker.close()
    roles.close_last()


class WaitingWorker(IdleWorker):
    is_idle = False

    def wait(self, seconds):
        self.calls.append("wait")
        self.seconds = seconds


def plan_of(facade, tokens):
    facade.bind_connector_metadata(PlanMetadata(EMPTY_PLAN, has_tokens=tokens))
    facade.start_load_kv(None)
    facade.get_transfer_results(set())
    facade.clear_connector_metadata()


def test_a_worker_waits_in_steps_without_tokens_only():
    facade, role = worker_facade(WaitingWorker())
    plan_of(facade, tokens=True)
    assert "wait" not in role.calls
    role.calls.clear()
    plan_of(facade, tokens=False)
    assert role.calls == ["begin", "load", "save", "wait", "collect", "end"]
    assert role.seconds == IDLE_WAIT_SECONDS


def test_a_worker_that_fails_to_wait_is_asked_all_the_same():
    class Broken(WaitingWorker):
        def wait(self, seconds):
            raise OSError("broken")

    counters = Counters()
    role = Broken()
    facade = RolesAsV1(make_config(), KVConnectorRole.WORKER, worker=role, observer=counters)
    plan_of(facade, tokens=False)
    assert role.calls[-2:] == ["collect", "end"]
    assert counters["hook_failed_wait"] == 1


def test_the_step_lifecycle_waits_in_steps_without_tokens_only():
    role = WaitingWorker()
    lifecycle = StepLifecycle(role)
    with lifecycle.step(EMPTY_PLAN, ()):
        pass
    assert "wait" not in role.calls
    lifecycle.no_forward(EMPTY_PLAN, ())
    assert role.calls.count("wait") == 1

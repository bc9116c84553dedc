"""A worker with work in the background may wait for it in steps without tokens."""

from __future__ import annotations

from kvferry.contract.driver import StepDriver
from kvferry.contract.messages import EMPTY_OUTPUT, Plan
from kvferry.contract.worker import IDLE_WAIT_SECONDS, WorkerRole
from kvferry.observe import Counters
from kvferry.v1.facade import RolesAsV1
from kvferry.v1.types import KVConnectorRole, PlanMetadata
from tests.v1.test_driven import make_config

EMPTY_PLAN = Plan()


class WaitingWorker(WorkerRole):
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

    def wait(self, seconds):
        self.calls.append("wait")
        self.seconds = seconds


def plan_of(facade, tokens):
    facade.bind_connector_metadata(PlanMetadata(EMPTY_PLAN, has_tokens=tokens))
    facade.start_load_kv(None)
    facade.get_transfer_results(set())
    facade.clear_connector_metadata()


def test_a_worker_waits_in_steps_without_tokens_only():
    role = WaitingWorker()
    facade = RolesAsV1(make_config(), KVConnectorRole.WORKER, worker=role)
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


def test_the_driver_waits_in_steps_without_tokens_only():
    role = WaitingWorker()
    driver = StepDriver(role)
    with driver.step(EMPTY_PLAN, ()):
        pass
    assert "wait" not in role.calls
    driver.no_forward(EMPTY_PLAN, ())
    assert role.calls.count("wait") == 1

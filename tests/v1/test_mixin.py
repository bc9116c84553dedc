"""vLLM's mixin calls drive a V1 connector and a worker role through the same step."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from kvferry.contract.messages import WorkerOutput
from kvferry.errors import ContractError
from kvferry.observe import Counters
from kvferry.v1.base import KVConnectorBase_V1
from kvferry.v1.mixin import EMPTY_MODEL_RUNNER_OUTPUT, KVConnectorModelRunnerMixin
from kvferry.v1.types import (
    CounterStats,
    KVConnectorMetadata,
    KVConnectorOutput,
    KVConnectorRole,
)  # fmt: skip
from tests.contract.recording import LoadPlan, RecordingWorker
from tests.v1.test_driven import make_config

STEP = ["bind", "start_load_kv", "wait_for_save", "get_finished", "clear"]


class Metadata(KVConnectorMetadata):
    pass


class RecordingV1(KVConnectorBase_V1):
    def __init__(self, role=KVConnectorRole.WORKER, *, fail=()):
        super().__init__(make_config(), role)
        self.calls, self.fail = [], set(fail)
        self.finished = (None, None)
        self.invalid, self.stats = set(), None
        self.contexts = []

    def _note(self, name):
        self.calls.append(name)
        if name in self.fail:
            raise OSError(name)

    def bind_connector_metadata(self, connector_metadata):
        super().bind_connector_metadata(connector_metadata)
        self._note("bind")

    def clear_connector_metadata(self):
        super().clear_connector_metadata()
        self._note("clear")

    def start_load_kv(self, forward_context, **kwargs):
        self.contexts.append(forward_context.attn_metadata)
        self._note("start_load_kv")

    def wait_for_layer_load(self, layer_name):
        self._note(f"wait {layer_name}")

    def save_kv_layer(self, layer_name, kv_layer, attn_metadata, **kwargs):
        self._note(f"save {layer_name}")

    def wait_for_save(self):
        self._note("wait_for_save")

    def get_finished(self, finished_req_ids):
        assert isinstance(finished_req_ids, set)
        self._note("get_finished")
        return self.finished

    def get_block_ids_with_load_errors(self):
        return self.invalid

    def get_kv_connector_stats(self):
        return self.stats

    def shutdown(self):
        self._note("shutdown")

    def get_num_new_matched_tokens(self, request, num_computed_tokens):
        return 0, False

    def update_state_after_alloc(self, request, blocks, num_external_tokens):
        pass

    def build_connector_meta(self, scheduler_output):
        return Metadata()


class Runner(KVConnectorModelRunnerMixin):
    def __init__(self, connector):
        self.kv_connector = connector
        self.kv_observer = Counters()

    def forward_without_saves(self, scheduler_output):
        with self._get_kv_connector_output(scheduler_output, wait_for_save=False):
            pass


def message(metadata=None, finished=(), num_tokens=5):
    return SimpleNamespace(
        kv_connector_metadata=metadata or Metadata(),
        finished_req_ids=set(finished),
        total_num_scheduled_tokens=num_tokens,
    )


def test_a_step_around_a_forward():
    connector = RecordingV1()
    connector.finished, connector.invalid = ({"sent"}, {"loaded"}), {7}
    connector.stats = CounterStats({"n": 1})
    runner = Runner(connector)
    with runner.maybe_get_kv_connector_output(message(finished=["sent"])) as output:
        connector.calls.append("forward")
        assert output == KVConnectorOutput()
    assert connector.calls == [*STEP[:2], "forward", *STEP[2:]]
    assert output == KVConnectorOutput(
        finished_sending={"sent"}, finished_recving={"loaded"}, invalid_block_ids={7},
        kv_connector_stats=CounterStats({"n": 1}),
    )  # fmt: skip
    assert runner.get_kv_connector_stats() == CounterStats({"n": 1})


def test_a13_a_step_without_tokens_waits_for_saves_too():
    connector = RecordingV1()
    output = Runner(connector).kv_connector_no_forward(message(num_tokens=0), object())
    assert connector.calls == STEP
    assert connector.contexts == [None]
    assert output is EMPTY_MODEL_RUNNER_OUTPUT


def test_a_step_without_tokens_brings_reports_in_an_output_of_its_own():
    connector = RecordingV1()
    connector.finished = (None, {"r"})
    output = Runner(connector).kv_connector_no_forward(message(num_tokens=0))
    assert output.kv_connector_output.finished_recving == {"r"}
    assert EMPTY_MODEL_RUNNER_OUTPUT.kv_connector_output is None


def test_the_calls_one_by_one():
    connector = RecordingV1()
    connector.finished = ({"r"}, None)
    runner = Runner(connector)
    step = message(finished=["r"])
    runner.maybe_setup_kv_connector(step)
    assert connector.calls == STEP[:2]
    runner.maybe_wait_for_kv_save()
    assert runner.get_finished_kv_transfers(step) == ({"r"}, None)
    assert connector.calls == STEP
    connector.finished = (None, None)
    runner.maybe_setup_kv_connector(message())
    assert runner.get_finished_kv_transfers(message()) == (None, None)


def test_a_forward_that_raises_is_not_saved_and_reported_nevertheless():
    connector = RecordingV1()
    connector.invalid = {3}
    outputs = []

    def step():
        with Runner(connector).maybe_get_kv_connector_output(message()) as output:
            outputs.append(output)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        step()
    assert connector.calls == [name for name in STEP if name != "wait_for_save"]
    assert outputs[0].invalid_block_ids == {3}


def test_waiting_for_saves_can_be_left_out():
    connector = RecordingV1()
    Runner(connector).forward_without_saves(message())
    assert "wait_for_save" not in connector.calls


@pytest.mark.parametrize("hook", STEP)
def test_a_fault_of_the_connector_does_not_reach_the_engine(hook):
    connector = RecordingV1(fail={hook})
    runner = Runner(connector)
    with runner.maybe_get_kv_connector_output(message()):
        pass
    assert runner.kv_observer["hook_failed"] == 1
    connector.fail.clear()
    connector.calls.clear()
    with runner.maybe_get_kv_connector_output(message()):
        pass
    assert connector.calls == STEP


def test_a_worker_role_of_ours_is_driven_by_its_plan():
    worker = RecordingWorker(WorkerOutput(stats={"n": 1}, finished_recving=frozenset({"r"})))
    runner = Runner(worker)
    plan = LoadPlan(recving=frozenset({"r"}))
    with runner.maybe_get_kv_connector_output(message(plan)) as output:
        pass
    assert worker.calls == ["begin_step", "start_load", "save", "collect", "end_step"]
    assert worker.plans == [plan]
    assert output.finished_recving == {"r"}
    assert not output.is_empty()


def test_preempted_ids_go_to_connectors_that_ask_for_ids():
    class Older(RecordingV1):
        def handle_preemptions(self, preempted_req_ids):
            self.calls.append(("preempted", preempted_req_ids))

    class Newer(RecordingV1):
        def handle_preemptions(self, kv_connector_metadata):
            self.calls.append(("preempted", kv_connector_metadata))

    metadata = Metadata()
    for connector, told in ((Older(), {"r"}), (Newer(), metadata)):
        step = message(metadata)
        step.preempted_req_ids = {"r"}
        Runner(connector).kv_connector_no_forward(step)
        assert connector.calls[0] == ("preempted", told)


def test_without_a_connector_every_call_does_nothing():
    runner = Runner(None)
    runner.maybe_setup_kv_connector(message())
    runner.maybe_wait_for_kv_save()
    assert runner.get_finished_kv_transfers(message()) == (None, None)
    assert runner.get_kv_connector_stats() is None
    assert runner.kv_connector_no_forward(message()) is EMPTY_MODEL_RUNNER_OUTPUT
    with runner.maybe_get_kv_connector_output(message()) as output:
        assert output is None
    runner.ensure_kv_transfer_shutdown()


def test_missing_metadata_is_the_hosts_mistake():
    step = message()
    step.kv_connector_metadata = None
    with pytest.raises(ContractError, match="build_connector_meta"):
        Runner(RecordingV1()).maybe_setup_kv_connector(step)


def test_shutdown_happens_once_and_leaves_no_connector():
    connector = RecordingV1()
    runner = Runner(connector)
    runner.ensure_kv_transfer_shutdown()
    runner.ensure_kv_transfer_shutdown()
    assert connector.calls == ["shutdown"]
    assert runner.kv_connector is None

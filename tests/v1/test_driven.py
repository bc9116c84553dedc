"""A connector written for vLLM's base class runs here after a change of its import line."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch

from kvferry.contract.driver import StepDriver
from kvferry.contract.guard_scheduler import GuardedScheduler
from kvferry.engine.request import Request
from kvferry.errors import ConfigError, LayoutError
from kvferry.observe import Counters
from kvferry.testing.connector import RULES
from kvferry.testing.connector.runner import CaseOutcome, Limits, Runner, Target
from kvferry.v1.base import KVConnectorBase_V1
from kvferry.v1.driven import V1Plan, V1SchedulerRole, V1WorkerRole, v1_config, v1_roles
from kvferry.v1.types import KVConnectorRole
from tests.contract.tiny_host import TinyHost, true_kv, true_output

SAMPLE = Path(__file__).with_name("sample_v1_connector.py")
VLLM_IMPORT = "from vllm.distributed.kv_transfer.kv_connector.v1.base import ("
OUR_IMPORT = "from kvferry.v1 import ("
PROMPT = list(range(100, 122))


def with_our_import() -> str:
    """The sample with its import line changed."""
    source = SAMPLE.read_text()
    assert source.count(VLLM_IMPORT) == 1
    return source.replace(VLLM_IMPORT, OUR_IMPORT)


def load_sample() -> ModuleType:
    module = ModuleType("sample_v1_connector")
    # Pickle finds the metadata class by its module's name.
    sys.modules[module.__name__] = module
    exec(compile(with_our_import(), SAMPLE, "exec"), vars(module))
    return module


def make_config(block_size=4, **options):
    return v1_config(block_size=block_size, options=options, model="tiny", dtype="int64")


@pytest.fixture
def make_host(tmp_path):
    module = load_sample()

    def make(**options) -> TinyHost:
        config = make_config(path=str(tmp_path))
        observer = Counters()
        scheduler = module.SampleConnector(config, KVConnectorRole.SCHEDULER)
        worker = module.SampleConnector(config, KVConnectorRole.WORKER)
        host = TinyHost(
            GuardedScheduler(V1SchedulerRole(scheduler), observer, block_size=4),
            V1WorkerRole(worker),
            observer=observer,
            **{"strict": True, **options},
        )
        host.observer = observer
        host.connectors = (scheduler, worker)
        return host

    return make


def run(host: TinyHost, *prompts, num_new: int = 3):
    requests = [host.add(f"r{i}", prompt, num_new) for i, prompt in enumerate(prompts)]
    host.run()
    for request, prompt in zip(requests, prompts, strict=True):
        assert request.all_token_ids == true_output(prompt, num_new)
    assert host.observer["hook_failed"] == host.observer["contract_violation"] == 0
    return requests


@pytest.fixture(scope="module")
def kit(tmp_path_factory):
    directory = tmp_path_factory.mktemp("modules")
    (directory / "sample_of_the_kit.py").write_text(with_our_import())
    target = Target("sample_of_the_kit", "SampleConnector", {"path": "{dir}"})
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(directory)
        with Runner(target, limits=Limits(part=240.0, patience=60.0)) as runner:
            yield runner


@pytest.mark.parametrize(
    "name",
    [
        "restart", "whole-blocks", "chunked-prefill", "generated-tokens", "preempted", "aborts",
        "abort-after-promise", "same-step", "truncated", "removed",
    ],
)  # fmt: skip
def test_the_sample_keeps_rules_of_the_conformance_kit(kit, name):
    (rule,) = [rule for rule in RULES if rule.name == name]
    assert kit.run_case(rule) == CaseOutcome("right")


def test_a_fault_of_the_connector_is_a_failed_load(make_host):
    run(make_host(), PROMPT)
    host = make_host(strict=False)

    def fail(context, **kwargs):
        raise RuntimeError("size mismatch")

    host.connectors[1].start_load_kv = fail
    request = host.add("r", PROMPT, 3)
    host.run()
    assert request.hit_tokens == 20
    assert request.all_token_ids == true_output(PROMPT, 3)
    assert host.observer["hook_failed_start_load"] > 0


def serve(host: TinyHost) -> None:
    """Run a request to its end, whatever its connector answers."""
    request = host.add("r", range(20, 40), 3)
    host.run()
    assert request.all_token_ids == true_output(range(20, 40), 3)


@pytest.mark.parametrize("answer", [8, (8,), ("many", False), (1, 2, 3)])
def test_an_answer_of_a_connector_that_is_none_is_a_miss(make_host, answer):
    host = make_host()
    scheduler, _ = host.connectors
    scheduler.get_num_new_matched_tokens = lambda *_: answer
    serve(host)
    assert host.observer["hook_failed_lookup"] == 1


@pytest.mark.parametrize("answer", [True, (False, "text"), (False, None, None)])
def test_an_end_of_a_request_that_a_connector_answers_wrongly_frees_the_blocks(make_host, answer):
    host = make_host()
    scheduler, _ = host.connectors
    scheduler.request_finished = lambda *_: answer
    serve(host)
    assert host.observer["hook_failed_request_finished"] == 1


@pytest.mark.parametrize("takes_it_in", [False, True])
@pytest.mark.parametrize("number", range(1, 9))
def test_a_plan_that_fails_costs_one_step_and_stores_nothing_wrong(
    make_host, tmp_path, number, takes_it_in
):
    host = make_host(budget=5)
    scheduler = host.connectors[0]
    original, steps = scheduler.build_connector_meta, []

    def build(output):
        steps.append(output)
        if len(steps) == number and not takes_it_in:
            raise RuntimeError("before it looked at the step")
        metadata = original(output)
        if len(steps) == number:
            raise RuntimeError("after it took all of the step in")
        return metadata

    scheduler.build_connector_meta = build
    host.add("r", PROMPT, 9)
    host.run()
    whole = true_output(PROMPT, 9)
    assert host.requests["r"].all_token_ids == whole
    for end in range(4, len(whole), 4):
        file = Path(scheduler.file(scheduler.key(whole, end)))
        if file.exists():
            for layer, kv in enumerate(torch.load(file).values()):
                assert kv.tolist() == true_kv(whole[:end], layer)[-4:]
    assert host.observer["hook_failed"] == 1


def test_a_load_that_a_failed_plan_left_with_the_connector_is_not_done(make_host):
    run(make_host(), PROMPT)
    host = make_host(strict=False)
    scheduler, worker = host.connectors
    start_load_kv, build, loaded = worker.start_load_kv, scheduler.build_connector_meta, []

    def load(context, **kwargs):
        loaded.extend(worker._get_connector_metadata().loads)
        start_load_kv(context, **kwargs)

    def fail(_output):
        scheduler.build_connector_meta = build
        raise RuntimeError("before it has planned the loads")

    worker.start_load_kv, scheduler.build_connector_meta = load, fail
    request = host.add("r", PROMPT, 3)
    host.run()
    assert request.hit_tokens == 20
    assert request.all_token_ids == true_output(PROMPT, 3)
    assert loaded == []
    assert host.observer["contract_violation"] == 1


def test_the_null_block_is_no_block_of_a_plan():
    """Requests share it: a failed load of one would fail all."""
    connector = LoadsLater(make_config(), KVConnectorRole.SCHEDULER)
    connector.get_num_new_matched_tokens = lambda *_: (12, False)
    connector.update_state_after_alloc = lambda *_: None
    connector.build_connector_meta = lambda _: ""
    role = V1SchedulerRole(connector)
    request = Request("r", PROMPT, max_total_tokens=30)
    role.lookup(request, 0)
    role.update_after_alloc(request, ([0, 8, 9, 10], [0, 0, 7, 11]), 12)
    step = SimpleNamespace(scheduled=[], preempted_request_ids=(), finished_request_ids=())
    assert role.build_plan(step).blocks == {7, 8, 9}


def test_the_wrong_half_is_refused(make_host):
    scheduler, worker = make_host().connectors
    with pytest.raises(ConfigError, match=r"built as WORKER, SCHEDULER is needed"):
        V1SchedulerRole(worker)
    with pytest.raises(ConfigError, match=r"built as SCHEDULER, WORKER is needed"):
        V1WorkerRole(scheduler)


def test_exactly_the_seven_methods_of_the_shape_are_abstract():
    assert KVConnectorBase_V1.__abstractmethods__ == {
        "start_load_kv", "wait_for_layer_load", "save_kv_layer", "wait_for_save",
        "get_num_new_matched_tokens", "update_state_after_alloc", "build_connector_meta",
    }  # fmt: skip


class LoadsLater(KVConnectorBase_V1):
    """Of the time of vLLM 0.14: fills block 2 with sevens and reports it a step later."""

    def register_kv_caches(self, kv_caches):
        self.registered = kv_caches

    def start_load_kv(self, forward_context, **kwargs):
        self.context = forward_context

    def get_finished(self, finished_req_ids):
        if self._get_connector_metadata() != "load":
            return None, None
        [layer] = self.context.no_compile_layers.values()
        kv = layer.kv_cache[self.context.virtual_engine]
        # In place only if the memory is contiguous, as connectors of that time take for granted.
        kv.reshape(2, -1, 2 * 3)[:, 2 * 4 : 3 * 4] = 7.0
        return None, {"r"}

    def save_kv_layer(self, layer_name, kv_layer, attn_metadata, **kwargs):
        self.saved = kv_layer

    wait_for_layer_load = wait_for_save = None
    get_num_new_matched_tokens = update_state_after_alloc = build_connector_meta = None


@pytest.fixture
def kv():
    """`[blocks, heads, tokens, content]`, the axes in another order in memory."""
    return torch.arange(5 * 4 * 2 * 6.0).reshape(5, 4, 2, 6).transpose(1, 2)


@pytest.fixture
def worker_of_014(kv):
    connector = LoadsLater(make_config(), KVConnectorRole.WORKER)
    worker = V1WorkerRole(connector, release="0.14")
    worker.register_kv_caches({"layer": kv})
    return worker, connector


def test_release_014_sees_written_blocks_with_k_and_v_apart(worker_of_014, kv):
    worker, connector = worker_of_014
    worker.begin_step(V1Plan(metadata="", written=frozenset({1, 3})))
    worker.save_layer("layer", kv, None)
    assert connector.saved is connector.registered["layer"]
    assert connector.saved.shape == (2, 5, 4, 2, 3)
    for block in (1, 3):
        keys, values = connector.saved[:, block]
        assert torch.equal(keys, kv[block, ..., :3].transpose(0, 1))
        assert torch.equal(values, kv[block, ..., 3:].transpose(0, 1))
    assert not connector.saved[:, [0, 2, 4]].any()


def test_an_async_load_of_release_014_is_in_the_blocks_when_its_end_is_reported(worker_of_014, kv):
    worker, _ = worker_of_014
    before = kv.clone()
    for metadata in ("start", "load"):
        recving = {"r": frozenset({2})} if metadata == "start" else {}
        plan = V1Plan(metadata=metadata, has_tokens=False, recving=recving)
        worker.begin_step(plan)
        worker.start_load()
        assert torch.equal(kv, before)
        output = worker.collect(set())
    assert output.finished_recving == {"r"}
    assert (kv[2] == 7.0).all()
    others = [0, 1, 3, 4]
    assert torch.equal(kv[others], before[others])


def test_an_async_load_of_release_014_whose_start_failed_does_not_reach_the_blocks(
    worker_of_014, kv
):
    """The host has given the blocks to other requests by the time the connector reports its end."""
    role, connector = worker_of_014
    driver = StepDriver(role)
    start_load_kv = connector.start_load_kv

    def fail(context, **kwargs):
        start_load_kv(context, **kwargs)
        raise RuntimeError("after the load has begun")

    connector.start_load_kv = fail
    before = kv.clone()
    with driver.step(V1Plan(metadata="start", recving={"r": frozenset({2})}), set()):
        pass
    assert driver.output.failed_recving == {"r"}
    connector.start_load_kv = start_load_kv
    with driver.step(V1Plan(metadata="load"), set()):
        pass
    assert driver.output.finished_recving == frozenset()
    assert torch.equal(kv, before)


@pytest.mark.parametrize("shape", [(5, 2, 4, 7), (5, 4, 6)])
def test_kv_that_release_014_has_no_form_for_is_refused(shape):
    worker = V1WorkerRole(LoadsLater(make_config(), KVConnectorRole.WORKER), release="0.14")
    with pytest.raises(LayoutError, match=r'release 0.14 needs .* use release="0.32"'):
        worker.register_kv_caches({"layer": torch.zeros(shape)})


def test_release_032_shares_the_tensors(kv):
    connector = LoadsLater(make_config(), KVConnectorRole.WORKER)
    worker = V1WorkerRole(connector, release="0.32")
    worker.register_kv_caches({"layer": kv})
    worker.begin_step(V1Plan(metadata=""))
    worker.start_load()
    assert connector.registered["layer"] is kv
    assert connector.context.no_compile_layers["layer"].kv_cache is kv
    assert not hasattr(connector.context, "virtual_engine")


def test_both_halves_are_made_for_constructors_with_and_without_groups():
    class WithGroups(LoadsLater):
        def __init__(self, vllm_config, role, kv_cache_config):
            super().__init__(vllm_config, role, kv_cache_config)

    class WithoutGroups(LoadsLater):
        def __init__(self, vllm_config, role):
            super().__init__(vllm_config, role)

    for connector_class in (WithGroups, WithoutGroups):
        roles = v1_roles(connector_class, make_config())
        assert isinstance(roles.scheduler, V1SchedulerRole)
        assert isinstance(roles.worker, V1WorkerRole)

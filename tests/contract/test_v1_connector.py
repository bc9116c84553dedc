"""A connector written for vLLM's base class runs here after a change of its import line."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from kvferry.contract.guard import GuardedScheduler, GuardedWorker
from kvferry.contract.v1 import KVConnectorBase_V1, KVConnectorRole
from kvferry.errors import ConfigError
from kvferry.observe import Counters
from kvferry.runner.v1 import V1SchedulerRole, V1WorkerRole
from tests.runner.tiny_host import TinyHost, true_output

SAMPLE = Path(__file__).with_name("sample_v1_connector.py")
VLLM_IMPORT = "from vllm.distributed.kv_transfer.kv_connector.v1.base import ("
OUR_IMPORT = "from kvferry.contract.v1 import ("
PROMPT = list(range(100, 122))


def load_sample() -> ModuleType:
    """The sample with its import line changed."""
    source = SAMPLE.read_text()
    assert source.count(VLLM_IMPORT) == 1
    module = ModuleType("sample_v1_connector")
    # Pickle finds the metadata class by its module's name.
    sys.modules[module.__name__] = module
    exec(compile(source.replace(VLLM_IMPORT, OUR_IMPORT), SAMPLE, "exec"), vars(module))
    return module


def make_config(block_size=4, **extra):
    return SimpleNamespace(
        kv_transfer_config=SimpleNamespace(
            kv_connector="SampleConnector",
            kv_role="kv_both",
            engine_id="e",
            kv_connector_extra_config=extra,
            get_from_extra_config=extra.get,
        ),
        cache_config=SimpleNamespace(block_size=block_size, cache_dtype="auto"),
        model_config=SimpleNamespace(model="tiny", dtype="int64"),
        parallel_config=SimpleNamespace(
            tensor_parallel_size=1, pipeline_parallel_size=1, world_size=1, rank=0
        ),
    )


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
            GuardedWorker(V1WorkerRole(worker), observer),
            observer=observer,
            strict=True,
            **options,
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


def test_what_one_host_saved_another_reads(make_host):
    (cold,) = run(make_host(), PROMPT)
    (warm,) = run(make_host(), PROMPT)
    assert (cold.hit_tokens, warm.hit_tokens) == (0, 20)


def test_a4_last_token_is_left_to_the_engine(make_host):
    run(make_host(), PROMPT[:20])
    (warm,) = run(make_host(), PROMPT[:20])
    assert warm.hit_tokens == 16


def test_a7_chunked_prefill_and_generated_tokens_are_seen_as_cached_requests(make_host):
    run(make_host(budget=5), PROMPT, num_new=6)
    whole = true_output(PROMPT, 6)
    (warm,) = run(make_host(), whole)
    assert warm.hit_tokens == 24  # 27 tokens had KV: all blocks that were full


def test_a8_a_preempted_request_is_seen_as_resumed(make_host):
    host = make_host()
    host.add("r", PROMPT, 6)
    for _ in range(4):
        host.step()
    host.preempt(host.requests["r"])
    host.run()
    assert host.requests["r"].all_token_ids == true_output(PROMPT, 6)
    assert host.requests["r"].hit_tokens > 0  # it read back what it had saved itself
    assert host.observer["hook_failed"] == 0
    (warm,) = run(make_host(), PROMPT)
    assert warm.hit_tokens == 20


def test_a8_preemption_under_pressure(make_host):
    run(make_host(num_blocks=12), PROMPT, PROMPT[:13], [1, 2, 3], list(range(15)), num_new=5)


def test_a10_abort_before_the_first_step_and_while_running(make_host):
    host = make_host()
    early, late = host.add("early", PROMPT), host.add("late", PROMPT[:9], 9)
    host.abort(early)
    host.step()
    host.step()
    host.abort(late)
    host.run()
    host.step()  # tells of the last end
    assert host.observer["hook_failed"] == 0
    assert len(host.free) == 39
    assert host.connectors[0].tracked == {}


@pytest.mark.parametrize("damage", ["truncated", "gone"])
def test_a11_a_load_that_fails_is_recomputed(make_host, tmp_path, damage):
    run(make_host(), PROMPT)
    host = make_host()
    files = sorted(tmp_path.iterdir())
    (request,) = [host.add("r", PROMPT, 3)]
    original = host.connectors[1].start_load_kv

    def damage_first(context, **kwargs):
        for file in files:
            file.write_bytes(b"") if damage == "truncated" else file.unlink(missing_ok=True)
        original(context, **kwargs)

    host.connectors[1].start_load_kv = damage_first
    host.run()
    assert request.hit_tokens == 20
    assert any(output.invalid_block_ids for output in host.outputs)
    assert request.all_token_ids == true_output(PROMPT, 3)


def test_a13_steps_without_tokens_reach_the_connector(make_host):
    host = make_host()
    calls = []
    host.connectors[1].wait_for_save = lambda: calls.append("wait_for_save")
    host.step()
    assert calls == ["wait_for_save"]
    assert host.observer["hook_failed"] == 0


def test_a_forward_that_raises_saves_nothing(make_host, tmp_path):
    host = make_host()
    host.add("r", PROMPT)
    host.fail_forward = True
    with pytest.raises(ZeroDivisionError):
        host.step()
    assert list(tmp_path.iterdir()) == []
    assert not host.connectors[1].has_connector_metadata()


def test_a_fault_of_the_connector_is_a_failed_load(make_host):
    run(make_host(), PROMPT)
    host = make_host()

    def fail(context, **kwargs):
        raise RuntimeError("size mismatch")

    host.connectors[1].start_load_kv = fail
    request = host.add("r", PROMPT, 3)
    host.run()
    assert request.hit_tokens == 20
    assert request.all_token_ids == true_output(PROMPT, 3)
    assert host.observer["hook_failed_start_load"] > 0


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

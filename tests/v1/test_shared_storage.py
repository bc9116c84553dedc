"""The connector in the one-class shape: a host of the seeds' kind drives it."""

from __future__ import annotations

import json
import sys
import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvferry.errors import ConfigError
from kvferry.testing.models import make_tiny_model
from kvferry.v1 import (
    ReqMeta,
    SharedStorageConnector,
    SharedStorageConnectorMetadata,
    align_to_block_size,
)
from kvferry.v1.types import KVConnectorRole
from tests.adapters.vllm.fakes import HFConfig, identity_of, load_config
from tests.adapters.vllm.fakes import make_config as vllm_config

BLOCK = 4


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    return make_tiny_model(tmp_path_factory.mktemp("model"))


class TransferConfig(SimpleNamespace):
    def get_from_extra_config(self, key: str, default: Any) -> Any:
        return self.kv_connector_extra_config.get(key, default)


def make_config(model_dir, **extra: Any) -> Any:
    extra.setdefault("chunk_tokens", 8)
    extra.setdefault("audit", "off")
    extra.setdefault("load_timeout_seconds", 60.0)
    extra.setdefault("memory_bytes", 1 << 22)
    return SimpleNamespace(
        kv_transfer_config=TransferConfig(
            kv_connector="SharedStorageConnector",
            kv_role="kv_both",
            engine_id="e",
            kv_connector_extra_config=extra,
        ),
        cache_config=SimpleNamespace(block_size=BLOCK, cache_dtype="auto"),
        model_config=SimpleNamespace(model=str(model_dir), dtype=torch.float32),
        parallel_config=SimpleNamespace(
            tensor_parallel_size=1, pipeline_parallel_size=1, world_size=1, rank=0
        ),
    )


class OldHost:
    """Drives both halves as the seeds' host does: sync loads, [2, B, N, H, D].

    Args:
        config: of the host.
        seed: of what its blocks hold at first.
        carries_reports: whether it brings what workers report to the scheduler.
    """

    def __init__(self, config: Any, *, seed: int = 0, carries_reports: bool = True) -> None:
        self._carries_reports = carries_reports
        self.scheduler = SharedStorageConnector(config, KVConnectorRole.SCHEDULER)
        self.worker = SharedStorageConnector(config, KVConnectorRole.WORKER)
        spec = self.worker.cache.spec.groups[0]
        head_dim = spec.content_size // 2
        shape = (2, 32, BLOCK, spec.num_kv_heads, head_dim)
        generator = torch.Generator().manual_seed(seed)
        self.caches = {
            f"layers.{i}": torch.randn(shape, generator=generator) for i in range(spec.num_layers)
        }
        self.worker.register_kv_caches(self.caches)
        self.worker.set_host_xfer_buffer_ops(None)
        assert self.scheduler.cache.store.wait_indexed(60)

    def prefill(self, request_id: str, prompt: list[int], blocks: list[int]) -> int:
        request = SimpleNamespace(
            request_id=request_id,
            prompt_token_ids=prompt,
            all_token_ids=prompt,
            num_tokens=len(prompt),
            num_prompt_tokens=len(prompt),
            num_computed_tokens=0,
        )
        hit, is_async = self._look_up(request)
        assert not is_async
        table = SimpleNamespace(get_block_ids=lambda: (blocks,))
        self.scheduler.update_state_after_alloc(request, table, hit)
        new = SimpleNamespace(
            req_id=request_id,
            prompt_token_ids=prompt,
            block_ids=(blocks,),
            num_computed_tokens=hit,
        )
        self.step([new], {request_id: len(prompt) - hit})
        self.scheduler.request_finished(request, blocks)
        self.step([], {})
        return hit

    def _look_up(self, request: Any) -> tuple[int, bool]:
        until = time.monotonic() + 20
        while (answer := self.scheduler.get_num_new_matched_tokens(request, 0))[0] is None:
            assert time.monotonic() < until
            self.step([], {})
        return answer

    def settle(self) -> None:
        """Step until all saves have ended."""
        until = time.monotonic() + 20
        while self.scheduler.scheduler_role.pool.num_taken:
            assert time.monotonic() < until
            self.step([], {})

    def step(self, new: list[Any], num_scheduled: dict[str, int]) -> set[int]:
        output = SimpleNamespace(
            scheduled_new_reqs=new,
            scheduled_cached_reqs=SimpleNamespace(
                req_ids=[],
                new_block_ids=[],
                num_computed_tokens=[],
                resumed_from_preemption=[],
            ),
            num_scheduled_tokens=num_scheduled,
            total_num_scheduled_tokens=sum(num_scheduled.values()),
            finished_req_ids=set(),
        )
        self.worker.bind_connector_metadata(self.scheduler.build_connector_meta(output))
        # No attention metadata: the promised load must happen all the same.
        self.worker.start_load_kv(SimpleNamespace(attn_metadata=None, no_compile_layers={}))
        for name, cache in self.caches.items():
            self.worker.wait_for_layer_load(name)
            self.worker.save_kv_layer(name, cache, None)
        if num_scheduled:
            self.worker.wait_for_save()
        assert self.worker.get_finished(set()) == (None, None)
        bad = self.worker.get_block_ids_with_load_errors()
        fields = {
            "finished_sending": None,
            "finished_recving": None,
            "invalid_block_ids": bad,
            "kv_connector_stats": None,
        }
        if self._carries_reports:
            fields["kv_connector_worker_meta"] = self.worker.build_connector_worker_meta()
        self.worker.clear_connector_metadata()
        self.scheduler.update_connector_output(SimpleNamespace(**fields))
        return bad

    def close(self) -> None:
        self.worker.shutdown()
        self.scheduler.shutdown()
        self.worker.shutdown()


def test_kv_of_a_prompt_survives_the_host(model_dir, tmp_path):
    config = make_config(model_dir, shared_storage_path=str(tmp_path / "k v#50%41?"))
    prompt = list(range(5, 26))
    first = OldHost(config, seed=1)
    assert first.prefill("a", prompt, [3, 4, 5, 6, 7, 8]) == 0
    first.settle()
    first.close()
    second = OldHost(config, seed=2)
    assert second.prefill("b", prompt, [9, 20, 10, 11, 13, 12]) == 16
    for name, cache in second.caches.items():
        source = first.caches[name][:, [3, 4, 5, 6]]
        assert torch.equal(cache[:, [9, 20, 10, 11]], source)
    second.close()


def test_the_first_hit_is_audited(model_dir, tmp_path, caplog):
    config = make_config(model_dir, shared_storage_path=str(tmp_path / "kv"), audit="first")
    prompt, blocks = list(range(5, 26)), [3, 4, 5, 6, 7, 8]
    hits = {}
    # What a host "computes" is what its blocks hold at first.
    for seed in (1, 1, 2):
        host = OldHost(config, seed=seed)
        hits[seed] = [host.prefill("a", prompt, blocks)]
        host.settle()
        hits[seed].append(host.prefill("b", prompt, blocks))
        host.settle()
        host.close()
    # Of two chunks, the last is compared, or the first; after that, the next hit is audited, too.
    assert hits[1] in ([8, 16], [0, 8], [0, 0])
    assert hits[2] in ([8, 0], [0, 0])
    assert caplog.text.count("computes other KV than is stored") == 1


def test_names_and_arithmetic_of_the_original():
    assert [align_to_block_size(n, 16) for n in (0, 1, 16, 17, 33)] == [-16, 0, 0, 16, 32]
    metadata = SharedStorageConnectorMetadata()
    metadata.add_request(list(range(20)), [7, 2], 16, True)
    meta = metadata.requests[0]
    assert isinstance(meta, ReqMeta)
    assert meta.is_store
    assert meta.token_ids.tolist() == list(range(16))
    assert meta.slot_mapping.tolist() == list(range(112, 128))
    load = ReqMeta.make_meta(list(range(21)), [5, 1], 16, False)
    assert load.slot_mapping.tolist() == list(range(80, 96))


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({"chunk_token": 8}, "chunk_tokens"),
        ({"store": "nowhere"}, "file://"),
        ({"store": "memory://x", "memory_bytes": 1}, "memory_bytes"),
    ],
)
def test_bad_options_are_refused_at_construction(model_dir, extra, message: str):
    extra = {"store": "memory://x", **extra}
    with pytest.raises(ConfigError, match=message):
        SharedStorageConnector(make_config(model_dir, **extra), KVConnectorRole.SCHEDULER)


class SlidingWindowSpec(SimpleNamespace):
    """As a host calls it."""


class FullAttentionSpec(SimpleNamespace):
    """Of layers whose window the host does not use to drop blocks."""


@pytest.mark.parametrize(
    ("specs", "message"),
    [
        pytest.param([FullAttentionSpec(), FullAttentionSpec()], "has 2", id="several groups"),
        pytest.param([SlidingWindowSpec(sliding_window=64)], "one of 64 tokens", id="window"),
        pytest.param([FullAttentionSpec(sliding_window=64)], None, id="all tokens kept"),
    ],
)
def test_hosts_with_several_tables_or_windows_are_refused(model_dir, specs, message):
    groups = [SimpleNamespace(kv_cache_spec=spec) for spec in specs]
    host = SimpleNamespace(kv_cache_groups=groups)
    config = make_config(model_dir, store="memory://x")
    if message is None:
        SharedStorageConnector(config, KVConnectorRole.SCHEDULER, host).shutdown()
        return
    with pytest.raises(ConfigError, match=message):
        SharedStorageConnector(config, KVConnectorRole.SCHEDULER, host)


@pytest.mark.parametrize(
    ("fields", "refused"),
    [
        pytest.param({"sliding_window": 64}, True, id="window"),
        pytest.param({"sliding_window": 64, "use_sliding_window": False}, False, id="not used"),
        pytest.param({"sliding_window": None}, False, id="none"),
    ],
)
def test_a_window_of_which_the_host_says_nothing_is_refused(tmp_path, fields, refused: bool):
    directory = make_tiny_model(tmp_path / "model")
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))
    config = make_config(directory, store="memory://x")
    if not refused:
        SharedStorageConnector(config, KVConnectorRole.SCHEDULER).shutdown()
        return
    with pytest.raises(ConfigError, match="one of 64 tokens"):
        SharedStorageConnector(config, KVConnectorRole.SCHEDULER)


def test_this_connector_and_the_plug_in_for_vllm_know_a_model_alike(model_dir, monkeypatch):
    reader = SimpleNamespace(get_config=load_config)
    monkeypatch.setitem(sys.modules, "vllm.transformers_utils.config", reader)
    config = vllm_config(model_dir, model_config__quantization="fp8")
    values = config.model_config.hf_config.to_dict()
    config.model_config.hf_config = HFConfig(values | {"rope_scaling": {"factor": 2.0}})
    config.kv_transfer_config = make_config(model_dir, store="memory://x").kv_transfer_config
    connector = SharedStorageConnector(config, KVConnectorRole.SCHEDULER)
    connector.shutdown()
    identity = connector.cache.spec.identity
    assert identity == identity_of(config)
    assert identity.config["overrides"] == {"rope_scaling": {"factor": 2.0}}


def test_pipeline_parallelism_is_refused(model_dir):
    config = make_config(model_dir, store="memory://x")
    config.parallel_config.pipeline_parallel_size = 2
    with pytest.raises(ConfigError, match="pipeline_parallel_size=2"):
        SharedStorageConnector(config, KVConnectorRole.WORKER)


def test_a_host_that_carries_no_reports_is_found_out_and_loads_nothing(model_dir, tmp_path, caplog):
    path = str(tmp_path / "kv")
    prompt = list(range(5, 26))
    writer = OldHost(make_config(model_dir, shared_storage_path=path), seed=1)
    writer.prefill("a", prompt, [3, 4, 5, 6, 7, 8])
    writer.settle()
    writer.close()
    config = make_config(model_dir, shared_storage_path=path)
    reader = OldHost(config, seed=2, carries_reports=False)
    assert reader.prefill("b", prompt, [9, 20, 10, 11, 13, 12]) == 0
    assert caplog.text.count("carries no reports from workers") == 1
    reader.close()

"""The connector in the one-class shape, driven by the host of the conformance kit."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvferry.errors import ConfigError
from kvferry.testing.connector.content import Ask
from kvferry.testing.connector.lab import Lab, write_models
from kvferry.testing.connector.own_host import OwnHost
from kvferry.testing.models import make_tiny_model
from kvferry.testing.stores.hooks import wait_until
from kvferry.v1 import (
    ReqMeta,
    SharedStorageConnector,
    SharedStorageConnectorMetadata,
    align_to_block_size,
)
from kvferry.v1.types import KVConnectorRole
from tests.adapters.vllm.fakes import HFConfig, identity_of, load_config
from tests.adapters.vllm.fakes import make_config as vllm_config

OPTIONS = {
    "chunk_tokens": 16, "audit": "off", "load_timeout_seconds": 60.0, "memory_bytes": 1 << 22,
}  # fmt: skip


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    return make_tiny_model(tmp_path_factory.mktemp("model"))


class TransferConfig(SimpleNamespace):
    def get_from_extra_config(self, key: str, default: Any) -> Any:
        return self.kv_connector_extra_config.get(key, default)


def make_config(model_dir, **extra: Any) -> Any:
    extra = {**OPTIONS, **extra}
    return SimpleNamespace(
        kv_transfer_config=TransferConfig(
            kv_connector="SharedStorageConnector",
            kv_role="kv_both",
            engine_id="e",
            kv_connector_extra_config=extra,
        ),
        cache_config=SimpleNamespace(block_size=4, cache_dtype="auto"),
        model_config=SimpleNamespace(model=str(model_dir), dtype=torch.float32),
        parallel_config=SimpleNamespace(
            tensor_parallel_size=1, pipeline_parallel_size=1, world_size=1, rank=0
        ),
    )


@pytest.fixture
def make_lab(tmp_path):
    """Factory of labs over one directory, each with this connector under the kit's own host."""
    labs = []
    (models := tmp_path / "models").mkdir()
    write_models(models)

    def make(**options: Any) -> Lab:
        options = {**OPTIONS, "kv_layout": "BHNC", "shared_storage_path": "{dir}", **options}
        labs.append(Lab(SharedStorageConnector, options, OwnHost, tmp_path, models, 0, 0, 60.0))
        return labs[-1]

    yield make
    for lab in labs:
        lab.close()


def serve(lab: Lab, ask: Ask) -> int:
    """Serve a request that the engine itself has not, until saves have ended. Return its hit."""
    lab.forget()
    (row,) = lab.serve(ask)
    pool = lab.host.scheduler_half.scheduler_role.pool
    wait_until(lambda: lab.host.step() or not pool.num_taken, "saves end")
    return row.hit


def test_kv_of_a_prompt_survives_the_host(make_lab):
    lab = make_lab(shared_storage_path="{dir}/k v#50%41?")
    prompt = lab.stored()
    lab.close()
    lab.start()
    lab.expect(lab.again(prompt), 64)


def test_the_first_hit_is_audited(make_lab, caplog):
    lab = make_lab(audit="first")
    prompt = lab.ask(21)  # one chunk, so that nothing is read but to compare it
    hits = []
    for identity in ("a", "a", "b"):
        host = lab.start()
        host.setup = replace(host.setup, identity=identity)
        hits.append([serve(lab, lab.again(prompt)) for _ in range(2)])
        lab.close()
    assert hits == [[0, 16], [0, 16], [0, 0]]
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
        connector = SharedStorageConnector(config, KVConnectorRole.SCHEDULER, host)
        connector.shutdown()
        assert connector.cache.spec.kv_layout == "2BNHD"
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


def test_a_host_that_carries_no_reports_is_found_out_and_loads_nothing(make_lab, caplog):
    lab = make_lab()
    prompt = lab.stored()
    half = lab.start().scheduler_half
    carry = half.update_connector_output

    def carry_less(output: Any) -> None:
        fields = {**vars(output)}
        del fields["kv_connector_worker_meta"]
        carry(SimpleNamespace(**fields))

    half.update_connector_output = carry_less
    (row,) = lab.serve(lab.again(prompt))
    assert row.hit == 0
    assert caplog.text.count("carries no reports from workers") == 1

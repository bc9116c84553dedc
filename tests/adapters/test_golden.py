"""The namespaces of each host never change by accident: records of yesterday are found."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvferry.engine.config import EngineConfig
from kvferry.engine.connector import engine_spec
from kvferry.engine.model_config import ModelConfig
from kvferry.identity import model_identity
from kvferry.keys import ModelIdentity, Namespace
from kvferry.types import KVGroup
from kvferry.v1.driven import v1_config
from kvferry.v1.running_model import as_written
from tests.adapters.sglang import host as sglang
from tests.adapters.sglang.conftest import KVFerryStorage
from tests.adapters.vllm.fakes import (
    HFConfig,
    identity_of,
    load_config,
    make_code,
    make_config,
    registry_of,
    write_model,
)
from tests.adapters.vllm.versioned_config import make_model

GOLDEN: dict[str, dict[str, str]] = json.loads(Path(__file__).with_name("golden.json").read_text())
GROUP = KVGroup(num_layers=2, num_kv_heads=2, content_size=8, dtype="float32", block_size=4)


def digest_of(identity: ModelIdentity) -> str:
    return Namespace.of(identity, (GROUP,), 128).digest.hex()


def of_vllm(config: Any, version: str | None = None, reader: Any = load_config) -> str:
    return digest_of(identity_of(config, version, reader))


QUANTIZED = {"quantization_config": {"quant_method": "fp8"}}
CODE = {"auto_map": {"AutoModel": "modeling_x.X", "AutoConfig": "configuration_x.X"}}
LORA = {
    "target_modules": ["o_proj"],
    "enable_tower_connector_lora": True,
    "enable_mixed_moe_lora_format": False,
    "enable_moe_shared_loras": True,
}

# What is written of a model, how the host runs it, the variables that are set.
Case = tuple[dict[str, Any], dict[str, Any], dict[str, str]]
VLLM: dict[str, Case] = {
    "plain": ({}, {}, {}),
    "dtype": ({}, {"model_config__dtype": torch.bfloat16}, {}),
    "fp8 kv": (
        {},
        {
            "cache_config__cache_dtype": "fp8_e4m3",
            "cache_config__kv_cache_dtype_skip_layers": ["0", "sliding_window"],
        },
        {},
    ),
    "kv dtype as the model's": ({}, {"cache_config__cache_dtype": "float32"}, {}),
    "online quantisation": ({}, {"model_config__quantization": "fp8"}, {}),
    "options of quantisation": (
        QUANTIZED,
        {
            "model_config__quantization": "fp8",
            "model_config__quantization_config": {"moe": "int8"},
        },
        {},
    ),
    "quantised checkpoint": (QUANTIZED, {"model_config__quantization": "fp8"}, {}),
    "kernels of a quantised model": (
        {},
        {
            "model_config__quantization": "fp8",
            "kernel_config": SimpleNamespace(
                moe_backend="marlin", linear_backend="auto", linear_backend_per_quant={"fp8": "x"}
            ),
        },
        {},
    ),
    "kernels of another model": (
        {},
        {
            "kernel_config": SimpleNamespace(
                moe_backend="marlin", linear_backend="auto", linear_backend_per_quant=None
            )
        },
        {},
    ),
    "LoRA": ({}, {"lora_config": SimpleNamespace(**LORA)}, {}),
    "queries": (
        {},
        {
            "attention_config": SimpleNamespace(
                disable_flashinfer_q_quantization=True, use_prefill_query_quantization=False
            )
        },
        {},
    ),
    "a platform": ({}, {"additional_config": {"kv": "compressed"}}, {}),
    "by Transformers": ({}, {"model_config__using_transformers_backend": lambda: True}, {}),
    "load format": (
        {},
        {"load_config__load_format": "PT", "load_config__model_loader_extra_config": {"a": 1}},
        {},
    ),
    "load format alone": ({}, {"load_config__load_format": "mistral"}, {}),
    "fast load format": ({}, {"load_config__load_format": "fastsafetensors"}, {}),
    "latents": (
        {},
        {
            "model_config__use_mla": True,
            "device_config": SimpleNamespace(device_type="cuda"),
        },
        {},
    ),
    "long rope": (
        {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4}},
        {"model_config__max_model_len": 128},
        {},
    ),
    "overrides": ({}, {"overrides": {"rope_parameters": {"rope_theta": 5e5}}}, {}),
    "code": (CODE, {"model_config__trust_remote_code": True}, {}),
    "code that is not run": (CODE, {}, {}),
    "variables": ({}, {}, {"VLLM_BATCH_INVARIANT": "1", "VLLM_MARLIN_INPUT_DTYPE": "int8"}),
    "version": ({}, {"version": "v1"}, {}),
    "version of a hub": ({}, {"version": "v1", "model_config__model": "no/such", "hub": True}, {}),
    "unknown loader with version": (
        {},
        {
            "version": "v1",
            "load_config__load_format": "tensorizer",
            "model_config__model": "no/such",
            "hub": True,
        },
        {},
    ),
    "unreadable": ({}, {"reader": "fails"}, {}),
}


def unreadable(*_: object, **__: object) -> None:
    raise OSError("gone")


def run_vllm(path: Path, case: Case) -> str:
    written, changes, _ = case
    model = write_model(path, **written)
    (path / "modeling_x.py").write_text("SCALE = 1.0\n")
    changes = dict(changes)
    version = changes.pop("version", None)
    reader = unreadable if changes.pop("reader", None) else load_config
    overrides = changes.pop("overrides", None)
    if changes.pop("hub", False):
        reader = unreadable
    config = make_config(model, **changes)
    if overrides is not None:
        running = HFConfig(load_config(model).to_dict() | overrides)
        config.model_config.hf_config = running
    return of_vllm(config, version, reader)


def run_v1(path: Path) -> str:
    config = v1_config(block_size=4, model=str(write_model(path)), dtype="float32")
    return digest_of(model_identity(as_written(config), None))


def run_sglang(path: Path, case: dict[str, Any]) -> str:
    """Of the KV pool, as the storage back end has it."""
    model = write_model(path / "model", **case.get("written", {}))
    sglang.RUNNING.arguments = {
        "model_path": str(model),
        "load_format": "auto",
        "overrides": case.get("overrides", {}),
        "device": "cuda",
        **case.get("arguments", {}),
    }
    given = {"store": (path / "store").as_uri(), **case.get("extra", {})}
    backend = KVFerryStorage(sglang.storage_config(given, **case.get("config", {})), {})
    try:
        pool = case.get("pool", sglang.HostPool)()
        backend.register_mem_pool_host(pool)
        return backend._pools["kv"][1]._cache.namespace.hex()
    finally:
        backend.close()
        sglang.RUNNING.arguments = None


class ScaledPool(sglang.HostPool):
    """A pool with scales, and with what this start has of memory."""

    def __init__(self) -> None:
        super().__init__()
        self.page_num = sglang.NUM_PAGES
        self.layer_num = sglang.LAYERS
        self.device_num_pages = 12345
        self.k_scale_host = [torch.zeros((sglang.NUM_PAGES, 3)) for _ in range(3)]


SGLANG: dict[str, dict[str, Any]] = {
    "plain": {},
    "tensor parallel": {"config": {"tp_rank": 1, "tp_size": 2}},
    "latents": {
        "config": {"is_mla_model": True, "tp_rank": 1, "tp_size": 2},
        "pool": lambda: sglang.HostPool("layer_first", latent=True),
    },
    "pieces": {"pool": sglang.UnequalPool},
    "page_head": {"pool": lambda: sglang.HostPool("page_head")},
    "more of the pool": {"pool": ScaledPool},
    "quantisation": {"arguments": {"quantization": "fp8", "torchao_config": "int4"}},
    "quantised checkpoint": {"written": QUANTIZED, "arguments": {"quantization": "fp8"}},
    "loader": {
        "arguments": {
            "load_format": "mistral",
            "model_loader_extra_config": "{}",
            "kv_cache_dtype": "fp8_e5m2",
        }
    },
    "overrides": {"overrides": {"rope_parameters": {"rope_theta": 5e5}}},
    "long rope": {"written": {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4}}},
    "adapters with version": {
        "arguments": {"enable_lora": True},
        "extra": {"weights_version": "v1"},
    },
    "tenant": {"extra": {"tenant": "them"}},
}


def run_engine(path: Path) -> str:
    engine = EngineConfig()
    spec = engine_spec(ModelConfig(make_model(path), engine), engine)
    return Namespace.of(spec.identity, spec.groups, 128).digest.hex()


def every_case() -> list[tuple[str, str, Callable[[Path], str]]]:
    found: list[tuple[str, str, Callable[[Path], str]]] = [
        ("v1", "plain", run_v1),
        ("engine", "plain", run_engine),
    ]
    found += [
        ("vllm", name, lambda path, case=case: run_vllm(path, case)) for name, case in VLLM.items()
    ]
    found += [
        ("sglang", name, lambda path, case=case: run_sglang(path, case))
        for name, case in SGLANG.items()
    ]
    return found


@pytest.mark.parametrize(("host", "name", "run"), every_case())
def test_namespaces_are_those_of_yesterday(
    host: str,
    name: str,
    run: Callable[[Path], str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if host == "vllm":
        for variable, value in VLLM[name][2].items():
            monkeypatch.setenv(variable, value)
    assert run(tmp_path / "model") == GOLDEN[host][name]


def test_no_two_cases_are_alike_but_those_that_compute_the_same() -> None:
    alike = {"plain", "kv dtype as the model's", "kernels of another model", "fast load format"}
    for host, digests in GOLDEN.items():
        different = [digest for name, digest in digests.items() if name not in alike - {"plain"}]
        assert len(set(different)) == len(different), host
    assert len({GOLDEN["vllm"][name] for name in alike}) == 1


def test_a_class_of_a_plug_in_is_named_with_the_digest_of_its_file(tmp_path: Path) -> None:
    code = type(HFConfig)("Model", (HFConfig,), {"__module__": HFConfig.__module__})
    config = make_config(write_model(tmp_path), model_config__registry=registry_of(code))
    own = make_config(
        tmp_path, model_config__registry=registry_of(make_code("vllm.models.llama", name="Other"))
    )
    assert of_vllm(config) == of_vllm(config) != of_vllm(own)

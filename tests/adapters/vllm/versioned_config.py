"""The configuration of `versioned_host`'s engine, with the fields that a release of vLLM has."""

from __future__ import annotations

import copy
import dataclasses
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors.torch import save_file

from .fakes import OWN_CODE
from .released import Release
from .versioned_kv import BLOCK, HEAD_SIZE, HEADS, LAYERS, layer_names
from .versioned_stages import layers_of_stage

NUM_TOKENS = 37
CHUNK = 6
"""Neither a multiple nor a divisor of the block size, so that chunks straddle blocks."""
WINDOW = 8
"""Of the layers of `uniform` that have one."""


def make_model(folder: Path, seed: int = 0) -> Path:
    """Write a model directory: a config, and weights that identify the model."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 64,
        "hidden_size": HEADS * HEAD_SIZE,
        "intermediate_size": 16,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": HEADS,
        "max_position_embeddings": 4096,
    }
    (folder / "config.json").write_text(json.dumps(config))
    weights = torch.arange(16, dtype=torch.float32) + seed
    save_file({"model.embed_tokens.weight": weights}, str(folder / "model.safetensors"))
    return folder


def make_config(
    release: Release,
    model: Path,
    *,
    world: int = 1,
    stages: int = 1,
    extra: dict[str, Any] | None = None,
    **changes: Any,
) -> Any:
    """Return a `VllmConfig` with those of the attributes below that the release has.

    Args:
        release: the release of vLLM.
        model: the model directory.
        world: number of tensor-parallel ranks of each of the pipeline's stages.
        extra: the `kv_connector_extra_config`.
        changes: attributes by `config__name`, for example `cache_config__block_size=8`.
    """
    from transformers import AutoConfig

    hf_config = AutoConfig.from_pretrained(model)
    wanted: dict[str, dict[str, Any]] = {
        "model_config": {
            "model": str(model),
            "dtype": torch.float32,
            "hf_config": hf_config,
            "hf_text_config": hf_config,
            "quantization": None,
            "max_model_len": 4096,
            "revision": None,
            "seed": 0,
            "hf_config_path": None,
        },
        "cache_config": {
            "block_size": BLOCK,
            "cache_dtype": "auto",
            "enable_prefix_caching": True,
            "sliding_window": None,
            "calculate_kv_scales": False,
            "kv_cache_layout": None,
        },
        "parallel_config": {
            "tensor_parallel_size": world,
            "pipeline_parallel_size": stages,
            "decode_context_parallel_size": 1,
            "prefill_context_parallel_size": 1,
            "data_parallel_size": 1,
            "world_size": world * stages,
            "rank": 0,
            "distributed_executor_backend": "uni" if world * stages == 1 else "mp",
        },
        "scheduler_config": {"disable_hybrid_kv_cache_manager": False, "async_scheduling": False},
        "kv_transfer_config": {
            "kv_connector": "KVFerryConnector",
            "kv_role": "kv_both",
            "engine_id": "engine",
            "kv_connector_extra_config": dict(extra or {}),
        },
    }
    for name, value in changes.items():
        config, _, attribute = name.partition("__")
        wanted[config][attribute] = value
    records = {}
    for name, values in wanted.items():
        class_name = {"kv_transfer_config": "KVTransferConfig"}.get(name) or "".join(
            part.title() for part in name.split("_")
        )
        records[name] = release.record(class_name, **values)
    records["model_config"].get_total_num_kv_heads = lambda: HEADS
    records["model_config"].get_num_kv_heads = lambda parallel: HEADS // world
    records["model_config"].get_head_size = lambda: HEAD_SIZE
    records["model_config"].use_mla = False
    records["model_config"].using_transformers_backend = lambda: False
    records["model_config"].registry = OWN_CODE
    # What every release has, and the snapshots do not name.
    for name, value in {
        "code_revision": None,
        "config_format": "auto",
        "trust_remote_code": False,
        "hf_overrides": {},
    }.items():
        setattr(records["model_config"], name, value)
    executor = "uni" if world * stages == 1 else "mp"
    records["parallel_config"].distributed_executor_backend = executor
    load = SimpleNamespace(load_format="auto", download_dir=None, model_loader_extra_config={})
    device = SimpleNamespace(device_type="cpu")
    return SimpleNamespace(
        **records, load_config=load, device_config=device, lora_config=None, additional_config={}
    )


def at_rank(vllm_config: Any, rank: int) -> Any:
    """Return the configuration as the worker of a rank sees it."""
    parallel = SimpleNamespace(**vllm_config.parallel_config.__dict__)
    parallel.rank = rank
    return SimpleNamespace(**{**vllm_config.__dict__, "parallel_config": parallel})


def make_kv_cache_config(release: Release, num_blocks: int, world: int) -> Any:
    """Return one group of full attention, or None if the release tells connectors of no groups."""
    if all(call["positional"] == 2 for call in release.facts["construction"]):
        return None
    heads = HEADS // world
    values = {
        "block_size": BLOCK,
        "num_kv_heads": heads,
        "head_size": HEAD_SIZE,
        "head_size_v": HEAD_SIZE,
        "dtype": torch.float32,
    }
    # In a snapshot, fields without a default look like properties.
    found = [
        each
        for name in ("KVCacheSpec", "AttentionSpec", "FullAttentionSpec")
        for each in release.facts["types"][name]["fields"]
    ]
    fields = {
        each.rstrip("="): values.get(each.rstrip("="))
        for each in found
        if each.endswith("=") or each in values
    }
    spec_class = dataclasses.make_dataclass(
        "FullAttentionSpec",
        [(name, Any, value) for name, value in fields.items()],
        namespace={"page_size_bytes": 2 * heads * HEAD_SIZE * BLOCK * 4},
    )
    spec = spec_class()
    group = release.record(
        "KVCacheGroupSpec",
        layer_names=layer_names(),
        kv_cache_spec=spec,
        is_eagle_group=False,
        host_resident=False,
        enable_kv_transfer=True,
    )
    return release.record(
        "KVCacheConfig",
        num_blocks=num_blocks,
        kv_cache_tensors=[],
        kv_cache_groups=[group],
        kv_cache_layout="LBHNC",
    )


def of_stage(groups: Any, stage: int, num_stages: int) -> Any:
    """Return the configuration of a worker: all groups, with the layers of its pipeline stage."""
    if num_stages == 1:
        return groups
    [group] = groups.kv_cache_groups
    own = copy.copy(group)
    own.layer_names = [layer_names()[number] for number in layers_of_stage(stage, num_stages)]
    result = copy.copy(groups)
    result.kv_cache_groups = [own]
    return result


def uniform(groups: Any) -> Any:
    """Return the configuration of workers whose first layer attends to all tokens and whose other
    layers have a window, all in one group."""
    [group] = groups.kv_cache_groups
    first, *others = group.layer_names
    windowed = dataclasses.replace(group.kv_cache_spec, sliding_window=WINDOW)
    specs = {first: group.kv_cache_spec, **dict.fromkeys(others, windowed)}
    mixed = copy.copy(group)
    mixed.kv_cache_spec = SimpleNamespace(block_size=BLOCK, kv_cache_specs=specs)
    result = copy.copy(groups)
    result.kv_cache_groups = [mixed]
    return result


def whole_blocks(num_tokens: int) -> int:
    """Return how many tokens a prompt hits if an equal one is stored."""
    return min(num_tokens // CHUNK * CHUNK, num_tokens - 1) // BLOCK * BLOCK


def options(tmp_path: Path, **more: object) -> dict[str, object]:
    store = f"file://{tmp_path}/store"
    return {"store": store, "chunk_tokens": CHUNK, "audit": "off", "memory_bytes": 4 << 20, **more}


def prompt(start: int = 1, count: int = NUM_TOKENS) -> list[int]:
    return [(start + 13 * token) % 61 for token in range(count)]

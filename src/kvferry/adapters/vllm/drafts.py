"""The draft layers of vLLM (EAGLE, MTP, a draft model): which of them are stored beside chunks, and
under which drafter. What cannot be described is left out, and said: that costs drafts after hits,
and no hit. The scheduler's half knows nothing of them."""

# ruff: noqa: ANN401 - configurations and specs are the host's

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from blake3 import blake3

from kvferry.adapters.vllm.layers import Layer, described, draft_names, stages_of
from kvferry.adapters.vllm.spec import layer_views, order_in_blocks, sorted_layers
from kvferry.contract.spec import DraftSpec, EngineSpec
from kvferry.errors import ConfigError, LayoutError
from kvferry.identity import weight_files
from kvferry.keys import relevant_config
from kvferry.layout.shards import pipeline_shard
from kvferry.v1.running_model import model_files

logger = logging.getLogger(__name__)

DRAFTER_BYTES = 16

_SAMPLE_BYTES = 64 * 1024
_NUM_SAMPLES = 64


def draft_layers(
    vllm_config: Any, kv_cache_config: Any, layers: Sequence[Layer], platform: str
) -> list[Layer]:
    """Return the draft layers whose KV can be stored beside that of `layers`; none without a
    drafter, or if any of them cannot be, which is logged."""
    names = () if kv_cache_config is None else draft_names(vllm_config, kv_cache_config)
    if not names:
        return []
    try:
        return _checked(vllm_config, kv_cache_config, names, layers, platform)
    except ConfigError as error:
        _warn(error)
        return []


def draft_spec(
    vllm_config: Any,
    layers: Sequence[Layer],
    of_model: EngineSpec,
    cpu_kernels: str | None,
) -> DraftSpec | None:
    """Return what is stored of the draft layers `layers` beside the chunks of `of_model`. None if
    there are none, or if their blocks cannot be copied with those of the model, which is logged."""
    if not layers:
        return None
    parallel = vllm_config.parallel_config
    groups, stages, tables = sorted_layers(layers, 1, 0)
    layout, _, multiple = order_in_blocks(layers, groups, tables, cpu_kernels)
    try:
        if (layout, of_model.chunk_multiple % multiple) != (of_model.kv_layout, 0):
            raise ConfigError("their blocks lie in another way than the model's")
        shard = pipeline_shard(groups, parallel.rank, parallel.tensor_parallel_size, stages)
        if of_model.shard.num_replicas not in (1, shard.num_replicas):
            raise ConfigError("ranks that hold the same of the model hold different parts of them")
        drafter = drafter_digest(vllm_config)
    except (ConfigError, OSError) as error:
        _warn(error)
        return None
    return DraftSpec(drafter=drafter, groups=groups, shard=shard, tables=tables)


def views_with_drafts(
    tensors: Mapping[str, torch.Tensor],
    modules: Mapping[str, Any],
    layers: Sequence[Layer],
    drafts: Sequence[Layer],
    layout: str,
) -> dict[str, torch.Tensor]:
    """Return as `layer_views`, which raises for layers of the model alone: drafts that it does not
    serve stay as they are, which their registration refuses."""
    try:
        return layer_views(tensors, modules, [*layers, *drafts], layout)
    except LayoutError as error:
        views = layer_views(tensors, modules, layers, layout)
        _warn(error)
        return views


def _warn(why: Exception) -> None:
    logger.warning("the KV of draft layers is not stored, so drafts after a hit are poor: %s", why)


def _checked(
    vllm_config: Any,
    kv_cache_config: Any,
    names: set[str],
    layers: Sequence[Layer],
    platform: str,
) -> list[Layer]:
    parallel, config = vllm_config.parallel_config, vllm_config.speculative_config
    tp = parallel.tensor_parallel_size
    drafter_tp = getattr(getattr(config, "draft_parallel_config", None), "tensor_parallel_size", tp)
    if not _saves_after_drafts():
        raise ConfigError("this vLLM ends a step's saves before its drafter runs; use a later one")
    if stages_of(parallel) > 1 or drafter_tp != tp:
        raise ConfigError("the drafter is not divided over ranks as the model is")
    tables = {each.table for each in layers if each.table_window is each.table_chunk is None}
    found = described(names, config.draft_model_config, vllm_config, kv_cache_config, platform)
    for layer in found:
        if layer.table not in tables:
            raise ConfigError(f"layer {layer.name} is in block table {layer.table}")
        if not layer.kind.window is layer.kind.chunk is None:
            raise ConfigError(f"layer {layer.name} attends to a part of the tokens")
        if layer.whole_blocks is not None:
            raise ConfigError(f"blocks of layer {layer.name} can only be stored whole")
    return found


def _saves_after_drafts() -> bool:
    """Whether vLLM has connectors end their saves once the drafter has run, too."""
    module = sys.modules.get("vllm.v1.worker.kv_connector_model_runner_mixin")
    runner = getattr(module, "KVConnectorModelRunnerMixin", None)
    return runner is None or hasattr(runner, "finalize_kv_connector")


def drafter_digest(vllm_config: Any) -> bytes:
    """Return a digest of the drafter: its method, its configuration, and a sample of its weights.
    Two drafters with one digest would cost time only. Raises ConfigError if its weights are not on
    this disk, OSError if they cannot be read."""
    config = vllm_config.speculative_config
    model = config.draft_model_config
    said = model.hf_config.to_dict() if hasattr(model.hf_config, "to_dict") else {}
    described = {
        "method": str(getattr(config, "method", None)),
        "config": relevant_config(said),
        "dtype": str(model.dtype),
        "quantization": str(getattr(model, "quantization", None)),
    }
    hasher = blake3(json.dumps(described, sort_keys=True, default=str).encode())
    load = getattr(config, "draft_load_config", None) or vllm_config.load_config
    where = model_files(SimpleNamespace(model_config=model, load_config=load)).find()
    if where is None:
        raise ConfigError(f"the weights of {model.model} are not on this disk")
    for piece in _sample(where):
        hasher.update(piece)
    return hasher.digest(length=DRAFTER_BYTES)


def _sample(model_dir: Path) -> Iterator[bytes]:
    """Yield the names and sizes of weight files, and 64 pieces of each."""
    for name, path in weight_files(model_dir).counted.items():
        with path.open("rb", buffering=0) as file:
            size = os.fstat(file.fileno()).st_size
            yield f"{name}\0{size}\0".encode()
            last = max(0, size - _SAMPLE_BYTES)
            for index in range(_NUM_SAMPLES):
                yield os.pread(file.fileno(), _SAMPLE_BYTES, last * index // (_NUM_SAMPLES - 1))

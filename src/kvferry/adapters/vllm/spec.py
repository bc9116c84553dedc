"""vLLM's configuration as an `EngineSpec`, and its KV tensors as layouts of ours.

vLLM sorts layers into KV groups as suits its allocator. A record sorts them by their content (kv
heads, size, dtype, window), so that engines with other groups share records. When the engine
starts, `FerryConnector` calls this module, which refuses layers whose KV we cannot store.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import fields, replace
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import torch

from kvferry.adapters.vllm.host import (
    cpu_kernels,
    first_local_rank,
    has_whole_items,
    load_host,
    platform_name,
)
from kvferry.adapters.vllm.layers import Layer, num_target_layers, stages_of
from kvferry.adapters.vllm.states import identity_with_states, state_sizes
from kvferry.contract.spec import EngineSpec, Mode, StateSpec
from kvferry.errors import ConfigError, LayoutError
from kvferry.identity import model_identity
from kvferry.keys import UNREAD, JsonValue, ModelIdentity
from kvferry.layout.shards import pipeline_shard
from kvferry.types import KVGroup, TablePart
from kvferry.v1.running_model import running_model

_MODES = {"kv_producer": Mode.WRITE, "kv_consumer": Mode.READ}
_MULTI_PROCESS_EXECUTORS = ("mp", "ray", "external_launcher")


def engine_spec(
    vllm_config: Any,  # noqa: ANN401 - the host's
    layers: Sequence[Layer] | None,
    cpu_kernels: str | None,
    chunk_tokens: int | None,
    model_identity: Callable[[], ModelIdentity],
    states: StateSpec | None = None,
) -> EngineSpec:
    """Return the spec of this engine and this rank.

    Args:
        layers: of all pipeline stages; None for hosts that do not pass a `kv_cache_config`. All
            layers then form one full-attention group, as the configuration has it also for a model
            that keeps no KV.
        cpu_kernels: instruction set of vLLM's CPU kernels; None if it runs elsewhere.
        chunk_tokens: tokens of a record, as the operator set them; None: not set.
        model_identity: reads the model's files; not called before all else is checked.
        states: the model's recurrent states, if it has any.

    Raises:
        ConfigError: a model that cannot be described, or chunks that divide what must stay whole.
    """
    parallel, transfer = vllm_config.parallel_config, vllm_config.kv_transfer_config
    tp, num_stages = parallel.tensor_parallel_size, stages_of(parallel)
    rank = parallel.rank % (tp * num_stages)
    if layers:
        groups, stages, tables = sorted_layers(layers, num_stages, rank // tp)
    else:
        groups, tables = (_only_group(vllm_config),), None
        stages = [[(0, groups[0].num_layers)]] * num_stages
    layout, whole_blocks, multiple = order_in_blocks(layers or (), groups, tables, cpu_kernels)
    groups = _with_tails(groups, tables or (), layers or (), multiple)
    if chunk_tokens is not None and chunk_tokens % multiple:
        raise ConfigError(
            f"chunk_tokens={chunk_tokens} is no multiple of the block size {multiple}, and these "
            "blocks can only be stored whole; use a multiple, or leave the option out"
        )
    executor = str(getattr(parallel, "distributed_executor_backend", None) or "")
    events = getattr(vllm_config, "kv_events_config", None)
    step = getattr(vllm_config, "scheduler_config", None)
    # For releases without `data_parallel_index` (0.14 has it); others give dense models rank 0.
    engine = getattr(parallel, "data_parallel_rank", 0)
    identity = model_identity()
    return EngineSpec(
        identity=replace(identity, config={**identity.config, **whole_blocks}),
        groups=groups,
        shard=pipeline_shard(groups, rank, tp * num_stages, stages),
        kv_layout=layout,
        multi_process=parallel.world_size > 1 or executor in _MULTI_PROCESS_EXECUTORS,
        data_parallel_index=getattr(parallel, "data_parallel_index", engine),
        mode=_MODES.get(transfer.kv_role, Mode.BOTH),
        host_publishes_events=events is not None and bool(events.enable_kv_cache_events),
        step_tokens=getattr(step, "max_num_batched_tokens", None),
        chunk_multiple=multiple,
        whole_items=has_whole_items(vllm_config),
        engine_id=getattr(transfer, "engine_id", None),
        first_local_rank=first_local_rank(rank),
        tables=tables,
        states=states,
    )


def order_in_blocks(
    layers: Sequence[Layer],
    groups: Sequence[KVGroup],
    tables: Sequence[TablePart] | None,
    cpu_kernels: str | None,
) -> tuple[str, dict[str, JsonValue], int]:
    """Return the layout of the host's tensors, what identity says of blocks that can only be
    stored whole, and the tokens of which a chunk is a multiple for their sake."""
    whole: dict[str, JsonValue] = {}
    layout, multiple = _BY_TOKEN, 1
    if cpu_kernels is not None:
        sizes = {part.block_size for part in tables or groups}
        whole = cpu_blocks(cpu_kernels, {group.dtype for group in groups}, sizes)
        layout = _WHOLE_BLOCKS if whole else _KEYS_ACROSS
        multiple = math.lcm(*sizes) if whole else 1
    kept_whole = [layer for layer in layers if layer.whole_blocks is not None]
    if kept_whole:
        multiple = math.lcm(multiple, *(layer.block_size for layer in kept_whole))
        whole["whole_blocks"] = sorted({str(layer.whole_blocks) for layer in kept_whole})
    return layout, whole, multiple


def _with_tails(
    groups: tuple[KVGroup, ...],
    tables: Sequence[TablePart],
    layers: Sequence[Layer],
    multiple: int,
) -> tuple[KVGroup, ...]:
    """Return the groups, of which those have a tail whose window is shorter than any chunk, where
    blocks can only be stored whole: else most of a record would be what no hit needs, and what the
    host has dropped before the chunk is complete."""
    by_token = {layer.table for layer in layers if layer.whole_blocks is None}
    found = []
    for index, group in enumerate(groups):
        parts = [part for part in tables if part.group == index]
        needed = [
            multiple if part.window_in_blocks is None else part.window_in_blocks for part in parts
        ]
        is_whole = by_token.isdisjoint(part.table for part in parts)
        tail = max(1, *needed) if is_whole and needed else multiple
        found.append(replace(group, tail=tail) if tail < multiple else group)
    return tuple(found)


def cpu_blocks(
    kernels: str, dtypes: Collection[str], block_sizes: Collection[int]
) -> dict[str, JsonValue]:
    """Return what identity says of the blocks that CPU kernels fill; nothing if all engines can
    share them. `dtypes` are those of the KV."""
    if kernels in _ACROSS_KERNELS and all(dtype in _PLAIN_DTYPES for dtype in dtypes):
        return {}
    return {"cpu_blocks": f"{kernels} of {', '.join(map(str, sorted(block_sizes)))} tokens"}


def spec_of_workers(own: EngineSpec, described: Sequence[EngineSpec]) -> EngineSpec | None:
    """Return the spec that the scheduler's half must take from the workers; None if it has it.

    Raises:
        ConfigError: the workers disagree among themselves.
    """
    specs = sorted(described, key=lambda spec: spec.shard.rank)
    specs = [_hashed_as(spec, specs[0]) for spec in specs]
    of_layers: dict[object, EngineSpec] = {}
    for spec in specs:
        if spec.identity.weights != specs[0].identity.weights:
            raise ConfigError(
                f"ranks {specs[0].shard.rank} and {spec.shard.rank} say that they run other "
                "weights: their machines hold other files, or the weights are of a load_format "
                "(such as dummy) that none can name; serve this model without kvferry"
            )
        first = of_layers.setdefault(tuple(each.layers for each in spec.shard.groups), spec)
        for other, here, there in (
            (specs[0], _of_all_ranks(specs[0]), _of_all_ranks(spec)),
            (first, first.tables, spec.tables),
        ):
            if here != there:
                raise ConfigError(
                    f"ranks {other.shard.rank} and {spec.shard.rank} describe the model's KV "
                    "differently, so no record would hold both; serve this model without kvferry"
                )
    first = _hashed_as(specs[0], own) if specs else own
    is_known = _of_all_ranks(first) == _of_all_ranks(own) and first.tables == own.tables
    return None if is_known else first


def _hashed_as(spec: EngineSpec, other: EngineSpec) -> EngineSpec:
    """Return `spec` with the weights of `other` while one of them does not know its own. These are
    compared once a rank reports them (`kvferry.cache.messages.SlotRegion`)."""
    if UNREAD not in (spec.identity.weights, other.identity.weights):
        return spec
    return replace(spec, identity=replace(spec.identity, weights=other.identity.weights))


def _of_all_ranks(spec: EngineSpec) -> tuple[object, ...]:
    tables = [
        (part.table, part.group, part.block_size, part.window, part.chunk)
        for part in spec.table_parts
    ]
    return (
        *(spec.identity, spec.groups, tables, spec.kv_layout),
        *(spec.chunk_multiple, spec.mode, spec.shard.world_size, spec.states),
    )


def sorted_layers(
    layers: Sequence[Layer], num_stages: int, stage: int
) -> tuple[tuple[KVGroup, ...], list[list[tuple[int, int]]], tuple[TablePart, ...]]:
    """Group the model's layers by kind. Return the groups, the layers of each stage by group, and
    the place in the tables of those that one `stage` holds."""
    of_kind: dict[KVGroup, list[Layer]] = {}
    for layer in sorted(layers, key=lambda layer: (layer.number, layer.name)):
        of_kind.setdefault(layer.kind, []).append(layer)
    groups, parts = [], []
    stages: list[list[tuple[int, int]]] = [[] for _ in range(num_stages)]
    for group, (kind, members) in enumerate(of_kind.items()):
        groups.append(replace(kind, num_layers=len(members), block_size=members[0].block_size))
        stop = 0
        for number, held in enumerate(stages):
            start, stop = stop, stop + sum(layer.stage == number for layer in members)
            held.append((start, stop))
        here = [layer for layer in members if layer.stage == stage]
        for table in sorted({layer.table for layer in members}):
            like = next(layer for layer in members if layer.table == table)
            found = [(i, layer.name) for i, layer in enumerate(here) if layer.table == table]
            parts.append(
                TablePart(
                    table=table,
                    group=group,
                    layers=tuple(index for index, _ in found),
                    layer_names=tuple(name for _, name in found),
                    block_size=like.block_size,
                    window=like.table_window,
                    chunk=like.table_chunk,
                )
            )
    return tuple(groups), stages, tuple(parts)


def _only_group(vllm_config: Any) -> KVGroup:  # noqa: ANN401 - the host's
    """Return one full-attention group of all layers, from the model's configuration alone."""
    model, cache = vllm_config.model_config, vllm_config.cache_config
    if getattr(model, "use_mla", False) or getattr(model, "is_hybrid", False):
        raise ConfigError(
            "this vLLM does not tell connectors how it groups KV, which this model needs; use 0.14 "
            "or later"
        )
    dtype = str(model.dtype).removeprefix("torch.")
    return KVGroup(
        num_layers=num_target_layers(model),
        num_kv_heads=model.get_total_num_kv_heads(),
        content_size=2 * model.get_head_size(),
        dtype=dtype if cache.cache_dtype == "auto" else str(cache.cache_dtype),
        block_size=cache.block_size,
    )


# --- a model without its engine -------------------------------------------------------------------


class HostedModel(NamedTuple):
    """A model as the vLLM of this environment runs it.

    Attributes:
        identity: includes what the kernels here decide, if it is known.
        knows_kernels: whether it is: on CPUs, but for latent attention. Elsewhere it takes the
            model's layers, which only a running engine has.
        block_size: of a model with recurrent states, with which engines of 1 to 8 ranks share.
        layer_state_bytes: of such a model, what a recurrent layer keeps, of all ranks.
    """

    identity: ModelIdentity
    knows_kernels: bool
    block_size: int | None = None
    layer_state_bytes: int | None = None


def hosted_model(
    directory: Path, options: Mapping[str, Any], weights_version: str | None, weights: bytes
) -> HostedModel:
    """Return how this vLLM would run a model. Loads vLLM, and no weights.

    Args:
        options: of vLLM, by name; those that do not belong to its engine are left out.
        weights: digest of the weights.

    Raises:
        ConfigError: vLLM or kvferry would refuse it.
    """
    arguments = import_module("vllm.engine.arg_utils").EngineArgs
    known = {each.name for each in fields(arguments)}
    given = {
        name: value
        for name, value in options.items()
        # Ranks need devices, and how many there are is no part of identity.
        if name in known and "parallel" not in name
    }
    given |= {"model": str(directory), "skip_tokenizer_init": True}
    try:
        config = arguments(**given).create_engine_config()
    except Exception as error:  # vLLM, Transformers and their hub raise errors of any base
        raise ConfigError(" ".join(str(error).split())) from error
    model = running_model(config, load_host().load_config)
    identity = model_identity(model, weights_version, lambda _: weights)
    if getattr(config.model_config, "is_hybrid", False):
        # Its blocks are as large as its states make them, once the layers are known.
        block_size, layer_state_bytes = state_sizes(config)
        return HostedModel(
            identity_with_states(identity, platform_name()),
            knows_kernels=False,
            block_size=block_size,
            layer_state_bytes=layer_state_bytes,
        )
    size = config.cache_config.block_size
    kernels = cpu_kernels(config, {size}) if size else None
    if kernels is None:
        return HostedModel(identity, knows_kernels=False)
    dtype = str(identity.config.get("kv_cache_dtype", identity.config["dtype"]))
    blocks = cpu_blocks(kernels, {dtype}, {size})
    return HostedModel(replace(identity, config={**identity.config, **blocks}), knows_kernels=True)


# --- layouts --------------------------------------------------------------------------------------
#
# Since 0.30 every layer is a view `[block, head, token, content]` in any memory order. Before, each
# attention backend had a shape of its own. The order of its axes shows only in the shape that the
# backend gives for a cache whose sizes all differ.
#
# Within a block, the CPU kernels have an order of their own, and the axes of the tensor mean
# nothing. Most of them keep keys transposed, which is one of our layouts. The blocks of the others
# are stored whole, for engines with the same kernels and block size.

_BY_TOKEN = "BHNC|BND|2BNHD"
_KEYS_ACROSS = "BHNC~|2BHND~"
_WHOLE_BLOCKS = "BHNC|2BNHD"

_ACROSS_KERNELS = ("vec", "vec16")
"""Instruction sets whose kernels keep keys transposed. (With "neon" it depends on the build.)"""

_PLAIN_DTYPES = ("float32", "float16", "bfloat16")
"""Dtypes whose keys these kernels keep transposed; they pack KV of other dtypes otherwise."""

# Sizes that no two axes share, so that a shape shows its order.
_BLOCKS, _BLOCK_SIZE, _HEADS, _HEAD_SIZE = 1013, 1024, 7, 576


_BLOCK_AND_TOKEN = {3: (0, 1), 4: (0, 2), 5: (1, 2)}
"""Positions of the axes B and N in tensors of so many axes."""


def layer_views(
    tensors: Mapping[str, torch.Tensor],
    modules: Mapping[str, Any],
    layers: Sequence[Layer],
    layout: str,
) -> dict[str, torch.Tensor]:
    """Return the host's tensors in one of the layouts that `layout` names.

    Args:
        tensors: KV tensors by layer name.
        modules: the host's layers by name; their backends name the order of five axes.
        layers: what kvferry stores of them.
        layout: `EngineSpec.kv_layout`.

    Raises:
        LayoutError: a backend whose shape has other axes than those known, or splits blocks in a
            way that is not served.
    """
    if layout == _KEYS_ACROSS:
        return dict(tensors)
    views = {
        name: tensor if tensor.dim() < 5 else tensor.permute(_axes_of(modules[name]))
        for name, tensor in tensors.items()
    }
    for layer in layers:
        if layer.name in views:
            view = views[layer.name]
            if layer.kind.dtype == "uint8" and view.dtype != torch.uint8:
                view = view.view(torch.uint8)  # bytes that hold scales
            is_whole = layout == _WHOLE_BLOCKS or layer.whole_blocks is not None
            if is_whole:
                view = _as_if_by_token(view, layer)
            views[layer.name] = _of_whole_blocks(view, layer, is_whole=is_whole)
    return views


def _as_if_by_token(tensor: torch.Tensor, layer: Layer) -> torch.Tensor:
    """Return a view that gives each token, or the few that are a row of ours, an equal part of its
    block, if the host's rows are others. Such blocks are stored whole."""
    blocks, heads, rows, size = tensor.shape if tensor.dim() == 4 else (0, 0, 0, 0)
    content, num_rows = layer.kind.content_size, layer.num_rows
    is_of_rows = heads * size * rows == content * num_rows and size != content
    dense = (rows * size, size, 1), (size, heads * size, 1)
    is_dense = heads == 1 and tensor.stride()[2:] == (size, 1)
    if not is_of_rows or not (is_dense or tensor.stride()[1:] in dense):
        return tensor  # as it is, or refused when it is registered
    strides = (tensor.stride(0), num_rows * content, content, 1)
    return tensor.as_strided((blocks, 1, num_rows, content), strides)


def _of_whole_blocks(tensor: torch.Tensor, layer: Layer, *, is_whole: bool) -> torch.Tensor:
    """Return a view whose blocks are those of the host's block tables. A backend may split each
    into several, as many as its kernels need; the tensor then has more and smaller ones."""
    block, token = _BLOCK_AND_TOKEN.get(tensor.dim(), (0, 0))
    size = tensor.shape[token]
    if not 0 < size < layer.num_rows or layer.num_rows % size:
        return tensor  # as the tables say, or refused when it is registered
    shape, strides = list(tensor.shape), list(tensor.stride())
    if is_whole or strides[block] != size * strides[token]:
        raise LayoutError(
            f"layer {layer.name}: the attention backend splits blocks of {layer.block_size} tokens "
            f"into blocks of {size}, which kvferry cannot join; set --block-size {size}"
        )
    num_parts = layer.num_rows // size
    shape[block], shape[token] = shape[block] // num_parts, layer.num_rows
    strides[block] *= num_parts
    return tensor.as_strided(shape, strides)


def _axes_of(layer: Any) -> list[int]:  # noqa: ANN401 - the host's
    """Return the positions of the axes `[2, block, token, head, dim]` in the backend's tensors."""
    backend = layer.get_attn_backend()
    shape = tuple(backend.get_kv_cache_shape(_BLOCKS, _BLOCK_SIZE, _HEADS, _HEAD_SIZE))
    wanted = (2, _BLOCKS, _BLOCK_SIZE, _HEADS, _HEAD_SIZE)
    if sorted(shape) != sorted(wanted):
        raise LayoutError(
            f"{backend.__name__} keeps KV as {shape} for {_BLOCKS} blocks of {_BLOCK_SIZE} tokens, "
            f"{_HEADS} heads and head size {_HEAD_SIZE}: not served"
        )
    return [shape.index(size) for size in wanted]

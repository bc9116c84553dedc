"""vLLM's configuration as an `EngineSpec`, and its KV tensors as layouts of ours.

vLLM sorts layers into KV groups as suits its allocator. A record sorts them by their content (kv
heads, size, dtype, window), so that engines with other groups share records. When the engine
starts, `FerryConnector` calls this module, which refuses layers whose KV we cannot store.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from kvferry.contract.spec import EngineSpec
from kvferry.errors import ConfigError, LayoutError
from kvferry.keys import ModelIdentity
from kvferry.layout.shards import tensor_parallel_shard
from kvferry.types import KVGroup, TablePart

if TYPE_CHECKING:
    import torch

_FULL = frozenset({"FullAttentionSpec", "MLAAttentionSpec"})
_SLIDING = frozenset({"SlidingWindowSpec", "SlidingWindowMLASpec"})
_MLA = frozenset({"MLAAttentionSpec", "SlidingWindowMLASpec"})

_NUMBER = re.compile(r"\.(\d+)(?:\.|$)")
_ANY_NUMBER = re.compile(r"(\d+)")
_MULTI_PROCESS_EXECUTORS = ("mp", "ray", "external_launcher")


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """One attention layer of the model that this vLLM runs.

    Attributes:
        name: vLLM's name of the layer.
        number: position in the model.
        table: index of its KV group in vLLM, and so of its block table.
        block_size: tokens per block of that table.
        table_window: tokens that the table keeps (with a drafter, more than the window); None: all.
        kind: the form of its KV, as a group of one layer; layers of one kind make a record's group.
    """

    name: str
    number: int
    table: int
    block_size: int
    table_window: int | None
    kind: KVGroup


def engine_spec(
    vllm_config: Any,  # noqa: ANN401 - the host's
    kv_cache_config: Any,  # noqa: ANN401 - the host's, or None
    identity: ModelIdentity,
    *,
    publishes: bool,
) -> EngineSpec:
    """Return the spec of this engine and this rank, without a layout (see `with_layout`).

    Hosts that do not pass `kv_cache_config` give None: all layers then form one full-attention
    group.

    Raises:
        ConfigError: a parallel configuration or a kind of layer that is not served.
    """
    parallel = vllm_config.parallel_config
    _refuse_parallel(parallel)
    tp = parallel.tensor_parallel_size
    layers = [] if kv_cache_config is None else _layers_of(vllm_config, kv_cache_config)
    if layers:
        groups, tables = _sorted_layers(layers)
    else:
        groups, tables = (_only_group(vllm_config),), None
    executor = str(getattr(parallel, "distributed_executor_backend", None) or "")
    transfer = vllm_config.kv_transfer_config
    step = getattr(vllm_config, "scheduler_config", None)
    # For releases without `data_parallel_index` (0.14 has it); others give dense models rank 0.
    rank = getattr(parallel, "data_parallel_rank", 0)
    return EngineSpec(
        identity=identity,
        groups=groups,
        shard=tensor_parallel_shard(groups, parallel.rank % tp, tp),
        multi_process=parallel.world_size > 1 or executor in _MULTI_PROCESS_EXECUTORS,
        data_parallel_index=getattr(parallel, "data_parallel_index", rank),
        loads=transfer.kv_role != "kv_producer",
        saves=transfer.kv_role != "kv_consumer",
        host_publishes_events=publishes,
        step_tokens=getattr(step, "max_num_batched_tokens", None),
        tables=tables,
    )


def _sorted_layers(layers: Sequence[Layer]) -> tuple[tuple[KVGroup, ...], tuple[TablePart, ...]]:
    """Group the model's layers by kind; return the groups and each layer's place in the tables."""
    of_kind: dict[KVGroup, list[Layer]] = {}
    for layer in sorted(layers, key=lambda layer: (layer.number, layer.name)):
        of_kind.setdefault(layer.kind, []).append(layer)
    groups, parts = [], []
    for group, (kind, members) in enumerate(of_kind.items()):
        groups.append(replace(kind, num_layers=len(members), block_size=members[0].block_size))
        for table in sorted({layer.table for layer in members}):
            here = [(i, layer) for i, layer in enumerate(members) if layer.table == table]
            parts.append(
                TablePart(
                    table=table,
                    group=group,
                    layers=tuple(index for index, _ in here),
                    layer_names=tuple(layer.name for _, layer in here),
                    block_size=here[0][1].block_size,
                    window=here[0][1].table_window,
                )
            )
    return tuple(groups), tuple(parts)


def _refuse_parallel(parallel: Any) -> None:  # noqa: ANN401 - the host's
    """Raise ConfigError for a split of KV that is not served."""
    for name in (
        "pipeline_parallel_size",
        "decode_context_parallel_size",
        "prefill_context_parallel_size",
    ):
        size = getattr(parallel, name, 1)
        if isinstance(size, int) and size != 1:
            raise ConfigError(f"{name}={size} is not served with kvferry; set it to 1")


def _layers_of(vllm_config: Any, kv_cache_config: Any) -> list[Layer]:  # noqa: ANN401 - the host's
    """Return every layer whose KV is stored, in any order. Draft layers of speculative decoding are
    left out: their KV depends on another model, and a wrong draft only costs time."""
    model, parallel = vllm_config.model_config, vllm_config.parallel_config
    num_layers = _num_target_layers(model)
    found, place = [], 0
    for table, group in enumerate(kv_cache_config.kv_cache_groups):
        if not getattr(group, "enable_kv_transfer", True):
            continue
        each = getattr(group.kv_cache_spec, "kv_cache_specs", None)
        for name in group.layer_names:
            # A uniform group has a spec for each layer.
            spec = each[name] if isinstance(each, Mapping) else group.kv_cache_spec
            number = _number_of(name, place)
            place += 1
            if number >= num_layers or name.startswith("draft_model."):
                continue
            kind = _kind_of(name, spec, model, parallel.tensor_parallel_size)
            found.append(
                Layer(
                    name=name,
                    number=number,
                    table=table,
                    block_size=group.kv_cache_spec.block_size,
                    table_window=_table_window(spec),
                    kind=replace(kind, window=_window_of(number, spec, model)),
                )
            )
    return found


def _kind_of(name: str, spec: Any, model: Any, tp: int) -> KVGroup:  # noqa: ANN401 - the host's
    """Return the form of a layer's KV, without window; block size 0: all sizes are stored alike."""
    kind = type(spec).__name__
    if kind not in _FULL | _SLIDING:
        raise ConfigError(
            f"layer {name} keeps its KV as a {kind}, which kvferry does not store; serve this "
            "model without it"
        )
    for attribute in ("attention_chunk_size", "state_content_bytes", "num_head_slots"):
        if getattr(spec, attribute, None) is not None:
            raise ConfigError(
                f"layer {name} has {attribute}={getattr(spec, attribute)}, which kvferry does not "
                "store; serve this model without it"
            )
    # Other modes have scales in the blocks or beside them, or belong to one platform.
    mode = getattr(getattr(spec, "kv_quant_mode", None), "name", "NONE")
    if mode not in ("NONE", "FP8_PER_TENSOR"):
        raise ConfigError(
            f"layer {name} keeps its KV as {mode}, which kvferry does not store; set another "
            "--kv-cache-dtype"
        )
    if getattr(spec, "prefix_replay_tokens", 0):
        raise ConfigError(
            f"layer {name} has prefix_replay_tokens={spec.prefix_replay_tokens}: it computes the "
            "end of a hit again, which kvferry does not serve; serve this model without it"
        )
    content = spec.head_size
    if kind not in _MLA:
        content += getattr(spec, "head_size_v", None) or spec.head_size
    size = content * spec.num_kv_heads * spec.block_size * spec.dtype.itemsize
    if getattr(spec, "page_size_padded", None) is None and spec.page_size_bytes != size:
        raise ConfigError(
            f"a KV block of layer {name} has {spec.page_size_bytes} bytes, its keys and values "
            f"only {size}; kvferry does not store the other bytes"
        )
    return KVGroup(
        num_layers=1,
        num_kv_heads=1 if kind in _MLA else _total_heads(spec.num_kv_heads, model, tp),
        content_size=content,
        dtype=str(spec.dtype).removeprefix("torch."),
        block_size=0,
    )


def _window_of(number: int, spec: Any, model: Any) -> int | None:  # noqa: ANN401 - the host's
    """Return the window of a layer. vLLM may keep all tokens of layers with and without a window in
    one group, whose spec does not tell them apart; the model's configuration does."""
    window = getattr(spec, "sliding_window", None)
    config = getattr(model, "hf_text_config", None) or model.hf_config
    kinds = getattr(config, "layer_types", None)
    if type(spec).__name__ not in _SLIDING and isinstance(kinds, list) and number < len(kinds):
        window = config.sliding_window if kinds[number] == "sliding_attention" else None
    return window if isinstance(window, int) else None


def _table_window(spec: Any) -> int | None:  # noqa: ANN401 - the host's
    """Return how many tokens vLLM keeps of a layer; None if all."""
    if type(spec).__name__ not in _SLIDING:
        return None
    return int(spec.sliding_window) + int(getattr(spec, "extra_retained_tokens", 0))


def _total_heads(per_rank: int, model: Any, tp: int) -> int:  # noqa: ANN401 - the host's
    """Return the distinct kv heads over all ranks; with one per rank, ranks may hold copies."""
    if per_rank > 1:
        return per_rank * tp
    return int(min(tp, max(1, model.get_total_num_kv_heads())))


def _num_target_layers(model: Any) -> int:  # noqa: ANN401 - the host's
    config = getattr(model, "hf_text_config", None) or model.hf_config
    for name in ("num_hidden_layers", "n_layer", "num_layers"):
        number = getattr(config, name, None)
        if isinstance(number, int) and not isinstance(number, bool):
            return number
    return 1 << 30


def _number_of(name: str, place: int) -> int:
    """Return the position in the model: the first number in the name, or the host's order."""
    match = _NUMBER.search(name) or _ANY_NUMBER.search(name)
    return place if match is None else int(match.group(1))


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
        num_layers=_num_target_layers(model),
        num_kv_heads=model.get_total_num_kv_heads(),
        content_size=2 * model.get_head_size(),
        dtype=dtype if cache.cache_dtype == "auto" else str(cache.cache_dtype),
        block_size=cache.block_size,
    )


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


def with_layout(spec: EngineSpec, cpu_kernels: str | None, chunk_tokens: object) -> EngineSpec:
    """Return `spec` with the layout of this vLLM's blocks.

    Args:
        cpu_kernels: instruction set of vLLM's CPU kernels; None if it runs elsewhere.
        chunk_tokens: tokens of a record, as the operator set them.

    Raises:
        ConfigError: records would end within blocks that can only be stored whole.
    """
    if cpu_kernels is None:
        return replace(spec, kv_layout=_BY_TOKEN)
    if cpu_kernels in _ACROSS_KERNELS and all(g.dtype in _PLAIN_DTYPES for g in spec.groups):
        return replace(spec, kv_layout=_KEYS_ACROSS)
    sizes = sorted({part.block_size for part in spec.table_parts})
    if isinstance(chunk_tokens, int) and any(chunk_tokens % size for size in sizes):
        raise ConfigError(
            f"chunk_tokens={chunk_tokens} is no multiple of the block size {sizes[-1]}, which "
            f"CPU kernels {cpu_kernels!r} need; use a multiple"
        )
    content = f"{cpu_kernels} of {', '.join(map(str, sizes))} tokens"
    config = {**spec.identity.config, "cpu_blocks": content}
    return replace(spec, kv_layout=_WHOLE_BLOCKS, identity=replace(spec.identity, config=config))


def layer_views(
    tensors: Mapping[str, torch.Tensor], layers: Mapping[str, Any], layout: str
) -> dict[str, torch.Tensor]:
    """Return the host's tensors in one of the layouts that `layout` names.

    Args:
        tensors: KV tensors by layer name.
        layers: the host's layers by name; their backends name the order of five axes.
        layout: from `with_layout`.

    Raises:
        LayoutError: a backend whose shape has other axes than those known.
    """
    if layout == _KEYS_ACROSS:
        return dict(tensors)
    return {
        name: tensor if tensor.dim() < 5 else tensor.permute(_axes_of(layers[name]))
        for name, tensor in tensors.items()
    }


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

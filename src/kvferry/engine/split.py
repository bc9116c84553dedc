"""Splits the layers of a model over tensor-parallel ranks, in place.

As in Megatron-LM: each rank keeps the rows of the projections that make its heads, and the columns
of the projection that takes them, whose outputs add up over the ranks; likewise the MLP where its
shape is known. All else (embeddings, norms, routers, experts, logits) is replicated.

What may be split is known by the names of a layer's projections. Whether the result is right is not
believed but checked: see `PagedModel.split`.
"""

# ruff: noqa: ANN401 - the modules of Transformers share no typed surface.

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import nn

from kvferry.engine.rank_group import RankGroup
from kvferry.errors import ConfigError
from kvferry.topology.shards import heads_of_rank

_PER_QUERY_HEAD = ("q_proj", "q_b_proj", "kv_b_proj", "query_key_value")
"""Projections whose rows belong to query heads, head after head."""

_PER_KV_HEAD = ("k_proj", "v_proj")

_OUTPUTS = ("o_proj", "dense")
"""Projections whose columns belong to query heads."""

_BEFORE_HEADS = ("q_a_proj", "kv_a_proj_with_mqa")
"""Projections of an attention layer that know no heads: replicated."""

_MLPS = ((("gate_proj", "up_proj"), "down_proj"), (("dense_h_to_4h",), "dense_4h_to_h"))
"""Projections into an MLP and out of it."""


class Heads(NamedTuple):
    """Attention heads of the whole model."""

    num_query_heads: int
    num_kv_heads: int


def split_layers(model: nn.Module, heads: Heads, group: RankGroup) -> int:
    """Leave of every layer what this rank computes.

    Returns:
        The number of attention layers split.

    Raises:
        ConfigError: an attention layer of unknown projections. (`ModelConfig` refuses heads that do
            not divide.)
    """
    num_attention_layers = 0
    for module in list(model.modules()):
        children = dict(module.named_children())
        if isinstance(getattr(module, "layer_idx", None), int) and children.keys() & {*_OUTPUTS}:
            _split_attention(module, children, heads, group)
            num_attention_layers += 1
        for inputs, output in _MLPS:
            if all(isinstance(children.get(name), nn.Linear) for name in (*inputs, output)):
                _split_mlp([children[name] for name in inputs], children[output], group)
    return num_attention_layers


def _split_attention(
    module: nn.Module, children: dict[str, nn.Module], heads: Heads, group: RankGroup
) -> None:
    known = {*_PER_QUERY_HEAD, *_PER_KV_HEAD, *_OUTPUTS, *_BEFORE_HEADS}
    for name, child in children.items():
        if not isinstance(child, nn.Linear):
            continue
        if name not in known:
            raise ConfigError(
                f"{type(module).__name__} has a projection {name!r} that the engine cannot split; "
                "set tensor_parallel_size=1"
            )
        if name in _PER_QUERY_HEAD:
            _keep_rows(child, _share(heads.num_query_heads, group), heads.num_query_heads)
        elif name in _PER_KV_HEAD:
            mine = heads_of_rank(heads.num_kv_heads, group.rank, group.size)
            _keep_rows(child, mine, heads.num_kv_heads)
        elif name in _OUTPUTS:
            _keep_columns(child, _share(heads.num_query_heads, group), heads.num_query_heads, group)
    for name, parameter in list(module.named_parameters(recurse=False)):
        if name != "sinks":
            raise ConfigError(
                f"{type(module).__name__} has a parameter {name!r} that the engine cannot split; "
                "set tensor_parallel_size=1"
            )
        setattr(module, name, _frozen(parameter[slice(*_share(heads.num_query_heads, group))]))


def _split_mlp(inputs: list[Any], output: Any, group: RankGroup) -> None:
    size = output.in_features
    if size % group.size or any(each.out_features != size for each in inputs):
        return  # replicated: as right, only slower
    mine = _share(size, group)
    for each in inputs:
        _keep_rows(each, mine, size)
    _keep_columns(output, mine, size, group)


def _share(count: int, group: RankGroup) -> tuple[int, int]:
    return group.rank * count // group.size, (group.rank + 1) * count // group.size


def _keep_rows(linear: nn.Linear, mine: tuple[int, int], count: int) -> None:
    """Keep `mine` of `count` equal runs of outputs."""
    size, rest = divmod(linear.out_features, count)
    if rest:
        raise ConfigError(
            f"a projection to {linear.out_features} values does not make {count} heads"
        )
    rows = slice(mine[0] * size, mine[1] * size)
    linear.weight = _frozen(linear.weight[rows])
    if linear.bias is not None:
        linear.bias = _frozen(linear.bias[rows])
    linear.out_features = linear.weight.shape[0]


def _keep_columns(linear: Any, mine: tuple[int, int], count: int, group: RankGroup) -> None:
    """Keep `mine` of `count` equal runs of inputs; outputs are added up over the ranks."""
    size = linear.in_features // count
    linear.weight = _frozen(linear.weight[:, mine[0] * size : mine[1] * size])
    linear.in_features = linear.weight.shape[1]
    if group.rank > 0:
        linear.bias = None  # added once
    linear.register_forward_hook(lambda module, args, output: group.all_reduce(output))


def _frozen(part: torch.Tensor) -> nn.Parameter:
    """A copy, so that the memory of the whole is let go."""
    return nn.Parameter(part.detach().clone(), requires_grad=False)

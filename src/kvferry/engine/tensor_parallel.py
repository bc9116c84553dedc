"""One rank's share of a model, and the sums that join it to the other ranks.

As in Megatron-LM, each rank keeps those rows of the projections that make its heads, and those
columns of the output projection that read its heads. The outputs of all ranks are added up. MLPs
are split likewise, where their shape is known, shared experts included. All else (embeddings,
norms, routers, other experts, logits) is replicated.

The names of a layer's projections decide how it is split. `PagedModel.split` calls this at load,
and checks the result against the whole model.

Process groups are made directly, because torch's process-wide default group may belong to the
application, and a process may hold several engines.
"""

# ruff: noqa: ANN401 - torch's process groups and Transformers' modules have no typed surface.

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from kvferry.engine.model_config import ModelGeometry
from kvferry.errors import ConfigError, RankError
from kvferry.layout.shards import heads_of_rank

RANK_TIMEOUT_SECONDS = 60.0
"""How long one rank waits for another: for its part of a sum, or for an answer."""

_PER_QUERY_HEAD = ("q_proj", "q_b_proj", "kv_b_proj", "query_key_value")
"""Projections whose rows belong to query heads, head after head."""

_PER_KV_HEAD = ("k_proj", "v_proj")

_OUTPUTS = ("o_proj", "dense")
"""Projections whose columns belong to query heads."""

_BEFORE_HEADS = ("q_a_proj", "kv_a_proj_with_mqa")
"""Projections of an attention layer that come before the split into heads: replicated."""

_MLPS = ((("gate_proj", "up_proj"), "down_proj"), (("dense_h_to_4h",), "dense_4h_to_h"))
"""Names of the projections into an MLP, and of the one out of it."""


class RankGroup:
    """Sums tensors over all ranks of a tensor-parallel engine.

    Runs in: every rank, on the model runner's thread.
    """

    def __init__(self, rank: int, size: int, rendezvous: Path, device: torch.device) -> None:
        """Meet the other ranks, which all call this with the same `rendezvous`.

        Args:
            rendezvous: path of a file that does not exist yet, in a directory of our own.
            device: device of the tensors; sums run over NCCL on CUDA, over gloo elsewhere.

        Raises:
            RankError: the others did not come.
        """
        self.rank = rank
        self.size = size
        timeout = timedelta(seconds=RANK_TIMEOUT_SECONDS)
        distributed: Any = dist
        try:
            store = distributed.FileStore(str(rendezvous), size)
            store.set_timeout(timeout)
            self._process_group = _process_group(device, store, rank, size, timeout)
        except RuntimeError as error:
            raise RankError(f"rank {rank} of {size} cannot reach the others: {error}") from error

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the sum over all ranks, added up in float32 and bitwise equal on all of them. May
        write into `tensor`.

        Raises:
            RankError: another rank is gone, or did not come in time.
        """
        total = tensor.float().contiguous()
        try:
            self._process_group.allreduce([total]).wait()
        except RuntimeError as error:
            raise RankError(f"rank {self.rank} of {self.size} lost another: {error}") from error
        return total.to(tensor.dtype)


def device_of_rank(device: str, rank: int) -> str:
    """Return a rank's device: for "cuda" the one of its number, else `device`, which all share."""
    return f"cuda:{rank}" if device == "cuda" else device


def _process_group(
    device: torch.device, store: Any, rank: int, size: int, timeout: timedelta
) -> Any:
    backend: Any
    if device.type == "cuda":
        backend = dist.ProcessGroupNCCL
        options = backend.Options()
    else:
        backend = dist.ProcessGroupGloo
        options = backend._Options()  # torch has no public name for it
        # All ranks are on this machine; its name need not resolve.
        options._devices = [backend.create_device(hostname="127.0.0.1")]
    options._timeout = timeout
    return backend(store, rank, size, options)


def split_layers(model: nn.Module, geometry: ModelGeometry, group: RankGroup) -> int:
    """Keep this rank's part of every layer.

    Returns:
        The number of attention layers split.

    Raises:
        ConfigError: an attention layer has a projection or a parameter that cannot be split.
        TopologyError: neither the number of ranks nor the number of KV heads divides the other.
            (`ModelConfig` refuses query heads that cannot be divided among the ranks.)
    """
    num_attention_layers = 0
    for module in list(model.modules()):
        children = dict(module.named_children())
        if isinstance(getattr(module, "layer_idx", None), int) and children.keys() & {*_OUTPUTS}:
            _split_attention(module, children, geometry, group)
            num_attention_layers += 1
        for inputs, output in _MLPS:
            if all(isinstance(children.get(name), nn.Linear) for name in (*inputs, output)):
                _split_mlp([children[name] for name in inputs], children[output], group)
    return num_attention_layers


def _split_attention(
    module: nn.Module, children: dict[str, nn.Module], geometry: ModelGeometry, group: RankGroup
) -> None:
    num_heads, num_kv_heads = geometry.num_query_heads, geometry.num_kv_heads
    mine = heads_of_rank(num_heads, group.rank, group.size)
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
            _keep_rows(child, mine, num_heads)
        elif name in _PER_KV_HEAD:
            _keep_rows(child, heads_of_rank(num_kv_heads, group.rank, group.size), num_kv_heads)
        elif name in _OUTPUTS:
            _keep_columns(child, mine, num_heads, group)
    for name, parameter in list(module.named_parameters(recurse=False)):
        if name != "sinks":
            raise ConfigError(
                f"{type(module).__name__} has a parameter {name!r} that the engine cannot split; "
                "set tensor_parallel_size=1"
            )
        setattr(module, name, _frozen(parameter[slice(*mine)]))


def _split_mlp(inputs: list[Any], output: Any, group: RankGroup) -> None:
    size = output.in_features
    if size % group.size or any(each.out_features != size for each in inputs):
        return  # replicated: correct, but slower
    mine = heads_of_rank(size, group.rank, group.size)  # heads of size 1
    for each in inputs:
        _keep_rows(each, mine, size)
    _keep_columns(output, mine, size, group)


def _keep_rows(linear: nn.Linear, mine: tuple[int, int], count: int) -> None:
    """Cut the outputs into `count` equal runs, and keep the runs from `mine[0]` to `mine[1] - 1`.
    Raises ConfigError if they cannot be cut so."""
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
    """As `_keep_rows`, for inputs. A hook then adds up the outputs over the ranks."""
    size = linear.in_features // count
    linear.weight = _frozen(linear.weight[:, mine[0] * size : mine[1] * size])
    linear.in_features = linear.weight.shape[1]
    if group.rank > 0:
        linear.bias = None  # rank 0 adds it
    linear.register_forward_hook(lambda module, args, output: group.all_reduce(output))


def _frozen(part: torch.Tensor) -> nn.Parameter:
    """Copy a part as a parameter, so that the memory of the whole is freed."""
    return nn.Parameter(part.detach().clone(), requires_grad=False)

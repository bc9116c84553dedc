"""The memory of the KV pool: one tensor over all layers, its axes in any order."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from kvferry.engine.config import KV_LAYOUTS
from kvferry.errors import ConfigError
from kvferry.runner.kv_allocation import AttentionBackend, allocate_uniform_kv_caches

_AXES = "LBHNC"
"""Layer, block, kv head, token of the block, content."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolSpec:
    """What lies in the pool; the `AttentionSpec` of every layer.

    Attributes:
        layer_names: in layer order.
        num_kv_heads: that this rank holds.
        head_size: elements per token and head, K and V or a latent.
    """

    layer_names: tuple[str, ...]
    num_blocks: int
    block_size: int
    num_kv_heads: int
    head_size: int
    dtype: torch.dtype

    @property
    def page_size_bytes(self) -> int:
        """Bytes of one layer's block."""
        return self.block_size * self.num_kv_heads * self.head_size * self.dtype.itemsize


def allocate_pool(
    spec: PoolSpec, kv_layout: str, device: torch.device
) -> list[tuple[str, torch.Tensor]]:
    """Name and KV of each layer, zeroed: views `[num_blocks, num_kv_heads, block_size, head_size]`
    into one tensor, whatever the order in memory.

    Args:
        spec: of the pool.
        kv_layout: one of `KV_LAYOUTS`.
        device: where to allocate.

    Raises:
        ConfigError: there is not enough memory.
    """
    layer_bytes = spec.num_blocks * spec.page_size_bytes
    plan = _Plan([_LayerTensor(layer_bytes, [name]) for name in spec.layer_names])
    group = _Group(_Backend(KV_LAYOUTS[kv_layout]), spec)
    try:
        caches = allocate_uniform_kv_caches(plan, [[group]], "auto", device, [spec.block_size])
    except RuntimeError as error:
        raise ConfigError(
            f"no memory for a KV pool of {layer_bytes * len(spec.layer_names)} bytes on {device}; "
            "set kv_cache_bytes or num_blocks lower"
        ) from error
    return [(name, caches.kv_caches[name]) for name in spec.layer_names]


class _Backend:
    """Attention that takes any order: it reads through strides."""

    def __init__(self, order: str) -> None:
        self._order = order

    def get_kv_cache_shape(
        self,
        num_blocks: int,
        block_size: int,
        num_kv_heads: int,
        head_size: int,
        cache_dtype_str: str = "auto",
    ) -> tuple[int, ...]:
        del cache_dtype_str
        return num_blocks, num_kv_heads, block_size, head_size

    def get_kv_cache_stride_order(
        self, include_num_layers_dimension: bool = False
    ) -> tuple[int, ...]:
        order = tuple(_AXES.index(axis) for axis in self._order)
        if include_num_layers_dimension:
            return order
        return tuple(axis - 1 for axis in order if axis > 0)


class _Group(NamedTuple):
    backend: AttentionBackend
    kv_cache_spec: object


class _LayerTensor(NamedTuple):
    size: int
    shared_by: list[str]


class _Plan(NamedTuple):
    kv_cache_tensors: list[_LayerTensor]

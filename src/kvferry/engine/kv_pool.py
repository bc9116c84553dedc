"""The KV pool: its size, its memory, and what of a token's attention it keeps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

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


class KVCodec(Protocol):
    """Between what attention layers compute and rows of the pool. One per model."""

    def encode(self, layer_index: int, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """Rows of the tokens that a layer has just computed: `[1, num_kv_heads, num_tokens,
        content]`.

        Args:
            layer_index: the layer's own number.
            key: `[1, heads, num_tokens, key_size]`, as the layer hands it to attention.
            value: `[1, heads, num_tokens, value_size]`.
        """

    def decode(
        self, layer_index: int, rows: torch.Tensor, key_size: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values as `encode` got them, from rows as it gave them."""


class KeyValueCodec:
    """Keys and values side by side."""

    def encode(self, layer_index: int, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """See `KVCodec`."""
        del layer_index
        return torch.cat((key, value), dim=-1)

    def decode(
        self, layer_index: int, rows: torch.Tensor, key_size: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `KVCodec`."""
        del layer_index
        return rows[..., :key_size], rows[..., key_size:]


class LatentCodec:
    """Multi-head latent attention: one latent and one rotated key for all heads, expanded to keys
    and values of every head when they are read.

    Layers offer the latent to a Transformers cache before they expand it. This object is handed to
    the model in place of that cache: it notes what it is offered and keeps nothing.

    Rows hold the latent, then the rotated key with the two numbers of each rotated pair side by
    side, as vLLM keeps them; Transformers' DeepSeek-V3 has the first numbers of all pairs first.
    """

    def __init__(self, attention_layers: dict[int, Any], *, pairs_apart: bool) -> None:
        """Serve these layers.

        Args:
            attention_layers: by number; each has Transformers' `expand_kv` and `kv_lora_rank`.
            pairs_apart: whether the layers' rotated keys have the first numbers of all pairs first.
        """
        self._layers = attention_layers
        self._pairs_apart = pairs_apart
        self._offered: dict[int, torch.Tensor] = {}

    def update(
        self, latent: torch.Tensor, rotated: torch.Tensor, layer_index: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Called by the layer as a cache's `update`; `[1, 1, num_tokens, size]` each."""
        rows = rotated
        if self._pairs_apart:
            rows = torch.unflatten(rotated, -1, (2, -1)).transpose(-1, -2).flatten(-2)
        self._offered[layer_index] = torch.cat((latent, rows), dim=-1)
        return latent, rotated

    def encode(self, layer_index: int, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """See `KVCodec`. What the layer offered, which it did right before."""
        del key, value
        return self._offered.pop(layer_index)

    def decode(
        self, layer_index: int, rows: torch.Tensor, key_size: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `KVCodec`."""
        del key_size
        layer = self._layers[layer_index]
        latent, rotated = rows[..., : layer.kv_lora_rank], rows[..., layer.kv_lora_rank :]
        if self._pairs_apart:
            rotated = torch.unflatten(rotated, -1, (-1, 2)).transpose(-1, -2).flatten(-2)
        key, value = layer.expand_kv(latent, rotated)
        return key, value

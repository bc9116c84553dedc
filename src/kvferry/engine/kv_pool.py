"""The KV pool: its size, its memory, and what it keeps of each token."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import torch

from kvferry.engine.config import KV_LAYOUTS, EngineConfig
from kvferry.engine.model_config import ModelGeometry
from kvferry.errors import ConfigError

DEFAULT_KV_BYTES = 1 << 30

_AXES = "LBHNC"
"""Layer, block, kv head, token of the block, content."""


def num_blocks_for(engine: EngineConfig, geometry: ModelGeometry) -> int:
    """Blocks of the KV pool, the null block included.

    Raises:
        ConfigError: `kv_cache_bytes` is too little for any request.
    """
    if engine.num_blocks is not None:
        return engine.num_blocks
    row_bytes = geometry.content_size * geometry.torch_dtype.itemsize
    block_bytes = geometry.num_layers * geometry.num_kv_heads * engine.block_size * row_bytes
    if engine.kv_cache_bytes is not None:
        num_blocks = engine.kv_cache_bytes // block_bytes
        if num_blocks < 2:
            raise ConfigError(
                f"kv_cache_bytes is {engine.kv_cache_bytes}; two blocks of this model are "
                f"{2 * block_bytes} bytes"
            )
        return num_blocks
    enough = 1 + engine.max_num_seqs * -(-geometry.context_length // engine.block_size)
    return max(2, min(enough, DEFAULT_KV_BYTES // block_bytes))


def allocate_pool(
    layer_names: Sequence[str],
    shape: tuple[int, int, int, int],
    dtype: torch.dtype,
    *,
    kv_layout: str,
    device: torch.device,
) -> list[tuple[str, torch.Tensor]]:
    """Name and KV of each layer, zeroed: views of one tensor.

    Args:
        layer_names: in layer order.
        shape: of each view: `[num_blocks, num_kv_heads, block_size, content]`.
        kv_layout: one of `KV_LAYOUTS`.

    Raises:
        ConfigError: there is not enough memory.
    """
    sizes = (len(layer_names), *shape)
    order = [_AXES.index(axis) for axis in KV_LAYOUTS[kv_layout]]
    try:
        pool = torch.zeros([sizes[axis] for axis in order], dtype=dtype, device=device)
    except RuntimeError as error:
        raise ConfigError(
            f"no memory for a KV pool of {prod(sizes) * dtype.itemsize} bytes on {device}; "
            "set kv_cache_bytes or num_blocks lower"
        ) from error
    layers = pool.permute([order.index(axis) for axis in range(len(order))])
    return list(zip(layer_names, layers, strict=True))


def pairs_together(rotated: torch.Tensor) -> torch.Tensor:
    """Rotated keys with the two numbers of each pair side by side, as vLLM and records have them,
    from keys with the first numbers of all pairs first, as Transformers' DeepSeek-V3 has them."""
    return torch.unflatten(rotated, -1, (2, -1)).transpose(-1, -2).flatten(-2)


def pairs_apart(rotated: torch.Tensor) -> torch.Tensor:
    """The inverse of `pairs_together`."""
    return torch.unflatten(rotated, -1, (-1, 2)).transpose(-1, -2).flatten(-2)


class KVCodec:
    """Turns the keys and values of attention layers into rows of the pool, side by side, and back.
    One per model."""

    def encode(self, layer_index: int, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """Rows of the tokens that a layer has just computed: `[1, num_kv_heads, num_tokens,
        content]`. Keys and values as the layer hands them to attention: `[1, heads, num_tokens,
        size]`."""
        return torch.cat((key, value), dim=-1)

    def decode(
        self, layer_index: int, rows: torch.Tensor, key_size: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values as `encode` got them, from rows as it gave them."""
        return rows[..., :key_size], rows[..., key_size:]


class LatentCodec(KVCodec):
    """Multi-head latent attention: one latent and one rotated key for all heads, expanded to keys
    and values of every head when they are read.

    Layers pass the latent to the `update` of a Transformers cache before they expand it. The model
    gets this object in place of that cache; `encode` hands out what `update` got.

    Rows hold the latent, then the rotated key (`pairs_together`).
    """

    def __init__(self, attention_layers: dict[int, Any], *, has_pairs_apart: bool) -> None:
        """`attention_layers`, by number, have Transformers' `expand_kv` and `kv_lora_rank`."""
        self._layers = attention_layers
        self._has_pairs_apart = has_pairs_apart
        self._offered: dict[int, torch.Tensor] = {}

    def update(
        self, latent: torch.Tensor, rotated: torch.Tensor, layer_index: int, **_: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Called by the layer as a cache's `update`; `[1, 1, num_tokens, size]` each."""
        rows = pairs_together(rotated) if self._has_pairs_apart else rotated
        self._offered[layer_index] = torch.cat((latent, rows), dim=-1)
        return latent, rotated

    def encode(self, layer_index: int, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """See `KVCodec`. The layer has called `update` just before."""
        return self._offered.pop(layer_index)

    def decode(
        self, layer_index: int, rows: torch.Tensor, key_size: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `KVCodec`."""
        layer = self._layers[layer_index]
        latent, rotated = rows[..., : layer.kv_lora_rank], rows[..., layer.kv_lora_rank :]
        if self._has_pairs_apart:
            rotated = pairs_apart(rotated)
        key, value = layer.expand_kv(latent, rotated)
        return key, value

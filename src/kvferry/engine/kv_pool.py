"""The engine's KV pool: its size, its memory on one rank, and what it keeps of each token."""

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
"""Layer, block, kv head, token within the block, content."""


def num_blocks_for(engine: EngineConfig, geometry: ModelGeometry) -> int:
    """Return the number of blocks of the KV pool, the null block included.

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
    """Allocate the pool as one zeroed tensor. Return the name and the view of each layer.

    Args:
        layer_names: names of the layers, in order.
        shape: shape of each view: `[num_blocks, num_kv_heads, block_size, content]`.
        kv_layout: a key of `KV_LAYOUTS`.

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
    """Put the two numbers of each rotary pair of a key side by side, as vLLM and records have them.
    Transformers' DeepSeek-V3 has the first numbers of all pairs first, then the second ones."""
    return torch.unflatten(rotated, -1, (2, -1)).transpose(-1, -2).flatten(-2)


def pairs_apart(rotated: torch.Tensor) -> torch.Tensor:
    """The inverse of `pairs_together`."""
    return torch.unflatten(rotated, -1, (-1, 2)).transpose(-1, -2).flatten(-2)


class KVCodec:
    """Turns keys and values of attention layers into rows of the pool, and back. A row holds key
    and value of one token and kv head, side by side. One codec per model."""

    def encode(self, layer_index: int, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """Return the rows of the tokens that a layer has just computed: `[1, num_kv_heads,
        num_tokens, content]`. Takes keys and values as the layer hands them to attention:
        `[1, heads, num_tokens, size]`."""
        return torch.cat((key, value), dim=-1)

    def decode(
        self, layer_index: int, rows: torch.Tensor, key_size: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the keys and values from which `encode` made `rows`."""
        return rows[..., :key_size], rows[..., key_size:]


class LatentCodec(KVCodec):
    """The codec of multi-head latent attention. A row holds one latent, then one rotated key
    (`pairs_together`), for all heads; `decode` expands them to keys and values of every head.

    Layers pass the latent to the `update` of a Transformers cache before they expand it. The model
    gets this object in place of that cache; `encode` returns what `update` received.
    """

    def __init__(self, attention_layers: dict[int, Any], *, has_pairs_apart: bool) -> None:
        """`attention_layers`: modules by layer number, with Transformers' `expand_kv` and
        `kv_lora_rank`. `has_pairs_apart`: their rotated keys are as `pairs_apart` makes them."""
        self._layers = attention_layers
        self._has_pairs_apart = has_pairs_apart
        self._offered: dict[int, torch.Tensor] = {}

    def update(
        self, latent: torch.Tensor, rotated: torch.Tensor, layer_index: int, **_: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Keep latents and rotated keys, `[1, 1, num_tokens, size]` each; a layer calls this as a
        cache's `update`."""
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

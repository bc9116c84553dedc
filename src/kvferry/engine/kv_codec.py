"""What of a token's attention is kept in the KV pool, and how keys and values come out of it."""

from __future__ import annotations

from typing import Any, Protocol

import torch


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

"""Attention of given queries to given keys, with what some models do to the scores."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch.nn.functional import scaled_dot_product_attention


class Scores(NamedTuple):
    """How a layer makes weights of its scores."""

    scaling: float | None = None
    """Factor; None for `head_dim ** -0.5`."""
    softcap: float | None = None
    """Scores stay between this and its negative."""
    sinks: torch.Tensor | None = None
    """`[num_heads]` scores of a key without a value, which every query sees."""

    @property
    def is_plain(self) -> bool:
        """Whether torch's fused attention can do it."""
        return self.softcap is None and self.sinks is None


def attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scores: Scores,
    mask: torch.Tensor | None = None,
    *,
    is_causal: bool = False,
) -> torch.Tensor:
    """Attention: `[1, num_heads, num_queries, value_dim]`.

    Args:
        query: `[1, num_heads, num_queries, head_dim]`.
        key: `[1, num_kv_heads, num_keys, head_dim]`.
        value: `[1, num_kv_heads, num_keys, value_dim]`.
        scores: what is special about the layer.
        mask: `[num_queries, num_keys]`, added to the scores.
        is_causal: instead of a mask: query i sees keys 0 to i.
    """
    if scores.is_plain:
        return scaled_dot_product_attention(
            *(query, key, value, mask),
            is_causal=is_causal,
            scale=scores.scaling,
            enable_gqa=True,
        )
    group = query.shape[1] // key.shape[1]
    key, value = (each.repeat_interleave(group, dim=1) for each in (key, value))
    scaling = query.shape[-1] ** -0.5 if scores.scaling is None else scores.scaling
    weights = query @ key.transpose(2, 3) * scaling
    if scores.softcap is not None:
        weights = torch.tanh(weights / scores.softcap) * scores.softcap
    if is_causal:
        hidden = torch.full(weights.shape[2:], float("-inf"), device=weights.device)
        mask = hidden.triu(1)
    if mask is not None:
        weights = weights + mask
    weights = weights.float()
    if scores.sinks is not None:
        sinks = scores.sinks.float().reshape(1, -1, 1, 1).expand(*weights.shape[:3], 1)
        weights = torch.cat((weights, sinks), dim=-1)
    weights = weights.softmax(dim=-1).to(value.dtype)
    return weights[..., : value.shape[2]] @ value

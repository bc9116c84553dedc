"""Compares a chunk of KV that was computed again with its record: an audit.

Checksums show that a record is what its writer wrote. They do not show that its writer ran the
model that reads it now: two models may get the same key, if their identity leaves out what differs,
and a model may change in memory. An audit shows that: the model computes the chunk again on top of
the loaded prefix. The worker role compares on a thread of its own; a host's adapter may compare,
too.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch

from kvferry.blocks.rows import RankRows
from kvferry.blocks.tolerance import SHALLOW_LAYERS, Tolerances

_SAMPLE_TOKENS = 128
"""Number of tokens for which tolerances of bias hold. For fewer they are widened, since rounding
averages out less."""


def tensors_of(rows: RankRows, slot: memoryview) -> list[torch.Tensor]:
    """View a slot as one tensor `[layers, heads, tokens, content]` per group: the part of a chunk
    that a rank holds."""
    found = []
    for group in sorted(rows.all_groups):
        dtype, memory = getattr(torch, rows.dtype_of(group)), rows.group_rows(slot, group)
        flat = torch.frombuffer(memory, dtype=dtype) if len(memory) else torch.empty(0, dtype=dtype)
        found.append(flat.view(rows.group_shape(group)))
    return found


class Difference(NamedTuple):
    """The layer, head and half of the content that differ most, relative to the tolerance."""

    excess: float
    """The larger of error and bias, each as a multiple of its tolerance. Above 1 the record is not
    this model's. Infinite if a compared token has NaN on one side only."""
    error: float
    bias: float
    group: int
    layer: int
    """`layer` and `head` are counted within what this rank holds of the group."""
    head: int
    is_value: bool
    """Whether this is the second half of a token's content: values, or the end of a latent."""

    def describe(self, rows: RankRows) -> str:
        """Describe it for people. Layer (within the group) and head are counted as in the whole
        model."""
        layer, head = rows.origin_of(self.group)
        half = "values" if self.is_value else "keys"
        return (
            f"{half} of layer {layer + self.layer}, head {head + self.head} of group {self.group} "
            f"have an error of {self.error:.2%}, and are {self.bias:.2%} too large or too small"
        )


def compare(
    rows: RankRows, computed: memoryview, stored: memoryview, tolerances: Tolerances
) -> Difference:
    """Return what differs most between two slots: a chunk computed again, and its record."""
    depths = [rows.depths_of(group) for group in sorted(rows.all_groups)]
    pair = tensors_of(rows, computed), tensors_of(rows, stored)
    return largest_difference(*pair, tolerances, depths)


def largest_difference(
    computed: Sequence[torch.Tensor],
    stored: Sequence[torch.Tensor],
    tolerances: Tolerances,
    depths: Sequence[Sequence[int]],
) -> Difference:
    """Return the layer, head and half that differ most. With only empty tensors `excess` is -1.

    Args:
        computed: one tensor `[layers, heads, tokens, content]` per group.
        stored: tensors of the same shapes.
        tolerances: tolerances by dtype.
        depths: by group, the number of the model's layers before each of the layers.
    """
    worst = Difference(-1.0, 0.0, 0.0, 0, 0, 0, False)
    pairs = zip(computed, stored, depths, strict=True)
    for group, (ours, theirs, before) in enumerate(pairs):
        if not ours.numel():  # a rank may have no layers of a group
            continue
        tolerance = tolerances[str(ours.dtype).removeprefix("torch.")]
        deep = torch.tensor(before)[:, None].div(SHALLOW_LAYERS).clamp_min(1.0).sqrt()
        halves = zip(ours.float().chunk(2, -1), theirs.float().chunk(2, -1), strict=True)
        for half, (one, other) in enumerate(halves):
            error, bias = _error_and_bias(one, other)
            widening = max(1.0, math.sqrt(_SAMPLE_TOKENS / one.shape[2]))
            excess = torch.maximum(error / tolerance.error, bias / (tolerance.bias * widening))
            excess /= deep
            largest, at = excess.flatten().max(0)
            if largest > worst.excess:
                layer, head = divmod(int(at), excess.shape[1])
                worst = Difference(
                    excess=float(largest),
                    error=float(error[layer, head]),
                    bias=float(bias[layer, head]),
                    group=group,
                    layer=layer,
                    head=head,
                    is_value=half == 1,
                )
    return worst


def _error_and_bias(
    computed: torch.Tensor, stored: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return relative error and bias of each layer and head: `[layers, heads]` each, over the nine
    tenths of the tokens that differ least. NaN equals NaN."""
    are_equal = (computed == stored) | (computed.isnan() & stored.isnan())
    difference = (computed - stored).masked_fill(are_equal, 0.0)
    by_token = difference.square().sum(-1).nan_to_num(torch.inf)
    num_tokens = by_token.shape[-1]
    most = by_token.kthvalue(num_tokens - num_tokens // 10, dim=-1, keepdim=True).values
    left_out = by_token > most
    numbers = computed.nan_to_num(0.0, 0.0, 0.0)
    squares = numbers.square().sum(-1).masked_fill(left_out, 0.0).sum(-1).clamp_min(1e-30)
    error = (by_token.masked_fill(left_out, 0.0).sum(-1) / squares).sqrt()
    along = (numbers * difference).sum(-1).masked_fill(left_out, 0.0)
    bias = along.sum(-1).abs() / squares
    return error.nan_to_num(torch.inf), bias.nan_to_num(torch.inf)

"""Compares a chunk of KV that was computed again with the record of it.

Checksums show that a record is what its writer wrote. They do not show that its writer ran the
model that reads it now: two models may share a key by a hole in their identity, and a model may
change in memory. What the model itself computes on top of the loaded prefix shows that.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch

from kvferry.blocks.rows import RankRows
from kvferry.blocks.tolerance import Tolerances

_SAMPLE_TOKENS = 128
"""Tolerances of bias hold for so many tokens. They are widened for fewer, over which rounding
averages out less."""


def tensors_of(rows: RankRows, slot: memoryview) -> list[torch.Tensor]:
    """What a rank holds of a chunk, by group `[layers, heads, tokens, content]`: over the memory of
    a slot."""
    found = []
    for group in sorted(rows.all_groups):
        dtype, memory = getattr(torch, rows.dtype_of(group)), rows.group_rows(slot, group)
        flat = torch.frombuffer(memory, dtype=dtype) if len(memory) else torch.empty(0, dtype=dtype)
        found.append(flat.view(rows.group_shape(group)))
    return found


class Difference(NamedTuple):
    """What differs most, measured by what is tolerated."""

    excess: float
    """The larger of error and bias, each as a multiple of its tolerance. More than 1: not the same
    model. Infinite if a token that is compared has NaN on one side only."""
    error: float
    bias: float
    group: int
    layer: int
    """Within the group."""
    head: int
    is_value: bool
    """The second half of a token's content: values, or the end of a latent."""

    def describe(self, rows: RankRows) -> str:
        """For people: the layer of the group and the head as the whole model counts."""
        layer, head = rows.origin_of(self.group)
        half = "values" if self.is_value else "keys"
        return (
            f"{half} of layer {layer + self.layer}, head {head + self.head} of group {self.group} "
            f"have an error of {self.error:.2%}, and are {self.bias:.2%} too large or too small"
        )


def compare(
    rows: RankRows, computed: memoryview, stored: memoryview, tolerances: Tolerances
) -> Difference:
    """What differs most between two slots, of a chunk that was computed again and of its record."""
    return largest_difference(tensors_of(rows, computed), tensors_of(rows, stored), tolerances)


def largest_difference(
    computed: Sequence[torch.Tensor],
    stored: Sequence[torch.Tensor],
    tolerances: Tolerances,
) -> Difference:
    """The layer, head and half that differ most.

    Args:
        computed: by group `[layers, heads, tokens, content]`.
        stored: of the same shapes.
        tolerances: of the dtypes of these.
    """
    worst = Difference(-1.0, 0.0, 0.0, 0, 0, 0, False)
    for group, (ours, theirs) in enumerate(zip(computed, stored, strict=True)):
        if not ours.numel():  # a rank may have no layers of a group
            continue
        tolerance = tolerances[str(ours.dtype).removeprefix("torch.")]
        halves = zip(ours.float().chunk(2, -1), theirs.float().chunk(2, -1), strict=True)
        for half, (one, other) in enumerate(halves):
            error, bias = _error_and_bias(one, other)
            widening = max(1.0, math.sqrt(_SAMPLE_TOKENS / one.shape[2]))
            excess = torch.maximum(error / tolerance.error, bias / (tolerance.bias * widening))
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
    """Relative error and bias of each layer and head, `[layers, heads]`, over the nine tenths of
    the tokens that differ least: a few may have gone to other experts. NaN equals NaN."""
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

"""Compares a chunk of KV that was computed again with the record of it.

Checksums show that a record is what its writer wrote. They do not show that its writer ran the
model that reads it now: two models may share a key by a hole in their identity, and a model may
change in memory. What the model itself computes on top of the loaded prefix shows that.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch

from kvferry.blocks.rows import RankRows

_SAMPLE_TOKENS = 128
"""The limits of bias are of so many tokens: rounding averages out less over fewer."""


class Tolerance(NamedTuple):
    """The most that honest computation may differ by, in one layer and head. Rounding differs with
    the size of chunks and blocks, with the kernel, and with the number of ranks."""

    error: float
    """Norm of the difference, relative to the norm of what was computed, over the nine tenths of
    the tokens that differ least: a few tokens may have gone to other experts."""
    bias: float
    """By what part all of these numbers are larger or smaller. Rounding goes both ways, so this
    notices changes that are smaller than rounding."""


Tolerances = Mapping[torch.dtype, Tolerance]
"""Of each dtype that can be compared."""

TOLERANCE: Tolerances = {
    torch.float64: Tolerance(5e-4, 5e-5),
    torch.float32: Tolerance(5e-4, 5e-5),
    torch.float16: Tolerance(0.01, 0.001),
    torch.bfloat16: Tolerance(0.06, 0.006),
}
"""How these were found: docs/identity.md."""

TOLERANCE_WITH_EXPERTS: Tolerances = {
    torch.float64: Tolerance(5e-3, 5e-4),
    torch.float32: Tolerance(5e-3, 5e-4),
    torch.float16: Tolerance(0.1, 0.03),
    torch.bfloat16: Tolerance(0.4, 0.1),
}
"""Rounding sends some tokens to other experts, in deep layers most of them."""


def tolerances_for(config: Mapping[str, object]) -> Tolerances:
    """The tolerances of a model, from its Hugging Face config."""
    for name, value in config.items():
        if isinstance(value, Mapping) and tolerances_for(value) is TOLERANCE_WITH_EXPERTS:
            return TOLERANCE_WITH_EXPERTS
        counts = value if isinstance(value, list | tuple) else (value,)
        if "experts" in str(name) and any(isinstance(each, int) and each > 1 for each in counts):
            return TOLERANCE_WITH_EXPERTS
    return TOLERANCE


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
    """The larger of error and bias, each as a multiple of its tolerance; infinite if something is
    no number. More than 1: not the same model."""
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
            f"differ by {self.error:.2%}, {self.bias:.2%} in size"
        )


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
        tolerance = tolerances[ours.dtype]
        halves = zip(ours.float().chunk(2, -1), theirs.float().chunk(2, -1), strict=True)
        for half, (one, other) in enumerate(halves):
            error, bias = _error_and_bias(one, other)
            fewer = max(1.0, math.sqrt(_SAMPLE_TOKENS / one.shape[2]))
            excess = torch.maximum(error / tolerance.error, bias / (tolerance.bias * fewer))
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
    """Both of each layer and head, `[layers, heads]`."""
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

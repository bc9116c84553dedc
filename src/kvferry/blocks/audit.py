"""Compares a chunk of KV that was computed again with the record of it.

Checksums show that a record is what its writer wrote. They do not show that its writer ran the
model that reads it now: two models may share a key by a hole in their identity, and a model may
change in memory. What the model itself computes on top of the loaded prefix shows that.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from kvferry.errors import ConfigError

TOLERANCE = {
    torch.float64: 5e-4,
    torch.float32: 5e-4,
    torch.float16: 0.01,
    torch.bfloat16: 0.06,
}
"""Largest relative error of one layer and head that honest computation may have, by dtype: rounding
differs with the size of chunks and blocks, with the kernel, and with the number of ranks. How these
were found: docs/identity.md."""


def check_audit(option: object) -> None:
    """Check the option `audit` of a config.

    Raises:
        ConfigError: neither "first" nor "off" nor a number from 0 to 1.
    """
    if isinstance(option, int | float) and not isinstance(option, bool):
        is_known = 0 <= option <= 1
    else:
        is_known = option in ("first", "off")
    if not is_known:
        raise ConfigError(f'audit must be "first", "off" or a number from 0 to 1, not {option!r}')


class Difference(NamedTuple):
    """What differs most."""

    error: float
    """Norm of the difference, relative to the norm of what was computed; infinite if that is no
    number."""
    group: int
    layer: int
    """Within the group."""
    head: int
    is_value: bool
    """The second half of a token's content: values, or the end of a latent."""

    def is_beyond(self, dtype: torch.dtype) -> bool:
        return not self.error <= TOLERANCE[dtype]


def largest_difference(
    computed: Sequence[torch.Tensor], stored: Sequence[torch.Tensor]
) -> Difference:
    """The layer, head and half that differ most.

    Args:
        computed: by group `[layers, heads, tokens, content]`.
        stored: of the same shapes.
    """
    worst = Difference(-1.0, 0, 0, 0, is_value=False)
    for group, (ours, theirs) in enumerate(zip(computed, stored, strict=True)):
        halves = zip(ours.float().chunk(2, -1), theirs.float().chunk(2, -1), strict=True)
        for half, (one, other) in enumerate(halves):
            errors = (one - other).norm(dim=(2, 3)) / one.norm(dim=(2, 3)).clamp_min(1e-30)
            errors = errors.nan_to_num(float("inf"), float("inf"))
            error, at = errors.flatten().max(0)
            if error > worst.error:
                layer, head = divmod(int(at), errors.shape[1])
                worst = Difference(float(error), group, layer, head, is_value=half == 1)
    return worst

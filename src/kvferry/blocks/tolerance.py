"""By how much a chunk that was computed again may differ from its record.

Needs no torch: the scheduler role asks which dtypes can be compared.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

OTHER_KV = "other_kv"
"""Why a record that differs from what the model computes is taken out of the store."""


class Tolerance(NamedTuple):
    """The most that honest computation may differ by, in one layer and head. Rounding differs with
    the size of chunks and blocks, with the kernel, and with the number of ranks."""

    error: float
    """Norm of the difference, relative to the norm of what was computed, over the nine tenths of
    the tokens that differ least: a few tokens may have gone to other experts."""
    bias: float
    """By what part all of these numbers are larger or smaller. Rounding goes both ways, so this
    notices changes that are smaller than rounding."""


Tolerances = Mapping[str, Tolerance]
"""By the name of each dtype that can be compared."""

TOLERANCE: Tolerances = {
    "float64": Tolerance(5e-4, 5e-5),
    "float32": Tolerance(5e-4, 5e-5),
    "float16": Tolerance(0.01, 0.001),
    "bfloat16": Tolerance(0.06, 0.006),
}
"""How these were found: docs/identity.md."""

TOLERANCE_WITH_EXPERTS: Tolerances = {
    "float64": Tolerance(5e-3, 5e-4),
    "float32": Tolerance(5e-3, 5e-4),
    "float16": Tolerance(0.1, 0.03),
    "bfloat16": Tolerance(0.4, 0.1),
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

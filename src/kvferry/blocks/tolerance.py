"""By how much a chunk that was computed again may differ from its record.

Audits (`blocks.audit`) use this. It needs no torch, because the scheduler role, too, asks which
dtypes can be compared.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

OTHER_KV = "other_kv"
"""The reason given when a record is taken out of the store because the model computes other KV."""


class Tolerance(NamedTuple):
    """The largest difference in one layer and head that rounding can explain. Rounding differs with
    the size of chunks and blocks, with the kernel, and with the number of ranks."""

    error: float
    """Norm of the difference, relative to the norm of the computed KV, over the nine tenths of the
    tokens that differ least, since a few tokens may have gone to other experts."""
    bias: float
    """Fraction by which the KV of these tokens as a whole is too large or too small. Rounding goes
    both ways, so the bias shows changes that are smaller than rounding."""


Tolerances = Mapping[str, Tolerance]
"""Tolerances by the name of each dtype that can be compared."""

TOLERANCE: Tolerances = {
    "float64": Tolerance(5e-4, 5e-5),
    "float32": Tolerance(5e-4, 5e-5),
    "float16": Tolerance(0.01, 0.001),
    "bfloat16": Tolerance(0.06, 0.006),
}
"""docs/identity.md says how these were found."""

TOLERANCE_WITH_EXPERTS: Tolerances = {
    "float64": Tolerance(5e-3, 5e-4),
    "float32": Tolerance(5e-3, 5e-4),
    "float16": Tolerance(0.1, 0.03),
    "bfloat16": Tolerance(0.4, 0.1),
}
"""For models with experts: rounding sends some tokens to other experts, in deep layers most."""


def tolerances_for(config: Mapping[str, object]) -> Tolerances:
    """Return the tolerances of a model, given its Hugging Face config."""
    for name, value in config.items():
        if isinstance(value, Mapping) and tolerances_for(value) is TOLERANCE_WITH_EXPERTS:
            return TOLERANCE_WITH_EXPERTS
        counts = value if isinstance(value, list | tuple) else (value,)
        if "experts" in str(name) and any(isinstance(each, int) and each > 1 for each in counts):
            return TOLERANCE_WITH_EXPERTS
    return TOLERANCE

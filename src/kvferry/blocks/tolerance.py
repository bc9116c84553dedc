"""By how much a chunk that was computed again may differ from its record.

Audits (`blocks.audit`) use this. It needs no torch, because the scheduler role, too, asks which
dtypes can be compared.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

OTHER_KV = "other_kv"
"""The reason given when a record is taken out of the store because the model computes other KV."""

ROUNDING = (
    "a hit differs more than rounding did in tests, and less than for a mismatch; it is used. "
    "Either the model was changed a little, or it rounds otherwise than where the record was "
    'stored (other kernels, device or number of ranks); the option audit "off" ends comparisons'
)


class Tolerance(NamedTuple):
    """The largest difference in one layer and head that rounding can explain. Rounding differs with
    the size of chunks and blocks, with the kernel, and with the number of ranks."""

    error: float
    """Norm of the difference, relative to the norm of the computed KV, over the nine tenths of the
    tokens that differ least, since a few tokens may have gone to other experts."""
    bias: float
    """Fraction by which the KV of these tokens as a whole is too large or too small. Rounding goes
    both ways, so the bias shows changes that are smaller than rounding."""


DOUBTFUL = 0.5
"""A difference above this part of the tolerance is more than any that was seen in honest KV. It is
no mismatch yet, but a warning."""

SHALLOW_LAYERS = 8
"""Number of layers for which tolerances hold. Rounding adds up from layer to layer: behind n times
as many, it is allowed the square root of n as much."""

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

TOLERANCE_OF_8_BITS: Tolerances = dict.fromkeys(TOLERANCE, Tolerance(0.35, 0.06))
"""For models that round activations to 8 bits: a difference in the last bit before it is one of a
whole step behind it."""

TOLERANCE_OF_8_BITS_WITH_EXPERTS: Tolerances = dict.fromkeys(TOLERANCE, Tolerance(0.6, 0.15))

_QUANTIZATION = (
    *("quantization_config", "online_quantization", "hf_quant_config"),
    "VLLM_MARLIN_INPUT_DTYPE",
)
"""Where the identity of a model says how it is quantised."""

_WEIGHTS_ONLY = ("awq", "gptq", "weight_only")
"""Methods with one of these in their name leave activations as they are."""


def tolerances_for(config: Mapping[str, object]) -> Tolerances:
    """Return the tolerances of a model, given the configuration of its identity. Empty for models
    that round activations to 4 bits: honest KV then differs as much as that of another model."""
    bits = min((_activation_bits(value) for value in _values(config, _QUANTIZATION)), default=16)
    if bits < 8:
        return {}
    if _has_experts(config):
        return TOLERANCE_WITH_EXPERTS if bits > 8 else TOLERANCE_OF_8_BITS_WITH_EXPERTS
    return TOLERANCE if bits > 8 else TOLERANCE_OF_8_BITS


def _values(config: Mapping[str, object], names: tuple[str, ...]) -> Iterator[object]:
    """Yield what a nested configuration has under any of these names."""
    for name, value in config.items():
        if name in names:
            if value:
                yield value
        elif isinstance(value, Mapping):
            yield from _values(value, names)


def _has_experts(config: Mapping[str, object]) -> bool:
    for name, value in config.items():
        if isinstance(value, Mapping) and _has_experts(value):
            return True
        counts = value if isinstance(value, list | tuple) else (value,)
        if "experts" in str(name) and any(isinstance(each, int) and each > 1 for each in counts):
            return True
    return False


def _activation_bits(quantization: object) -> int:
    """Bits of the numbers that a quantised model multiplies: 4, 8, or 16 if only its weights are
    quantised. Of a method that is not known here, 8."""
    settings = quantization if isinstance(quantization, Mapping) else {"method": quantization}
    method = str(settings.get("quant_method") or settings.get("method")).lower()
    groups = settings.get("config_groups")
    inputs: object = settings
    if isinstance(groups, Mapping):  # as compressed-tensors writes it
        inputs = [each.get("input_activations") for each in groups.values()]
        if not any(inputs):
            return 16
    if any(name in method for name in _WEIGHTS_ONLY):
        return 16
    has_4_bits = "fp4" in str(inputs).lower() or "'num_bits': 4" in str(inputs)
    return 4 if has_4_bits and "mxfp4" not in method else 8  # mxfp4 is of weights

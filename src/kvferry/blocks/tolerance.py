"""By how much a chunk that was computed again may differ from its record.

Audits (`blocks.audit`) use this. It needs no torch, because the scheduler role, too, asks which
dtypes can be compared.
"""

from __future__ import annotations

import re
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
    *("VLLM_MARLIN_INPUT_DTYPE", "VLLM_HUMMING_INPUT_QUANT_CONFIG"),
)
"""Where the identity of a model says how it is quantised."""

_WEIGHTS_ONLY = ("awq", "gptq", "weight_only", "wna16")
"""Methods with one of these in their name leave activations as they are."""

_SCHEME = re.compile(r"(?:w\d+|fp4|fp8)a(?:fp|int)?(\d+)")
"""Names that say how many bits activations have: W4A16_AWQ, W4AFP8, NVFP4A16."""

_BY_LAYER = (
    *("config_groups", "quantized_layers"),
    *("layer_quant_config", "layer_type_quant_config"),
)
"""Where compressed-tensors, ModelOpt and Quark say how layers are quantised."""

_INPUTS = ("input_activations", "input_tensors", "forward_dtype")
"""Where they say what numbers a layer multiplies its weights with."""


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
    quantised. Of a method that is not known here, 8; if it differs by layer, the fewest."""
    if not isinstance(quantization, Mapping):
        return _bits_of(str(quantization))
    settings = dict(quantization)
    if isinstance(settings.get("quantization"), Mapping):  # in ModelOpt's own file
        return _activation_bits(settings["quantization"])
    if isinstance(settings.get("global_quant_config"), Mapping):  # of the layers without their own
        settings["layer_quant_config"] = {
            **(settings.get("layer_quant_config") or {}),
            "others": settings["global_quant_config"],
        }
    groups = [settings[name] for name in _BY_LAYER if isinstance(settings.get(name), Mapping)]
    if groups:
        # A layer may have no more than the name of its scheme.
        pairs = [pair for group in groups for pair in group.items()]
        layers = (value if isinstance(value, Mapping) else name for name, value in pairs)
        return min(map(_activation_bits, layers), default=16)
    if settings.keys() & {"weight", "weights", *_INPUTS}:
        inputs = [settings[name] for name in _INPUTS if settings.get(name)]
        return _bits_of(str(inputs)) if inputs else 16
    algorithm = settings.get("quant_algo")
    method = str(settings.get("quant_method") or settings.get("method")).lower()
    options = str(settings.get("options"))
    if not algorithm and "mxfp4" in method:
        return 8  # 4 are of weights
    return min(_bits_of(str(algorithm or method)), 16 if options == "None" else _bits_of(options))


def _bits_of(text: str) -> int:
    """`_activation_bits` from the name of a scheme, or from what is said of a layer's inputs."""
    text = text.lower()
    if scheme := _SCHEME.search(text):
        return int(scheme[1])
    if any(each in text for each in _WEIGHTS_ONLY):
        return 16
    return 4 if any(each in text for each in ("fp4", "int4", "'num_bits': 4")) else 8

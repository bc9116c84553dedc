"""Models of checkpoints that were published quantised: what of their computation no file shows.

Such a model is identified by its files, by the `quantization_config` of its config.json, and by
what decides the numbers besides: the libraries and kernels that multiply packed weights, or that
unpacked them when the model was loaded. A model that is unpacked at load has no
`quantization_config` while it runs, which is a deviation (identity.py); so it shares nothing with
one that stays packed. `HostModel` calls this.
"""

# ruff: noqa: ANN401 - the models and configs of Transformers share no typed surface.

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator, Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from kvferry.errors import ConfigError
from kvferry.keys import JsonValue

LIBRARIES: Mapping[str, tuple[str, ...]] = {
    "auto-round": ("auto-round", "gptqmodel"),
    "awq": ("gptqmodel",),
    "bitnet": (),
    "bitsandbytes": ("bitsandbytes",),
    "compressed-tensors": ("compressed-tensors",),
    "fp8": ("kernels", "triton"),
    "gptq": ("gptqmodel", "optimum"),
    "hqq": ("hqq",),
    "mxfp4": ("kernels", "triton"),
    "mxfp8": ("kernels", "triton"),
    "torchao": ("torchao",),
}
"""Packages beside torch and Transformers whose code multiplies or unpacks weights, by the
`quant_method` of a checkpoint."""

_OF_HUB = re.compile(
    r"--(?P<name>[^/]+)/snapshots/(?P<commit>[0-9a-f]{7,64})/build/(?P<kind>[^/]+)/"
)
"""Where the files of a kernel of a hub lie: repository, commit, build."""


def refuse_other_quantisation(model: Any, stored_config: Any, directory: Path) -> None:
    """Refuse a model that is quantised in another way than by the config of its checkpoint.

    Args:
        stored_config: Transformers' config of the directory.

    Raises:
        ConfigError: names the way.
    """
    if any(type(module).__module__.startswith("torch.ao.") for module in model.modules()):
        raise ConfigError(
            "the model was quantised by torch after it was loaded, so its KV is not that of the "
            "weights in its directory; load it without quantize_dynamic"
        )
    quantizer = getattr(model, "hf_quantizer", None)
    if quantizer is None:
        is_left = getattr(model.config, "quantization_config", None) is not None
        _refuse_ignored(quantisation_of(stored_config), directory, is_left=is_left)
        return
    method = _method_of(quantizer.quantization_config)
    if not quantizer.pre_quantized:
        raise ConfigError(
            f"the model was quantised ({method}) when it was loaded, so its KV is not that of the "
            "weights in its directory; save it to a directory of its own and load it from there"
        )
    _refuse_nameless(method)


def refuse_unknown_method(asked: Any, directory: Path) -> None:
    """Refuse a checkpoint that was published quantised in a way without a known name, or that
    Transformers ignores.

    Args:
        asked: its `quantization_config`, or none.

    Raises:
        ConfigError: names the way.
    """
    _refuse_ignored(asked, directory, is_left=False)
    _refuse_nameless(_method_of(asked))


def _refuse_nameless(method: str) -> None:
    if method not in LIBRARIES:
        raise ConfigError(
            f"the model is quantised by {method!r}, whose kernels have no known name; known are "
            f"{', '.join(LIBRARIES)}"
        )


def _refuse_ignored(asked: Any, directory: Path, *, is_left: bool) -> None:
    """Refuse packed weights that Transformers takes for plain ones. It removes the config of those
    that it unpacks; `is_left` is whether it did not."""
    from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING as KNOWN

    what = None
    if asked and (is_left or _method_of(asked) not in {*KNOWN, "bitsandbytes"}):
        what = f"quantization_config ({_method_of(asked)})"
    elif not asked and (directory / "hf_quant_config.json").exists():
        what = "hf_quant_config.json"
    if what is not None:
        raise ConfigError(
            f"Transformers ignores the {what} of {directory}, so it multiplies packed weights as "
            "if they were plain; serve this model with an engine that knows its format"
        )


def libraries_of(model: Any) -> tuple[str, ...]:
    """Return the roots of modules whose code computes a model that stays packed."""
    quantizer = getattr(model, "hf_quantizer", None)
    if quantizer is None:
        return ()
    packages = LIBRARIES.get(_method_of(quantizer.quantization_config), ())
    return tuple(each.replace("-", "_") for each in packages)


def warm_up(model: Any) -> None:
    """Run a token through a packed model: some unpack their weights at the first one, and load
    their kernels. So a model has one identity, whether it ran before or not."""
    if getattr(model, "hf_quantizer", None) is not None:
        with torch.inference_mode():
            model(input_ids=torch.zeros((1, 1), dtype=torch.int64, device=model.device))


def quantisation_facts(model: Any, stored_config: Any) -> list[JsonValue]:
    """Return what decides the numbers of a checkpoint that was published quantised, and is in none
    of its files: device, versions of libraries, kernels of a hub. Empty for others."""
    asked = quantisation_of(stored_config)
    if not asked:
        return []
    packages = ("transformers", "torch", *LIBRARIES.get(_method_of(asked), ()))
    found = [f"{each} {_version(each)}" for each in packages]
    return [_device_of(model), *found, *sorted(_kernels())]


def quantisation_of(config: Any) -> Any:
    """Return the `quantization_config` of a config of Transformers, where its `from_pretrained`
    looks for it; None or empty without one."""
    found = getattr(config, "quantization_config", None)
    return found or getattr(config.get_text_config(decoder=True), "quantization_config", None)


def parts_of(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield the plain tensors that a tensor consists of: itself, or what a library's class of
    tensors packs it into (torchao)."""
    if not hasattr(tensor, "__tensor_flatten__"):
        yield tensor
        return
    names, _ = tensor.__tensor_flatten__()
    for name in names:
        yield from parts_of(getattr(tensor, name))


def comparable(quantisation: Any) -> Any:
    """Return a `quantization_config` as Transformers completes it."""
    from transformers.quantizers.auto import AutoQuantizationConfig

    if not isinstance(quantisation, Mapping):
        return quantisation
    try:
        completed = AutoQuantizationConfig.from_dict(dict(quantisation)).to_dict()
    except (ImportError, ValueError, TypeError, KeyError, AttributeError):  # or it is not known
        completed = dict(quantisation)
    return json.loads(json.dumps(completed, default=str))


def _method_of(config: Any) -> str:
    """Return the name of a way of quantising, as a config or an object of Transformers has it."""
    found = config.get("quant_method") if isinstance(config, Mapping) else config.quant_method
    return str(getattr(found, "value", found))


def _device_of(model: Any) -> str:
    """Name the kind of device, by which Transformers and the libraries choose kernels."""
    device = model.device
    if device.type != "cuda":
        return str(device.type)
    return f"{device.type} {'.'.join(map(str, torch.cuda.get_device_capability(device)))}"


def _kernels() -> set[str]:
    """Return the kernels of a hub that this process has loaded, with their commits."""
    files = (getattr(each, "__file__", None) for each in list(sys.modules.values()))
    matches = (_OF_HUB.search(file) for file in files if isinstance(file, str))
    return {f"{each['name']} {each['commit']} {each['kind']}" for each in matches if each}


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "is not installed"

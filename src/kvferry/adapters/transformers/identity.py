"""The part of a loaded model's identity that only memory shows: settings, code, buffers, dtypes.

The rest is in the model's directory. A model as `from_pretrained(directory, dtype=...)` makes it
has no deviations, so it shares records with engines that load that directory. `HostModel` calls it.
"""

# ruff: noqa: ANN401 - the models and configs of Transformers share no typed surface.

from __future__ import annotations

import copy
import json
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from importlib.metadata import PackageNotFoundError, version
from inspect import unwrap
from pathlib import Path
from types import FunctionType
from typing import Any

import torch
from blake3 import blake3
from torch.overrides import TorchFunctionMode

from kvferry.adapters.transformers.quantisation import (
    comparable,
    libraries_of,
    quantisation_facts,
)
from kvferry.engine.model import LOADING, quiet_transformers, unknown_arguments
from kvferry.engine.model_config import is_library_class, is_library_code
from kvferry.engine.paged_attention import (
    ATTENTION_NAME,
    AttentionCall,
    causal_attention,
    register_attention,
)
from kvferry.errors import ConfigError
from kvferry.keys import JsonValue, relevant_config

_WITHOUT_EFFECT = {"architectures", "dtype", "pad_token_id", "pretraining_tp", "torch_dtype"}
"""Config fields that users or loading may set, and on which no KV byte depends. The model's own
dtype enters the identity separately."""

_ATTENTION_KINDS = {
    "eager": "eager",
    "sdpa": "sdpa",
    "flex_attention": "flex",
    "flash_attention_2": "flash",
    "flash_attention_3": "flash",
    "flash_attention_4": "flash",
}
"""Attention implementations that compute plain attention alike, each with the prefix of its
functions' names. Not those named `paged|...`, which need a cache of their own."""

_BUFFER_TOLERANCE = 1e-6
"""Relative; devices differ in the last bits of a power."""

_UNMAKEABLE = (RuntimeError, TypeError, ValueError, AttributeError, KeyError, ImportError)
"""Errors of a model class that cannot be made from its config alone."""


def deviations(model: Any, stored_config: Any) -> dict[str, JsonValue]:
    """Return the part of the identity that decides the model's KV and is not in its directory.

    Args:
        model: a loaded causal LM.
        stored_config: Transformers' config of its directory.

    Returns:
        Empty for a model as `from_pretrained` makes it. Otherwise some of: `overrides`, the fields
        in which the running config differs; `code`, the names of functions and classes that are not
        Transformers' own; `attention`, the implementations that may ignore what the model asks of
        attention; `buffers`, a digest of the buffers that differ from those that the class makes;
        `dtypes`, the dtypes of tensors that are not kept as `from_pretrained` keeps them.
    """
    found: dict[str, JsonValue] = {
        "overrides": _overrides(model, stored_config),
        "code": sorted(set(_other_code(model))),
        "attention": _unsure_attention(model),
        "buffers": _changed_buffers(model),
        "dtypes": _other_dtypes(model),
        "quantisation": quantisation_facts(model, stored_config),
    }
    return {name: value for name, value in found.items() if value}


def refuse_other_code(model: Any) -> None:
    """Raise ConfigError if code that is not Transformers' own computes the model: custom code of
    its directory, registered or replaced functions, kernels of a hub."""
    for name in _other_code(model):
        raise ConfigError(
            f"{name} computes the model; it is not Transformers' own code and has no digest; "
            "load the model without it, or pass a weights_version that names the code, too"
        )


def called_functions(model: Any) -> tuple[object, ...]:
    """Return the functions, not methods, that modules of the model call. The result compares
    unequal once one was replaced, or another attention or expert implementation was chosen."""
    return tuple(_called(model).items())


# --- settings -------------------------------------------------------------------------------------


def _overrides(model: Any, stored_config: Any) -> dict[str, JsonValue]:
    """Return the fields in which the running model's config differs from its directory's."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING

    stored, running = (
        _decisive(json.loads(json.dumps(config.to_dict(), default=str)))
        for config in (stored_config, model.config)
    )
    for each in (stored, running):
        if "quantization_config" in each:
            each["quantization_config"] = comparable(each["quantization_config"])
    mappings: Any = (MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING)
    if any(type(model) is each.get(type(stored_config), None) for each in mappings):
        # Config types may share a model class; the running config then has the class's own type.
        running["model_type"] = stored.get("model_type")
    return {
        name: running.get(name)
        for name in sorted(stored.keys() | running.keys())
        if stored.get(name) != running.get(name)
    }


def _decisive(config: Mapping[str, JsonValue]) -> dict[str, JsonValue]:
    """Return `config` without the fields of no effect, also in its sub-configs, to which loading
    adds a dtype."""
    return {
        name: _decisive(value) if isinstance(value, Mapping) and name.endswith("_config") else value
        for name, value in relevant_config(config).items()
        if name not in _WITHOUT_EFFECT
    }


# --- code -----------------------------------------------------------------------------------------


def _called(model: Any) -> dict[tuple[str, str, str], Any]:
    """Return the functions of Transformers' interfaces and of modeling files that the model's
    modules call, by file, place and name; None for a name without a function."""
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

    found: dict[tuple[str, str, str], Any] = {}
    for forward, config in _forwards(model):
        place = forward.__globals__
        file = str(place.get("__name__"))
        for name in forward.__code__.co_names:
            if isinstance(place.get(name), FunctionType):
                found[file, "function", name] = place[name]
        attention: Any = getattr(config, "_attn_implementation", None)
        if attention is not None and "ALL_ATTENTION_FUNCTIONS" in place:
            # A file may have an interface of its own, with other functions.
            found[file, "attention", attention] = place["ALL_ATTENTION_FUNCTIONS"].get(
                attention, place.get("eager_attention_forward")
            )
            found[file, "mask", attention] = ALL_MASK_ATTENTION_FUNCTIONS.get(attention)
        experts: Any = getattr(config, "_experts_implementation", None)
        if experts not in (None, "eager"):
            from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

            found[file, "experts", experts] = ALL_EXPERTS_FUNCTIONS.get(experts)
    return found


def _forwards(model: Any) -> Iterator[tuple[FunctionType, Any]]:
    """Yield the innermost `forward` and the config, if any, of the model's modules; once for
    modules of one class and config."""
    found = {}
    for module in model.modules():
        config = vars(module).get("config")
        found[type(module), id(config)] = config
    for (kind, _), config in found.items():
        forward = unwrap(kind.forward)
        if isinstance(forward, FunctionType):
            yield forward, config


def _other_code(model: Any) -> Iterator[str]:
    """Yield names of functions and classes that compute the model and are not Transformers' own."""
    libraries = libraries_of(model)  # which the identity names
    for kind in dict.fromkeys(map(type, model.modules())):
        if not is_library_class(kind, libraries):
            yield f"class {_name(kind)}"
    if type(model.config).__module__.partition(".")[0] != "transformers":
        yield f"config class {_name(type(model.config))}"
    if getattr(model, "_use_kernels", False):
        yield "a kernel of a hub (use_kernels)"
    for (_, place, name), function in _called(model).items():
        if place == "function":
            root = str(function.__module__).partition(".")[0]
            is_known = is_library_code(function, libraries) or root in sys.stdlib_module_names
        elif place == "experts":
            is_known = is_library_code(function)
        elif function is None:  # the implementation has no such function
            is_known = name in _ATTENTION_KINDS
        else:
            beginning = _ATTENTION_KINDS.get(name, "?")
            is_known = is_library_code(function) and function.__name__.startswith(beginning)
        if not is_known:
            yield f"{place} {name!r} ({_name(function)})"


def _name(code: Any) -> str:
    """Return file and name of a function or class, without the path in a dynamic module's name."""
    file = str(getattr(code, "__module__", "")).rpartition(".")[2]
    return f"{file}.{getattr(code, '__qualname__', type(code).__name__)}"


def is_library_cache(kind: type) -> bool:
    """Whether a class of caches, or of their parts, and its methods come from Transformers, torch
    or Python."""
    if kind.__module__.partition(".")[0] in sys.stdlib_module_names:
        return True
    is_named = kind.__module__.partition(".")[0] in ("torch", "transformers")
    methods = (each for each in vars(kind).values() if isinstance(each, FunctionType))
    return is_named and all(map(is_library_code, methods))


def code_of(model: Any, others: Iterable[type] = ()) -> str:
    """Return the release of Transformers, and a digest of the source files of all classes that
    compute the model, and of `others`."""
    modules = {kind.__module__ for kind in (*map(type, model.modules()), *others)}
    modules |= {place for place, _, _ in _called(model)}
    hasher = blake3()
    for name in sorted({*modules, "transformers.cache_utils", "transformers.masking_utils"}):
        file = getattr(sys.modules.get(name), "__file__", None)
        hasher.update(f"{name}\n".encode())
        if file is not None and name.partition(".")[0] != "torch":
            hasher.update(Path(file).read_bytes())
    return f"{_version('transformers')}, {hasher.hexdigest()[:32]}"


# --- attention ------------------------------------------------------------------------------------


def _unsure_attention(model: Any) -> list[str]:
    """If the model asks for more than plain attention, return its implementations other than
    "eager", and library versions: some implementations ignore sinks, or soft-capping ("sdpa" before
    Transformers 5, for Gemma 2). Empty if all compute the same."""
    names = {config._attn_implementation for config in _attention_configs(model)} - {None, "eager"}
    if not names or not _asks_for_more(model):
        return []
    versions = [_version(package) for package in ("transformers", "flash_attn")]
    return [*sorted(names), *versions]


def _attention_configs(model: Any) -> list[Any]:
    configs = {id(config): config for _, config in _forwards(model)}
    return [each for each in configs.values() if hasattr(each, "_attn_implementation")]


def _version(package: str) -> str:
    try:
        return f"{package} {version(package)}"
    except PackageNotFoundError:
        return f"no {package}"


class _Asked:
    """An attention context that records whether plain attention is all that a model asks for."""

    def __init__(self) -> None:
        self.is_plain = True

    def attend(self, call: AttentionCall) -> torch.Tensor:
        """See `AttentionContext.attend`. Attends causally among the tokens of the call."""
        self.is_plain &= call.scores.is_plain and not unknown_arguments(call.rest)
        return causal_attention(call.query, call.key, call.value, call.scores).transpose(1, 2)


def _asks_for_more(model: Any) -> bool:
    """Whether attention has soft-capping, sinks, a bias or anything else besides a scale and a
    window. Runs a token with the engine's attention, which sees each argument; True on failure."""
    register_attention()
    asked = _Asked()
    chosen = [(each, each._attn_implementation) for each in _attention_configs(model)]
    try:
        for config, _ in chosen:
            config._attn_implementation_internal = ATTENTION_NAME
        with torch.inference_mode():
            input_ids = torch.zeros((1, 1), dtype=torch.int64, device=model.device)
            model(input_ids=input_ids, use_cache=False, kvferry_context=asked)
    except (*_UNMAKEABLE, IndexError, ConfigError):
        return True
    finally:
        for config, name in chosen:
            config._attn_implementation_internal = name
    return not asked.is_plain


# --- buffers and dtypes ---------------------------------------------------------------------------


class _EmptyOnMeta(TorchFunctionMode):
    """A mode of this thread: `torch.empty`, which makes the parameters, takes no memory."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.empty:
            kwargs["device"] = "meta"
        return func(*args, **kwargs)


def _changed_buffers(model: Any) -> str | None:
    """Return a digest of the buffers that no file holds and that differ from those that the model's
    class makes from the config; None if none differ. For example, `model.to(torch.bfloat16)` rounds
    rotary frequencies, `from_pretrained(dtype=torch.bfloat16)` does not."""
    in_files = model.state_dict().keys()
    buffers = {name: each for name, each in model.named_buffers() if name not in in_files}
    made = _made(model) if buffers else None
    expected = {} if made is None else dict(made.named_buffers())
    hasher = None
    for name, buffer in sorted(buffers.items()):
        value = buffer.detach().cpu()
        if not _is_same(value, expected.get(name)):
            hasher = hasher or blake3()
            hasher.update(f"{name} {value.dtype} {list(value.shape)}\n".encode())
            hasher.update(value.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return None if hasher is None else hasher.hexdigest()


def _made(model: Any) -> Any:
    """Make a model of this class, config and dtype without parameters; None if that fails."""
    try:
        with LOADING, quiet_transformers(), torch.random.fork_rng(devices=[]), _EmptyOnMeta():
            return type(model)._from_config(
                copy.deepcopy(model.config), dtype=model.dtype, attn_implementation="eager"
            )
    except _UNMAKEABLE:
        return None


def states_of_prompts(model: Any) -> list[tuple[Any, str]]:
    """Return the modules and attributes in which a run before left a tensor that a model of this
    class starts without, such as the `rope_deltas` of an image."""
    held = [
        (place, module, name)
        for place, module in model.named_modules()
        for name, value in vars(module).items()
        if isinstance(value, torch.Tensor)
    ]
    made = _made(model) if held else None
    if made is None:
        return []
    modules = dict(made.named_modules())
    return [
        (module, name)
        for place, module, name in held
        if place in modules and vars(modules[place]).get(name, module) is None
    ]


def _is_same(value: torch.Tensor, expected: torch.Tensor | None) -> bool:
    if expected is None or expected.is_meta:
        return False
    if value.dtype != expected.dtype or value.shape != expected.shape:
        return False
    if not value.is_floating_point():
        return torch.equal(value, expected)
    return torch.allclose(value, expected, rtol=_BUFFER_TOLERANCE, atol=0.0, equal_nan=True)


def _other_dtypes(model: Any) -> dict[str, JsonValue]:
    """Return the dtypes of parameters and stored buffers not kept as `from_pretrained` does."""
    kept = set(getattr(model, "_keep_in_fp32_modules_strict", None) or ())
    if model.dtype == torch.float16:
        kept |= set(getattr(model, "_keep_in_fp32_modules", None) or ())
    pattern = re.compile(rf"(^|\.)({'|'.join(map(re.escape, kept))})(\.|$)" if kept else r"(?!)")
    return {
        name: str(tensor.dtype).removeprefix("torch.")
        for name, tensor in sorted(model.state_dict().items())
        if tensor.is_floating_point()
        and tensor.dtype != (torch.float32 if pattern.search(name) else model.dtype)
    }

"""A loaded Transformers model: the identity and the shape of its KV.

A model changed after loading (trained, merged, quantised, pruned) computes different KV from the
model in its directory. This module refuses every change that it can detect, and names it.

`StoredKV` makes a `HostModel`, asks it at each call whether it `is_unchanged`, and computes with
it.
"""

# ruff: noqa: ANN401 - the models and configs of Transformers share no typed surface.

from __future__ import annotations

import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

from kvferry.adapters.transformers.identity import (
    called_functions,
    deviations,
    refuse_other_code,
    refuse_other_weights,
)
from kvferry.blocks.tolerance import tolerances_for
from kvferry.contract.spec import EngineSpec
from kvferry.engine.config import EngineConfig
from kvferry.engine.connector import engine_spec
from kvferry.engine.model import cache_argument
from kvferry.engine.model_config import LATENT_MODELS, ModelConfig, first_line
from kvferry.errors import ConfigError

_OF_GENERATE = {
    *("_compiled_call", "_last_compile_config", "_previous_max_cache_length"),
    "generate",
}
"""Attributes whose changes are ignored. `generate` sets the first in a static-cache run; no other
call reads them. The last is put on a model for a pipeline; `HostModel` calls the class's."""

_PROBES = ((3, 4, 5, 6), (3, 4, 5, 7))
"""Token ids that exist in every vocabulary and are rarely padding."""

_ROUNDING = 0.02
"""Tolerance relative to the largest value; above bfloat16's error from reordered additions."""

_SAMPLES_PER_LOOK = 16
"""Number of parameters of which one look compares values; the next look goes on with others."""

_VALUES_PER_SAMPLE = 64
"""At least so many values of a parameter are compared, if it has them."""


class CacheLayer(NamedTuple):
    """One layer of the model's cache, and where its KV lies in a record."""

    group: int
    row: int
    """Index of the layer among those of its group."""
    num_kv_heads: int
    key_size: int
    """Elements per token and head of the cache's keys; the latent of latent attention."""
    value_size: int
    """Elements per token and head of the cache's values; the rotated key of latent attention."""
    has_pairs_apart: bool
    """Whether the values are rotated keys as `engine.kv_pool.pairs_apart` makes them."""
    dtype: torch.dtype

    def mismatch(self, layer: Any, num_tokens: int) -> tuple[str, str] | None:
        """Return the actual and the expected form of the first tensor that does not match; None if
        keys and values of one row match."""
        for tensor, size in ((layer.keys, self.key_size), (layer.values, self.value_size)):
            shape = (1, self.num_kv_heads, num_tokens, size)
            if tuple(tensor.shape) != shape or tensor.dtype != self.dtype:
                return f"{tensor.dtype} {list(tensor.shape)}", f"{self.dtype} {list(shape)}"
        return None


class HostModel:
    """A model that passed every check.

    Attributes:
        identity, groups: equal to the embedded engine's without `deviations`: both share records.
        tolerances: tolerances for comparisons of KV.
        layers: layers in the order of the model's cache.
        layer_devices: the device of each layer's KV.
        vocab_size: bound that all token ids are below.
        cache_argument: the name of the argument that takes a cache.

    Raises:
        ConfigError: the model's KV has no certain identity or no record form; names the reason.
    """

    def __init__(self, model: Any, model_dir: Path | None, weights_version: str | None) -> None:
        self._model = model
        _refuse_changed(model)
        self.cache_argument = cache_argument(model)
        self._parameters = inspect.signature(model.forward).parameters
        directory = model_dir or _directory_of(model)
        dtype: Any = str(model.dtype).removeprefix("torch.")  # ModelConfig refuses unknown dtypes
        engine = EngineConfig(dtype=dtype)
        config = ModelConfig(directory, engine)
        self.vocab_size = int(model.get_input_embeddings().weight.shape[0])
        if weights_version is None:
            refuse_other_code(model)
            refuse_other_weights(model.state_dict(), directory)
        spec = engine_spec(
            config,
            engine,
            deviations=deviations(model, config.transformers_config),
            weights_version=weights_version,
            name=getattr(model, "name_or_path", None),
        )
        self.groups = spec.groups
        self.layers = _layers(config, spec)
        self.identity = spec.identity
        self.tolerances = tolerances_for(spec.identity.config)
        self.layer_devices = self._probe(directory)
        self._samples = [(each, _sample(each)) for each in model.parameters()]
        self._next_sample = 0
        self._fingerprint = self._look()

    @property
    def is_unchanged(self) -> bool:
        """Whether the model looks the same as at construction. Each call checks all modules, and
        samples values of a few parameters, different ones each time."""
        return self._look() == self._fingerprint and self._samples_agree()

    def compute(
        self, input_ids: torch.Tensor, cache: Any, mask: torch.Tensor | None = None
    ) -> None:
        """Append the KV of these tokens to a cache, as `generate` computes it.

        Args:
            input_ids: `[rows, tokens]`.
            mask: `[rows, tokens]` of the cached and the new tokens, 0 where one is hidden; None:
                all are visible.
        """
        device = self._model.device
        arguments = {self.cache_argument: cache, "use_cache": True}
        if mask is not None and not mask.all():
            arguments["attention_mask"] = mask.to(device)
            if "position_ids" in self._parameters:
                positions = (mask.cumsum(-1) - 1).clamp_min(0)[:, -input_ids.shape[1] :]
                arguments["position_ids"] = positions.to(device)
        if "logits_to_keep" in self._parameters:
            arguments["logits_to_keep"] = 1
        with torch.no_grad():
            self._model(input_ids=input_ids.to(device), **arguments)

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """Call the model's `generate`, also if the caller put another one on the object."""
        return type(self._model).generate(self._model, *args, **kwargs)

    def prepare_generation(
        self, generation_config: Any, given: Mapping[str, Any]
    ) -> tuple[Any, dict[str, Any]]:
        """Return the config that `generate` makes of its arguments, and those that are not part of
        it. `generate` itself asks this method of Transformers."""
        config, rest = self._model._prepare_generation_config(generation_config, **given)
        return config, rest

    def _look(self) -> object:
        """Return a value that changes with an optimizer step, a merge, a move, a cast, a switch to
        training, a new hook, function or setting of a module, and under autocast."""
        tensors = (*self._model.named_parameters(), *self._model.named_buffers())
        return (
            torch.is_autocast_enabled(self._model.device.type),
            repr(vars(self._model.config)),
            tuple(map(_settings, self._model.modules())),
            called_functions(self._model),
            tuple(
                (name, tensor.data_ptr(), 0 if tensor.is_inference() else tensor._version)
                for name, tensor in tensors
            ),
        )

    def _samples_agree(self) -> bool:
        for _ in range(min(_SAMPLES_PER_LOOK, len(self._samples))):
            tensor, values = self._samples[self._next_sample]
            if not torch.equal(_sample(tensor), values):
                return False
            self._next_sample = (self._next_sample + 1) % len(self._samples)
        return True

    def _probe(self, directory: Path) -> tuple[torch.device, ...]:
        """Run a few tokens, check the KV that the model keeps, and return each layer's device.

        Two runs of one length differ in their last token: the KV of all other tokens must be equal.
        """
        name = f"{type(self._model).__name__} from {directory}"
        run, other = (_layers_of_run(self._model, token_ids, name) for token_ids in _PROBES)
        if len(run) != len(self.layers):
            raise ConfigError(
                f"{name} keeps KV in {len(run)} layers; its config.json says "
                f"{len(self.layers)}, each with its own"
            )
        num_tokens = len(_PROBES[0])
        for number, (layer, expected) in enumerate(zip(run, self.layers, strict=True)):
            if not is_plain(layer) or layer.keys is None:
                raise ConfigError(
                    f"{name} keeps a {type(layer).__name__} in layer {number}; only keys and "
                    "values of attention can be stored"
                )
            mismatch = expected.mismatch(layer, num_tokens)
            if mismatch is not None:
                raise ConfigError(
                    f"{name} keeps {mismatch[0]} in layer {number}; expected {mismatch[1]} by "
                    "config.json and dtype"
                )
            if _differ_before_last(layer, other[number]):
                raise ConfigError(
                    f"{name} is not causal: KV of a token in layer {number} depends on later "
                    "tokens, so the KV of a prefix cannot be reused"
                )
        self._refuse_own_positions(run, name)
        return tuple(layer.keys.device for layer in run)

    def _refuse_own_positions(self, run: list[Any], name: str) -> None:
        """Refuse a model whose default positions differ from those of `generate`, which start at 0.
        A forward without positions would compute different KV for the same tokens."""
        if "position_ids" not in self._parameters:
            return
        positions = torch.arange(len(_PROBES[0]), device=self._model.device)[None]
        placed = _layers_of_run(self._model, _PROBES[0], name, position_ids=positions)
        if any(_differ_before_last(*layers) for layers in zip(run, placed, strict=True)):
            raise ConfigError(
                f"{name} numbers tokens otherwise than generate() does, so that its KV depends on "
                "who calls it"
            )


def _settings(module: Any) -> tuple[Any, ...]:
    """Return what decides a module's computation besides its tensors: class, hooks, numbers,
    switches and functions."""
    own = vars(module)
    hooks = (own.get("_forward_pre_hooks"), own.get("_forward_hooks"))
    return (
        type(module),
        type(module).forward,
        *((place, id(hook)) for place, each in enumerate(hooks) for hook in (each or {}).values()),
        *(
            (name, id(value) if callable(value) else value)
            for name, value in own.items()
            if name not in _OF_GENERATE
            and (value is None or isinstance(value, bool | int | float | str) or callable(value))
        ),
    )


def _sample(tensor: torch.Tensor) -> torch.Tensor:
    """Copy a few values, evenly spaced, to the CPU."""
    flat = tensor.detach().flatten()
    return flat[:: max(1, flat.numel() // _VALUES_PER_SAMPLE)].to("cpu", copy=True)


def _layers_of_run(
    model: Any, token_ids: tuple[int, ...], name: str, **arguments: Any
) -> list[Any]:
    from transformers import DynamicCache

    cache: Any = DynamicCache()
    try:
        with torch.inference_mode():
            input_ids = torch.tensor([token_ids], device=model.device)
            arguments[cache_argument(model)] = cache
            model(input_ids=input_ids, use_cache=True, **arguments)
    except (RuntimeError, TypeError, ValueError, AttributeError, IndexError) as error:
        raise ConfigError(f"{name} cannot run with a DynamicCache: {first_line(error)}") from error
    return list(cache.layers)


def _differ_before_last(layer: Any, other: Any) -> bool:
    """Whether KV before the last token differs by more than rounding. Rounding may depend on the
    last token where experts are chosen."""
    for tensor, same in ((layer.keys, other.keys), (layer.values, other.values)):
        ours, theirs = tensor[:, :, :-1].float(), same[:, :, :-1].float()
        if (ours - theirs).abs().max() > _ROUNDING * ours.abs().max():
            return True
    return False


def is_plain(layer: Any) -> bool:
    """Whether a cache layer keeps keys and values as they are."""
    from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

    return type(layer) in (DynamicLayer, DynamicSlidingWindowLayer)


def _refuse_changed(model: Any) -> None:
    from transformers import PreTrainedModel

    modules = tuple(model.modules()) if isinstance(model, torch.nn.Module) else ()
    adapted = any(type(module).__module__.split(".")[0] == "peft" for module in modules)
    if adapted or getattr(model, "_hf_peft_config_loaded", False):
        raise ConfigError(
            "the model carries a PEFT adapter, which its KV depends on and its directory does not "
            "name; merge it and save the model to a directory of its own"
        )
    if any(map(_is_compiled, modules)):
        raise ConfigError(
            "the model is compiled by torch.compile, which rounds differently and recompiles for "
            "every cache length; pass the uncompiled model from from_pretrained() to StoredKV, and "
            "call generate() on it"
        )
    if not isinstance(model, PreTrainedModel):
        raise ConfigError(
            f"model is a {type(model).__name__}; give a causal LM from from_pretrained()"
        )
    implementation = getattr(model.generation_config, "cache_implementation", None)
    if implementation is not None:
        raise ConfigError(
            f"the model's generation_config has cache_implementation={implementation!r}, "
            "so generate() accepts no cache; set it to None"
        )
    is_quantised = any(type(module).__module__.startswith("torch.ao.") for module in modules)
    if is_quantised or getattr(model, "hf_quantizer", None) or getattr(model, "is_quantized", 0):
        raise ConfigError(
            "the model is quantised, so its KV is not that of the weights in its directory; load "
            "it without quantization_config or quantize_dynamic"
        )
    if any(parameter.is_meta for parameter in model.parameters()):
        raise ConfigError(
            "weights of the model are offloaded (device_map), so they cannot be checked; load it "
            "onto one device"
        )
    kind = model.config.model_type
    if getattr(model.config, "kv_lora_rank", None) is not None and kind not in LATENT_MODELS:
        raise ConfigError(
            f"{kind!r} models use latent attention in a form that is not known here; known are "
            f"{', '.join(LATENT_MODELS)}"
        )
    if model.training:
        raise ConfigError("the model is in training mode, where dropout changes KV; call eval()")


def _is_compiled(module: Any) -> bool:
    """Whether torch.compile wrapped the module, its forward or its call."""
    return (
        type(module).__name__ == "OptimizedModule"
        or getattr(module, "_compiled_call_impl", None) is not None
        or hasattr(vars(module).get("forward"), "_torchdynamo_orig_callable")
    )


def _directory_of(model: Any) -> Path:
    """Return the directory that the model was loaded from, maybe in the cache of a model hub."""
    from transformers.utils.hub import cached_file

    name = model.name_or_path
    if name and Path(name).is_dir():
        return Path(name)
    try:
        found = name and cached_file(
            name,
            "config.json",
            revision=getattr(model.config, "_commit_hash", None),
            local_files_only=True,
        )
    except (OSError, ValueError):
        found = None
    if not found:
        raise ConfigError(
            f"the model's name_or_path is {name!r}, no directory with its weights; pass "
            "model_dir=, after save_pretrained() if need be"
        )
    return Path(found).parent


def _layers(config: ModelConfig, spec: EngineSpec) -> tuple[CacheLayer, ...]:
    at: dict[str, CacheLayer] = {}
    transformers_config = config.transformers_config
    is_latent = config.geometry.is_latent
    for part in spec.table_parts:
        group = spec.groups[part.group]
        key_size = transformers_config.kv_lora_rank if is_latent else group.content_size // 2
        for row, name in zip(part.layers, part.layer_names or (), strict=True):
            at[name] = CacheLayer(
                part.group,
                row,
                group.num_kv_heads,
                key_size,
                group.content_size - key_size,
                LATENT_MODELS.get(transformers_config.model_type, False),
                getattr(torch, group.dtype),
            )
    return tuple(at[name] for name in config.geometry.layer_names)

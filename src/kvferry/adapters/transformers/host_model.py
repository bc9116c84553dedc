"""A loaded Transformers model: the identity and the shape of its KV.

A model changed after loading (trained, merged, quantised, pruned) computes different KV from the
model in its directory. This module refuses every change that it can detect, and names it.

`StoredKV` makes a `HostModel`, asks it at each call whether it `is_unchanged`, and computes with
it.
"""

# ruff: noqa: ANN401 - the models and configs of Transformers share no typed surface.

from __future__ import annotations

import copy
import inspect
from collections.abc import Container, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from kvferry.adapters.transformers.cache_tree import CacheTree
from kvferry.adapters.transformers.identity import (
    called_functions,
    deviations,
    is_library_cache,
    refuse_other_code,
    states_of_prompts,
)
from kvferry.adapters.transformers.items import Items
from kvferry.adapters.transformers.learning import NoRowsError, learn
from kvferry.adapters.transformers.plain_kv import (
    UNRUNNABLE,
    NotCausalError,
    PlainKV,
    plain_kv,
)
from kvferry.adapters.transformers.quantisation import (
    parts_of,
    quantisation_of,
    refuse_other_quantisation,
    warm_up,
)
from kvferry.adapters.transformers.weights import (
    is_all_of_files,
    refuse_other_weights,
    refuse_unread_weights,
)
from kvferry.blocks.tolerance import tolerances_for
from kvferry.engine.model_config import (
    first_line,
    read_config,
)
from kvferry.errors import ConfigError
from kvferry.identity import Loads, identify, length_dependent_rope, weight_files

_CACHES = ("cache", "past_key_values", "cache_params", "state", "mems")
"""Names of the argument of a model's forward that takes a cache, and of its output."""

_OF_GENERATE = {
    *("_compiled_call", "_last_compile_config", "_previous_max_cache_length"),
    "generate",
    "_output_capturing_hooks_installed",
}
"""Attributes whose changes are ignored. `generate` sets the first three in a static-cache run; no
other call reads them. `generate` is put on a model for a pipeline; `HostModel` calls the class's.
Hooks that collect outputs are installed by the first forward that asks for hidden states."""

_COLLECTS_OUTPUTS = "transformers.utils.output_capturing"
"""Module of these hooks, which return nothing."""

_LOGITS = {"float64": 1e-4, "float32": 1e-4, "float16": 2e-2, "bfloat16": 6e-2}
"""Largest difference of logits, relative to the largest, that rounding explains."""

_SAMPLES_PER_LOOK = 16
"""Number of parameters of which one look compares values; the next look goes on with others."""

_VALUES_PER_SAMPLE = 64
"""At least so many values of a parameter are compared, if it has them."""


class HostModel:
    """A model that passed every check.

    Attributes:
        identity: equal to the embedded engine's without `deviations`.
        plain: the KV of a model that the engine and vLLM share records of; None: its cache is
            served as a tree (cache_tree.py), if that can be proven.
        why_not_plain: why `plain` is None, in words.
        tolerances: tolerances for comparisons of KV.
        cache_argument: the name of the argument that takes a cache.

    Raises:
        ConfigError: the model's KV has no certain identity; names the reason.
    """

    def __init__(self, model: Any, model_dir: Path | None, weights_version: str | None) -> None:
        self._model = model
        _refuse_changed(model)
        self._parameters = inspect.signature(model.forward).parameters
        self.cache_argument = argument_of_cache(model, self._parameters)
        directory = model_dir or _directory_of(model)
        config = read_config(directory)
        refuse_config(config, directory)
        refuse_other_quantisation(model, config, directory)
        loads = Loads.ALL
        if weights_version is None:
            refuse_other_code(model)
            state = model.state_dict()
            is_packed = bool(quantisation_of(config))
            refuse_other_weights(model, state, directory, is_packed=is_packed)
            refuse_unread_weights(model, directory)
            is_mixed = weight_files(directory, Loads.BY_NAME).left_out
            if is_mixed and is_all_of_files(state, directory):
                loads = Loads.BY_NAME
            del state
        warm_up(model)
        dtype = str(model.dtype).removeprefix("torch.")
        for module, name in states_of_prompts(model):
            setattr(module, name, None)
        self._first_attributes = _attributes(model)
        self._empty_attributes = tuple(
            place for place, (value, _) in self._first_attributes.items() if value is None
        )
        self._hidden: tuple[tuple[Any, str, Any], ...] = ()
        self._is_settled = False
        self._empty_cache: tuple[Any] | None = None
        self._records_states = False
        self._ignores_types: dict[str, bool] = {}
        self._refuses_code = weights_version is None
        self.identity = identify(
            directory,
            dtype=dtype,
            deviations=deviations(model, config),
            weights_version=weights_version,
            name=getattr(model, "name_or_path", None) or str(directory),
            loads=loads,
        )
        self.tolerances = tolerances_for(_as_it_runs(self.identity.config))
        self.plain: PlainKV | None = None
        self.why_not_plain = ""
        try:
            self.plain = plain_kv(model, directory, dtype)
            self.settle()
        except NotCausalError:
            raise
        except ConfigError as error:
            self.why_not_plain = str(error)

    @property
    def model(self) -> Any:
        """The model of Transformers."""
        return self._model

    @property
    def vocab_size(self) -> int:
        """The bound that the ids of all tokens of text are below, also after a change of it."""
        return int(self._model.get_input_embeddings().weight.shape[0])

    def settle(self) -> None:
        """Take the model as it is now for unchanged: after probes, which may have left state in its
        modules. Such state is put back to what it was, now and at each `reset`.

        Raises:
            ConfigError: state that cannot be put back; names it.
        """
        self._find_hidden()
        self.reset()
        parts = (part for each in self._model.parameters() for part in parts_of(each))
        self._samples = [(each, _sample(each)) for each in parts]
        self._next_sample = 0
        self._fingerprint = self._look()
        self._is_settled = True

    @property
    def hidden(self) -> tuple[str, ...]:
        """Names of the attributes of modules in which runs leave state."""
        names = {id(module): name for name, module in self._model.named_modules()}
        return tuple(f"{names[id(module)]}.{name}".lstrip(".") for module, name, _ in self._hidden)

    def reset(self) -> None:
        """Put state that runs left in modules back, so that a prompt starts as in a new process."""
        for module, name, value in self._hidden:
            setattr(module, name, value)
        # Also where no probe left any, as an image does; nothing but a run makes a tensor of None.
        for module, name in self._empty_attributes:
            if isinstance(vars(module).get(name), torch.Tensor):
                setattr(module, name, None)

    def _changed_attributes(self) -> Iterator[tuple[Any, str, Any]]:
        names = {id(module): name for name, module in self._model.named_modules()}
        for (module, name), (value, mark) in _attributes(self._model).items():
            before, old_mark = self._first_attributes.get((module, name), (None, None))
            if mark == old_mark:
                continue
            if old_mark is None or _mark_of(before) != old_mark or name in vars(module)["_buffers"]:
                raise ConfigError(
                    f"{type(self._model).__name__} keeps state of a prompt in "
                    f"{names[id(module)]}.{name}, outside its cache ({type(value).__name__}), so "
                    "that a stored cache would go on with another prompt's"
                )
            yield module, name, before

    @property
    def is_unchanged(self) -> bool:
        """Whether the model looks the same as at construction. Each call checks all modules, and
        samples values of a few parameters, different ones each time."""
        return self._look() == self._fingerprint and self._samples_agree()

    @property
    def is_timed(self) -> bool:
        """Whether a forward has ended when it returns, so that its time can be told."""
        return bool(self._model.device.type == "cpu")

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

    def run(
        self,
        input_ids: torch.Tensor,
        cache: Any,
        num_cached: int,
        *,
        mask: torch.Tensor | None = None,
        num_logits: int = 0,
        inputs: Mapping[str, torch.Tensor] | None = None,
    ) -> tuple[Any, torch.Tensor]:
        """Append tokens to a cache as `generate` does, with mask and positions. Return the cache,
        and the logits of the last `num_logits` tokens, or of more.

        Args:
            input_ids: `[rows, tokens]`.
            cache: of `num_cached` tokens; None: the model makes one.
            mask: `[rows, num_cached + tokens]`; None: all are visible.
            inputs: other arguments for these tokens, as `Items.inputs` makes them.

        Raises:
            ConfigError: the output has no cache.
        """
        device, num_tokens = self._model.device, input_ids.shape[1]
        arguments: dict[str, Any] = {"use_cache": True}
        if cache is not None:
            arguments[self.cache_argument] = cache
        if mask is None:
            mask = torch.ones((len(input_ids), num_cached + num_tokens), dtype=torch.long)
        if "attention_mask" in self._parameters:
            arguments["attention_mask"] = mask.to(device)
        if "position_ids" in self._parameters:
            positions = (mask.cumsum(-1) - 1).clamp_min(0)[:, -num_tokens:]
            arguments["position_ids"] = positions.to(device)
        if "logits_to_keep" in self._parameters:
            arguments["logits_to_keep"] = max(num_logits, 1)
        arguments["input_ids"] = input_ids.to(device)
        if inputs:
            arguments = self._model.prepare_inputs_for_generation(
                is_first_iteration=True, **{**arguments, **inputs}
            )
        with torch.no_grad():
            output = self._model(**arguments)
        found = self.cache_of_output(output)
        if found is None or not hasattr(output, "logits"):
            raise ConfigError(f"{type(self._model).__name__} returns no cache beside its logits")
        return found, output.logits[:, -max(num_logits, 1) :]

    @property
    def logits_limit(self) -> float:
        """The largest difference of logits, relative to the largest, that rounding explains."""
        dtype = str(self._model.dtype).removeprefix("torch.")
        return _LOGITS.get(dtype, _LOGITS["bfloat16"])

    def ignores_types_of_text(self, name: str) -> bool:
        """Whether the argument of this name, if it says that all tokens are text, changes nothing.
        Runs a few tokens with and without it, once."""
        if name not in self._ignores_types:
            self._ignores_types[name] = self._computes_same_with(name)
            self.reset()
        return self._ignores_types[name]

    def _computes_same_with(self, name: str) -> bool:
        ids = self.probe_ids(9, 3)
        try:
            without, found = (
                self.run(ids, None, 0, num_logits=ids.shape[1], inputs=inputs)[1]
                for inputs in ({}, {name: torch.zeros_like(ids).to(self._model.device)})
            )
        except UNRUNNABLE:
            return False
        return bool((without - found).abs().max() <= self.logits_limit * without.abs().max())

    def cache_of_output(self, output: Any) -> Any:
        """Return the cache in an output of the model; None: it has none."""
        return next((output[name] for name in _CACHES if output.get(name) is not None), None)

    def positions(
        self, input_ids: torch.Tensor, mask: torch.Tensor, inputs: Mapping[str, Any]
    ) -> dict[str, torch.Tensor]:
        """Return the argument with the positions that `generate` gives to the tokens of whole
        prompts, if the model takes one. Leaves in the model what a run of them would.

        Args:
            inputs: other arguments of the prompts.
        """
        if "position_ids" not in self._parameters:
            return {}
        ids, device = input_ids.to(self._model.device), self._model.device
        given = {**inputs, "attention_mask": mask.to(device)}
        return {"position_ids": self._model._prepare_position_ids_for_generation(ids, given)}

    def placed(self, rows: Sequence[Sequence[int]], items: Items) -> Items:
        """Give items the positions of all tokens of their prompt, and leave them in the model."""
        ids = torch.tensor(rows)
        inputs = items.inputs(0, ids.shape[1])
        inputs.pop("position_ids", None)
        return items.placed(self.positions(ids, torch.ones_like(ids), inputs))

    def new_cache(self) -> Any:
        """Return an empty cache whose windows keep all tokens; None if the model has no windows or
        a cache of its own."""
        if self._empty_cache is None:
            cache, _ = self.run(self.probe_ids(2, 9), None, 0)
            self._empty_cache = (
                _recording(cache, self._model.config, with_states=self._records_states),
            )
        self.reset_all()
        return copy.deepcopy(self._empty_cache[0])

    def learn_tree(self, chunk_tokens: int | None) -> CacheTree:
        """Return the cache of this model as a tree. Runs some chunks of tokens.

        Raises:
            ConfigError: it has no laws, or is of foreign code; names the leaf or class.
        """
        name = type(self._model).__name__
        try:
            tree = self._learnt(chunk_tokens)
        except ConfigError as error:  # it is a ValueError, too
            raise ConfigError(f"{name} cannot be served: {error}") from error
        except UNRUNNABLE as error:
            raise ConfigError(f"{name} cannot go on from a cache: {first_line(error)}") from error
        self.reset_all()
        for kind in tree.kinds:
            if self._refuses_code and not is_library_cache(kind):
                raise ConfigError(
                    f"a {kind.__module__}.{kind.__name__} keeps the cache of {name}; it is not "
                    "Transformers' own code; pass a weights_version that names the code, too"
                )
        return tree

    def _learnt(self, chunk_tokens: int | None) -> CacheTree:
        try:
            return learn(self, chunk_tokens)
        except NoRowsError:
            # All attention may be in windows beside states: keep their tokens, too.
            self._records_states, self._empty_cache = True, None
            return learn(self, chunk_tokens)

    def reset_all(self) -> None:
        """As `reset`, while the hidden state is not known yet."""
        if not self._is_settled:
            self._find_hidden()
        self.reset()

    def _find_hidden(self) -> None:
        known = {(id(module), name) for module, name, _ in self._hidden}
        found = self._changed_attributes()
        new = [each for each in found if (id(each[0]), each[1]) not in known]
        self._hidden = (*self._hidden, *new)

    def probe_ids(self, num_tokens: int, seed: int, num_rows: int = 1) -> torch.Tensor:
        """Return ids `[num_rows, num_tokens]` of text: none that the config gives a meaning."""
        special = set(_numbers_of(self._model.config.to_dict()))
        plain = [each for each in range(3, min(self.vocab_size, 1000)) if each not in special]
        generator = torch.Generator().manual_seed(seed)
        shape = (num_rows, num_tokens)
        return torch.tensor(plain)[torch.randint(len(plain), shape, generator=generator)]

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
        hidden = {(id(module), name) for module, name, _ in self._hidden}
        return (
            torch.is_autocast_enabled(self._model.device.type),
            repr(vars(self._model.config)),
            tuple(_settings(each, hidden) for each in self._model.modules()),
            called_functions(self._model),
            tuple(
                (name, part.data_ptr(), 0 if part.is_inference() else part._version)
                for name, tensor in tensors
                for part in parts_of(tensor)
            ),
        )

    def _samples_agree(self) -> bool:
        for _ in range(min(_SAMPLES_PER_LOOK, len(self._samples))):
            tensor, values = self._samples[self._next_sample]
            if not torch.equal(_sample(tensor), values):
                return False
            self._next_sample = (self._next_sample + 1) % len(self._samples)
        return True


def _recording(cache: Any, config: Any, *, with_states: bool) -> Any:
    """Return an empty cache like `cache` whose windows keep all tokens, also those in layers with
    states if asked for; None if it has no windows, or cannot be made from the config."""
    from transformers import cache_utils

    windows = [cache_utils.DynamicSlidingWindowLayer]
    if with_states:
        windows.append(cache_utils.LinearAttentionAndSlidingWindowAttentionLayer)
    if not any(type(layer) in windows for layer in getattr(cache, "layers", ())):
        return None
    try:
        empty = type(cache)(config=config.get_text_config(decoder=True))
    except (TypeError, ValueError, AttributeError):
        return None
    for layer in empty.layers:
        if type(layer) in windows:
            layer.record_past = True  # as its `activate_past_recording` does
    return empty


def _numbers_of(config: Mapping[str, Any]) -> Iterator[int]:
    """Yield the token ids that a config names, also in its parts."""
    for name, value in config.items():
        if isinstance(value, Mapping):
            yield from _numbers_of(value)
        elif str(name).endswith(("_id", "_ids", "_index")):
            yield from (each for each in (value if isinstance(value, list) else [value]) if each)


_OF_MODULES = {*vars(torch.nn.Module()), *_OF_GENERATE} - {"training"}


def _attributes(model: Any) -> dict[tuple[Any, str], tuple[Any, object]]:
    """Return the attributes and buffers of all modules, with a mark that changes when the value
    does. Parameters are checked elsewhere."""
    found = {}
    for module in model.modules():
        own = {name: value for name, value in vars(module).items() if name not in _OF_MODULES}
        for name, value in {**own, **vars(module)["_buffers"]}.items():
            found[module, name] = value, _mark_of(value)
    return found


def _mark_of(value: Any) -> object:
    if isinstance(value, torch.Tensor):
        return id(value), 0 if value.is_inference() else value._version
    if value is None or isinstance(value, bool | int | float | str):
        return type(value), value
    if isinstance(value, list | tuple | set):
        return id(value), tuple(map(id, value))
    if isinstance(value, dict):
        return id(value), tuple((name, id(each)) for name, each in value.items())
    return id(value)


def _settings(module: Any, hidden: Container[tuple[int, str]]) -> tuple[Any, ...]:
    """Return what decides a module's computation besides its tensors: class, hooks, numbers,
    switches and functions. Not what a prompt leaves `hidden` in it."""
    own = vars(module)
    hooks = (own.get("_forward_pre_hooks"), own.get("_forward_hooks"))
    return (
        type(module),
        type(module).forward,
        *(
            (place, id(hook))
            for place, each in enumerate(hooks)
            for hook in (each or {}).values()
            if getattr(hook, "__module__", "") != _COLLECTS_OUTPUTS
        ),
        *(
            (name, id(value) if callable(value) else value)
            for name, value in own.items()
            if name not in _OF_GENERATE
            and (id(module), name) not in hidden
            and (value is None or isinstance(value, bool | int | float | str) or callable(value))
        ),
    )


def _sample(tensor: torch.Tensor) -> torch.Tensor:
    """Copy a few values, evenly spaced, to the CPU."""
    flat = tensor.detach().flatten()
    return flat[:: max(1, flat.numel() // _VALUES_PER_SAMPLE)].to("cpu", copy=True)


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
    if any(parameter.is_meta for parameter in model.parameters()):
        raise ConfigError(
            "weights of the model are offloaded (device_map), so they cannot be checked; load it "
            "onto one device"
        )
    if model.training:
        raise ConfigError("the model is in training mode, where dropout changes KV; call eval()")


def _as_it_runs(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the configuration of an identity with its overrides: a model that was unpacked at load
    has no quantization_config."""
    return {**config, **config.get("overrides", {})}


def refuse_config(config: Any, directory: Path) -> None:
    what = f"{directory} holds a {config.model_type!r} model"
    if getattr(config, "is_encoder_decoder", False):
        raise ConfigError(f"{what}, an encoder-decoder; only decoders are served")
    if rope_type := length_dependent_rope(config.to_dict()):
        raise ConfigError(
            f"{what} with {rope_type!r} rotary embeddings: its keys depend on how long other "
            "sequences of a batch are, so they cannot be kept"
        )


def argument_of_cache(model: Any, parameters: Mapping[str, Any]) -> str:
    name = next((name for name in _CACHES if name in parameters), None)
    if name is None:
        raise ConfigError(
            f"{type(model).__name__} takes no cache in its forward; give a model that generates"
        )
    return name


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

"""Plain KV of a Transformers model: keys and values of one shape in all layers.

Records of it are those of the embedded engine and of vLLM. `HostModel` asks whether a loaded model
keeps its KV so; `kvferry doctor` asks it of a config alone.
"""

# ruff: noqa: ANN401 - the models and caches of Transformers share no typed surface.

from __future__ import annotations

import inspect
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from kvferry.config import build_config
from kvferry.contract.spec import EngineSpec
from kvferry.engine.config import EngineConfig
from kvferry.engine.connector import engine_spec
from kvferry.engine.model import cache_argument
from kvferry.engine.model_config import LATENT_MODELS, ModelConfig, first_line
from kvferry.errors import ConfigError
from kvferry.types import KVGroup

UNRUNNABLE = (
    *(RuntimeError, TypeError, ValueError, AttributeError, IndexError, KeyError, AssertionError),
    StopIteration,
)
"""Errors of a model that cannot run in a way that it was not made for."""

_PROBES = ((3, 4, 5, 6), (3, 4, 5, 7))
"""Token ids that exist in every vocabulary and are rarely padding."""

_ROUNDING = 0.02
"""Tolerance relative to the largest value; above bfloat16's error from reordered additions."""


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


class NotCausalError(ConfigError):
    """No form of cache can serve the model."""


class PlainKV(NamedTuple):
    """Keys and values of one shape in all layers, in records that other hosts share.

    The engine's geometry says what is in a record; the cache must have the same.
    """

    groups: tuple[KVGroup, ...]
    layers: tuple[CacheLayer, ...]
    """In the order of the model's cache."""
    layer_devices: tuple[torch.device, ...]
    """The device of each layer's KV."""


def plain_kv(model: Any, directory: Path, dtype: str) -> PlainKV:
    """Return the plain KV of a loaded model.

    Raises:
        ConfigError: it has none; names the reason.
    """
    groups, layers = plain_layers(model.config, directory, dtype)
    return PlainKV(groups, layers, _probed_devices(model, layers, str(directory)))


def plain_layers(
    config: Any, directory: Path, dtype: str
) -> tuple[tuple[KVGroup, ...], tuple[CacheLayer, ...]]:
    """Return the groups and layers of a model whose KV is plain by its config alone.

    Raises:
        ConfigError: it is not; names the reason.
    """
    kind = config.model_type
    if getattr(config, "kv_lora_rank", None) is not None and kind not in LATENT_MODELS:
        raise ConfigError(f"{kind!r} models keep latents in a form of their own")
    engine = build_config(EngineConfig, {"dtype": dtype}, where="the model")
    served = ModelConfig(directory, engine)
    spec = engine_spec(served, engine, weights_version="the host's")
    return spec.groups, _layers(served, spec)


def refuse_other_form(model: Any, layers: Sequence[CacheLayer], directory: str) -> None:
    """Raise ConfigError if a model without values (on the meta device) keeps KV of another form
    than `layers`. Where it cannot run to the end without values, because it chooses experts by
    them, only the layers before are looked at."""
    from transformers import DynamicCache

    name, cache = f"{type(model).__name__} from {directory}", DynamicCache()
    try:
        _run(model, _PROBES[0], cache)
    except UNRUNNABLE:
        found = [each for each in cache.layers if getattr(each, "keys", None) is not None]
        layers = layers[: len(found)]
    else:
        found = cache.layers
    _check_form(found, layers, name)


def _check_form(run: Sequence[Any], layers: Sequence[CacheLayer], name: str) -> None:
    if len(run) != len(layers):
        raise ConfigError(
            f"{name} keeps KV in {len(run)} layers; its config.json says {len(layers)}, each with "
            "its own"
        )
    for number, (layer, expected) in enumerate(zip(run, layers, strict=True)):
        if not is_plain(layer) or layer.keys is None:
            raise ConfigError(
                f"{name} keeps a {type(layer).__name__} in layer {number}, not plain keys and "
                "values"
            )
        mismatch = expected.mismatch(layer, len(_PROBES[0]))
        if mismatch is not None:
            raise ConfigError(
                f"{name} keeps {mismatch[0]} in layer {number}; expected {mismatch[1]} by "
                "config.json and dtype"
            )


def _probed_devices(
    model: Any, layers: tuple[CacheLayer, ...], directory: str
) -> tuple[torch.device, ...]:
    """Run a few tokens, check the KV that the model keeps, and return each layer's device.

    Two runs of one length differ in their last token: the KV of all other tokens must be equal. So
    must be the KV of a run with the positions that `generate` gives.
    """
    name = f"{type(model).__name__} from {directory}"
    run, other = (_layers_of_run(model, token_ids, name) for token_ids in _PROBES)
    _check_form(run, layers, name)
    for number, pair in enumerate(zip(run, other, strict=True)):
        if _differ_before_last(*pair):
            raise NotCausalError(
                f"{name} is not causal: KV of a token in layer {number} depends on later tokens, "
                "so the KV of a prefix cannot be reused"
            )
    if "position_ids" in inspect.signature(model.forward).parameters:
        positions = torch.arange(len(_PROBES[0]), device=model.device)[None]
        placed = _layers_of_run(model, _PROBES[0], name, position_ids=positions)
        if any(_differ_before_last(*pair) for pair in zip(run, placed, strict=True)):
            raise ConfigError(f"{name} numbers tokens otherwise than generate() does")
    return tuple(layer.keys.device for layer in run)


def _layers_of_run(
    model: Any, token_ids: tuple[int, ...], name: str, **arguments: Any
) -> list[Any]:
    from transformers import DynamicCache

    cache: Any = DynamicCache()
    try:
        _run(model, token_ids, cache, **arguments)
    except UNRUNNABLE as error:
        raise ConfigError(f"{name} cannot run with a DynamicCache: {first_line(error)}") from error
    return list(cache.layers)


def _run(model: Any, token_ids: tuple[int, ...], cache: Any, **arguments: Any) -> None:
    with torch.inference_mode():
        input_ids = torch.tensor([token_ids], device=model.device)
        arguments[cache_argument(model)] = cache
        model(input_ids=input_ids, use_cache=True, **arguments)


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

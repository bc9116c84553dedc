"""Reads and checks the config of a model directory, before any weights are read."""

# ruff: noqa: ANN401 - the configs of Transformers share no typed surface.

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from kvferry.engine.config import EngineConfig
from kvferry.errors import ConfigError, install_hint
from kvferry.identity import length_dependent_rope

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

LATENT_MODELS = {"deepseek_v2": False, "deepseek_v3": True}
"""Models with multi-head latent attention, and whether their rotated keys in Transformers have the
two numbers of a pair apart."""

_KNOWN_LAYER_TYPES = ("full_attention", "sliding_attention")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelGeometry:
    """The shape of the whole model's KV, of which a rank may hold a part.

    Attributes:
        content_size: elements of KV per token and kv head.
        is_latent: the KV is the latent of multi-head latent attention.
        windows: number of tokens that each layer attends to; None for all.
        context_length: number of tokens that the model was built for.
        dtype: dtype of weights and KV: "float32", "bfloat16" or "float16".
    """

    num_layers: int
    num_query_heads: int
    num_kv_heads: int
    content_size: int
    is_latent: bool
    windows: tuple[int | None, ...]
    context_length: int
    vocab_size: int
    dtype: str

    @property
    def torch_dtype(self) -> torch.dtype:
        return _DTYPES[self.dtype]

    @property
    def layer_names(self) -> tuple[str, ...]:
        return tuple(f"layers.{index}" for index in range(self.num_layers))


class ModelConfig:
    """The config of a model directory that the engine or `StoredKV` can serve.

    Attributes:
        transformers_config: the config object of Transformers.
        geometry: the shape of the model's KV.

    Raises:
        ConfigError: this is no model directory, or the model is not served.
    """

    def __init__(self, model_dir: Path, engine: EngineConfig) -> None:
        self.model_dir = model_dir
        self.transformers_config = read_config(model_dir)
        for refusal in self._refusals():
            what = f"{model_dir} holds a {self.transformers_config.model_type!r} model"
            raise ConfigError(what + refusal)
        try:
            self.geometry = self._geometry(engine.dtype)
        except (AttributeError, TypeError, RuntimeError) as error:  # a list by layer, or missing
            raise ConfigError(
                f"{model_dir}/config.json does not say what KV all layers have: "
                f"{first_line(error).partition('. ')[0]}"
            ) from error
        heads, ranks = self.geometry.num_query_heads, engine.tensor_parallel_size
        if heads % ranks:
            # Checked before ranks exist: one of them could fail before others are connected.
            raise ConfigError(
                f"{heads} attention heads cannot be split over tensor_parallel_size={ranks}; use "
                "a size that divides them"
            )

    def model_class(self) -> Any:
        """Return Transformers' class of causal LM for this config.

        Raises:
            ConfigError: Transformers has none.
        """
        from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

        config = self.transformers_config
        if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
            raise ConfigError(
                f"{self.model_dir} holds a {config.model_type!r} model, which is not a causal LM "
                "that Transformers knows"
            )
        return MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]

    def _refusals(self) -> Iterator[str]:
        """Yield why neither engine nor `StoredKV` serves this model, as ends of a sentence."""
        config = self.transformers_config
        if getattr(config, "is_encoder_decoder", False):
            yield ", an encoder-decoder; only decoders are served"
        if config.get_text_config() is not config or _has_other_inputs(config):
            yield ", which takes more than text; only text is served"
        model_class = self.model_class()
        if getattr(model_class, "_is_stateful", False):
            yield " with recurrent layers; only the KV of attention is kept"
        if not getattr(model_class, "_supports_attention_backend", False):
            yield ", whose attention does not go through Transformers' attention interface"
        if "logits_to_keep" not in inspect.signature(model_class.forward).parameters:
            yield ", whose forward cannot compute single logits (logits_to_keep)"
        unknown = set(getattr(config, "layer_types", None) or ()) - set(_KNOWN_LAYER_TYPES)
        if unknown:
            yield (
                f" with layers of type {', '.join(sorted(unknown))}; "
                f"{' and '.join(_KNOWN_LAYER_TYPES)} are served"
            )
        if config.model_type in LATENT_MODELS and not getattr(config, "rope_interleave", True):
            yield " with rope_interleave=false; other engines would read its latents wrongly"
        if getattr(config, "use_bidirectional_attention", None):
            yield " with bidirectional attention; only causal attention is served"
        if rope_type := length_dependent_rope(config.to_dict()):
            yield (
                f" with {rope_type!r} rotary embeddings: its keys depend on how long other "
                "sequences of a batch are, so they cannot be kept"
            )

    def _geometry(self, dtype: str) -> ModelGeometry:
        config = self.transformers_config
        if dtype == "auto":
            dtype = str(getattr(config, "dtype", None) or torch.float32).removeprefix("torch.")
        if dtype not in _DTYPES:
            raise ConfigError(f"{self.model_dir} is stored as {dtype}; pass dtype='float32'")
        num_heads = config.num_attention_heads
        is_latent = config.model_type in LATENT_MODELS
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // num_heads
        num_kv_heads = getattr(config, "num_key_value_heads", None) or num_heads
        context_length = getattr(config, "max_position_embeddings", None)
        if not isinstance(context_length, int):
            raise ConfigError(f"{self.model_dir}: its config names no max_position_embeddings")
        return ModelGeometry(
            num_layers=config.num_hidden_layers,
            num_query_heads=num_heads,
            num_kv_heads=1 if is_latent else num_kv_heads,
            content_size=(
                config.kv_lora_rank + config.qk_rope_head_dim if is_latent else 2 * head_dim
            ),
            is_latent=is_latent,
            windows=_windows(config),
            context_length=context_length,
            vocab_size=config.vocab_size,
            dtype=dtype,
        )


def read_config(model_dir: Path) -> Any:
    """Return Transformers' config of a model directory.

    Raises:
        ConfigError: it is none, or it needs code of its own.
    """
    if not model_dir.is_dir():
        raise ConfigError(f"{model_dir} is not a directory; give one with config.json and weights")
    if not (model_dir / "config.json").is_file():
        raise ConfigError(f"{model_dir} is not a model directory: it has no config.json")
    require_transformers("the engine")
    from transformers import AutoConfig

    try:
        # With False, Transformers never asks on the terminal whether to run the directory's code.
        return AutoConfig.from_pretrained(model_dir, local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{model_dir}/config.json cannot be used: {first_line(error)}") from error


def require_transformers(what: str) -> None:
    """Raise ConfigError if Transformers is not installed. The message says how to install it, and
    that `what` needs it."""
    try:
        import transformers.cache_utils  # noqa: F401
    except ImportError as error:
        raise ConfigError(f"{what} needs Transformers: {install_hint('transformers')}") from error


def _has_other_inputs(config: Any) -> bool:
    """Whether parts of the model read images or sound, which the token ids do not name. Some models
    with such parts have no separate config of their text part."""
    return any(name.startswith(("vision_", "audio_")) for name in config.sub_configs)


def _windows(config: Any) -> tuple[int | None, ...]:
    window: int | None = getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None)
    if kinds is None:
        return (window,) * int(config.num_hidden_layers)
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def is_library_code(function: object, others: tuple[str, ...] = ()) -> bool:
    """Whether a function and all that it wraps come from files of Transformers, torch or the
    packages `others`. A caller's replacement may have the name of a function of theirs, but not its
    file."""
    roots = ("torch", "transformers", *others)
    files = (getattr(sys.modules.get(each), "__file__", None) for each in roots)
    places = tuple(f"{Path(file).parent}{os.sep}" for file in files if file)
    while True:
        code = getattr(function, "__code__", None)
        if code is None or not code.co_filename.startswith(places):
            return False
        if not hasattr(function, "__wrapped__"):
            return True
        function = function.__wrapped__


def is_library_class(module_class: type, others: tuple[str, ...] = ()) -> bool:
    """Whether a class of modules and its `forward` come from Transformers, torch or the packages
    `others`."""
    root = module_class.__module__.partition(".")[0]
    return root in ("torch", "transformers", *others) and is_library_code(
        getattr(module_class, "forward", None), others
    )


def first_line(error: Exception) -> str:
    """Return the first line of an error: Transformers' errors are long, ours are one line."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]

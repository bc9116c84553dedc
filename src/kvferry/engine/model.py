"""A Hugging Face causal LM that reads and writes paged KV."""

# ruff: noqa: ANN401 - the configs and models of Transformers share no typed surface.

from __future__ import annotations

import inspect
import logging
import pickle
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from kvferry.engine.config import EngineConfig
from kvferry.engine.paged_attention import ATTENTION_NAME, AttentionContext, register_attention
from kvferry.errors import ConfigError
from kvferry.keys import JsonValue, effective_config

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

_LENGTH_DEPENDENT_ROPE = ("dynamic", "longrope")
"""Their angles depend on the longest sequence of a forward, so cached keys would go stale."""

_KNOWN_LAYER_TYPES = ("full_attention", "sliding_attention")

_UNLOADABLE = (
    *(OSError, ValueError, RuntimeError, KeyError, TypeError, EOFError),
    *(SafetensorError, pickle.UnpicklingError),
)
"""What Transformers lets through when weight files are damaged or belong to another config."""

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json")

_HARMLESS_ARGUMENTS = frozenset(
    {"dropout", "position_ids", "cache_position", "use_cache", "is_causal", "logits_to_keep"}
)
"""What layers pass to attention that changes nothing here: inference, no Transformers cache."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelGeometry:
    """What the KV pool must know of a model.

    Attributes:
        context_length: tokens the model was built for.
        dtype: of weights and KV: "float32", "bfloat16" or "float16".
    """

    num_layers: int
    num_kv_heads: int
    head_dim: int
    context_length: int
    vocab_size: int
    dtype: str

    @property
    def torch_dtype(self) -> torch.dtype:
        return _DTYPES[self.dtype]

    @property
    def layer_names(self) -> tuple[str, ...]:
        return tuple(f"layers.{index}" for index in range(self.num_layers))

    def block_bytes(self, block_size: int) -> int:
        """Bytes of one block over all layers."""
        content = self.num_kv_heads * block_size * 2 * self.head_dim
        return self.num_layers * content * self.torch_dtype.itemsize


class ModelConfig:
    """The config of a model directory, judged before any weight is read.

    Raises:
        ConfigError: not a model directory, or a model this engine cannot serve, and why.
    """

    def __init__(self, model_dir: Path, engine: EngineConfig) -> None:
        self.model_dir = model_dir
        self._config = _read_config(model_dir)
        self._refuse_unservable()
        self.geometry = self._geometry(engine.dtype)

    def effective_config(self) -> dict[str, JsonValue]:
        """The part of the config that decides KV bytes, with the dtype the engine computes in."""
        config = effective_config(self.model_dir)
        config.pop("torch_dtype", None)
        config["dtype"] = self.geometry.dtype
        return config

    def load(self, device: str) -> PagedModel:
        """Read the weights."""
        return PagedModel(self._model_class(), self._config, self.geometry, self.model_dir, device)

    def _model_class(self) -> Any:
        from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

        if type(self._config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
            raise ConfigError(
                f"{self.model_dir} holds a {self._config.model_type!r} model, which is not a "
                "causal LM that Transformers knows"
            )
        return MODEL_FOR_CAUSAL_LM_MAPPING[type(self._config)]

    def _refuse_unservable(self) -> None:
        config = self._config
        what = f"{self.model_dir} holds a {config.model_type!r} model"
        if getattr(config, "is_encoder_decoder", False):
            raise ConfigError(f"{what}, an encoder-decoder; the engine serves decoders only")
        if config.get_text_config() is not config:
            raise ConfigError(f"{what}, which takes more than text; the engine serves text only")
        model_class = self._model_class()
        if getattr(model_class, "_is_stateful", False):
            raise ConfigError(f"{what} with recurrent layers; the engine pages attention KV only")
        if not getattr(model_class, "_supports_attention_backend", False):
            raise ConfigError(
                f"{what}, whose attention does not go through Transformers' attention interface"
            )
        parameters = inspect.signature(model_class.forward).parameters
        if "logits_to_keep" not in parameters:
            raise ConfigError(
                f"{what}, whose forward cannot compute single logits (logits_to_keep)"
            )
        unknown = set(getattr(config, "layer_types", None) or ()) - set(_KNOWN_LAYER_TYPES)
        if unknown:
            raise ConfigError(
                f"{what} with layers of type {', '.join(sorted(unknown))}; "
                f"the engine serves {' and '.join(_KNOWN_LAYER_TYPES)}"
            )
        if getattr(config, "use_bidirectional_attention", None):
            raise ConfigError(f"{what} with bidirectional attention; the engine's is causal")
        for rope_type in _rope_types(config):
            if rope_type in _LENGTH_DEPENDENT_ROPE:
                raise ConfigError(
                    f"{what} with {rope_type!r} rotary embeddings: its keys depend on how long "
                    "other sequences of a batch are, so they cannot be kept"
                )

    def _geometry(self, dtype: str) -> ModelGeometry:
        config = self._config
        if dtype == "auto":
            dtype = str(getattr(config, "dtype", None) or torch.float32).removeprefix("torch.")
        if dtype not in _DTYPES:
            raise ConfigError(f"{self.model_dir} is stored as {dtype}; pass dtype='float32'")
        num_heads = config.num_attention_heads
        context_length = getattr(config, "max_position_embeddings", None)
        if not isinstance(context_length, int):
            raise ConfigError(f"{self.model_dir}: its config names no max_position_embeddings")
        return ModelGeometry(
            num_layers=config.num_hidden_layers,
            num_kv_heads=getattr(config, "num_key_value_heads", None) or num_heads,
            head_dim=getattr(config, "head_dim", None) or config.hidden_size // num_heads,
            context_length=context_length,
            vocab_size=config.vocab_size,
            dtype=dtype,
        )


class PagedModel:
    """The loaded model, ready for flattened batches."""

    def __init__(
        self,
        model_class: Any,
        config: Any,
        geometry: ModelGeometry,
        model_dir: Path,
        device: str,
    ) -> None:
        """Load weights and check, on one token, that attention is what `geometry` says.

        Raises:
            ConfigError: weights missing or unreadable, or attention the engine cannot page.
        """
        register_attention()
        self.geometry = geometry
        self.device = _usable_device(device)
        with quiet_transformers():
            try:
                model, info = model_class.from_pretrained(
                    model_dir,
                    config=config,
                    dtype=geometry.torch_dtype,
                    attn_implementation=ATTENTION_NAME,
                    local_files_only=True,
                    output_loading_info=True,
                    ignore_mismatched_sizes=True,  # refused below, by name
                )
            except _UNLOADABLE as error:
                raise ConfigError(
                    f"cannot load the weights in {model_dir}: {_first_line(error)}"
                ) from error
        # Transformers makes up what does not fit or is missing, and only logs it.
        if info["mismatched_keys"]:
            name, stored, configured = min(info["mismatched_keys"])
            raise ConfigError(
                f"{model_dir}: {name} has shape {list(stored)} in the weights and "
                f"{list(configured)} by config.json; they are not of one model"
            )
        if info["missing_keys"]:
            raise ConfigError(
                f"{model_dir} lacks {len(info['missing_keys'])} of the model's tensors, "
                f"{min(info['missing_keys'])} for one"
            )
        self._model = model.to(self.device).eval()
        self.eos_token_ids = _eos_token_ids(model)
        probe = _Probe()
        self.forward(
            torch.zeros(1, dtype=torch.int64), torch.zeros(1, dtype=torch.int64), probe, [0]
        )
        probe.check(geometry, model_dir)

    @torch.inference_mode()
    def forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        context: AttentionContext,
        logit_rows: list[int],
    ) -> torch.Tensor:
        """Run the flattened tokens of a step.

        Args:
            token_ids: `[num_tokens]` int64, request after request.
            positions: `[num_tokens]` int64, of each token in its own request.
            context: where KV is written and read.
            logit_rows: the flattened tokens whose logits are wanted.

        Returns:
            `[len(logit_rows), vocab]` float32.
        """
        output = self._model(
            input_ids=token_ids[None].to(self.device),
            position_ids=positions[None].to(self.device),
            use_cache=False,
            logits_to_keep=torch.tensor(logit_rows, dtype=torch.int64, device=self.device),
            kvferry_context=context,
        )
        logits: torch.Tensor = output.logits[0]
        return logits.float()


class _Probe:
    """An attention context that only looks. With one token, attention is its value."""

    def __init__(self) -> None:
        self._layers: list[int] = []
        self._shapes: set[tuple[int, int, int, int]] = set()
        self._unknown: set[str] = set()

    def attend(
        self,
        layer_index: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        scaling: float | None,
        window: int | None,
        rest: dict[str, object],
    ) -> torch.Tensor:
        """See `AttentionContext.attend`."""
        del scaling, window
        self._layers.append(layer_index)
        self._shapes.add((key.shape[1], key.shape[3], value.shape[1], value.shape[3]))
        if rest["is_causal"] is False:
            self._unknown.add("keys behind the query (is_causal=False)")
        self._unknown |= {
            name
            for name, argument in rest.items()
            if argument is not None and argument is not False and name not in _HARMLESS_ARGUMENTS
        }
        return value.repeat_interleave(query.shape[1] // value.shape[1], dim=1).transpose(1, 2)

    def check(self, geometry: ModelGeometry, model_dir: Path) -> None:
        """Refuse what was seen if it is not plain attention of the expected shape."""
        if self._unknown:
            raise ConfigError(
                f"{model_dir}: its attention uses {', '.join(sorted(self._unknown))}, "
                "which the engine does not implement"
            )
        if sorted(self._layers) != list(range(geometry.num_layers)):
            raise ConfigError(
                f"{model_dir}: attention ran in layers {self._layers}; the config says there are "
                f"{geometry.num_layers}, each with its own KV"
            )
        expected = (geometry.num_kv_heads, geometry.head_dim) * 2
        if self._shapes != {expected}:
            raise ConfigError(
                f"{model_dir}: key and value heads and sizes are {sorted(self._shapes)}; the "
                f"engine pages one shape for all layers, {expected} by the config"
            )


def _read_config(model_dir: Path) -> Any:
    if not model_dir.is_dir():
        raise ConfigError(f"{model_dir} is not a directory; give one with config.json and weights")
    if not (model_dir / "config.json").is_file():
        raise ConfigError(f"{model_dir} is not a model directory: it has no config.json")
    try:
        from transformers import AutoConfig
    except ImportError as error:
        raise ConfigError(
            "the engine needs Transformers: pip install 'kvferry[transformers]'"
        ) from error
    try:
        return AutoConfig.from_pretrained(model_dir, local_files_only=True)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{model_dir}/config.json cannot be used: {_first_line(error)}"
        ) from error


def _usable_device(name: str) -> torch.device:
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise ConfigError(f"device {name!r} cannot be used: {_first_line(error)}") from error
    return device


def _first_line(error: Exception) -> str:
    """Errors of Transformers explain at length; ours are one line."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def load_tokenizer(model_dir: Path) -> Any | None:
    """The tokenizer in a model directory, None if it holds none.

    Raises:
        ConfigError: there is one, but it cannot be loaded.
    """
    from transformers import AutoTokenizer

    if not any((model_dir / name).is_file() for name in _TOKENIZER_FILES):
        return None
    try:
        return AutoTokenizer.from_pretrained(model_dir, local_files_only=True)
    except (OSError, ValueError, ImportError) as error:
        raise ConfigError(
            f"cannot load the tokenizer in {model_dir}: {_first_line(error)}"
        ) from error


def _rope_types(config: Any) -> Iterator[str]:
    # One dict of parameters, or one per layer type; "rope_scaling" before Transformers 5.
    for name in ("rope_parameters", "rope_scaling"):
        parameters = getattr(config, name, None)
        if not isinstance(parameters, Mapping):
            continue
        for entry in (parameters, *parameters.values()):
            if isinstance(entry, Mapping):
                yield str(entry.get("rope_type", entry.get("type", "default")))


def _eos_token_ids(model: Any) -> frozenset[int]:
    for source in (model.generation_config, model.config):
        eos = getattr(source, "eos_token_id", None)
        if eos is not None:
            return frozenset([eos] if isinstance(eos, int) else eos)
    return frozenset()


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """No progress bars of Transformers inside, which it draws for every load and save, and none of
    its reports on weights that do not fit: what matters of them becomes an error of ours."""
    from transformers.utils import logging as transformers_logging

    was_enabled = transformers_logging.is_progress_bar_enabled()
    verbosity = transformers_logging.get_verbosity()
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    transformers_logging.set_verbosity(logging.CRITICAL)
    try:
        yield
    finally:
        transformers_logging.set_verbosity(verbosity)
        if was_enabled:
            transformers_logging.enable_progress_bar()  # type: ignore[no-untyped-call]

"""A Hugging Face causal LM that reads and writes paged KV: load it, check it, split it, run it.
Each rank of the engine makes one `PagedModel`; its `ModelRunner` runs that in steps with tokens."""

# ruff: noqa: ANN401 - the models of Transformers share no typed surface.

from __future__ import annotations

import inspect
import logging
import pickle
import re
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from kvferry.engine.kv_pool import KVCodec, LatentCodec
from kvferry.engine.model_config import LATENT_MODELS, ModelConfig, ModelGeometry, first_line
from kvferry.engine.paged_attention import (
    ATTENTION_NAME,
    AttentionCall,
    AttentionContext,
    causal_attention,
    register_attention,
)
from kvferry.engine.tensor_parallel import RankGroup, split_layers
from kvferry.errors import ConfigError
from kvferry.layout.shards import heads_of_rank

_HARMLESS_ARGUMENTS = frozenset(
    {"dropout", "position_ids", "cache_position", "use_cache", "is_causal", "logits_to_keep"}
)
"""Arguments of attention that have no effect in inference without a Transformers cache."""

_UNLOADABLE = (
    OSError,
    ValueError,
    RuntimeError,
    KeyError,
    TypeError,
    EOFError,
    SafetensorError,
    pickle.UnpicklingError,
)
"""Errors that Transformers raises for weight files that are damaged or fit another config."""

_UNRUNNABLE = (RuntimeError, TypeError, KeyError, AttributeError, IndexError)
"""Errors that a model raises when its config contradicts itself."""

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json")

LOADING = threading.Lock()
"""Held while Transformers loads. It patches torch and its own settings for the whole process: when
two threads load models at once, one model can end up without its tied weights."""

_PROBE_TOKENS = 5

_SPLIT_TOLERANCE = 0.05
"""How far logits of a split model may be from the whole model's, relative to the largest (or to 1).
A wrong split is off by as much as the logits themselves, 16-bit sums in another order by 1e-2."""


def cache_argument(model: Any) -> str:
    """Return the name of the argument of `forward` that takes a cache: `cache` since Transformers
    5.24, `past_key_values` before, and in models that keep their own code."""
    names = inspect.signature(model.forward).parameters
    return "cache" if "cache" in names else "past_key_values"


def unknown_arguments(rest: Mapping[str, Any]) -> set[str]:
    """Return the names of those further arguments of attention that may change its result."""
    return {
        name
        for name, argument in rest.items()
        if argument is not None and argument is not False and name not in _HARMLESS_ARGUMENTS
    }


class Probe:
    """An attention context that records a model's attention calls, so that a model that the engine
    would serve wrongly is refused at load. Attends causally among the tokens of each call."""

    def __init__(self, codec: KVCodec) -> None:
        self._codec = codec
        self._layers: list[int] = []
        self._windows: dict[int, int | None] = {}
        self._shapes: set[tuple[int, int, bool]] = set()
        self._unknown: set[str] = set()

    def attend(self, call: AttentionCall) -> torch.Tensor:
        """See `AttentionContext.attend`."""
        layer_index, query, key, value, scores, rest = call
        self._layers.append(layer_index)
        self._windows[layer_index] = scores.window
        rows = self._codec.encode(layer_index, key, value)
        decoded = self._codec.decode(layer_index, rows, query.shape[-1])
        same = all(torch.equal(*pair) for pair in zip((key, value), decoded, strict=True))
        self._shapes.add((rows.shape[1], rows.shape[3], same))
        if rest["is_causal"] is False:
            self._unknown.add("keys behind the query (is_causal=False)")
        self._unknown |= unknown_arguments(rest)
        return causal_attention(query, key, value, scores).transpose(1, 2)

    def check(self, geometry: ModelGeometry, model_dir: Path) -> None:
        """Raise ConfigError unless all calls were causal attention of the expected shape."""
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
        windows = tuple(self._windows[index] for index in range(geometry.num_layers))
        if windows != geometry.windows:
            raise ConfigError(
                f"{model_dir}: its layers attend to windows of {_kinds(windows)} tokens, by the "
                f"config of {_kinds(geometry.windows)}; give layer_types and sliding_window there"
            )
        expected = (geometry.num_kv_heads, geometry.content_size, True)
        if self._shapes != {expected}:
            raise ConfigError(
                f"{model_dir}: kv heads and what is kept of each token are "
                f"{sorted(shape[:2] for shape in self._shapes)}; the engine pages one shape for "
                f"all layers, {expected[:2]} by the config"
            )


def _kinds(windows: Sequence[int | None]) -> str:
    return ", ".join("all" if window is None else str(window) for window in dict.fromkeys(windows))


class PagedModel:
    """The loaded model, ready for flattened batches.

    Attributes:
        model: Transformers' model, with our attention.
        geometry: shape of the whole model's KV.
        num_kv_heads: kv heads that this rank computes.
        codec: turns keys and values into what the KV pool keeps, and back.
        device: device of the weights; the KV must be there, too.
        eos_token_ids: tokens that end a text.
    """

    def __init__(self, config: ModelConfig, device: str) -> None:
        """Load weights, and check with a few tokens that attention has the shape in the config.

        Raises:
            ConfigError: weights are missing or unreadable, or the engine cannot page attention.
        """
        register_attention()
        self.geometry = config.geometry
        self.num_kv_heads = config.geometry.num_kv_heads
        self.device = _usable_device(device)
        self._model_dir = config.model_dir
        self.model = _load_weights(config).to(self.device).eval()
        latents = _latent_codec(self.model, config)
        self.codec = latents or KVCodec()
        # Layers hand latents only to a cache, so a latent codec takes the place of one.
        self._cache = {} if latents is None else {cache_argument(self.model): latents}
        self.eos_token_ids = _eos_token_ids(self.model)
        try:
            self._probe()
        except _UNRUNNABLE as error:
            raise ConfigError(
                f"{config.model_dir} loads but does not run: {first_line(error)}"
            ) from error

    def split(self, group: RankGroup) -> None:
        """Keep this rank's part of every layer, and check the logits against the whole model's.
        From here on, all ranks must run each forward at the same time.

        Raises:
            ConfigError, TopologyError: the engine cannot split this model.
            RankError: the other ranks do not answer.
        """
        geometry = self.geometry
        whole = self._probe()
        num_split = split_layers(self.model, geometry, group)
        if num_split != geometry.num_layers:
            raise ConfigError(
                f"{self._model_dir}: {num_split} of {geometry.num_layers} attention layers are of "
                "a kind that the engine can split; set tensor_parallel_size=1"
            )
        first, stop = heads_of_rank(geometry.num_kv_heads, group.rank, group.size)
        self.num_kv_heads = stop - first
        try:
            mine = self._probe()
        except _UNRUNNABLE as error:
            raise ConfigError(
                f"{self._model_dir} does not run split over {group.size} ranks "
                f"({first_line(error)}); set tensor_parallel_size=1"
            ) from error
        error_size = float((mine - whole).abs().max() / whole.abs().max().clamp(min=1.0))
        if not error_size <= _SPLIT_TOLERANCE:
            raise ConfigError(
                f"{self._model_dir} computes other logits when split over {group.size} ranks "
                f"(off by {error_size:.2g} of the largest); set tensor_parallel_size=1"
            )

    def _probe(self) -> torch.Tensor:
        """Run a few tokens, check the attention calls, and return the logits."""
        probe = Probe(self.codec)
        token_ids = torch.arange(_PROBE_TOKENS) % self.geometry.vocab_size
        rows = list(range(_PROBE_TOKENS))
        logits = self.forward(token_ids, torch.arange(_PROBE_TOKENS), probe, rows)
        probe.check(replace(self.geometry, num_kv_heads=self.num_kv_heads), self._model_dir)
        return logits

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
            positions: `[num_tokens]` int64, position of each token in its own request.
            context: writes and reads KV, and computes attention.
            logit_rows: indices of the flattened tokens whose logits are wanted.

        Returns:
            `[len(logit_rows), vocab]` float32.
        """
        output = self.model(
            input_ids=token_ids[None].to(self.device),
            position_ids=positions[None].to(self.device),
            use_cache=False,
            logits_to_keep=torch.tensor(logit_rows, dtype=torch.int64, device=self.device),
            kvferry_context=context,
            **self._cache,
        )
        logits: torch.Tensor = output.logits[0]
        return logits.float()


def _latent_codec(model: Any, config: ModelConfig) -> LatentCodec | None:
    if not config.geometry.is_latent:
        return None
    layers = {
        module.layer_idx: module for module in model.modules() if hasattr(module, "expand_kv")
    }
    if len(layers) != config.geometry.num_layers:
        raise ConfigError(
            f"{config.model_dir} holds latent attention, which this Transformers expands before it "
            "is kept; install 5.23 or newer"
        )
    return LatentCodec(layers, has_pairs_apart=LATENT_MODELS[config.transformers_config.model_type])


def _load_weights(config: ModelConfig) -> Any:
    model_dir = config.model_dir
    if getattr(config.transformers_config, "quantization_config", None):
        raise ConfigError(
            f"{model_dir} was published quantised; the engine gives no name to the code that "
            "unpacks or multiplies such weights; StoredKV and vLLM serve it"
        )
    with LOADING, quiet_transformers():
        try:
            model, info = config.model_class().from_pretrained(
                model_dir,
                config=config.transformers_config,
                dtype=config.geometry.torch_dtype,
                attn_implementation=ATTENTION_NAME,
                local_files_only=True,
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # refused below, by name
            )
        except _UNLOADABLE as error:
            raise ConfigError(
                f"cannot load the weights in {model_dir}: {first_line(error)}"
            ) from error
    # Transformers initialises missing and unfitting tensors at random, and only logs it.
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
    return model


def _usable_device(name: str) -> torch.device:
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise ConfigError(f"device {name!r} cannot be used: {first_line(error)}") from error
    return device


def load_tokenizer(model_dir: Path) -> Any | None:
    """Load the tokenizer of a model directory; None if it holds none.

    Raises:
        ConfigError: the tokenizer cannot be loaded.
    """
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    if not any((model_dir / name).is_file() for name in _TOKENIZER_FILES):
        return None
    try:
        return AutoTokenizer.from_pretrained(model_dir, local_files_only=True)
    except (OSError, ValueError, ImportError) as error:
        try:
            # Another Transformers saved it, with another class: tokenizer.json is enough.
            return PreTrainedTokenizerFast.from_pretrained(model_dir, local_files_only=True)
        except Exception:
            raise ConfigError(
                f"cannot load the tokenizer in {model_dir}: {first_line(error)}"
            ) from error


def encode_message(tokenizer: Any, message: str) -> list[int]:
    """Return the token ids of a user's message: rendered by the model's chat template, or as it is
    if the model has no template.

    Raises:
        ConfigError: the template cannot be rendered.
    """
    if not tokenizer.chat_template:
        return list(tokenizer(message, verbose=False)["input_ids"])
    return encode_chat(tokenizer, [{"role": "user", "content": message}])


def encode_chat(
    tokenizer: Any,
    messages: Sequence[Mapping[str, Any]],
    arguments: Mapping[str, Any] | None = None,
    *,
    has_special: bool = False,
) -> list[int]:
    """Return the token ids of a chat's messages and of the beginning of the answer. Each message
    has `role` and `content`.

    Args:
        arguments: what the template gets besides the messages, or instead of what it would get.
        has_special: whether the tokenizer adds special tokens to what the template wrote.

    Raises:
        ConfigError: the model has no chat template, or the template cannot be rendered.
    """
    from jinja2 import TemplateError

    given = {"add_generation_prompt": True, **(arguments or {})}
    if not (tokenizer.chat_template or given.get("chat_template")):
        raise ConfigError("the model has no chat template for messages; give a text")
    try:
        rendered = tokenizer.apply_chat_template(list(messages), tokenize=False, **given)
    except (TemplateError, TypeError, ValueError) as error:
        raise ConfigError(f"the model's chat template cannot be rendered: {error}") from error
    return list(tokenizer(rendered, add_special_tokens=has_special, verbose=False)["input_ids"])


_MARKS = re.compile(r"\{%-?\s*(?:end)?generation\s*-?%\}")
"""A statement of Transformers' own, which prints nothing."""


def goes_through_parts(template: str) -> bool:
    """Whether a template goes through the parts of a content, instead of printing one text."""
    from jinja2 import Environment, TemplateError, nodes

    try:
        tree = Environment(extensions=["jinja2.ext.loopcontrols"]).parse(_MARKS.sub("", template))
    except TemplateError:
        return False  # rendering it says what is wrong
    return any(_is_content(loop.iter, nodes) for loop in tree.find_all(nodes.For))


def _is_content(node: Any, nodes: Any) -> bool:
    if isinstance(node, nodes.Filter):
        return node.node is not None and _is_content(node.node, nodes)
    if isinstance(node, nodes.Getitem):
        return isinstance(node.arg, nodes.Const) and node.arg.value == "content"
    is_attribute = isinstance(node, nodes.Getattr) and node.attr == "content"
    return is_attribute or (isinstance(node, nodes.Name) and node.name == "content")


def _eos_token_ids(model: Any) -> frozenset[int]:
    for source in (model.generation_config, model.config):
        eos = getattr(source, "eos_token_id", None)
        if eos is not None:
            return frozenset([eos] if isinstance(eos, int) else eos)
    return frozenset()


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Turn off Transformers' progress bars and its reports on weights that do not fit; our own
    errors report these."""
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

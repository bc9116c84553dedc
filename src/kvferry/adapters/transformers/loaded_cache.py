"""The cache that `StoredKV.load` returns, and checks of it for `save`. Imports Transformers."""

# ruff: noqa: ANN401 - the signatures of the methods are Transformers'.

from __future__ import annotations

import logging
from typing import Any

import torch
from transformers import DynamicCache

from kvferry.adapters.transformers.arguments import CacheShape, Prompt
from kvferry.errors import ConfigError, ContractError

logger = logging.getLogger(__name__)


class LoadedCache(DynamicCache):
    """A `DynamicCache` that keeps all tokens in every layer, and knows the prompts it is for.

    Beam search and `num_return_sequences` compute several rows for each prompt; the first `update`
    with more rows repeats the loaded rows.

    Assisted generation (an assistant model, prompt look-up) computes the whole prompt as if the
    cache were empty; the cache drops its loaded tokens when that begins.

    Attributes:
        rows: token ids of the prompts, padding included.
        prompts: what can be stored of each row.
        num_prompt_tokens: tokens of each row's prompt, padding included.
        attention_mask: the mask of the prompts, if one was given.
        num_loaded: tokens of each row that come from the store, padding included.
        num_certain: number of leading tokens whose KV surely belongs to the sequence that
            `generate` returns in the same row; None: all of them.
        explanation: for each row, what was hit and why the rest was not, in the form of the
            embedded engine's explanations; None unless `load` was asked to explain.
    """

    def __init__(
        self, rows: list[list[int]], prompts: list[Prompt], attention_mask: Any = None
    ) -> None:
        super().__init__()
        self.rows = rows
        self.prompts = prompts
        self.num_prompt_tokens = len(rows[0])
        # A copy: the caller's may change before the cache is saved.
        self.attention_mask = (
            None if attention_mask is None else torch.as_tensor(attention_mask).clone()
        )
        self.num_loaded = 0
        self.num_certain: int | None = None
        self.explanation: list[dict[str, Any]] | None = None
        self._is_new = True
        self._was_dropped = False

    def fill(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Put loaded KV into an empty layer; `[rows, heads, tokens, size]` each."""
        super().update(keys, values, layer)
        self.num_loaded = keys.shape[-2]

    def update(
        self,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
        layer_idx: int,
        *args: Any,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `DynamicCache.update`.

        Raises:
            ContractError: the first new tokens do not fit the loaded ones; see `_check_first`.
        """
        if self._is_new:
            self._check_first(key_states.shape[-2])
        self._is_new = False
        if layer_idx < len(self.layers):
            _repeat_rows(self.layers[layer_idx], key_states.shape[0])
        result: tuple[torch.Tensor, torch.Tensor] = super().update(
            key_states, value_states, layer_idx, *args, **kwargs
        )
        return result

    def activate_past_recording(self) -> None:
        """See `Cache.activate_past_recording`. Only assisted generation calls it before the first
        tokens are computed."""
        if self._is_new and self.num_loaded > 0:
            logger.info(
                "assisted generation computes the whole prompt: %d tokens that were loaded are "
                "not used",
                self.num_loaded,
            )
            self.layers.clear()
            self.num_loaded = 0
            self._was_dropped = True
        super().activate_past_recording()  # type: ignore[no-untyped-call]

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        """See `Cache.reorder_cache`. From then on, the rows are those of the running beams, not of
        the sequences that `generate` returns."""
        self.num_certain = self.num_prompt_tokens
        super().reorder_cache(beam_idx)

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """See `Cache.batch_select_indices`. From then on, a row may belong to any prompt."""
        self.num_certain = 0
        super().batch_select_indices(indices)

    def _check_first(self, num_new: int) -> None:
        """Refuse a first call that computes the whole prompt on top of loaded tokens, or only a
        part of the prompt after the loaded tokens were dropped."""
        # `generate` marks the cache that it is given, and computes only what is not loaded yet.
        is_whole = num_new >= self.num_prompt_tokens
        if self.num_loaded and is_whole and not getattr(self, "_is_user_defined", False):
            raise ContractError(
                f"{num_new} tokens are computed on top of {self.num_loaded} that were loaded for "
                f"a prompt of {self.num_prompt_tokens}: pass the cache to generate(), or compute "
                "only the tokens that are not loaded"
            )
        if self._was_dropped and not is_whole:
            raise ContractError(
                f"assisted generation computes {num_new} tokens, but the cache is for a prompt of "
                f"{self.num_prompt_tokens}: pass generate() all of its tokens"
            )


def _repeat_rows(layer: Any, num_rows: int) -> None:
    """Repeat each row, as `generate` repeats prompts."""
    if layer.keys is not None:
        repeats, rest = divmod(num_rows, layer.keys.shape[0])
        if repeats > 1 and rest == 0:
            layer.batch_repeat_interleave(repeats)


def num_savable(
    cache: Any, shape: CacheShape, rows: list[list[int]], num_tokens: int | None
) -> int:
    """Return how many leading tokens of each cache row are surely those of `rows`, with padding.

    Beam search leaves the KV of its running beams, in any order, and returns other sequences: only
    the KV of the prompts is sure.

    Raises:
        ConfigError: the cache cannot have been computed from these rows or tokens.
    """
    certain, num_prompts = num_tokens, 1
    if isinstance(cache, LoadedCache):
        certain, num_prompts = cache.num_certain, len(cache.prompts)
        if certain is None and shape.num_rows != len(rows):
            certain = cache.num_prompt_tokens
    elif shape.num_rows > 1 and num_tokens is None:
        raise ConfigError(
            f"the cache has {shape.num_rows} rows and is not from load(), so that beam search may "
            "have changed their order; pass num_tokens=, the length of the prompts, or load first"
        )
    elif shape.num_rows == 1:
        certain = None
    if shape.num_rows < len(rows) or shape.num_rows % num_prompts or len(rows) % num_prompts:
        raise ConfigError(
            f"the cache has {shape.num_rows} rows for {num_prompts} prompts, and {len(rows)} "
            "sequences are given; give what generate returned for these prompts"
        )
    # The KV of the last sampled token was not computed.
    if certain is None and not 0 <= len(rows[0]) - shape.num_tokens <= 1:
        raise ConfigError(
            f"the cache holds {shape.num_tokens} tokens and {len(rows[0])} ids are given; give all "
            "ids it was computed from, as generate returns them"
        )
    limits = (certain, num_tokens, shape.num_tokens, len(rows[0]))
    return max(0, min(limit for limit in limits if limit is not None))


def refuse_other_prompts(
    cache: Any, shape: CacheShape, rows: list[list[int]], prompts: list[Prompt]
) -> None:
    """Raise ConfigError if a cache was loaded for other rows, or for rows with other padding."""
    if not isinstance(cache, LoadedCache):
        return
    # A single row need agree in its loaded tokens only: a conversation may change what follows.
    # Several rows may have changed places, which only whole prompts show.
    is_alone = shape.num_rows == len(rows) == 1
    end = cache.num_loaded if is_alone else cache.num_prompt_tokens
    for number, (row, prompt) in enumerate(zip(rows, prompts, strict=True)):
        at = number * len(cache.rows) // len(rows)
        is_same = row[:end] == cache.rows[at][:end]
        is_hidden_alike = prompt.num_padding == cache.prompts[at].num_padding
        is_mask_known = cache.attention_mask is not None or cache.num_loaded > 0
        if not is_same or (is_mask_known and not is_hidden_alike):
            raise ConfigError(
                "the cache was loaded for other tokens than are given, or for another "
                "attention_mask; save it with the ids and the mask it was computed from"
            )

"""Arguments of `StoredKV` and its methods (options, ids, masks, caches), converted or refused."""

# ruff: noqa: ANN401 - token ids and caches come in many types.

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from operator import index
from typing import Any, NamedTuple

import torch

from kvferry.adapters.transformers.host_model import HostModel, is_plain
from kvferry.config import ChunkOptions
from kvferry.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredKVConfig(ChunkOptions):
    """Options of `StoredKV`, with those of `ChunkOptions`; each has a default.

    Attributes:
        save_timeout_seconds: after this, `save` starts no more records and returns.
        io_threads: threads for reads, and half as many for writes.
    """

    save_timeout_seconds: float = 60.0
    io_threads: int = 2


class Prompt(NamedTuple):
    """What can be stored of one row of a batch."""

    num_padding: int
    """Hidden tokens in front."""
    token_ids: list[int]
    """The tokens behind them, up to the next hidden token. Their KV depends on them alone."""


class CacheShape(NamedTuple):
    """The number of rows and tokens that a cache was computed from."""

    num_rows: int
    num_tokens: int  # of each row, padding included


def read_rows(given: Any, vocab_size: int) -> list[list[int]]:
    """Return ids by row, all of one length, from `[rows, num_tokens]`, `[num_tokens]` or lists.

    Raises:
        ConfigError: rows of several lengths, or values that are no ids of this vocabulary.
    """
    rows = given.tolist() if hasattr(given, "tolist") else given
    try:
        if isinstance(given, str) or len(rows) == 0 or not isinstance(rows[0], Sequence):
            rows = [rows]
        token_ids = [[index(token_id) for token_id in row] for row in rows]
    except (TypeError, KeyError) as error:
        raise ConfigError(
            f"token ids are a {type(given).__name__}; give the input_ids of one prompt, or of a "
            "batch"
        ) from error
    lengths = {len(row) for row in token_ids}
    if len(lengths) > 1:
        raise ConfigError(
            f"the rows have {min(lengths)} to {max(lengths)} tokens; pad them on the left, and "
            "give the attention_mask"
        )
    for row in token_ids:
        for extreme in (min(row, default=0), max(row, default=0)):
            if not 0 <= extreme < vocab_size:
                raise ConfigError(f"token id {extreme} is given; the vocabulary has {vocab_size}")
    return token_ids


def read_prompts(rows: list[list[int]], attention_mask: Any, model: HostModel) -> list[Prompt]:
    """Return what can be stored of each row: by the mask, else by what looks like padding.

    A mask may be shorter than the rows: generated tokens are visible. One row of it may stand for
    several of `rows`, which `generate` returned for one prompt.

    Raises:
        ConfigError: the mask cannot be of these rows.
    """
    if attention_mask is None:
        return [Prompt(0, row[: model.num_visible(row)]) for row in rows]
    try:
        mask = torch.as_tensor(attention_mask)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ConfigError(
            f"attention_mask is a {type(attention_mask).__name__}; give that of the tokenizer"
        ) from error
    mask = mask[None] if mask.ndim == 1 else mask
    if mask.ndim != 2 or len(rows) % max(1, len(mask)) or mask.shape[1] > len(rows[0]):
        raise ConfigError(
            f"attention_mask is {list(mask.shape)}, and the token ids are "
            f"{[len(rows), len(rows[0])]}; give the mask of these tokens"
        )
    if not bool(((mask == 0) | (mask == 1)).all()):
        raise ConfigError("attention_mask holds other values than 0 and 1; give the tokenizer's")
    masks = mask.int().tolist()
    return [_visible(row, masks[i * len(masks) // len(rows)]) for i, row in enumerate(rows)]


def _visible(row: list[int], mask: list[int]) -> Prompt:
    mask = mask + [1] * (len(row) - len(mask))
    first = mask.index(1) if 1 in mask else len(mask)
    end = mask.index(0, first) if 0 in mask[first:] else len(mask)
    return Prompt(first, row[first:end])


def shape_of(cache: Any, model: HostModel) -> CacheShape:
    """Return how many rows and tokens a cache of `model` was computed from.

    Raises:
        ConfigError: a cache of another kind, or of another model.
    """
    layers = getattr(cache, "layers", None)
    if layers is None or not all(is_plain(layer) for layer in layers):
        kinds = sorted({type(layer).__name__ for layer in layers or (cache,)})
        raise ConfigError(
            f"the cache is made of {', '.join(kinds)}; only a DynamicCache can be stored"
        )
    if getattr(cache, "offloading", False):
        raise ConfigError(
            "the cache is offloaded, so its tensors may be moving between devices; generate with "
            "the cache of kv.load(input_ids), which is not offloaded, and save that"
        )
    if not layers or cache.get_seq_length() == 0:
        return CacheShape(0, 0)
    if len(layers) != len(model.layers):
        raise ConfigError(
            f"the cache has {len(layers)} layers, the model {len(model.layers)}: they do not fit"
        )
    num_rows = int(layers[0].keys.shape[0])
    for position, (layer, expected) in enumerate(zip(layers, model.layers, strict=True)):
        mismatch = expected.mismatch(layer, num_rows=num_rows)
        if mismatch is not None:
            raise ConfigError(
                f"layer {position} of the cache is {mismatch[0]}; a cache of this model has "
                f"{mismatch[1]}"
            )
    return CacheShape(num_rows, int(cache.get_seq_length()))

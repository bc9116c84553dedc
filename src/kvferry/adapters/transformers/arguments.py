"""Arguments of `StoredKV` and its methods (options, ids, masks, calls), converted or refused."""

# ruff: noqa: ANN401 - token ids, masks and the arguments of `generate` come in many types.

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import index
from typing import Any, NamedTuple

import torch

from kvferry.adapters.transformers.host_model import HostModel
from kvferry.adapters.transformers.items import (
    NO_ITEMS,
    Items,
    is_of_items,
    is_types,
    items_of,
    placeholders,
)
from kvferry.config import ChunkOptions
from kvferry.errors import ConfigError

_MODES = {"greedy_search", "sample", "beam_search", "beam_sample"}
"""Kinds of generation that only append to a cache and reorder the rows of one prompt. Others, such
as assisted generation, compute the prompt themselves or run code of a hub."""

_NOT_SERVED = (
    *("cache_implementation", "token_healing", "output_attentions", "output_hidden_states"),
    "prefill_chunk_size",
)
"""Settings of a generation config with which `generate` takes no cache, takes other tokens, or
computes or returns something for the whole prompt."""

_OF_NO_KV = {
    *("input_ids", "attention_mask", "logits_processor", "stopping_criteria", "streamer"),
    *("prefix_allowed_tokens_fn", "synced_gpus", "tokenizer"),
    *("negative_prompt_ids", "negative_prompt_attention_mask"),
}
"""Arguments of `generate` outside its config that leave a prompt's KV and the forwards of its
tokens as they are. Every other one may change them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredKVConfig(ChunkOptions):
    """Options of `StoredKV`, with those of `ChunkOptions`; each has a default.

    Attributes:
        save_timeout_seconds: after this, a call starts no more writes and returns.
        io_threads: threads for reads, and half as many for writes.
        record: file to which a line for each row of a call is appended, with its keys and its
            answer; None: none.
    """

    save_timeout_seconds: float = 60.0
    io_threads: int = 2
    record: str | None = None


class Prompt(NamedTuple):
    """What can be stored of one row of a batch."""

    num_padding: int
    """Hidden tokens in front."""
    token_ids: list[int]
    """The tokens behind them, up to the next hidden token. Their KV depends on them alone."""
    is_whole: bool = True
    """Whether no token behind them is hidden, so that their last is the last of the row."""


class Prompts(NamedTuple):
    """The prompts of a call."""

    rows: list[list[int]]
    """Token ids, padding included; all rows are of one length."""
    mask: torch.Tensor
    """`[rows, tokens]`: 1 where a token is visible, 0 where it is hidden."""
    num_copies: int = 1
    """Rows that `generate` computes for each prompt: beams, or several answers."""
    items: Items = NO_ITEMS
    """Images, videos and sounds of the only row."""

    def each(self) -> list[Prompt]:
        """Return what can be stored of each row."""
        return [
            _visible(row, mask) for row, mask in zip(self.rows, self.mask.tolist(), strict=True)
        ]


def read_call(
    model: HostModel, inputs: Any, generation_config: Any, given: Mapping[str, Any]
) -> Prompts | str:
    """Return the prompts of a call of `generate`, or why it has to run without the store.

    Args:
        inputs, generation_config, given: arguments of `generate`.

    Raises:
        ConfigError: token ids or a mask that no call can use.
        ValueError: as `generate`.
    """
    config, rest = model.prepare_generation(generation_config, given)
    input_ids = rest.get("input_ids") if inputs is None else inputs
    if not isinstance(input_ids, torch.Tensor) or input_ids.ndim != 2 or not input_ids.numel():
        return "it has no input_ids of the shape [rows, tokens]"
    given_items, others = split_items(rest)
    others -= _OF_NO_KV
    asked = [name for name in _NOT_SERVED if getattr(config, name, None)]
    if config.use_cache is False:
        asked.append("use_cache=False")
    mode = config.get_generation_mode().value
    if mode not in _MODES:
        asked.append(mode)
    if others or asked:
        return f"it uses {', '.join([*sorted(others), *asked])}"
    rows = read_rows(input_ids, model)
    mask = read_mask(rest.get("attention_mask"), rows, config)
    prompts = Prompts(rows, mask, max(config.num_beams or 1, config.num_return_sequences or 1))
    return with_items(model, prompts, given_items)


def split_items(given: Mapping[str, Any]) -> tuple[dict[str, Any], set[str]]:
    """Return the arguments that describe images, videos or sounds, and the names of all others."""
    some = {name: value for name, value in given.items() if value is not None}
    items = {name: value for name, value in some.items() if is_of_items(name)}
    return items, some.keys() - items.keys()


def _are_of_text(model: HostModel, given: Mapping[str, Any]) -> bool:
    """Whether arguments only say that all tokens are text, as processors of models with images make
    them, and the model computes the same without them. Some learn an embedding of each type."""
    return all(
        is_types(name) and isinstance(types, torch.Tensor) and not types.any()
        for name, types in given.items()
    ) and all(map(model.ignores_types_of_text, given))


def with_items(model: HostModel, prompts: Prompts, given: Mapping[str, Any]) -> Prompts | str:
    """Add items to the prompts of a call, or say why it has to run without the store."""
    if _are_of_text(model, given):
        return prompts
    named = f"it uses {', '.join(sorted(given))}"
    if len(prompts.rows) > 1:
        return f"{named} in a batch"
    if prompts.num_copies > 1:
        return f"{named} with several answers to a prompt"
    if not prompts.mask.all():
        return f"{named} beside hidden tokens"
    found = items_of(model.model.config, prompts.rows[0], given)
    return found if isinstance(found, str) else prompts._replace(items=found)


def read_rows(given: Any, model: HostModel) -> list[list[int]]:
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
    size = model.vocab_size
    for each in set().union(*token_ids) - placeholders(model.model.config):
        if not 0 <= each < size:
            raise ConfigError(f"token id {each} is given; the vocabulary has {size}")
    return token_ids


def read_mask(attention_mask: Any, rows: list[list[int]], config: Any) -> torch.Tensor:
    """Return the mask of these rows. Without one, hide padding as `generate` does: the padding
    token of the generation config, unless it also ends sequences.

    Raises:
        ConfigError: the mask cannot be of these rows.
    """
    if attention_mask is None:
        ids, padding, ends = torch.tensor(rows), config.pad_token_id, config.eos_token_id
        is_end = padding in (ends if isinstance(ends, list) else [ends])
        return torch.ones_like(ids) if padding is None or is_end else ids.ne(padding).long()
    try:
        mask = torch.as_tensor(attention_mask)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ConfigError(
            f"attention_mask is a {type(attention_mask).__name__}; give that of the tokenizer"
        ) from error
    mask = mask[None] if mask.ndim == 1 else mask
    if list(mask.shape) != [len(rows), len(rows[0])]:
        raise ConfigError(
            f"attention_mask is {list(mask.shape)}, and the token ids are "
            f"{[len(rows), len(rows[0])]}; give the mask of these tokens"
        )
    if not bool(((mask == 0) | (mask == 1)).all()):
        raise ConfigError("attention_mask holds other values than 0 and 1; give the tokenizer's")
    return mask.long()


def _visible(row: list[int], mask: list[int]) -> Prompt:
    first = mask.index(1) if 1 in mask else len(mask)
    end = mask.index(0, first) if 0 in mask[first:] else len(mask)
    return Prompt(first, row[first:end], end == len(row))

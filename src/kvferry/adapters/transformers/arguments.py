"""Arguments of callers: options, token ids, masks and caches, made plain or refused."""

# ruff: noqa: ANN401 - token ids and caches come in many types.

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from operator import index
from typing import Any, Literal

import torch

from kvferry.adapters.transformers.host_model import HostModel, is_plain
from kvferry.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredKVConfig:
    """Options of `StoredKV`; each has a default that is right for one machine.

    Attributes:
        chunk_tokens: tokens per stored record; records of another value are not read.
        load_timeout_seconds: after this, `load` returns what has arrived.
        save_timeout_seconds: after this, `save` starts no more records and returns.
        io_threads: threads for reads, and as many for writes.
        tenant: keeps records apart from those of every other tenant.
        audit: how often a hit is checked against what the model itself computes: "first" for the
            first hit, a number for that part of later hits too, "off" for never. Costs the
            computation of one chunk.
        weights_version: a name for weights that are not those of the model's directory. The caller
            guarantees that different weights never share a name.
    """

    chunk_tokens: int = 128
    load_timeout_seconds: float = 5.0
    save_timeout_seconds: float = 60.0
    io_threads: int = 2
    tenant: str = ""
    audit: Literal["first", "off"] | float = "first"
    weights_version: str | None = None

    def __post_init__(self) -> None:
        if self.chunk_tokens < 1:
            raise ConfigError(f"chunk_tokens must be at least 1, not {self.chunk_tokens}")
        if not 1 <= self.io_threads <= 64:
            raise ConfigError(f"io_threads must be between 1 and 64, not {self.io_threads}")
        if isinstance(self.audit, float) and not 0 <= self.audit <= 1:
            raise ConfigError(f"audit must be first, off or from 0 to 1, not {self.audit}")
        for name in ("load_timeout_seconds", "save_timeout_seconds"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name} must be more than 0, not {getattr(self, name)}")


def read_token_ids(given: Any, vocab_size: int) -> list[int]:
    """The ids of one sequence: `[1, num_tokens]`, `[num_tokens]`, or a list.

    Raises:
        ConfigError: several sequences, or no ids of this vocabulary.
    """
    rows = given.tolist() if hasattr(given, "tolist") else given
    try:
        if len(rows) > 0 and isinstance(rows[0], Sequence) and not isinstance(given, str):
            if len(rows) != 1:
                raise ConfigError(
                    f"{len(rows)} sequences are given; what is stored of them differs in length, "
                    "so load and save one at a time"
                )
            rows = rows[0]
        token_ids = [index(token_id) for token_id in rows]
    except (TypeError, KeyError) as error:
        raise ConfigError(
            f"token ids are a {type(given).__name__}; give the input_ids of one prompt"
        ) from error
    for extreme in (min(token_ids, default=0), max(token_ids, default=0)):
        if not 0 <= extreme < vocab_size:
            raise ConfigError(f"token id {extreme} is given; the vocabulary has {vocab_size}")
    return token_ids


def refuse_padding(attention_mask: Any) -> None:
    """Raises ConfigError if a mask hides tokens."""
    if attention_mask is None or bool(torch.as_tensor(attention_mask).bool().all()):
        return
    raise ConfigError(
        "attention_mask hides tokens: KV then depends on more than the tokens themselves; give "
        "the prompt without padding"
    )


def num_tokens_in(cache: Any, model: HostModel) -> int:
    """The tokens that a cache of `model` was computed from.

    Raises:
        ConfigError: a cache of another kind, of several sequences, or of another model.
    """
    layers = getattr(cache, "layers", None)
    if layers is None or not all(is_plain(layer) for layer in layers):
        kinds = sorted({type(layer).__name__ for layer in layers or (cache,)})
        raise ConfigError(
            f"the cache is made of {', '.join(kinds)}; only a DynamicCache can be stored"
        )
    if not layers or cache.get_seq_length() == 0:
        return 0
    if len(layers) != len(model.layers):
        raise ConfigError(
            f"the cache has {len(layers)} layers, the model {len(model.layers)}: it is of another"
        )
    for position, (layer, expected) in enumerate(zip(layers, model.layers, strict=True)):
        mismatch = expected.mismatch(layer)
        if mismatch is not None:
            raise ConfigError(
                f"layer {position} of the cache is {mismatch[0]}; one sequence of this model has "
                f"{mismatch[1]}"
            )
    return int(cache.get_seq_length())

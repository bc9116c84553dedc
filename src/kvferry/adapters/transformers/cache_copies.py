"""Copies KV between a Transformers cache and record images. An image is a record in memory.

A cache layer holds keys and values `[rows, heads, tokens, size]`, padding included. A row is one
sequence of the batch (but `CacheLayer.row` is a layer's index in its group). A group of a record
holds `[layers, heads, tokens, K|V]`, without padding. For latent attention (MLA), the cache keeps
latents as keys and rotated keys as values.

Callers: `StoredKV` (`filled_cache`, `gather`), audit.py (`cache_of`, `gather`).
"""

# ruff: noqa: ANN401 - cache layers share no typed surface.

from __future__ import annotations

import mmap
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from kvferry.adapters.transformers.arguments import StoredKVConfig
from kvferry.adapters.transformers.host_model import HostModel
from kvferry.blocks.audit import tensors_of
from kvferry.blocks.rows import RankRows
from kvferry.engine.kv_pool import pairs_apart, pairs_together
from kvferry.keys import Namespace
from kvferry.layout.shards import tensor_parallel_shard
from kvferry.record.schema import RecordSchema, default_chunk_tokens


def record_layout(model: HostModel, config: StoredKVConfig) -> tuple[Namespace, RankRows]:
    """Return the namespace of a model's records, and where each layer's rows lie in a record."""
    chunk_tokens = config.chunk_tokens or default_chunk_tokens(model.groups)
    namespace = Namespace.of(model.identity, model.groups, chunk_tokens, config.tenant)
    schema = RecordSchema.for_groups(
        namespace=namespace.digest, chunk_tokens=chunk_tokens, groups=model.groups
    )
    return namespace, RankRows(model.groups, tensor_parallel_shard(model.groups, 0, 1), schema)


def gather(rows: RankRows, cache: Any, model: HostModel, row: int, first_token: int) -> memoryview:
    """Make the image of one chunk from one row of a cache: `head | group 0 | ...` as in the record
    file, with an empty head. `first_token` counts from the row's first token, padding included."""
    image = memoryview(mmap.mmap(-1, rows.slot_bytes))
    into = tensors_of(rows, image)
    for layer, place in zip(cache.layers, model.layers, strict=True):
        target = into[place.group][place.row]
        tokens = slice(first_token, first_token + target.shape[-2])
        keys, values = layer.keys[row, :, tokens].detach(), layer.values[row, :, tokens].detach()
        if place.has_pairs_apart:
            values = pairs_together(values)
        target.copy_(torch.cat((keys, values), dim=-1))
    return image


class StoredRow(NamedTuple):
    """The stored chunks of one row of a batch."""

    num_padding: int
    images: list[memoryview]
    """Images of the row's leading chunks, behind the padding. They must cover all tokens to fill;
    only the last chunk may go past their end."""


def filled_cache(
    stored: Sequence[StoredRow], rows: RankRows, model: HostModel, num_tokens: int
) -> Any:
    """Make a cache with `num_tokens` of each row, padding included: zeros, then the chunks. Its
    layers keep all tokens, also where the model's attention has a window."""
    from transformers import DynamicCache

    cache: Any = DynamicCache()
    tensors = [[tensors_of(rows, image) for image in each.images] for each in stored]
    size = rows.schema.chunk_tokens
    for number, place in enumerate(model.layers if num_tokens else ()):
        shape = (len(stored), place.num_kv_heads, num_tokens, place.key_size + place.value_size)
        both = torch.empty(shape, dtype=place.dtype)
        for row, (num_padding, _) in enumerate(stored):
            both[row, :, :num_padding] = 0
            for chunk, groups in enumerate(tensors[row]):
                start = num_padding + chunk * size
                kept = groups[place.group][place.row][:, : num_tokens - start]
                both[row, :, start : start + size] = kept
        both = both.to(model.layer_devices[number])
        keys, values = both[..., : place.key_size], both[..., place.key_size :]
        if place.has_pairs_apart:
            values = pairs_apart(values)
        cache.update(keys, values, number)
    return cache


def cache_of(images: Sequence[memoryview], rows: RankRows, model: HostModel) -> Any:
    """Make a cache of the leading chunks of one prompt without padding."""
    num_tokens = len(images) * rows.schema.chunk_tokens
    return filled_cache([StoredRow(0, list(images))], rows, model, num_tokens)

"""Copies between the layers of a Transformers cache and the rows of records.

A cache layer holds keys and values `[1, heads, tokens, size]`; a record component holds
`[layers, heads, tokens, K|V]`. With latent attention, what the cache calls keys is the latent, and
what it calls values the rotated key.
"""

# ruff: noqa: ANN401 - cache layers share no typed surface.

from __future__ import annotations

import mmap
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from kvferry.adapters.transformers.host_model import HostModel
from kvferry.blocks.rows import RankRows
from kvferry.record.schema import RowRange

if TYPE_CHECKING:
    from kvferry.adapters.transformers.loaded_cache import LoadedCache


class Image:
    """One record in memory of its own: `head | group 0 | ...`, as in the file."""

    def __init__(self, rows: RankRows) -> None:
        self._rows = rows
        # Page-aligned, so that a cold file can be read past the page cache.
        self.view = memoryview(mmap.mmap(-1, rows.slot_bytes))

    @property
    def head(self) -> memoryview:
        return self._rows.head_of(self.view)

    def part(self, rows: RowRange) -> memoryview:
        return self._rows.piece_of(self.view, rows)

    def digests(self) -> bytes:
        """The leaf table of what the image holds now."""
        return self._rows.digests(self.view, {})

    def tensor(self, group: int, dtype: str) -> torch.Tensor:
        """`[layers, heads, tokens, content]` of one group, over the same memory."""
        shape, memory = self._rows.group_rows(self.view, group)
        return torch.frombuffer(memory, dtype=getattr(torch, dtype)).view(shape)


def first_kept(cache: Any) -> int:
    """The first token that every layer still has: sliding-window layers drop those behind."""
    length = int(cache.get_seq_length())
    return max(int(length - layer.keys.shape[-2]) for layer in cache.layers)


def gather(image: Image, cache: Any, model: HostModel, first_token: int, num_tokens: int) -> None:
    """Copy tokens of a cache that has them in every layer into an image."""
    length = cache.get_seq_length()
    groups = [image.tensor(index, group.dtype) for index, group in enumerate(model.groups)]
    for layer, place in zip(cache.layers, model.layers, strict=True):
        start = first_token - (length - layer.keys.shape[-2])
        tokens = slice(start, start + num_tokens)
        keys, values = layer.keys[0, :, tokens].detach(), layer.values[0, :, tokens].detach()
        if place.pairs_apart:
            values = torch.unflatten(values, -1, (2, -1)).transpose(-1, -2).flatten(-2)
        groups[place.group][place.row].copy_(torch.cat((keys, values), dim=-1))


def fill(cache: LoadedCache, images: Sequence[Image], model: HostModel, num_tokens: int) -> None:
    """Put the first tokens of consecutive images into a new cache."""
    groups = [
        [image.tensor(index, group.dtype) for image in images]
        for index, group in enumerate(model.groups)
    ]
    for number, place in enumerate(model.layers):
        chunks = [group[place.row] for group in groups[place.group]]
        both = torch.cat(chunks, dim=1)[None, :, :num_tokens].to(model.device_of(number))
        keys, values = both[..., : place.key_size], both[..., place.key_size :]
        if place.pairs_apart:
            values = torch.unflatten(values, -1, (-1, 2)).transpose(-1, -2).flatten(-2)
        cache.fill(number, keys, values)

"""KV that checks itself: a function of all tokens up to its own, of weights, salt, adapter, image,
layer, head and place. So a byte that is wrong, stale, foreign or misplaced shows when it is read.
"""

from __future__ import annotations

import zlib
from collections.abc import Collection, Sequence
from functools import cache
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from kvferry.contract.spec import EngineSpec
from kvferry.types import NULL_BLOCK, ExtraKeys, KVGroup

Seeds = NDArray[np.uint64]

_MASK = (1 << 64) - 1
_LAYER, _HEAD, _PLACE = (
    np.uint64(0x9E3779B97F4A7C15),
    np.uint64(0xC2B2AE3D27D4EB4F),
    np.uint64(7919),
)

TAINT = 0.5
"""Added to KV that was computed from wrong KV: right values are whole numbers."""


def first_seed(weights: int, extra: ExtraKeys) -> int:
    """The seed before the first token of a prompt."""
    return zlib.crc32(repr((weights, extra.cache_salt, extra.lora)).encode()) + 1


def extend_seeds(seeds: list[int], tokens: Sequence[int], weights: int, extra: ExtraKeys) -> None:
    """Append the seeds of the tokens that have none. A seed depends on all tokens up to its own."""
    seed = seeds[-1] if seeds else first_seed(weights, extra)
    for place in range(len(seeds), len(tokens)):
        shown = tokens[place]
        for item in extra.items:
            if item.offset <= place < item.offset + item.length:
                shown += zlib.crc32(f"{item.digest} {place - item.offset}".encode())
        seed = (seed * 6364136223846793005 + shown * 1442695040888963407 + 1) & _MASK
        seeds.append(seed)


class Content(NamedTuple):
    """What a chunk's record must hold: KV of these groups, of tokens with these seeds."""

    groups: tuple[KVGroup, ...]
    seeds: tuple[int, ...]


@cache
def _mix(index: int, layers: range, heads: range, content_size: int) -> Seeds:
    """Part of all values of a group that does not depend on tokens: `[layers, heads, content]`."""
    of_layer = (np.arange(layers.start, layers.stop, dtype=np.uint64) + 64 * index) * _LAYER
    of_head = np.arange(heads.start, heads.stop, dtype=np.uint64) * _HEAD
    of_place = np.arange(content_size, dtype=np.uint64) * _PLACE * _LAYER
    mix: Seeds = of_layer[:, None, None] + of_head[None, :, None] + of_place[None, None, :]
    return mix


def _values(mix: Seeds, seeds: Seeds) -> NDArray[np.float32]:
    """The right KV, `[tokens, layers, heads, content]`."""
    mixed = (seeds[:, None, None, None] ^ mix[None]) * _HEAD
    return ((mixed >> np.uint64(44)) & np.uint64(0xFFFF)).astype(np.float32)


def payload_of(content: Content) -> bytes:
    """The bytes behind the head of a right record, as docs/format.md lays them out."""
    of_tokens = np.asarray(content.seeds, dtype=np.uint64)
    parts = []
    for index, group in enumerate(content.groups):
        layers, heads = range(group.num_layers), range(group.num_kv_heads)
        values = _values(_mix(index, layers, heads, group.content_size), of_tokens)
        parts.append(values.transpose(1, 2, 0, 3).tobytes())
    return b"".join(parts)


class WrongToken(NamedTuple):
    """A token of which some KV is wrong."""

    place: int
    block: int
    is_nan: bool
    """All that is wrong is NaN: it was computed as that, or never filled."""


class RankKV:
    """The KV tensors of one rank, `[blocks, heads, block size, content]` per layer.

    Attributes:
        tensors: by the name of the layer, as a worker role registers them.
    """

    def __init__(self, spec: EngineSpec, num_blocks: int, block_size: int) -> None:
        self.block_size = block_size
        self.tensors: dict[str, torch.Tensor] = {}
        self._arrays: list[NDArray[np.float32]] = []
        self._mixes: list[Seeds] = []
        for index, (group, shard) in enumerate(zip(spec.groups, spec.shard.groups, strict=True)):
            layers = range(*shard.layers)
            heads = range(*shard.heads)
            shape = (len(layers), num_blocks, len(heads), block_size, group.content_size)
            memory = torch.full(shape, float("nan"))
            self._arrays.append(memory.numpy())
            for layer in layers:
                self.tensors[f"{index}.{layer}"] = memory[layer - layers.start]
            self._mixes.append(_mix(index, layers, heads, group.content_size))

    def _places(self, blocks: Sequence[int], start: int, stop: int) -> tuple[NDArray, NDArray]:  # type: ignore[type-arg]
        tokens = np.arange(start, stop)
        return np.asarray(blocks)[tokens // self.block_size], tokens % self.block_size

    def compute(
        self, blocks: Sequence[int], seeds: Sequence[int], start: int, *, more: float
    ) -> None:
        """Write the KV of the tokens that follow the first `start`, and so much more than right:
        `TAINT` if the forward read wrong KV."""
        which, places = self._places(blocks, start, start + len(seeds))
        of_tokens = np.asarray(seeds, dtype=np.uint64)
        for group, array in enumerate(self._arrays):
            values = _values(self._mixes[group], of_tokens)
            array[:, which, :, places] = values + np.float32(more)

    def wrong_tokens(self, blocks: Sequence[int], seeds: Sequence[int]) -> list[WrongToken]:
        """The first tokens whose KV is not right; `seeds` are theirs."""
        if not seeds:
            return []
        which, places = self._places(blocks, 0, len(seeds))
        of_tokens = np.asarray(seeds, dtype=np.uint64)
        wrong: dict[int, bool] = {}
        for group, array in enumerate(self._arrays):
            found = array[:, which, :, places]
            right = _values(self._mixes[group], of_tokens)
            if np.array_equal(found, right):
                continue
            differs = (found != right).reshape(len(seeds), -1)
            is_nan = (~differs | np.isnan(found).reshape(len(seeds), -1)).all(axis=1)
            for place in np.flatnonzero(differs.any(axis=1)).tolist():
                wrong[place] = wrong.get(place, True) and bool(is_nan[place])
        return [WrongToken(at, int(which[at]), is_nan) for at, is_nan in sorted(wrong.items())]

    def poison(self, blocks: Collection[int]) -> None:
        for array in self._arrays:
            array[:, list(blocks)] = np.nan

    def null_block_is_untouched(self) -> bool:
        return all(np.isnan(array[:, NULL_BLOCK]).all() for array in self._arrays)

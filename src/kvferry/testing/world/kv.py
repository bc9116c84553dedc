"""KV that checks itself: a function of all tokens up to its own, of weights, salt, adapter, image,
layer, head and place. So a byte that is wrong, stale, foreign or misplaced shows when it is read.
"""

from __future__ import annotations

import zlib
from collections.abc import Collection, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from kvferry.contract.spec import EngineSpec
from kvferry.types import NULL_BLOCK, ExtraKeys

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
            of_layer = (np.arange(layers.start, layers.stop, dtype=np.uint64) + 64 * index) * _LAYER
            of_head = np.arange(heads.start, heads.stop, dtype=np.uint64) * _HEAD
            of_place = np.arange(group.content_size, dtype=np.uint64) * _PLACE * _LAYER
            mix = of_layer[:, None, None] + of_head[None, :, None] + of_place[None, None, :]
            self._mixes.append(mix)

    def _values(self, group: int, seeds: Seeds) -> NDArray[np.float32]:
        """The right KV, `[tokens, layers, heads, content]`."""
        mixed = (seeds[:, None, None, None] ^ self._mixes[group][None]) * _HEAD
        return ((mixed >> np.uint64(44)) & np.uint64(0xFFFF)).astype(np.float32)

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
            values = self._values(group, of_tokens)
            array[:, which, :, places] = values + np.float32(more)

    def wrong_blocks(self, blocks: Sequence[int], seeds: Sequence[int]) -> set[int]:
        """The blocks in which the KV of the tokens with these seeds is not right."""
        if not seeds:
            return set()
        which, places = self._places(blocks, 0, len(seeds))
        of_tokens = np.asarray(seeds, dtype=np.uint64)
        wrong: set[int] = set()
        for group, array in enumerate(self._arrays):
            found = array[:, which, :, places]
            right = self._values(group, of_tokens)
            if not np.array_equal(found, right):
                is_wrong = (found != right).reshape(len(seeds), -1).any(axis=1)
                wrong |= set(which[is_wrong].tolist())
        return wrong

    def poison(self, blocks: Collection[int]) -> None:
        for array in self._arrays:
            array[:, list(blocks)] = np.nan

    def null_block_is_untouched(self) -> bool:
        return all(np.isnan(array[:, NULL_BLOCK]).all() for array in self._arrays)

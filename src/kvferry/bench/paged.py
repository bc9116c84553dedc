"""Paged KV of engines of any shape, for benchmarks of layouts."""

from __future__ import annotations

import random
from dataclasses import dataclass
from math import prod

import numpy as np
import torch

from kvferry.layout.ops import MakeCopies, PagedKV, as_rows
from kvferry.layout.plan import BlockRun
from kvferry.layout.spec import parse
from kvferry.topology import tensor_parallel_shard
from kvferry.types import KVGroup

CHUNK_TOKENS = 128

Rows = np.ndarray[tuple[int, ...], np.dtype[np.int16]]
Bytes = np.ndarray[tuple[int, ...], np.dtype[np.uint8]]


@dataclass(frozen=True, slots=True)
class Shape:
    """How an engine keeps KV. Its layout has one tensor per layer."""

    tp: int
    block_size: int
    layout: str

    def __str__(self) -> str:
        return f"TP {self.tp}, {self.block_size}, {self.layout}"


def group_of(block_size: int, *, is_mla: bool = False) -> KVGroup:
    """KV of an 8B model, or of a small MLA model, in blocks of that size."""
    layers, heads, content = (27, 1, 576) if is_mla else (32, 8, 256)
    return KVGroup(
        num_layers=layers,
        num_kv_heads=heads,
        content_size=content,
        dtype="bfloat16",
        block_size=block_size,
    )


class Blocks:
    """Paged KV of one rank, its blocks in random order; block 0 stays free."""

    def __init__(
        self,
        group: KVGroup,
        shape: Shape,
        rank: int,
        num_tokens: int,
        rng: random.Random,
        *,
        device: str = "cpu",
        copies: MakeCopies | None = None,
    ) -> None:
        shard = tensor_parallel_shard((group,), rank, shape.tp).groups[0]
        self.heads = shard.heads
        num_heads = shard.heads[1] - shard.heads[0]
        num_blocks = num_tokens // shape.block_size
        self._tensors = kv_tensors(shape.layout, group, num_heads, num_blocks + 1, device)
        self.paged = PagedKV(self._tensors, group, shard, shape.layout, copies=copies)
        self._row_shape = (group.num_layers, num_heads, CHUNK_TOKENS, group.content_size)
        self.row_bytes = prod(self._row_shape) * 2
        self.ids = list(range(1, num_blocks + 1))
        rng.shuffle(self.ids)
        per_chunk = CHUNK_TOKENS // shape.block_size
        self.runs: list[list[BlockRun]] = [
            self.paged.runs(self.ids[start : start + per_chunk], 0, CHUNK_TOKENS)
            for start in range(0, num_blocks, per_chunk)
        ]

    def fill(self, seed: int) -> None:
        """Noise into all blocks."""
        noise = np.random.default_rng(seed).integers(0, 2**15, 2**16 + 1, dtype=np.int16)
        for tensor in self._tensors:
            values = np.resize(noise, tensor.numel()).reshape(tensor.shape)
            tensor.view(torch.int16).copy_(torch.from_numpy(values))

    def rows(self, staging: Bytes) -> Rows:
        """A chunk's rows in a buffer."""
        found: Rows = as_rows(staging.data, self.paged, "bfloat16", self._row_shape)
        return found


def kv_tensors(
    layout: str, group: KVGroup, num_heads: int, num_blocks: int, device: str
) -> list[torch.Tensor]:
    """One bfloat16 tensor per layer, in memory as the layout says."""
    spec = parse(layout)
    order = spec.order or "L" + spec.axes
    sizes = {
        "L": group.num_layers,
        "B": num_blocks,
        "2": 2,
        "H": num_heads,
        "N": group.block_size,
        "C": group.content_size,
        "D": group.content_size // (2 if "2" in order else 1),
    }
    memory = torch.zeros([sizes[axis] for axis in order], dtype=torch.bfloat16, device=device)
    return list(memory.permute(*(order.index(axis) for axis in "L" + spec.axes)))

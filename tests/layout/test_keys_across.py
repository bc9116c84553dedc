"""Blocks as vLLM's CPU kernels fill them: keys `[dim, token]`, then values `[token, dim]`."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kvferry.errors import LayoutError
from kvferry.layout.ops import PagedKV
from kvferry.layout.spec import Strided, layer_parts
from kvferry.types import GroupShard, KVGroup

LAYERS, HEADS, BLOCK, DIM, BLOCKS = 2, 3, 4, 5, 7

GROUP = KVGroup(
    num_layers=LAYERS, num_kv_heads=HEADS, content_size=2 * DIM, dtype="float32", block_size=BLOCK
)
SHARD = GroupShard(layers=(0, LAYERS), heads=(0, HEADS))
SHAPES = {
    "BHNC~": (BLOCKS, HEADS, BLOCK, 2 * DIM),
    "2BHND~": (2, BLOCKS, HEADS, BLOCK, DIM),
}


def tensors(layout: str) -> list[torch.Tensor]:
    return [torch.full(SHAPES[layout], -1.0) for _ in range(LAYERS)]


def strided(tensor: torch.Tensor) -> Strided:
    return Strided(tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset()), 1, "float32")


def write_as_the_kernel(tensor: torch.Tensor, block: int, slot: int, key, value) -> None:
    """By the arithmetic of the kernel, on flat memory: `[heads, dim]` each."""
    if tensor.dim() == 4:
        flat = tensor.view(BLOCKS, HEADS, -1)
        keys, values = flat[..., : BLOCK * DIM], flat[..., BLOCK * DIM :]
    else:
        keys, values = tensor.view(2, BLOCKS, HEADS, -1)
    for head in range(HEADS):
        for dim in range(DIM):
            keys[block, head, dim * BLOCK + slot] = key[head, dim]
            values[block, head, slot * DIM + dim] = value[head, dim]


def content(layer: int, token: int) -> torch.Tensor:
    """`[heads, keys and values]`."""
    base = torch.arange(HEADS * 2 * DIM, dtype=torch.float32).view(HEADS, 2 * DIM)
    return base + 1000 * token + 100_000 * layer


@pytest.mark.parametrize("layout", SHAPES)
@pytest.mark.parametrize(("start", "stop"), [(0, 11), (3, 9), (5, 6), (4, 8), (0, 12)])
def test_a_token_is_the_same_row_wherever_it_lies_in_its_block(layout, start, stop):
    memory = torch.stack(tensors(layout))  # layers evenly spaced in it: one move for all
    kv = list(memory)
    table = [5, 2, 6]
    for layer, tensor in enumerate(kv):
        for token in range(3 * BLOCK):
            row = content(layer, token)
            write_as_the_kernel(
                tensor, table[token // BLOCK], token % BLOCK, row[:, :DIM], row[:, DIM:]
            )
    paged = PagedKV(kv, GROUP, SHARD, layout)
    shape = (LAYERS, HEADS, stop - start, 2 * DIM)
    rows = paged.as_rows(memoryview(bytearray(4 * int(np.prod(shape)))), shape)
    blocks = table[start // BLOCK : -(-stop // BLOCK)]
    paged.gather(rows, 0, paged.runs(blocks, start, stop), start)
    found = torch.from_numpy(rows.copy()).view(torch.float32)
    for layer in range(LAYERS):
        for token in range(start, stop):
            assert torch.equal(found[layer, :, token - start], content(layer, token))

    other = tensors(layout)
    PagedKV(other, GROUP, SHARD, layout).scatter(rows, 0, paged.runs(blocks, start, stop), start)
    expected = tensors(layout)
    for layer, tensor in enumerate(expected):
        for token in range(start, stop):
            row = content(layer, token)
            write_as_the_kernel(
                tensor, table[token // BLOCK], token % BLOCK, row[:, :DIM], row[:, DIM:]
            )
    assert all(torch.equal(a, b) for a, b in zip(other, expected, strict=True))


@pytest.mark.parametrize("layout", SHAPES)
def test_blocks_that_are_not_in_one_piece_are_refused(layout):
    apart = [tensor.transpose(-1, -2).contiguous().transpose(-1, -2) for tensor in tensors(layout)]
    with pytest.raises(LayoutError, match=r"last two axes in one piece"):
        PagedKV(apart, GROUP, SHARD, layout)


@pytest.mark.parametrize("layout", SHAPES)
def test_the_number_of_axes_picks_among_layouts(layout):
    chosen = layer_parts([strided(t) for t in tensors(layout)], GROUP, SHARD, "BND|BHNC~|2BHND~")
    assert chosen == layer_parts([strided(t) for t in tensors(layout)], GROUP, SHARD, layout)


def test_no_layout_with_so_many_axes_is_an_error():
    with pytest.raises(LayoutError, match="layout BHNC has 4 axes, the tensor 2"):
        layer_parts([Strided((3, 3), (3, 1), 0, 1, "float32")] * 2, GROUP, SHARD, "BHNC|2BNHD")

"""Blocks as vLLM's CPU kernels fill them: keys `[dim, token]`, then values `[token, dim]`."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kvferry.errors import LayoutError
from kvferry.layout import numpy_copies
from kvferry.layout.ops import PagedKV, as_rows
from kvferry.layout.plan import Box, Move, in_wide_spans, moves, segments, split
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


@pytest.mark.parametrize("near_bytes", [numpy_copies._NEAR_BYTES, 2 * 4 * BLOCK * DIM, 1])
@pytest.mark.parametrize("layout", SHAPES)
@pytest.mark.parametrize(("start", "stop"), [(0, 11), (3, 9), (5, 6), (4, 8), (0, 12)])
def test_a_token_is_the_same_row_wherever_it_lies_in_its_block(
    layout, start, stop, near_bytes, monkeypatch
):
    monkeypatch.setattr(numpy_copies, "_NEAR_BYTES", near_bytes)
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
    rows = as_rows(memoryview(bytearray(4 * int(np.prod(shape)))), paged, "float32", shape)
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


def keys_and_values(layout: str, heads: int, num_slots: int) -> list[Move]:
    memory = torch.stack(tensors(layout))
    layers = layer_parts([strided(tensor) for tensor in memory], GROUP, SHARD, layout)
    box = Box(0, (LAYERS, heads, 3 * BLOCK, 2 * DIM), 0, num_slots)
    return [move for segment in segments(layers, 4) for move in moves(segment, box)]


def kv_bytes(move: Move) -> list[int]:
    """All bytes that a move covers of block 0."""
    return covered(move, move.kv_strides[1:], move.kv_offset)


def row_bytes(move: Move) -> list[int]:
    """All bytes that a move covers of rows, for one block."""
    return covered(move, move.row_strides[1:], move.row_offset)


def covered(move: Move, strides: tuple[int, ...], offset: int) -> list[int]:
    starts = np.full((), offset)
    for size, stride in zip(move.shape, strides, strict=True):
        starts = np.add.outer(starts, np.arange(size) * stride)
    return sorted((starts.reshape(-1, 1) + np.arange(move.span)).reshape(-1).tolist())


@pytest.mark.parametrize("num_slots", [BLOCK, BLOCK - 1])
@pytest.mark.parametrize("heads", [HEADS, 1])
@pytest.mark.parametrize("layout", SHAPES)
def test_wide_spans_cover_the_bytes_of_keys_and_no_others(layout, heads, num_slots):
    keys, values = keys_and_values(layout, heads, num_slots)
    assert in_wide_spans(values) is None
    wide = in_wide_spans(keys)
    if num_slots < BLOCK:
        assert wide is None
        return
    assert wide is not None
    assert (keys.span, wide.span) == (4, 4 * DIM)
    assert kv_bytes(keys) == kv_bytes(wide)
    assert row_bytes(keys) == row_bytes(wide)


@pytest.mark.parametrize("layout", ["2BNHD", "BHNC", "NHD", "HND", "BLNHC"])
def test_nothing_is_copied_twice_whose_spans_are_wide_already(layout):
    shape = {"2BNHD": (2, BLOCKS, BLOCK, HEADS, DIM)}.get(layout, (BLOCKS, HEADS, BLOCK, 2 * DIM))
    memory = torch.zeros(LAYERS, *shape)
    if layout == "NHD":
        memory = memory.transpose(2, 3).contiguous().transpose(2, 3)
    if layout == "BLNHC":
        memory = torch.zeros(BLOCKS, LAYERS, BLOCK, HEADS, 2 * DIM).permute(1, 0, 3, 2, 4)
    layers = layer_parts([strided(tensor) for tensor in memory], GROUP, SHARD, layout)
    box = Box(0, (LAYERS, HEADS, 3 * BLOCK, 2 * DIM), 0, BLOCK)
    found = [move for segment in segments(layers, 4) for move in moves(segment, box)]
    assert found
    for move in found:
        assert in_wide_spans(move) is None
        assert list(split(move, 1)) == [move]


@pytest.mark.parametrize(("max_bytes", "parts"), [(480, 1), (479, 2), (239, 6), (1, 6)])
@pytest.mark.parametrize("layout", SHAPES)
def test_what_lies_far_apart_is_split_and_stays_the_same(layout, max_bytes, parts):
    keys, _ = keys_and_values(layout, HEADS, BLOCK)
    assert keys.num_bytes == 4 * LAYERS * HEADS * DIM * BLOCK
    found = list(split(keys, max_bytes))
    assert len(found) == parts
    assert sorted(byte for part in found for byte in kv_bytes(part)) == kv_bytes(keys)
    assert sorted(byte for part in found for byte in row_bytes(part)) == row_bytes(keys)


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

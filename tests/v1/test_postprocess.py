"""Blocks that arrived byte for byte from another layout are put right, and others left alone.

Values are token * 100 + head * 10 + dim unless a row says 0, 1, 2, ...; rows list memory order.
"""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvferry.errors import LayoutError
from kvferry.v1 import (
    kv_postprocess_blksize_and_layout_on_receive,
    kv_postprocess_blksize_on_receive,
    kv_postprocess_layout_on_receive,
)

AXES = ["BNHD", "BHND"]


def block_in_memory(values, heads, tokens, dim, *, head_major, axes, num_blocks=3, at=1):
    """A cache whose block `at` holds `values` in memory order; the cache as `axes` wants it, and
    the flat memory of all blocks."""
    size = heads * tokens * dim
    memory = torch.arange(num_blocks * size) + 1000
    memory[at * size : (at + 1) * size] = torch.tensor(values)
    shape = (heads, tokens) if head_major else (tokens, heads)
    cache = memory.view(num_blocks, *shape, dim)
    lies_as = "BHND" if head_major else "BNHD"
    return (cache if axes == lies_as else cache.transpose(1, 2)), memory


def numbers(text):
    return [int(word) for word in text.split()]


@pytest.mark.parametrize("axes", AXES)
@pytest.mark.parametrize(
    ("heads", "tokens", "dim", "expected"),
    [
        (2, 4, 1, "0 4 1 5 2 6 3 7"),
        (3, 2, 2, "0 1 4 5 8 9 2 3 6 7 10 11"),
        (1, 4, 2, "0 1 2 3 4 5 6 7"),
        (4, 1, 2, "0 1 2 3 4 5 6 7"),
    ],
)
def test_worked_rows_of_layout_only(heads, tokens, dim, expected, axes):
    values = list(range(heads * tokens * dim))
    cache, memory = block_in_memory(values, heads, tokens, dim, head_major=False, axes=axes)
    before = memory.clone()
    kv_postprocess_layout_on_receive(cache, torch.tensor([1]), axes=axes)
    size = len(values)
    assert memory[size : 2 * size].tolist() == numbers(expected)
    assert torch.equal(memory[:size], before[:size])
    assert torch.equal(memory[2 * size :], before[2 * size :])


@pytest.mark.parametrize("axes", AXES)
@pytest.mark.parametrize(
    ("heads", "n", "ratio", "dim", "arrived", "expected"),
    [
        (2, 2, 2, 1, "0 100 10 110 200 300 210 310", "0 100 200 300 10 110 210 310"),
        (2, 1, 4, 1, "0 10 100 110 200 210 300 310", "0 100 200 300 10 110 210 310"),
        (1, 2, 2, 2, "0 1 100 101 200 201 300 301", "0 1 100 101 200 201 300 301"),
        (2, 4, 1, 1, "0 100 200 300 10 110 210 310", "0 100 200 300 10 110 210 310"),
    ],
)
def test_worked_rows_of_block_size_only(heads, n, ratio, dim, arrived, expected, axes):
    values = numbers(arrived)
    cache, memory = block_in_memory(values, heads, n * ratio, dim, head_major=True, axes=axes)
    kv_postprocess_blksize_on_receive(cache, torch.tensor([1]), ratio, axes=axes)
    assert memory[len(values) : 2 * len(values)].tolist() == numbers(expected)


@pytest.mark.parametrize("axes", AXES)
@pytest.mark.parametrize(
    ("n", "ratio", "arrived"),
    [
        (2, 2, "0 100 10 110 200 300 210 310"),
        (1, 4, "0 10 100 110 200 210 300 310"),
        (4, 1, "0 100 200 300 10 110 210 310"),
    ],
)
def test_worked_rows_of_block_size_and_layout(n, ratio, arrived, axes):
    cache, memory = block_in_memory(numbers(arrived), 2, n * ratio, 1, head_major=False, axes=axes)
    kv_postprocess_blksize_and_layout_on_receive(cache, torch.tensor([1]), ratio, axes=axes)
    assert memory[8:16].tolist() == numbers("0 10 100 110 200 210 300 310")


# -- any sizes ---------------------------


@st.composite
def transfers(draw):
    """KV of some blocks `[B, N, H, D]`, sender's blocks per block, which blocks, a dtype."""
    ratio, n = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    heads, dim, num_blocks = (draw(st.integers(1, 4)) for _ in range(3))
    shape = (num_blocks, ratio * n, heads, dim)
    dtype = draw(st.sampled_from([torch.float32, torch.bfloat16, torch.uint8]))
    kv = (torch.arange(math.prod(shape)) % 251).to(dtype).view(shape)
    chosen = draw(st.permutations(range(num_blocks)))[: draw(st.integers(0, num_blocks))]
    return kv, ratio, chosen


def sent(kv, ratio):
    """The bytes of each block as a sender with smaller head-major blocks has them, flat."""
    blocks, tokens, heads, dim = kv.shape
    smaller = kv.reshape(blocks, ratio, tokens // ratio, heads, dim)
    return smaller.transpose(2, 3).reshape(blocks, -1)


@given(transfers(), st.booleans(), st.booleans(), st.sampled_from(AXES))
def test_what_was_sent_is_what_is_read(transfer, head_major, as_float8, axes):
    kv, ratio, chosen = transfer
    blocks, tokens, heads, dim = kv.shape
    shape = (blocks, heads, tokens, dim) if head_major else (blocks, tokens, heads, dim)
    received = torch.zeros_like(kv).view(blocks, -1)
    received[chosen] = sent(kv, ratio)[chosen]
    if as_float8 and kv.dtype == torch.uint8:
        received = received.view(torch.float8_e4m3fn)
    cache = received.view(shape)
    as_axes = cache if (axes == "BHND") is head_major else cache.transpose(1, 2)
    if head_major:
        kv_postprocess_blksize_on_receive(as_axes, chosen, ratio, axes=axes)
    else:
        kv_postprocess_blksize_and_layout_on_receive(as_axes, chosen, ratio, axes=axes)
    got = (cache.transpose(1, 2) if head_major else cache).view(kv.dtype)
    assert torch.equal(got[chosen], kv[chosen])
    others = [block for block in range(blocks) if block not in chosen]
    assert not got[others].any()


@given(transfers())
def test_layout_only_is_ratio_one(transfer):
    kv, _, chosen = transfer
    other = kv.clone()
    kv_postprocess_layout_on_receive(kv, chosen)
    kv_postprocess_blksize_and_layout_on_receive(other, chosen, 1)
    assert torch.equal(kv, other)


# -- bad input ---------------------------


@pytest.mark.parametrize(
    ("cache", "indices", "ratio", "axes", "message"),
    [
        (torch.zeros(2, 4, 2, 1), [0], 3, "BNHD", "ratio 3 does not divide the block size 4"),
        (torch.zeros(2, 2, 4, 1), [0], 3, "BHND", "ratio 3 does not divide the block size 4"),
        (torch.zeros(2, 4, 2, 1), [0], 0, "BNHD", "ratio 0 does not divide"),
        (torch.zeros(2, 4, 2, 1), [2], 2, "BNHD", r"block id 2 is outside \[0, 2\)"),
        (torch.zeros(2, 4, 2, 1), [0, -1], 2, "BNHD", "block id -1 is outside"),
        (torch.zeros(2, 4, 2, 1), [[0]], 2, "BNHD", "one axis of int32 or int64"),
        (torch.zeros(2, 4, 2, 1), [0.5], 2, "BNHD", "one axis of int32 or int64"),
        (torch.zeros(2, 4, 2, 1), [True], 2, "BNHD", "one axis of int32 or int64"),
        (torch.zeros(2, 2, 4, 2, 1), [0], 2, "BNHD", "need 4 axes, the tensor has 5"),
        (torch.zeros(2, 4, 2, 1), [0], 2, "BDNH", "unknown axes 'BDNH'"),
    ],
)
def test_what_does_not_fit_is_refused_and_changes_nothing(cache, indices, ratio, axes, message):
    cache += torch.arange(cache.numel()).view(cache.shape)
    before = cache.clone()
    for process in (
        kv_postprocess_blksize_on_receive,
        kv_postprocess_blksize_and_layout_on_receive,
    ):
        with pytest.raises(LayoutError, match=message):
            process(cache, indices, ratio, axes=axes)
    assert torch.equal(cache, before)


def test_no_block_is_no_change():
    cache = torch.arange(8.0).view(1, 4, 2, 1)
    kv_postprocess_layout_on_receive(cache, torch.tensor([], dtype=torch.int64))
    kv_postprocess_blksize_on_receive(cache, [], 2)
    assert cache.flatten().tolist() == list(range(8))

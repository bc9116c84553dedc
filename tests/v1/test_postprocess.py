"""Blocks that arrived byte for byte from another layout are put right, and others left alone."""

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


@st.composite
def transfers(draw):
    """KV of some blocks `[B, N, H, D]`, sender's blocks per block, which blocks, a dtype."""
    ratio, n = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    heads, dim, num_blocks = (draw(st.integers(1, 4)) for _ in range(3))
    shape = (num_blocks, ratio * n, heads, dim)
    dtype = draw(st.sampled_from([torch.float32, torch.bfloat16, torch.uint8]))
    kv = (torch.arange(math.prod(shape)) % 251).to(dtype).view(shape)
    chosen = draw(st.permutations(range(num_blocks)))[: draw(st.integers(0, num_blocks))]
    form = draw(st.sampled_from([None, torch.int32, torch.int64]))
    return kv, ratio, chosen if form is None else torch.tensor(chosen, dtype=form)


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
    others = [block for block in range(blocks) if block not in list(chosen)]
    assert not got[others].any()


@given(transfers(), st.sampled_from(AXES))
def test_layout_only_is_ratio_one(transfer, axes):
    kv, _, chosen = transfer
    other = kv.clone()
    kv_postprocess_layout_on_receive(kv, chosen, axes=axes)
    kv_postprocess_blksize_and_layout_on_receive(other, chosen, 1, axes=axes)
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

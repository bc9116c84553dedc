"""`bench layout`: that it compares what it says, and would notice wrong bytes."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from benchmarks import layout
from benchmarks.host import CHUNK_TOKENS, Blocks, Shape, fill_with_noise, group_of, kv_tensors
from kvferry.errors import LayoutError

KEYS = {"case", "gb_per_s", "straight_gb_per_s", "ratio"}


@pytest.mark.parametrize("name", ["all three, back", "mla, block 16 to 64"])
def test_a_case_is_a_row_beside_the_straight_read(name):
    case = next(case for case in layout.CASES if case.name == name)
    row = layout.measure(case, CHUNK_TOKENS, 1, 0)
    assert set(row) >= KEYS
    assert row["stored_by"] == str(case.writer)
    assert all(row[key] > 0 for key in KEYS - {"case"})


def test_the_cases_have_the_conversions_of_the_target():
    names = [case.name for case in layout.CASES]
    assert len(set(names)) == len(names)
    case = next(case for case in layout.CASES if case.name == "all three")
    assert (case.writer, case.reader) == (Shape(4, 16, "NHD"), Shape(2, 128, "HND"))


@pytest.mark.parametrize(
    ("name", "axes", "in_memory"),
    [
        ("HND", "BHNC", "BHNC"),
        ("NHD", "BHNC", "BNHC"),
        ("BLNHC", "BHNC", "BNHC"),
        ("2BNHD", "2BNHD", "2BNHD"),
    ],
)
def test_tensors_lie_in_memory_as_the_layout_says(name, axes, in_memory):
    tensors = kv_tensors(name, group_of(16), 2, 3)
    strides = dict(zip(axes, tensors[0].stride(), strict=True))
    assert "".join(sorted(axes, key=lambda axis: -strides[axis])) == in_memory
    step = tensors[1].storage_offset() - tensors[0].storage_offset()
    assert (step < strides["B"]) == name.startswith("BL")


def test_ranks_have_their_heads_and_noise_of_their_own():
    ranks = [Blocks(group_of(16), Shape(4, 16, "NHD"), n, 128, random.Random(n)) for n in (0, 1)]
    found = np.zeros((2, 32, 2, 128, 256), np.int16)
    for rank, (blocks, rows) in enumerate(zip(ranks, found, strict=True)):
        assert blocks.heads == (2 * rank, 2 * rank + 2)
        assert sorted(blocks.ids) == list(range(1, 9)) != blocks.ids
        fill_with_noise(blocks.tensors, rank)
        blocks.paged.gather(rows, 0, blocks.runs[0], 0)
    assert (found[0] != found[1]).mean() > 0.99
    assert (found[0, 1:] != found[0, :-1]).mean() > 0.99
    assert len(np.unique(found[0, 5, 1, 7])) > 200


def test_a_leaf_that_changed_ends_the_benchmark():
    group = group_of(CHUNK_TOKENS)
    records = np.ones((1, 32, 8, CHUNK_TOKENS, 256), np.int16)
    reader = layout.Reader(group, Shape(2, CHUNK_TOKENS, "HND"), records, random.Random(0))
    reader.read()
    assert (reader.in_blocks() == 1).all()
    records[0, 31, 3, 127, 255] ^= 1
    with pytest.raises(LayoutError, match="a leaf changed"):
        reader.read()


@pytest.mark.parametrize(
    "device",
    [
        "cpu",
        pytest.param(
            "cuda",
            marks=[
                pytest.mark.gpu,
                pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
            ],
        ),
    ],
)
def test_the_cases_of_a_device_stand_beside_the_pinned_copy(device):
    rows = layout.device_rows("2BNHD", CHUNK_TOKENS, 1, 0, device=device)
    assert len({row["case"] for row in rows}) == 4
    assert all(set(row) >= KEYS and row["ratio"] > 0 for row in rows)

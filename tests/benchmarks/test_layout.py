"""`bench layout`: that it compares what it says, and would notice wrong bytes."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from benchmarks import layout
from benchmarks.host import CHUNK_TOKENS, Shape, group_of
from kvferry.errors import LayoutError

KEYS = {"case", "gb_per_s", "straight_gb_per_s", "ratio"}


@pytest.mark.parametrize("name", ["all three, back", "mla, block 16 to 64"])
def test_a_case_is_a_row_beside_the_straight_read(name):
    case = next(case for case in layout.CASES if case.name == name)
    row = layout.measure(case, CHUNK_TOKENS, 1, 0)
    assert set(row) >= KEYS
    assert row["stored_by"] == str(case.writer)
    assert all(row[key] > 0 for key in KEYS - {"case"})


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

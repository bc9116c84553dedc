"""The benchmark of the tier in little: its rows, beside vLLM's own file tier."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import Options, tier
from tests.real_vllm.host import serves_tiers

pytestmark = [serves_tiers(), pytest.mark.filterwarnings("ignore")]  # vLLM's own


def test_the_tier_stands_beside_that_of_vllm(tmp_path: Path) -> None:
    rows = tier.run(Options(directory=tmp_path, quick=True))
    on_disk = [row for row in rows if row["place"] == "disk"]
    assert [row["case"] for row in on_disk] == [
        *tier.CASES,
        *("fs, hits", "fs, misses", "kvferry, hits", "kvferry, misses"),
    ]
    assert {name for row in rows for name in row} == {
        "case", "place", "row_kib", "load_gb_per_s", "load_ratio", "store_gb_per_s", "store_ratio",
        "memcpy_gb_per_s", "read_gb_per_s", "write_gb_per_s", "lookup_us_per_chunk",
        "known_us_per_chunk",
    }  # fmt: skip
    assert list(tmp_path.iterdir()) == []

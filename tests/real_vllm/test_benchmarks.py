"""Benchmarks of vLLM in little: their rows, and that a hit changes no answer."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import Options, proxied, tier, vllm
from tests.real_vllm.host import RELEASE, serves_tiers


@pytest.mark.sweep
def test_kvferry_stands_beside_vllm_alone(tmp_path: Path) -> None:
    found = vllm.measure(["none", "kvferry"], vllm.QUICK, tmp_path, rounds=1, seed=0)
    rows = {(row["case"], row["phase"]): row for row in vllm.rows_of(found)}
    assert list(rows) == [
        *(("none", phase) for phase in ("cold", "own_hit", "decode")),
        *(("kvferry", phase) for phase in ("cold", "warm", "decode")),
    ]
    assert {name for row in rows.values() for name in row} == {
        "case", "phase", "note", "cpu_s", "cpu_ratio", "wall_s", "beyond_ms", "hit_tokens",
        "bytes_per_token", "us_per_step", "p50_ms", "equal",
    }  # fmt: skip
    warm = rows["kvferry", "warm"]
    assert warm["hit_tokens"] == rows["none", "own_hit"]["hit_tokens"] > 0
    assert warm["equal"]


@pytest.mark.sweep
@pytest.mark.skipif(RELEASE < (0, 32), reason="the proxy is that of 0.32")
def test_kvferry_hands_over_behind_the_proxy_of_vllm(tmp_path: Path) -> None:
    """A prefiller may die behind its answer."""
    row = proxied.run(Options(directory=tmp_path, quick=True))[0]
    assert row.keys() == {
        "case", "prompt_tokens", "prefill_ms", "handed_over_ms", "own_hit_ms", "computed_ms",
        "through_proxy_ms", "equal", "after_kill", "after_kill_ms",
    }  # fmt: skip
    assert row["case"] == "kvferry"
    assert row["equal"]
    assert row["after_kill"] == "right"


@serves_tiers()
@pytest.mark.filterwarnings("ignore")  # vLLM's own
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

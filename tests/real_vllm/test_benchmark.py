"""The benchmark of vLLM in little: its rows, and that a hit changes no answer."""

from __future__ import annotations

import pytest

from benchmarks import vllm


@pytest.mark.sweep
def test_kvferry_stands_beside_vllm_alone(tmp_path):
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

"""Rows and curves: tiers add up, bytes and seconds follow from rates."""

from __future__ import annotations

import pytest

from kvferry.errors import ConfigError
from kvferry.simulate.simulator import (
    OPTIMUM,
    Rates,
    Simulator,
    default_capacities,
    write_csv,
    write_png,
)
from tests.simulate.reference import conversations, lru_hits, make_trace

PROMPTS = conversations(seed=3, num_requests=150)
TOKENS = 16
RATES = Rates(bytes_per_token=10, prefill_tokens=100.0, tier_bytes=(4000.0, 2000.0))


@pytest.fixture
def simulator() -> Simulator:
    lengths = [len(prompt) * TOKENS - 5 for prompt in PROMPTS]
    return Simulator(make_trace(PROMPTS, TOKENS, lengths))


def test_tiers_add_up(simulator):
    references = [block for prompt in PROMPTS for block in prompt]
    rows = simulator.tiers(["lru"], [5, 40], RATES)
    assert [(row["policy"], row["tier"]) for row in rows] == [
        ("lru", 1), ("lru", 2), (OPTIMUM, 1), (OPTIMUM, 2),
    ]  # fmt: skip
    near, far, best_near, best_far = rows
    for row, capacity in ((near, 5), (far, 40)):
        hits = sum(lru_hits(references, capacity))
        assert row["hit_rate_so_far"] == pytest.approx(hits / len(references))
        assert row["written_blocks"] == len(references) - hits
    assert near["hit_rate"] + far["hit_rate"] == pytest.approx(far["hit_rate_so_far"])
    assert near["of_optimum"] == pytest.approx(near["hit_rate"] / best_near["hit_rate"])
    assert best_far["of_optimum"] == 1.0
    assert near["hit_rate"] < best_near["hit_rate"]


def test_bytes_and_seconds_follow_from_the_rates(simulator):
    far = simulator.tiers(["pool"], [5, 40], RATES)[1]
    tokens = far["hit_tokens"]
    assert 0 < tokens < far["hit_rate"] * simulator.trace.num_references * TOKENS
    assert far["read_bytes"] == 10 * tokens
    assert far["written_bytes"] == far["written_blocks"] * TOKENS * 10
    assert far["seconds_saved"] == pytest.approx(tokens / 100 - 10 * tokens / 2000)
    assert "read_bytes" not in simulator.tiers(["pool"], [5], Rates())[0]


def test_the_curve_has_every_policy_and_the_optimum(simulator):
    rows = simulator.curve(["chances"], [3, 9], RATES)
    assert [list(row) for row in rows] == [
        ["capacity_blocks", "capacity_bytes", "lru", "chances", OPTIMUM]
    ] * 2
    assert rows[1]["capacity_bytes"] == 9 * TOKENS * 10
    for row in rows:
        assert max(row["lru"], row["chances"]) <= row[OPTIMUM]
    assert rows[0]["lru"] <= rows[1]["lru"]


def test_facts_of_a_trace_without_reuse():
    simulator = Simulator(make_trace([[1, 2], [3]], TOKENS))
    assert simulator.facts()["hit_rate_without_limit"] == 0.0
    assert simulator.tiers(["lru"], [2], Rates())[0]["of_optimum"] == 1.0


def test_capacities_reach_from_small_to_all():
    assert default_capacities(3) == [1, 2, 3]
    assert default_capacities(2600) == [10, 20, 50, 100, 200, 500, 1000, 2000, 2600]


def test_files_of_a_curve(simulator, tmp_path):
    rows = simulator.curve(["pool"], [3, 9], Rates())
    write_csv(tmp_path / "curve.csv", rows)
    lines = (tmp_path / "curve.csv").read_text().splitlines()
    assert lines[0] == "capacity_blocks,lru,pool,optimum"
    assert len(lines) == 3
    write_png(tmp_path / "curve.png", rows, "trace.jsonl", {3: "tier 1"})
    assert (tmp_path / "curve.png").read_bytes().startswith(b"\x89PNG")
    for write in (write_csv, lambda path, rows: write_png(path, rows, "", {})):
        with pytest.raises(ConfigError, match=r"cannot write .*: Is a directory"):
            write(tmp_path, rows)

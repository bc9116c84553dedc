"""`kvferry simulate`: tables and files from a trace, and what a user can get wrong."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tests.simulate.reference import conversations


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """A Mooncake trace that a seed makes."""
    prompts = conversations(seed=3, num_requests=150)
    lines = [
        {
            "timestamp": 100 * at,
            "input_length": 512 * len(blocks) - 7,
            "output_length": 5,
            "hash_ids": blocks,
        }
        for at, blocks in enumerate(prompts)
    ]
    path = tmp_path / "trace.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_hit_rates_by_tier_and_policy(run, trace, tmp_path):
    out = tmp_path / "out.json"
    ran = run("simulate", trace, "--tiers", "5,50", "--policy", "pool,lru", "--json", out)
    assert ran.code == 0, ran.err
    assert "optimum" in ran.out
    value = json.loads(out.read_text())
    assert value["trace"]["requests"] == 150
    assert [(row["policy"], row["capacity_blocks"]) for row in value["tiers"]] == [
        (policy, size) for policy in ("pool", "lru", "optimum") for size in (5, 50)
    ]
    assert value["curve"] == []


def test_sizes_in_bytes(run, trace):
    ran = run(
        "simulate", trace, "--tiers", "1MiB,3MiB", "--bytes-per-token", "256B",
        "--prefill-rate", 8000, "--tier-rates", "20,3", "--json", "-",
    )  # fmt: skip
    assert ran.code == 0, ran.err
    rows = json.loads(ran.out)["tiers"]
    assert [row["capacity_blocks"] for row in rows[:2]] == [8, 24]
    assert rows[0]["read_bytes"] == rows[0]["hit_tokens"] * 256
    assert rows[0]["seconds_saved"] > 0


def test_the_curve_as_files(run, trace, tmp_path):
    csv, png = tmp_path / "curve.csv", tmp_path / "curve.png"
    ran = run("simulate", trace, "--capacities", "4,40", "--csv", csv, "--png", png)
    assert ran.code == 0, ran.err
    assert csv.read_text().startswith("capacity_blocks,lru,pool,optimum\n4,")
    assert png.read_bytes().startswith(b"\x89PNG")


def test_the_curve_of_default_capacities(run, trace):
    ran = run("simulate", trace, "--csv", trace.with_name("curve.csv"), "--json", "-")
    curve = json.loads(ran.out)["curve"]
    assert curve[-1]["lru"] == curve[-1]["optimum"]


BYTES = ["--bytes-per-token", "1KiB"]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--tiers", "0"], "--tiers 0: holds no block of 512 tokens"),
        (["--tiers", "1KiB", *BYTES], "--tiers 1KiB: holds no block of 512 tokens"),
        (["--tiers", "64GiB"], "give --bytes-per-token"),
        (["--tiers", "some"], "'some' is not a size"),
        (["--tiers", "64G", *BYTES], "unknown unit 'g'"),
        (["--tiers", "5,5"], "5 is not larger than the size before it"),
        (["--tiers", "5,,6"], "an entry is empty"),
        (["--capacities", "9,3"], "3 is not larger than the size before it"),
        (["--policy", "chance"], "unknown policy 'chance'; did you mean 'chances'?"),
        (["--policy", "arc"], "unknown policy 'arc'"),
        (["--bytes-per-token", "128"], "no unit"),
        (["--bytes-per-token", "0B"], "must be at least 1B"),
        (["--prefill-rate", "0"], "--prefill-rate '0.0': must be a number from"),
        (["--prefill-rate", "1e-320"], "must be a number from 1e-6"),
        (["--tier-rates", "3"], "needs --bytes-per-token and --prefill-rate"),
        (["--tier-rates", "3,4", *BYTES, "--prefill-rate", "9"], "2 rates for 1 tiers"),
        (["--tier-rates", "fast", *BYTES, "--prefill-rate", "9"], "'fast': must be a number"),
        (["--csv", "/nowhere/x.csv"], "cannot write /nowhere/x.csv: No such directory"),
        (["--png", "/"], "cannot write /: Is a directory"),
    ],
)
def test_what_cannot_be_done_is_one_line(run, trace, arguments, says):
    ran = run("simulate", trace, *arguments)
    assert ran.code == 2
    assert says in ran.error_line


@pytest.mark.parametrize("option", ["--csv", "--png", "--json"])
def test_the_trace_itself_is_not_overwritten(run, trace, option):
    before = trace.read_bytes()
    ran = run("simulate", trace, option, trace.parent / "." / trace.name)
    assert (ran.code, "is the input file, or is named twice" in ran.error_line) == (2, True)
    assert trace.read_bytes() == before


def test_two_outputs_in_one_file_are_refused(run, trace, tmp_path):
    ran = run("simulate", trace, "--csv", tmp_path / "out", "--json", tmp_path / "out")
    assert (ran.code, "named twice" in ran.error_line) == (2, True)


def test_a_trace_that_is_none(run, tmp_path):
    ran = run("simulate", tmp_path / "missing")
    assert (ran.code, "cannot read trace" in ran.error_line) == (2, True)
    (tmp_path / "thesis").write_text("precious")
    ran = run("simulate", tmp_path / "thesis")
    assert (ran.code, "line 1: " in ran.error_line) == (2, True)


def test_a_picture_needs_matplotlib(run, trace, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setattr("kvferry.cli.output.find_spec", lambda _name: None)
    ran = run("simulate", trace, "--png", tmp_path / "curve.png")
    assert (ran.code, "pip install 'kvferry[demo]'" in ran.error_line) == (2, True)

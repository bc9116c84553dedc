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


def test_hit_rates_by_size(run, trace, tmp_path):
    out, png = tmp_path / "out.json", tmp_path / "curve.png"
    ran = run("simulate", trace, "--sizes", "50, 5", "--json", out, "--png", png)
    assert ran.code == 0, ran.err
    assert "optimum" in ran.out
    value = json.loads(out.read_text())
    assert value["trace"]["requests"] == 150
    assert [row["capacity_blocks"] for row in value["curve"]] == [50, 5]
    assert png.read_bytes().startswith(b"\x89PNG")


def test_sizes_in_bytes(run, trace):
    ran = run("simulate", trace, "--sizes", "1MiB,3MiB", "--bytes-per-token", "256B", "--json", "-")
    assert ran.code == 0, ran.err
    rows = json.loads(ran.out)["curve"]
    assert [row["capacity_blocks"] for row in rows] == [8, 24]
    assert rows[1]["capacity_bytes"] == 24 * 512 * 256


def test_the_sizes_by_default_reach_all_blocks(run, trace):
    curve = json.loads(run("simulate", trace, "--json", "-").out)["curve"]
    assert curve[-1]["lru"] == curve[-1]["optimum"]


def test_hits_that_end_at_states(run, trace):
    anywhere, at_states = (
        json.loads(run("simulate", trace, "--sizes", "50", "--json", "-", *more).out)["curve"][0]
        for more in ([], ["--state-every", "1536"])
    )
    assert 0 < at_states["lru_hit_tokens"] < anywhere["lru_hit_tokens"]


BYTES = ["--bytes-per-token", "1KiB"]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--sizes", "0"], "--sizes 0: holds no block of 512 tokens"),
        (["--sizes", "1KiB", *BYTES], "--sizes 1KiB: holds no block of 512 tokens"),
        (["--sizes", "64GiB"], "give --bytes-per-token"),
        (["--sizes", "some"], "'some' is not a size"),
        (["--sizes", "64G", *BYTES], "unknown unit 'g'"),
        (["--sizes", "5,,6"], "'' is not a size"),
        (["--bytes-per-token", "128"], "no unit"),
        (["--bytes-per-token", "0B"], "must be at least 1B"),
        (["--state-every", "500"], "no multiple of the trace's blocks of 512 tokens"),
        (["--png", "/nowhere/x.png"], "cannot write /nowhere/x.png: No such directory"),
        (["--png", "/"], "cannot write /: Is a directory"),
    ],
)
def test_what_cannot_be_done_is_one_line(run, trace, arguments, says):
    ran = run("simulate", trace, *arguments)
    assert ran.code == 2
    assert says in ran.error_line


@pytest.mark.parametrize("option", ["--png", "--json"])
def test_the_trace_itself_is_not_overwritten(run, trace, option):
    before = trace.read_bytes()
    ran = run("simulate", trace, option, trace.parent / "." / trace.name)
    assert (ran.code, "is the input file, or is named twice" in ran.error_line) == (2, True)
    assert trace.read_bytes() == before


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
    assert (ran.code, "pip install '.[demo]'" in ran.error_line) == (2, True)

"""Every benchmark runs, with all its rows and figures."""

from __future__ import annotations

import importlib
import json
import os

import pytest

from benchmarks import BENCHMARKS, Options, layout
from benchmarks.__main__ import main
from kvferry.errors import ConfigError

RATES = {"gb_per_s", "straight_gb_per_s", "ratio", "copy_gb_per_s", "copy_ratio", "memcpy_gb_per_s"}
ROWS = {
    "audit": (
        ["no store", "off", "first", "1.0"],
        {"audit", "later_ms", "first_ms", "rate_of_1_percent"},
    ),
    "away": (
        ["no connector", "refuses", "never answers", "directory", "directory, never answers"],
        {
            "store", "tokens_per_s", "ratio", "worst_round", "lookups", "lookup_p999_us",
            "worst_lookup_us", "sum_p999_us", "worst_sum_us",
        },
    ),
    "datapath": (
        ["save_disk", "load_warm", "load_cold"],
        {
            "case", "gb_per_s", "limit", "limit_gb_per_s", "ratio", "cpu_s_per_gb",
            "limit_all_threads_gb_per_s", "in_hand_gb_per_s",
        },
    ),
    "device": (
        [
            *["machine", "tests", *["sanitizer"] * 2, *["copies"] * 4, *["stall"] * 2],
            *[*["launches"] * 3, *["soak"] * 6, *["rounding"] * 8],
        ],
        {
            "part", "case", "failed", "note", "triton", "cuda", "device_gib", "passed", "skipped",
            "chunk_mb", "out_gb_per_s", "out_ratio", "in_gb_per_s", "in_ratio", "both_gb_per_s",
            "hash_gb_per_s", "out_host_us", "in_host_us", "start_s", "stall_us", "gather_gb_per_s",
            "alone_ms", "verifying_ms", "without_lock_ms", "ratio", "verified_gb_per_s",
            "without_lock_gb_per_s", "actions", "wrong", "of_limit", "error", "bias", "chunks",
        },
    ),
    "handover": (
        [129, 257, 385, 320],
        {
            "prompt_tokens", "moved_tokens", "moved_mb", "computed_ms",
            "handed_over_ms", "own_hit_ms", "transfer_ms", "first_transfer_ms", "socket_ms",
            "step_ms", "worst_step_ms", "loaded_computed_ms", "loaded_handed_over_ms",
            "loaded_own_hit_ms", "computed_step_ms", "handed_over_step_ms", "own_hit_step_ms",
            "computed_worst_step_ms", "handed_over_worst_step_ms", "own_hit_worst_step_ms",
            "computed_takes_ms", "handed_over_takes_ms", "own_hit_takes_ms",
        },
    ),
    "launches": (
        [1, 2, 4],
        {
            "threads", "alone_ms", "verifying_ms", "without_lock_ms", "ratio",
            "verified_gb_per_s", "without_lock_gb_per_s",
        },
    ),
    "layout": (
        [case.name for case in layout.CASES],
        {"case", "stored_by", "read_by", *RATES},
    ),
    "lookup": (
        [1000, 2000],
        {
            "chunks_stored", "find_us_per_chunk", "us_per_chunk", "held_us_per_chunk",
            "index_bytes_per_chunk", "keys_us_per_chunk", "open_ms", "index_fill_s",
            "index_rebuild_s", "worst_lookup_ms_while_filling",
        },
    ),
    "peer": (
        [16, 256, 2048],
        {
            "record_kib", "transport_gb_per_s", "asked_gb_per_s", "ratio", "stream_gb_per_s",
            "stream_ratio", "verified_gb_per_s", "verified_ratio",
            "verified_all_threads_gb_per_s", "memcpy_gb_per_s",
        },
    ),
    "serving": (
        ["not read", "read once", "read without a pause"],
        {"case", "tokens_per_s", "ratio", "read_gb_per_s"},
    ),
    "stores": (
        ["file", "file", "memory", "memory"],
        {
            "store", "threads", "put_gbps", "read_gbps", "verified_gbps", "plain_put_gbps",
            "plain_get_gbps", "put_ratio", "read_ratio", "ask_us",
        },
    ),
    "step": ([32], {"layers", "us_per_step"}),
}  # fmt: skip
"""The first value of each row, and all names. A machine may add rows, of its tmpfs and its GPU."""
SLOW = {"device", "handover"}
"""`test_device` runs the parts of the former."""


def test_every_benchmark_is_run_here_but_those_of_vllm():
    """tests/real_vllm runs these."""
    assert ROWS.keys() == BENCHMARKS.keys() - {"proxied", "tier", "vllm"}


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.sweep if name in SLOW else ()) for name in ROWS]
)
def test_a_benchmark_prints_its_rows(name, tmp_path, capsys):
    out, scratch = tmp_path / "rows.json", tmp_path / "scratch"
    scratch.mkdir()
    assert main([name, "--quick", "--dir", str(scratch), "--json", str(out)]) == 0
    value = json.loads(out.read_text())
    assert list(value) == ["machine", "rows"]
    firsts, figures = ROWS[name]
    found = [next(iter(row.values())) for row in value["rows"]]
    assert [first for first in found if first in firsts] == firsts
    assert {figure for row in value["rows"] for figure in row} == figures
    printed = capsys.readouterr().out
    assert max(map(len, printed.splitlines())) <= 80
    measured = {name for row in value["rows"] for name, each in row.items() if each is not None}
    measured -= {"note"}  # its text is below the table
    assert all(figure.replace("_", " ") in printed for figure in measured)
    assert os.listdir(scratch) == []


@pytest.mark.parametrize("name", BENCHMARKS)
def test_every_benchmark_can_be_loaded(name):
    assert callable(importlib.import_module(f"benchmarks.{name}").run)


def test_without_a_name_all_are_listed(capsys):
    assert main([]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == list(BENCHMARKS)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["step", "--threads", "0"], "threads is 0"),
        (["step", "--rounds", "0"], "rounds is 0"),
        (["step", "--dir", "/nowhere/at/all"], "/nowhere/at/all"),
    ],
)
def test_bad_input_is_one_line(capsys, arguments, message):
    assert main(arguments) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ")
    assert message in line


def test_an_unknown_name_is_refused(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["lokup"])
    assert ended.value.code == 2
    assert "lookup" in capsys.readouterr().err


def test_options_that_make_no_sense_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="rounds is 0"):
        Options(directory=tmp_path, rounds=0)

"""Every benchmark runs, with all its rows."""

from __future__ import annotations

import importlib
import json
import os

import pytest

from benchmarks import BENCHMARKS, layout
from benchmarks.__main__ import main

ROWS = {
    "audit": ["no store", "off", "first", "1.0"],
    "away": ["no connector", "refuses", "never answers", "directory", "directory, never answers"],
    "datapath": ["save_disk", "load_warm", "load_cold"],
    "device": [
        *["machine", "tests", *["sanitizer"] * 2, *["copies"] * 4, *["stall"] * 2],
        *[*["launches"] * 3, *["soak"] * 6, *["rounding"] * 8],
    ],
    "handover": [129, 257, 385, 320],
    "launches": [1, 2, 4],
    "layout": [case.name for case in layout.CASES],
    "lookup": [1000, 2000],
    "peer": [16, 256, 2048],
    "serving": ["not read", "read once", "read without a pause"],
    "states": [
        *["first start", "later start", "computed and stored", "no store"],
        *["first hit, audited", "later hit", "plain read of the files", "bytes"],
    ],
    "stores": ["file", "file", "memory", "memory"],
    "step": [32],
}
"""The first value of each row. A machine may add rows, of its tmpfs and its GPU."""
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
    firsts = ROWS[name]
    found = [next(iter(row.values())) for row in value["rows"]]
    assert [first for first in found if first in firsts] == firsts
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

"""`kvferry bench`: one shape of result for every benchmark."""

from __future__ import annotations

import json
import os
import sys
from types import ModuleType

import pytest

from kvferry.bench import BENCHMARKS


@pytest.fixture
def fake_benchmark(monkeypatch):
    """A benchmark that writes a file and returns its options as its only row."""
    module = ModuleType("kvferry.bench.lookup")

    def run(options):
        (options.directory / "file").write_bytes(b"x")
        return [{"quick": options.quick, "threads": options.threads, "seed": options.seed}]

    module.run = run
    monkeypatch.setitem(sys.modules, "kvferry.bench.lookup", module)
    assert "lookup" in BENCHMARKS


def test_the_result_is_machine_and_rows(run, fake_benchmark, tmp_path):
    out = tmp_path / "out.json"
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    ran = run("bench", "lookup", "--quick", "--threads", 3, "--dir", scratch, "--json", out)
    assert ran.code == 0
    value = json.loads(out.read_text())
    assert list(value) == ["machine", "rows"]
    assert value["rows"] == [{"quick": True, "threads": 3, "seed": 0}]
    assert "threads" in ran.out
    assert os.listdir(scratch) == []
    assert os.listdir(tmp_path).count("out.json") == 1


def test_json_on_stdout_is_json_alone(run, fake_benchmark):
    assert json.loads(run("bench", "lookup", "--json", "-").out)["rows"]

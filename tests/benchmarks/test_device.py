"""The benchmark `device` where there is no GPU: each part runs, and what fails is seen."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from benchmarks import Options, device
from benchmarks.__main__ import main
from tests.cache.moving.soak import CONTROLS

SCRIPT = Path(__file__).parents[2] / "scripts" / "test-gpu"


@pytest.mark.parametrize("part", sorted(device.PARTS.keys() - {"launches", "tests"}))
def test_a_part_runs_in_little(part, tmp_path):
    """The others start processes, or are benchmarks of their own: test_main runs all."""
    out = tmp_path / "rows.json"
    assert main(["device", "--quick", "--part", part, "--json", str(out)]) == 0
    rows = json.loads(out.read_text())["rows"]
    assert {row["part"] for row in rows} == {part}
    assert {row["failed"] for row in rows} == {0}
    if part == "soak":
        right, *controls = rows
        assert right["wrong"] == 0
        assert len(controls) == len(CONTROLS)
        assert all(row["wrong"] > 0 for row in controls)


def test_an_unknown_part_is_refused(capsys):
    assert main(["device", "--part", "copy"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "no part 'copy'; there are machine, tests" in line


def fails(_options):
    return [{"case": "a", "failed": 0}, {"case": "b", "failed": 2}]


def test_what_a_row_found_is_the_exit_code(monkeypatch, capsys):
    monkeypatch.setitem(device.PARTS, "machine", (fails, 60))
    assert main(["device", "--part", "machine"]) == 1
    assert "failed" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("program", "seconds", "note"),
    [
        ("exec sleep 600", 0.01, "not done after 0.01 s"),
        ("kill -SEGV $$", 60, "exit code -11"),
        ("echo CUDA error: an illegal memory access >&2; exit 1", 60, "CUDA error: an illegal"),
    ],
)
def test_a_part_that_ends_or_hangs_is_a_row(program, seconds, note, tmp_path, monkeypatch):
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\n{program}\n")
    python.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(python))
    monkeypatch.setitem(device.PARTS, "machine", (fails, seconds))
    (row,) = device.run_apart("machine", Options(directory=tmp_path, quick=True))
    assert (row["part"], row["failed"]) == ("machine", 1)
    assert row["note"].startswith(note)


def run_script(wheels: Path) -> subprocess.CompletedProcess[str]:
    """Run it in a Python without any package."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return subprocess.run(
        [sys.executable, "-S", str(SCRIPT), "--wheels", str(wheels)],
        capture_output=True, text=True, timeout=120, env=environment, check=False,
    )  # fmt: skip


def test_packages_that_are_missing_are_named_in_one_line(tmp_path):
    done = run_script(tmp_path)
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert "lacks blake3, hypothesis, msgspec" in line
    assert "pip download" in line


def test_packages_may_lie_beside_it_as_wheels(tmp_path):
    with zipfile.ZipFile(tmp_path / "blake3-1-py3-none-any.whl", "w") as wheel:
        wheel.writestr("blake3/__init__.py", "")
    (line,) = run_script(tmp_path).stderr.splitlines()
    assert "lacks hypothesis, msgspec" in line

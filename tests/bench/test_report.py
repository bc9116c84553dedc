"""The benchmarks by name, and what is said about the machine they ran on."""

from __future__ import annotations

import getpass
import io
import json
import platform
from pathlib import Path

import pytest
from rich.console import Console

from kvferry.bench import BENCHMARKS, BenchOptions, load, report
from kvferry.errors import ConfigError


def test_an_unknown_benchmark_names_the_nearest():
    with pytest.raises(ConfigError, match="'lookup'"):
        load("lokup")


def test_options_that_make_no_sense_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="threads is 0"):
        BenchOptions(directory=tmp_path, threads=0)


@pytest.mark.parametrize("name", BENCHMARKS)
def test_every_benchmark_can_be_loaded(name):
    assert callable(load(name))


def test_the_machine_is_described_without_names(tmp_path):
    facts = report.machine(tmp_path)
    assert list(facts) == [
        "cpu", "cores", "memory_bytes", "kernel", "python", "torch", "kvferry", "file_system",
        "date",
    ]  # fmt: skip
    text = json.dumps(facts)
    for name in (platform.node(), str(tmp_path), Path.home().name):
        assert len(name) < 5 or name not in text
    assert getpass.getuser() not in text or getpass.getuser() in platform.platform()
    assert facts["memory_bytes"] > 2**28
    assert facts["cores"] >= 1


def test_the_file_system_is_that_of_the_directory(tmp_path):
    if platform.system() != "Linux":
        assert report.file_system(tmp_path) is None
        return
    assert report.file_system(Path("/proc/self")) == "proc"
    assert report.file_system(Path("/sys")) == "sysfs"
    assert report.file_system(tmp_path) not in (None, "proc", "sysfs")


def test_the_table_shows_every_row_and_the_machine(tmp_path):
    rows = [
        {"case": "load", "gb_per_s": 4.123456, "limit": "memcpy"},
        {"case": "save", "gb_per_s": 12345.678, "limit": None},
    ]
    console = Console(width=120, file=io.StringIO())
    console.print(report.table("datapath", report.machine(tmp_path), rows))
    # The line about the machine wraps where it is long.
    text = " ".join(console.file.getvalue().split())
    assert all(part in text for part in ("load", "4.123", "12346", "memcpy", "torch "))
    assert "None" not in text

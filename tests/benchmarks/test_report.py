"""The table of a measurement, and the machine that it ran on."""

from __future__ import annotations

import getpass
import json
import platform
from pathlib import Path

from benchmarks import report
from kvferry.filesystem import file_system


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
        assert file_system(tmp_path) is None
        return
    assert file_system(Path("/proc/self")) == "proc"
    assert file_system(Path("/sys")) == "sysfs"
    assert file_system(tmp_path) not in (None, "proc", "sysfs")


FACTS = {
    "cpu": "Some CPU",
    "cores": 2,
    "memory_bytes": 24 << 30,
    "torch": "2.13.0",
    "kvferry": "0.1",
    "file_system": None,
    "date": "2026-11-25",
}


def test_a_figure_is_a_line_and_a_row_is_a_column():
    rows = [
        {"case": "load", "phase": "cold", "gb_per_s": 4.123456, "limit": "memcpy"},
        {"case": "load", "phase": "warm", "gb_per_s": 12345.678, "equal": True},
        {"case": "save", "phase": "cold", "limit": None, "note": "not measured"},
    ]
    assert str(report.table("datapath", FACTS, rows)).splitlines() == [
        "datapath",
        "",
        "case        load   load  save",
        "phase       cold   warm  cold",
        "-----------------------------",
        "gb per s   4.123  12346",
        "limit     memcpy",
        "equal              True",
        "",
        "Some CPU, 2 cores, 24 GiB, torch 2.13.0, 2026-11-25",
        "save: not measured",
    ]


def test_columns_beyond_80_characters_stand_in_another_table():
    rows = [
        {"case": f"{number} has a text that is long", "only_of_the_first": None, "ratio": 1.5}
        for number in range(7)
    ]
    rows[0]["only_of_the_first"] = 1
    lines = str(report.table("layout", FACTS, rows)).splitlines()
    assert max(map(len, lines)) <= 80
    assert sum("ratio" in line for line in lines) == 3
    assert sum("only of the first" in line for line in lines) == 1
    assert sum(line.count("1.5") for line in lines) == 7
    assert [word for line in lines for word in line.split() if word.isdigit()] == [
        *("0", "1", "2"), "1", *("3", "4", "5"), "6", "2", "24",
    ]  # fmt: skip


def test_a_table_without_rows_names_the_machine():
    assert str(report.table("step", FACTS, [])).startswith("step\n\nSome CPU")

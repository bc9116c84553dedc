"""`kvferry bench`: stores beside their clients, and where the other benchmarks are."""

from __future__ import annotations

import json
import os

import pytest

from benchmarks import BENCHMARKS
from kvferry.cli.bench import IN_REPOSITORY


def test_the_result_is_machine_and_rows(run, tmp_path):
    out = tmp_path / "out.json"
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    options = ["--quick", "--threads", 3, "--store", "memory://one", "--dir", scratch]
    ran = run("bench", "stores", *options, "--json", out)
    assert ran.code == 0
    value = json.loads(out.read_text())
    assert list(value) == ["machine", "rows"]
    assert [(row["store"], row["threads"]) for row in value["rows"]] == [
        ("memory", 1),
        ("memory", 3),
    ]
    assert "\nput gbps" in ran.out
    assert max(map(len, ran.out.splitlines())) <= 80
    assert os.listdir(scratch) == []


def test_json_on_stdout_is_json_alone(run):
    ran = run("bench", "stores", "--quick", "--store", "memory://one", "--json", "-")
    assert json.loads(ran.out)["rows"]


@pytest.mark.parametrize("name", IN_REPOSITORY)
def test_a_benchmark_that_moved_is_one_line_that_says_where(run, name):
    ran = run("bench", name, "--quick")
    assert ran.code == 2
    assert f"make bench NAME={name}" in ran.error_line


def test_what_stands_in_the_repository_is_there():
    assert set(IN_REPOSITORY) == set(BENCHMARKS)

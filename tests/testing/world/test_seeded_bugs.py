"""Worlds find bugs that are put into kvferry. `seeded_bugs` runs all of them; here are a few."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from .seeded_bugs import BUGS, SRC, applied

QUICK = [
    "a load keeps its pins after its plan",
    "a hit ends inside of a block",
    "a reset does not change the namespace",
    "a reason is counted twice",
]


def test_every_bug_still_has_its_place():
    for bug in BUGS:
        by_file: dict[str, list] = {}
        for edit in bug.edits:
            by_file.setdefault(edit.file, []).append(edit)
        for file, edits in by_file.items():
            compile(applied((SRC / file).read_text("utf-8"), edits), file, "exec")


@pytest.mark.slow
def test_a_failure_is_replayed_by_its_line_with_the_same_trace():
    """A server hangs while a consumer waits for its producer, whose engine is killed, and is used
    no more."""
    code = (
        "import sys\n"
        f"from {__package__}.seeded_bugs import BUGS, infect\n"
        "(bug,) = [each for each in BUGS if each.name == 'a tier that was away never comes back']\n"
        "infect(bug)\n"
        "from kvferry.testing.world.__main__ import main\n"
        "sys.exit(main(['--scenario', 'producer-dies']))\n"
    )
    said = []
    for number in "12":
        variables = {**os.environ, "PYTHONHASHSEED": number}
        command = [sys.executable, "-c", code]
        done = subprocess.run(command, env=variables, capture_output=True, text=True, check=False)
        assert done.returncode == 1, done.stderr
        said.append(done.stdout)
    assert said[0] == said[1]
    assert "asking again: kill ('p'" in said[0]
    assert "FAILED: liveness" in said[0]


@pytest.mark.slow
@pytest.mark.parametrize("name", QUICK)
def test_a_bug_is_found(name):
    command = [sys.executable, "-m", f"{__package__}.seeded_bugs", name, "--seeds", "40"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.endswith("1 of 1 found; not: []\n"), done.stdout

"""The process of the vLLM benchmark that obeys: answers, ends, and what is left of it."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from kvferry.bench.vllm.process import Child, ChildFailedError, last_error

OBEYS = """
import json, os, subprocess, sys, time
print("noise", file=sys.stderr)
for line in sys.stdin:
    match json.loads(line)["do"]:
        case "die":
            raise RuntimeError("no such device")
        case "half":
            print("{", end="", flush=True)
            os._exit(0)
        case "hang":
            time.sleep(600)
        case "fork":
            print(subprocess.Popen(["sleep", "600"], stdout=sys.stderr).pid, flush=True)
        case "stay":
            print("{}", flush=True)
            sys.stdin.read()
            time.sleep(600)
        case "end badly":
            print("{}", flush=True)
            sys.exit("ValueError: still busy")
        case other:
            print(json.dumps({"did": other}), flush=True)
"""


@pytest.fixture
def start(tmp_path):
    children = []

    def start(seconds: float = 30.0) -> Child:
        command = (sys.executable, "-c", OBEYS)
        children.append(Child(tmp_path / "log", command, seconds))
        return children[-1]

    yield start
    for child in children:
        child.kill()


def state_of(pid: int) -> str:
    """As `ps` shows it; Z also once nothing is left of the process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return "Z"


def reaches(pid: int, state: str) -> bool:
    """Whether a process comes to a state within ten seconds."""
    until = time.monotonic() + 10
    while state_of(pid) != state and time.monotonic() < until:
        pass
    return state_of(pid) == state


def test_commands_are_answered_one_by_one_and_the_end_is_waited_for(start, tmp_path):
    child = start()
    assert [child.ask({"do": name}) for name in "ab"] == [{"did": "a"}, {"did": "b"}]
    child.close()
    child.kill()
    assert (tmp_path / "log").read_text() == "noise\n"


@pytest.mark.parametrize(
    ("command", "reason"),
    [("die", "RuntimeError: no such device"), ("half", "noise"), ("hang", "no answer within 1 s")],
)
def test_a_child_that_dies_or_hangs_is_told_with_its_reason(start, command, reason):
    child = start(seconds=1.0 if command == "hang" else 30.0)
    with pytest.raises(ChildFailedError, match=reason):
        child.ask({"do": command})


@pytest.mark.parametrize(
    ("command", "reason"), [("end badly", "ValueError: still busy"), ("stay", "no end within 1 s")]
)
def test_a_bad_end_is_a_failure(start, command, reason):
    child = start()
    child.ask({"do": command})
    if command == "stay":
        child._seconds = 1.0  # only now: to start may take longer
    with pytest.raises(ChildFailedError, match=reason):
        child.close()


def test_a_child_that_died_between_two_commands_fails_the_second(start):
    child = start()
    pid = child.ask({"do": "pid"}) and child._process.pid
    os.kill(pid, 9)
    with pytest.raises(ChildFailedError, match="noise"):
        child.ask({"do": "a"})


@pytest.mark.parametrize("end", ["close", "kill"])
def test_what_a_child_started_ends_with_it(start, end):
    child = start()
    pid = child.ask({"do": "fork"})
    assert state_of(pid) != "Z"
    getattr(child, end)()
    assert reaches(pid, "Z")


def test_a_child_is_stopped_between_commands(start):
    child = start()
    for _ in range(3):
        assert child.ask({"do": "a"}) == {"did": "a"}
        assert reaches(child._process.pid, "T")


def test_a_stopped_child_does_not_outlive_its_parent(tmp_path):
    script = f"""
import os, sys
from pathlib import Path
from kvferry.bench.vllm.process import Child
child = Child(Path({str(tmp_path / "log")!r}), (sys.executable, "-c", {OBEYS!r}))
child.ask({{"do": "a"}})
print(child._process.pid, flush=True)
os.kill(os.getpid(), 9)
"""
    parent = subprocess.run([sys.executable, "-c", script], capture_output=True, check=False)
    assert parent.returncode == -9, parent.stderr
    assert reaches(int(parent.stdout), "Z")


def test_the_reason_of_a_failure_is_the_last_error_of_the_log(tmp_path):
    log = tmp_path / "log"
    log.write_text("INFO starting\nValueError: first\nRuntimeError: the engine died\nINFO bye\n\n")
    assert last_error(log) == "RuntimeError: the engine died"
    log.write_text("Killed\n")
    assert last_error(log) == "Killed"
    log.write_text("")
    assert last_error(log) == "no output"

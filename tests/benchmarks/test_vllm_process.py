"""A process of the vLLM benchmark: its result, its end, and what is left of it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from benchmarks.vllm import ChildFailedError, last_error, run_child
from kvferry.testing.stores.hooks import wait_until

WORKS = """
import json, os, signal, subprocess, sys
print("noise", file=sys.stderr)
match (work := json.load(sys.stdin))["do"]:
    case "die":
        raise RuntimeError("no such device")
    case "say nothing":
        os._exit(0)
    case "hang":
        signal.pause()
    case "fork":
        print(subprocess.Popen(["sleep", "600"], stdout=sys.stderr).pid, flush=True)
    case "fork and hang":
        print(subprocess.Popen(["sleep", "600"]).pid, file=sys.stderr, flush=True)
        signal.pause()
    case "end badly":
        print("{}", flush=True)
        sys.exit("ValueError: still busy")
    case _:
        print(json.dumps({"did": work}), flush=True)
"""


@pytest.fixture
def run(tmp_path):
    """The result of a process that is given its work, and may take so long."""

    def run(do: str, seconds: float = 120.0, **more):
        return run_child(
            tmp_path / "log", {"do": do, **more}, (sys.executable, "-c", WORKS), seconds
        )

    return run


def state_of(pid: int) -> str:
    """As `ps` shows it; Z also once nothing is left of the process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return "Z"


def wait_gone(pid: int) -> None:
    wait_until(lambda: state_of(pid) == "Z", f"the end of {pid}", 60.0)


def test_work_goes_in_and_the_result_alone_comes_out(run, tmp_path):
    tokens = list(range(50_000))  # more than a pipe holds
    assert run("work", tokens=tokens) == {"did": {"do": "work", "tokens": tokens}}
    assert (tmp_path / "log").read_text() == "noise\n"


@pytest.mark.parametrize(
    ("do", "reason"),
    [
        ("die", "RuntimeError: no such device"),
        ("say nothing", "noise"),
        ("hang", "no answer within 1 s"),
        ("end badly", "ValueError: still busy"),
    ],
)
def test_a_process_that_dies_or_hangs_fails_with_its_reason(run, do, reason):
    with pytest.raises(ChildFailedError, match=reason):
        run(do, seconds=1.0 if do == "hang" else 120.0)


def test_what_a_process_started_ends_with_it(run, tmp_path):
    wait_gone(run("fork"))
    for seconds in (3.0, 60.0):  # a machine that stalls may not come to the fork at first
        with pytest.raises(ChildFailedError, match="no answer"):
            run("fork and hang", seconds)
        if (last := (tmp_path / "log").read_text().split()[-1]).isdigit():
            break
    wait_gone(int(last))


def test_the_reason_of_a_failure_is_the_last_error_of_the_log(tmp_path):
    log = tmp_path / "log"
    log.write_text("INFO starting\nValueError: first\nRuntimeError: the engine died\nINFO bye\n\n")
    assert last_error(log) == "RuntimeError: the engine died"
    log.write_text("Killed\n")
    assert last_error(log) == "Killed"
    log.write_text("")
    assert last_error(log) == "no output"

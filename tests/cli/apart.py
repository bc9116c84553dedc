"""Runs commands of kvferry in processes of their own, which start fast because this one forks them:
`python apart.py DIRECTORY JOBS [file|closed|tty] [one-by-one] [impatient|patient]`.

Prints a line with their process ids, then a line that says how they ended. Their input is empty.
Their output goes to a file, to a pipe without a reader, or to a terminal of 60 columns. A
command waits for the first answer of a server: one second if `impatient`, minutes if `patient`.
"""

from __future__ import annotations

import fcntl
import importlib
import json
import os
import pty
import resource
import struct
import sys
import termios
import time
from pathlib import Path

from kvferry.cli import stores
from kvferry.cli.main import main

for _name in ("kvferry.explain", "kvferry.doctor.stores", "kvferry.doctor.machine", "numpy"):
    importlib.import_module(_name)  # once here, so not in each process


def start(job: list[str], place: Path, stdout: str) -> tuple[int, int | None]:
    """Fork a process that runs a command; return its id, and the other end of its terminal."""
    leader, follower = pty.openpty() if stdout == "tty" else (None, None)
    pid = os.fork()
    if pid:
        if follower is not None:
            os.close(follower)
        return pid, leader
    if follower is not None:
        fcntl.ioctl(follower, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 60, 0, 0))
        os.environ["TERM"] = "xterm"
    elif stdout == "closed":
        reader, follower = os.pipe()
        os.close(reader)
    else:
        follower = os.open(f"{place}.out", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(follower, 1)
    os.dup2(os.open(f"{place}.err", os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 2)
    sys.exit(main(job))


def end(pid: int, leader: int | None, place: Path) -> dict[str, object]:
    started, before = time.monotonic(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    shown = b""
    try:
        while leader is not None and (piece := os.read(leader, 1 << 16)):
            shown += piece
    except OSError:  # all is read, and the other end is closed
        pass
    _, status, usage = os.wait4(pid, 0)
    out = Path(f"{place}.out")
    return {
        "code": os.waitstatus_to_exitcode(status),
        "out": shown.decode() if not out.exists() else out.read_text(),
        "err": Path(f"{place}.err").read_text(),
        "seconds": time.monotonic() - started,
        "grown_bytes": (usage.ru_maxrss - before) << 10,
    }


def run(directory: Path, jobs: list[list[str]], stdout: str, *, one_by_one: bool) -> None:
    places = [directory / f"job{number}" for number in range(len(jobs))]
    started, ended = [], []
    for job, place in zip(jobs, places, strict=True):
        started.append(start(job, place, stdout))
        if one_by_one:
            ended.append(end(*started[-1], place))
    print(json.dumps([pid for pid, _ in started]), flush=True)
    if not one_by_one:
        ended = [end(*each, place) for each, place in zip(started, places, strict=True)]
    print(json.dumps(ended), flush=True)


if __name__ == "__main__":
    given, jobs, *options = sys.argv[1:]
    stdout = options[0] if options else "file"
    for name, seconds in (("impatient", 1.0), ("patient", 600.0)):
        if name in options:
            stores.FIRST_ANSWER_SECONDS = seconds
    run(Path(given), json.loads(jobs), stdout, one_by_one="one-by-one" in options)

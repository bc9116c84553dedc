"""`kvferry status --watch` in a terminal of 60 columns: it follows changes; Ctrl-C ends it."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import re
import select
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from contextlib import contextmanager

from kvferry.observe import Counters
from tests.cli.test_status import exported, says, served

SECONDS = 120.0
"""Tells late from never."""

COLUMNS = 60
ALTERNATE, BACK = "\x1b[?1049h", "\x1b[?1049l"
HIDE, SHOW = "\x1b[?25l", "\x1b[?25h"
CODE = """
import fcntl, sys, termios
from kvferry.cli.main import main
fcntl.ioctl(0, termios.TIOCSCTTY, 0)  # so that Ctrl-C there is for this process
sys.exit(main(sys.argv[1:]))
"""


class Terminal:
    """A command in a terminal, and all that it has written there."""

    def __init__(self, process: subprocess.Popen[bytes], leader: int) -> None:
        self.process = process
        self.shown = ""
        self._leader = leader

    def wait_for(self, text: str) -> None:
        """Read until the text is written anew, or the command ends without it."""
        start, until = len(self.shown), time.monotonic() + SECONDS
        while text not in self.shown[start:]:
            assert self._read(until), f"{text!r} is not in {self.shown[start:]!r}"

    def press(self, keys: bytes) -> None:
        os.write(self._leader, keys)

    def read_to_end(self) -> int:
        """Exit code."""
        until = time.monotonic() + SECONDS
        while self._read(until):
            pass
        return self.process.wait(SECONDS)

    def _read(self, until: float) -> bool:
        left = max(0.0, until - time.monotonic())
        if not select.select([self._leader], [], [], left)[0]:
            return False
        try:
            piece = os.read(self._leader, 1 << 16)
        except OSError:  # the command has ended
            return False
        self.shown += piece.decode(errors="replace")
        return bool(piece)


@contextmanager
def top(*arguments: str) -> Iterator[Terminal]:
    leader, follower = pty.openpty()
    fcntl.ioctl(follower, termios.TIOCSWINSZ, struct.pack("HHHH", 40, COLUMNS, 0, 0))
    command = [sys.executable, "-c", CODE, "status", *arguments, "--watch", "--interval", "0.1"]
    sizes = {"COLUMNS", "LINES"}  # they would count for more than the terminal
    environment = {name: text for name, text in os.environ.items() if name not in sizes}
    environment["TERM"] = "xterm"
    try:
        with subprocess.Popen(
            command, stdin=follower, stdout=follower, stderr=follower, env=environment,
            start_new_session=True,
        ) as process:  # fmt: skip
            os.close(follower)
            try:
                yield Terminal(process, leader)
            finally:
                process.kill()
    finally:
        os.close(leader)


def assert_tidy(terminal: Terminal) -> None:
    """Ended by Ctrl-C, the terminal is as it was, and no line was wider than it."""
    terminal.press(b"\x03")
    assert terminal.read_to_end() == 0
    shown = terminal.shown
    assert shown.count(ALTERNATE) == shown.count(BACK) == 1
    assert shown.rindex(SHOW) > shown.rindex(HIDE)
    assert "Traceback" not in shown
    assert "error" not in shown
    # A frame starts there; the terminal itself shows that Ctrl-C was pressed.
    rows = shown.replace("\x1b[H", "\n").replace("^C", "")
    lines = re.split(r"[\r\n]+", re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", rows))
    assert max(map(len, lines)) <= COLUMNS


def test_requests_that_a_journal_gets_are_shown(tmp_path):
    path = tmp_path / "journal"
    request = {"time": 1.0, "chunk_tokens": 4, "num_tokens": 10, "keys": []}
    with path.open("a", buffering=1) as journal:
        journal.write(json.dumps({**request, "misses": {"absent": 10}}) + "\n")
        with top("--journal", str(path)) as terminal:
            terminal.wait_for("0 of 10 tokens")
            journal.write(json.dumps({**request, "hits": {"file": 10}}) + "\n")
            terminal.wait_for("10 of 20 tokens")
            assert_tidy(terminal)


def test_metrics_that_change_and_an_engine_that_goes_and_comes_are_shown():
    counters = Counters()
    counters.count("hit_tokens/file", 100)
    is_up = True

    def answer(handler):
        says(exported(counters) if is_up else b"<html>starting")(handler)

    with served(answer) as url, top(url) as terminal:
        terminal.wait_for("100 of 100 tokens")
        counters.count("miss_tokens/absent", 23)
        terminal.wait_for("0 of 23 tokens")
        is_up = False
        terminal.wait_for("no answer for")
        is_up = True
        counters.count("hit_tokens/file", 41)
        terminal.wait_for("41 of 41 tokens")
        assert_tidy(terminal)

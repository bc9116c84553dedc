"""`kvferry report` as a command: what it prints and writes, and how it ends. (The page:
tests/report/.)"""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys

import pytest

from tests.cli.conftest import put_records
from tests.servers.process import LOCALHOST


def started(*arguments, **given):
    command = [sys.executable, "-m", "kvferry.cli", "report", *map(str, arguments)]
    return subprocess.Popen(command, **given)


def test_a_store_becomes_a_page_and_a_line(make_store, run, tmp_path):
    made = make_store(num_records=4)
    before = made.snapshot()
    page, facts = tmp_path / "page.html", tmp_path / "facts.json"
    ran = run("report", made.url, "--html", page, "--json", facts)
    assert (ran.code, ran.err) == (0, "")
    assert ran.out.startswith(f"{page}: 4 records, ")
    assert json.loads(facts.read_text())["records"] == 4
    text = page.read_text()
    assert text.startswith("<!DOCTYPE html>")
    assert made.schema.namespace.hex()[:16] in text
    assert "Give a journal" in text
    assert made.snapshot() == before


def test_a_store_without_records_has_a_page(make_store, run, tmp_path):
    made = make_store(num_records=1)
    page = tmp_path / "page.html"
    assert run("rm", made.url, "--max-bytes", "0", "--yes").code == 0
    journal = tmp_path / "journal"
    journal.write_text("")
    assert run("report", made.url, "--html", page, "--journal", journal).code == 0
    text = page.read_text()
    assert text.count("Nothing is stored.") == 2
    assert "no answered request" in text


def test_a_server_that_remembers_nothing_says_so(valkey_server, run, tmp_path):
    url = f"valkey://{LOCALHOST}:{valkey_server.port}/{tmp_path.name}"
    page = tmp_path / "page.html"
    assert "nothing is stored under" in run("report", url, "--html", page).error_line
    assert not page.exists()
    put_records(url, num_records=3)
    ran = run("report", url, "--html", page)
    assert (ran.code, ran.err) == (0, "")
    text = page.read_text()
    assert "does not remember what it removed" in text
    assert "none kept" in text


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--html", "/nowhere/at/all.html"], "No such directory"),
        (["--html", "{tmp}"], "Is a directory"),
        (["--html", "{tmp}/journal", "--journal", "{tmp}/journal"], "is the input file"),
        (["--html", "{tmp}/p", "--journal", "{tmp}/journal"], "line 1"),
        (["--html", "{tmp}/p", "--journal", "{tmp}/none"], "cannot read journal"),
        (["--html", "{tmp}/p", "--json", "{tmp}/p"], "named twice"),
        ([], "--html"),
    ],
)
def test_what_cannot_be_is_one_line_before_anything_is_written(
    make_store, run, tmp_path, options, says
):
    url = make_store().url
    (tmp_path / "journal").write_text("no journal\n")
    ran = run("report", url, *(each.format(tmp=tmp_path) for each in options))
    assert ran.code == 2
    assert says in ran.error_line
    assert (tmp_path / "journal").read_text() == "no journal\n"
    assert not (tmp_path / "p").exists()


def test_a_terminal_shows_progress_and_a_pipe_does_not(make_store, tmp_path):
    made = make_store(num_records=3)
    for has_terminal in (True, False):
        ours, theirs = pty.openpty() if has_terminal else os.pipe()
        with started(
            made.url, "--html", tmp_path / "page.html",
            stdout=subprocess.PIPE, stderr=theirs, env={**os.environ, "TERM": "xterm"},
        ) as command:  # fmt: skip
            os.close(theirs)
            shown = b""
            try:
                while part := os.read(ours, 4096):
                    shown += part
            except OSError:  # how a terminal ends
                pass
            os.close(ours)
            assert command.stdout.read().count(b"\n") == 1
        assert command.returncode == 0
        assert (b"reading records" in shown) == has_terminal
    assert shown == b""

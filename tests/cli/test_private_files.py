"""Whatever is made of prompts, other users of the machine cannot read: every file, at any umask."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from kvferry import journal as journal_module
from kvferry.journal import Journal
from kvferry.store.url import open_store
from tests.cli.test_every_command import COMMANDS

PROMPT = "The clause is executed. " * 60

MAKES = {
    "generate": "{model} {prompt} --store {store} --record {out}.jsonl --json {out}.json",
    "ls": "{store} --json {out}.json",
    "status": "{store} --json {out}.json",
    "explain": "{store} --model {model} --prompt-file {text} --json {out}.json",
    "doctor": "{store} --model {model} --json {out}.json",
    "report": "{store} --html {out}.html --journal {top}/generate.jsonl --json {out}.json",
    "simulate": "{top}/generate.jsonl --sizes 10,20 --json {out}.json",
    "pin": "{store}?max_bytes=1GiB --model {model} --until 1h --json {out}.json",
    "copy": "{store} file://{out} --json {out}.json",
    "warm": "{model} --store file://{out} --prompts {lines} --json {out}.json",
    "verify": "{store} --json {out}.json",
    "rm": "{store} --everything --yes --json {out}.json",
}
"""The arguments of every command, in an order in which each finds what it needs."""


@pytest.fixture
def top(tmp_path, monkeypatch) -> Iterator[Path]:
    """A directory that everyone may enter, with the caches of this user."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (top := tmp_path / "top").mkdir()
    before = os.umask(0)
    yield top
    os.umask(before)


def readable_by_others(top: Path) -> list[str]:
    """The files that others can read, through directories that they can enter."""
    found = []
    for folder, folders, names in os.walk(top):
        folders[:] = [each for each in folders if (Path(folder, each)).stat().st_mode & 0o011]
        files = [Path(folder, name) for name in names]
        found += [str(each) for each in files if stat.S_IMODE(each.lstat().st_mode) & 0o066]
    return found


def test_no_command_makes_a_file_that_others_can_read(run, top, model_dir, tmp_path):
    assert {*MAKES, "demo"} == set(COMMANDS)  # the prompts of the demo are Python's documentation
    given = {"text": tmp_path / "prompt.txt", "lines": tmp_path / "prompts.jsonl"}
    given["text"].write_text(PROMPT)
    given["lines"].write_text(f'"{PROMPT}"\n')
    for command, arguments in MAKES.items():
        texts = {"model": model_dir, "store": f"file://{top}/store", "top": top, **given}
        filled = [
            each.format(**texts, out=top / command, prompt=PROMPT) for each in arguments.split()
        ]
        assert run(command, *filled).code in (0, 1), command
        assert (top / f"{command}.json").exists()
        assert readable_by_others(top) == [], command
    assert (top / "generate.jsonl").stat().st_size
    assert readable_by_others(tmp_path / "cache") == []


def test_no_place_of_a_directory_store_can_be_read_by_others(top):
    index = top / "elsewhere" / "index.sqlite3"
    for url in (f"file://{top}/one", f"file://{top}/two?index_file={index}"):
        with open_store(url) as store:
            store.put(key := bytes(32), [b"value"])
            store.describe(bytes(32), "{}")
            store.discard(key, "wrong")
            assert readable_by_others(top) == []
    assert index.exists()


def test_a_journal_is_its_users_alone_unless_it_was_there(top, monkeypatch):
    monkeypatch.setattr(journal_module, "MAX_BYTES", 1)
    for name, mode in (("made", None), ("given", 0o640)):
        path = top / name
        if mode is not None:
            path.touch()
            path.chmod(mode)
        for _ in range(3):  # it is renamed, and made anew
            with closing(Journal(path, 8)) as journal:
                journal.add(1.0, "id", 3, [], None)
        files = [path, Path(f"{path}.1")]
        assert [stat.S_IMODE(each.stat().st_mode) for each in files] == [mode or 0o600] * 2

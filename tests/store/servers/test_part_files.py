"""Records put together in shared memory: what a killed process leaves goes, and nothing else."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import closing

import pytest

from kvferry.store.base import PutResult
from kvferry.store.servers.part_files import PartFiles
from kvferry.testing.stores import make_key

OF_ANOTHER = """
import sys, time
from pathlib import Path
from kvferry.store.servers.part_files import PartFiles
parts = PartFiles(Path(sys.argv[1]))
print(parts.begin(bytes(32), 1000), flush=True)
time.sleep(60)
"""

SESSION = f"{'0' * 64}.{'0' * 8}.{'0' * 24}"


def files_in(parent):
    return {path.name for path in parent.glob("kvferry-parts-*/writing/*")}


@pytest.fixture
def another(tmp_path):
    """A process with a part file, and the file's name."""
    command = [sys.executable, "-c", OF_ANOTHER, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        yield process, process.stdout.readline().strip()
        process.kill()


def test_what_a_killed_process_left_is_removed_at_once(tmp_path, another):
    process, session = another
    with closing(PartFiles(tmp_path)):
        assert files_in(tmp_path) == {session}
    process.send_signal(signal.SIGKILL)
    process.wait()
    with closing(PartFiles(tmp_path)):
        assert files_in(tmp_path) == set()


def test_parts_of_another_process_come_together(tmp_path, another):
    _, session = another
    with closing(PartFiles(tmp_path)) as parts:
        assert parts.write_at(session, 990, [b"0123456789"])
        assert not parts.write_at(session, 991, [b"0123456789"])
        assert parts.pop(session, b"head") is None, "it was begun elsewhere"


def test_a_value_is_whole_and_its_file_is_gone(tmp_path):
    with closing(PartFiles(tmp_path)) as parts:
        session = parts.begin(make_key(), 8)
        assert parts.write_at(session, 4, [b"tail"])
        assert parts.pop(session, b"head") == (make_key(), b"headtail")
        assert files_in(tmp_path) == set()
        parts.begin(make_key(), 8)
    assert files_in(tmp_path) == set()


def test_files_that_are_no_parts_stay(tmp_path):
    folder = tmp_path / f"kvferry-parts-{os.getuid()}" / "writing"
    folder.mkdir(parents=True)
    for name in ("report.txt", SESSION[1:]):
        (folder / name).write_text("mine")
    with closing(PartFiles(tmp_path)):
        assert files_in(tmp_path) == {"report.txt", SESSION[1:]}


def test_a_folder_that_leads_elsewhere_is_not_used(tmp_path):
    """Anybody may make it before we do."""
    victim = tmp_path / "victim"
    (victim / "writing").mkdir(parents=True)
    (victim / "writing" / SESSION).write_text("mine")
    (tmp_path / f"kvferry-parts-{os.getuid()}").symlink_to(victim)
    with closing(PartFiles(tmp_path)) as parts:
        assert parts.begin(make_key(), 8) is PutResult.FAILED
        assert not parts.write_at(SESSION, 0, [b"x"])
    assert (victim / "writing" / SESSION).read_text() == "mine"


def test_a_folder_of_another_user_is_not_used(tmp_path, monkeypatch):
    with closing(PartFiles(tmp_path)) as parts:
        assert isinstance(parts.begin(make_key(), 8), str)
        mine = os.getuid()
        monkeypatch.setattr(os, "getuid", lambda: mine + 1)
        assert parts.begin(make_key(1), 8) is PutResult.FAILED
        assert len(files_in(tmp_path)) == 1


def test_a_folder_that_cannot_be_used_says_why(tmp_path):
    """As one that another user made first."""
    (tmp_path / f"kvferry-parts-{os.getuid()}").write_text("of a stranger")
    with closing(PartFiles(tmp_path)) as parts:
        assert parts.begin(make_key(), 100) is PutResult.FAILED
        assert "File exists; it must be a folder that this user alone can write to" in parts.refusal
        next(tmp_path.iterdir()).unlink()
        assert isinstance(parts.begin(make_key(), 100), str)
        assert parts.refusal == ""

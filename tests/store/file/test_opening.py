"""What may be opened as a store, and what is refused with a line that helps."""

from __future__ import annotations

import errno
import json
import os
import stat
import threading

import pytest

from kvferry.errors import ConfigError, StoreError
from kvferry.store.base import PutResult, Where
from kvferry.store.file import FileStore
from kvferry.testing.stores import make_key, read_value


def test_a_missing_directory_is_made_private(bench):
    store = bench.open()
    store.put(make_key(), [b"value"])
    for path in [bench.root, *bench.root.rglob("*")]:
        assert stat.S_IMODE(path.stat().st_mode) & 0o077 == 0 or path == bench.root.parent


def test_a_missing_directory_is_refused_if_it_shall_not_be_made(bench):
    with pytest.raises(ConfigError, match="does not exist"):
        bench.open(create=False)
    with pytest.raises(ConfigError, match="does not exist"):
        bench.open(read_only=True)
    assert not bench.root.exists()


def test_a_directory_with_other_things_is_never_made_a_store(bench):
    bench.root.mkdir()
    (bench.root / "thesis.tex").write_text("mine")
    with pytest.raises(ConfigError, match=r"thesis\.tex"):
        bench.open()
    assert os.listdir(bench.root) == ["thesis.tex"]


def test_a_fresh_mount_and_a_dead_creator_are_no_other_things(bench):
    (bench.root / "lost+found").mkdir(parents=True)
    (bench.root / ".kvferry.json.0123456789abcdef").write_text("{")
    assert bench.open().put(make_key(), [b"value"]).result is PutResult.STORED


def test_a_file_in_the_way_is_refused(bench):
    bench.root.write_text("a file")
    with pytest.raises(ConfigError, match="cannot be used"):
        bench.open()


def test_a_mount_whose_server_is_away_is_no_wrong_directory(bench, monkeypatch):
    def is_away(*_args, **_options):
        raise OSError(errno.ENOTCONN, os.strerror(errno.ENOTCONN))

    monkeypatch.setattr(os, "makedirs", is_away)
    with pytest.raises(StoreError, match="does not answer: Transport endpoint"):
        bench.open()


def test_a_disk_that_fails_while_it_is_opened_is_no_crash(bench, monkeypatch):
    bench.open().close()

    def fails(*_args, **_options):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr("kvferry.store.file.store.FileStore._open_index", fails)
    with pytest.raises(StoreError, match="does not answer: Input/output error"):
        bench.open()


@pytest.mark.parametrize(
    ("marker", "message"),
    [
        *(
            (
                json.dumps({"format": "kvferry-store", "version": version}),
                f"version {version}.*knows 2",
            )
            for version in (1, 3, 7)
        ),
        (json.dumps({"format": "kvferry-store", "version": "1"}), "not the marker"),
        (json.dumps({"format": "other", "version": 1}), "not the marker"),
        ("[" * 4000, "not the marker"),
        ("", "not the marker"),
        ("[]", "not the marker"),
    ],
)
def test_another_format_is_refused_and_left_alone(bench, marker, message):
    bench.root.mkdir()
    (bench.root / "kvferry.json").write_text(marker)
    before = {path: path.lstat().st_mtime_ns for path in [bench.root, *bench.root.rglob("*")]}
    with pytest.raises(ConfigError, match=message) as refused:
        bench.open()
    assert "\n" not in str(refused.value)
    after = {path: path.lstat().st_mtime_ns for path in [bench.root, *bench.root.rglob("*")]}
    assert after == before
    assert (bench.root / "kvferry.json").read_text() == marker


def test_two_that_create_at_once_both_succeed(bench, monkeypatch):
    listdir = os.listdir

    def late(fd):
        if not (bench.root / "kvferry.json").exists():
            monkeypatch.setattr(os, "listdir", listdir)
            FileStore(bench.root, background=False).close()
        return listdir(fd)

    monkeypatch.setattr(os, "listdir", late)
    assert bench.open().put(make_key(), [b"value"]).result is PutResult.STORED


def test_a_directory_that_cannot_be_written_is_opened_for_reading(bench, caplog, monkeypatch):
    bench.open().put(make_key(0), [b"value"])
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    store = bench.open()
    assert store.is_read_only
    assert "read-only" in caplog.text
    assert read_value(store, make_key(0)) == b"value"
    assert store.put(make_key(1), [b"value"]).result is PutResult.FAILED
    assert store.delete(make_key(0)) is False
    store.maintain()
    assert store.where(make_key(0)) is Where.HERE
    store.discard(make_key(0), "bad_checksum")
    store.maintain()
    assert store.where(make_key(0)) is not Where.HERE, "the same broken hit is not offered twice"
    assert store.stat().used_bytes == 5


def test_a_read_only_store_leaves_no_trace(bench):
    bench.open().put(make_key(), [b"value"])
    before = {path: path.lstat().st_mtime_ns for path in bench.root.rglob("*")}
    with bench.open(read_only=True) as store:
        assert read_value(store, make_key()) == b"value"
        store.touch([make_key()])
        store.maintain()
    assert {path: path.lstat().st_mtime_ns for path in bench.root.rglob("*")} == before


def test_a_forked_child_does_not_write_into_its_parents_account(bench):
    store = bench.open()
    pid = os.fork()
    if pid == 0:
        result = store.put(make_key(), [b"value"])
        os._exit(0 if result.result is PutResult.FAILED else 1)
    assert os.waitpid(pid, 0)[1] == 0
    assert store.put(make_key(), [b"value"]).result is PutResult.STORED


@pytest.mark.parametrize("has_begun", [True, False])
def test_an_interrupted_opening_leaves_no_thread(bench, monkeypatch, has_begun):
    start, started = threading.Thread.start, []

    def interrupted(thread):
        started.append(thread)
        if has_begun:
            start(thread)
        raise KeyboardInterrupt

    monkeypatch.setattr(threading.Thread, "start", interrupted)
    with pytest.raises(KeyboardInterrupt):
        FileStore(bench.root)
    monkeypatch.undo()
    (thread,) = started
    if not has_begun:
        start(thread)  # late, as after the interrupt
        thread.join(60)
    assert not thread.is_alive()

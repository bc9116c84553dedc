"""What is known of changes to records without a look at them."""

from __future__ import annotations

import errno
import os
import threading
from pathlib import Path

import pytest

from kvferry.store.file import inotify
from kvferry.store.file import watch as module
from kvferry.store.file.watch import RecordWatch
from kvferry.testing.stores import make_key


@pytest.fixture
def watch():
    watch = RecordWatch()
    yield watch
    watch.close()


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    path = tmp_path / "records" / "00"
    path.mkdir(parents=True)
    for number in range(3):
        record(path, number).write_bytes(b"value")
    return path


def record(directory: Path, number: int = 0) -> Path:
    return directory / f"{make_key(number).hex()}.safetensors"


def follow(watch: RecordWatch, directory: Path) -> int:
    moment = watch.follow(str(directory))
    assert moment is not None
    return moment


def write_in_place(path: Path) -> None:
    with path.open("r+b") as file:
        file.write(b"x")


def replace(path: Path) -> None:
    other = path.with_name("other")
    other.write_bytes(b"other")
    other.replace(path)


def to_directory(path: Path) -> None:
    path.unlink()
    path.mkdir()


CHANGES = [
    write_in_place,
    replace,
    to_directory,
    Path.unlink,
    lambda path: os.truncate(path, 1),
    lambda path: path.rename(path.with_name("elsewhere")),
]


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_is_told_of_one_record_and_from_then_on(watch, directory, change):
    before = follow(watch, directory)
    change(record(directory))
    assert not watch.is_unchanged(make_key(0), before)
    assert watch.is_unchanged(make_key(1), before)
    now = follow(watch, directory)
    assert watch.is_unchanged(make_key(0), now)
    assert not watch.is_unchanged(make_key(0), before)


@pytest.mark.parametrize(
    "nothing",
    [
        Path.read_bytes,
        lambda path: os.utime(path, ns=(1, 1)),
        lambda path: path.chmod(0o600),
        lambda path: os.link(path, record(path.parent, 7)),
        lambda path: path.with_name("foreign").write_bytes(b"x"),
    ],
)
def test_what_changes_no_byte_of_a_record_is_no_change(watch, directory, nothing):
    before = follow(watch, directory)
    nothing(record(directory))
    assert watch.is_unchanged(make_key(0), before)


def test_a_directory_that_is_not_followed_tells_nothing(watch, tmp_path):
    assert watch.follow(str(tmp_path / "absent")) is None
    (tmp_path / "file").write_bytes(b"")
    assert watch.follow(str(tmp_path / "file")) is None


@pytest.mark.parametrize("become", ["gone", "moved"])
def test_a_directory_that_goes_puts_all_in_doubt_and_is_followed_anew(watch, directory, become):
    before = follow(watch, directory)
    if become == "gone":
        for path in directory.iterdir():
            path.unlink()
        directory.rmdir()
    else:
        directory.rename(directory.with_name("ff"))
    assert not watch.is_unchanged(make_key(1), before)
    assert watch.follow(str(directory)) is None
    directory.mkdir()
    record(directory, 1).write_bytes(b"value")
    now = follow(watch, directory)
    assert watch.is_unchanged(make_key(1), now)
    write_in_place(record(directory, 1))
    assert not watch.is_unchanged(make_key(1), now)


def test_a_directory_made_anew_is_not_taken_for_the_one_that_was_followed(watch, directory):
    follow(watch, directory)
    for path in directory.iterdir():
        path.unlink()
    directory.rmdir()
    directory.mkdir()
    record(directory).write_bytes(b"value")
    assert watch.follow(str(directory)) is None  # nothing was heard of in between
    now = follow(watch, directory)
    write_in_place(record(directory))
    assert not watch.is_unchanged(make_key(0), now)


def test_news_that_were_lost_put_all_in_doubt(watch, directory, monkeypatch):
    before = follow(watch, directory)
    overflow = inotify._EVENT.pack(-1, inotify.OVERFLOW, 0, 0)
    with monkeypatch.context() as patch:
        patch.setattr(inotify.os, "read", lambda _fd, _size: overflow)
        assert not watch.is_unchanged(make_key(0), before)
    assert not watch.is_unchanged(make_key(0), before)
    assert watch.is_unchanged(make_key(0), follow(watch, directory))


def test_a_flood_of_news_is_taken_piece_by_piece_and_never_believed_to_be_none(watch, directory):
    before = follow(watch, directory)
    paths = [record(directory, number) for number in range(2)]
    for _ in range(1500):  # in turns, since equal news that follow each other are one
        for path in paths:
            write_in_place(path)
    follow_up = [watch.is_unchanged(make_key(2), before) for _ in range(10)]
    assert not follow_up[0]  # all was not known yet
    assert follow_up[-1]
    assert not watch.is_unchanged(make_key(0), before)


def test_what_is_remembered_of_changes_is_bounded(watch, directory, monkeypatch):
    monkeypatch.setattr(module, "_MAX_CHANGED", 4)
    before = follow(watch, directory)
    for number in range(10, 30):
        record(directory, number).write_bytes(b"x")
    assert not watch.is_unchanged(make_key(0), before)
    assert len(watch._changed) <= 4
    assert watch.is_unchanged(make_key(0), follow(watch, directory))


def test_a_closed_watch_knows_nothing(directory):
    watch = RecordWatch()
    before = follow(watch, directory)
    watch.close()
    watch.close()
    assert not watch.is_unchanged(make_key(0), before)
    assert watch.follow(str(directory)) is None


def test_a_forked_process_leaves_the_news_to_its_parent(watch, directory):
    before = follow(watch, directory)
    write_in_place(record(directory))
    child = os.fork()
    if child == 0:
        knows = watch.is_unchanged(make_key(1), before)
        os._exit(int(knows or watch.follow(str(directory)) is not None))
    assert os.waitpid(child, 0)[1] == 0
    assert not watch.is_unchanged(make_key(0), before)
    assert watch.is_unchanged(make_key(1), before)


def test_a_system_without_it_says_so(monkeypatch):
    monkeypatch.setattr(inotify.ctypes, "CDLL", lambda *_args, **_kwargs: object())
    with pytest.raises(OSError, match=os.strerror(errno.ENOSYS)):
        RecordWatch()


def test_threads_may_follow_and_ask_at_once(watch, directory):
    stop, errors = threading.Event(), []

    def work() -> None:
        try:
            while not stop.is_set():
                moment = watch.follow(str(directory))
                if moment is not None:
                    watch.is_unchanged(make_key(0), moment)
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    before = follow(watch, directory)
    for number in range(200):
        write_in_place(record(directory, number % 3))
    stop.set()
    for thread in threads:
        thread.join()
    assert errors == []
    assert not watch.is_unchanged(make_key(0), before)

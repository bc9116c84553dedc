"""A directory on a network mount: one index per machine, and only the files in common."""

from __future__ import annotations

import errno
import fcntl
import os
import pwd
import time

import pytest

from kvferry import filesystem
from kvferry.observe import Counters
from kvferry.store.base import PutResult, Where
from kvferry.store.file import FileSettings, FileStore, directory
from kvferry.store.file.settings import FileBounds
from kvferry.testing.clock import FakeClock
from kvferry.testing.stores import make_key, make_value, read_value
from kvferry.testing.stores.hooks import wait_until
from tests.store.file.halves import begin, finish

HOUR = 3600


@pytest.fixture
def machine(bench, tmp_path):
    """Opens the store as it is seen by the machine of this name."""

    def open_on(name, **options):
        return bench.open(index_file=tmp_path / name / "index.sqlite3", **options)

    return open_on


def stored_bytes(root):
    return sum(path.stat().st_size for path in root.glob("records/*/*"))


def look(store, bench):
    """What the thread does within a second or so."""
    for _ in range(100):
        bench.clock.advance(0.25)
        bench.wall.advance(0.25)
        store.upkeep.step()


def test_each_machine_finds_by_listing_what_the_other_stored(machine, bench):
    one, other = machine("one"), machine("other")
    look(one, bench)
    look(other, bench)
    for number in range(10):
        writer = (one, other)[number % 2]
        assert writer.put(make_key(number), [make_value(1000)]).result is PutResult.STORED
    look(one, bench)
    look(other, bench)
    for store in (one, other):
        assert all(store.where(make_key(number)) is Where.HERE for number in range(10))
        assert store.stat().used_bytes == 10_000
        assert store.put(make_key(3), [make_value(1000)]).result is PutResult.EXISTS


@pytest.mark.slow
def test_each_machine_finds_what_the_other_stored_within_seconds(tmp_path):
    root = tmp_path / "store"

    def open_on(name):
        bounds = FileBounds(rest_factor=1.0)  # no long rest after a stall of the machine
        settings = FileSettings(index_file=tmp_path / name / "index", bounds=bounds)
        return FileStore(root, settings=settings)

    with open_on("one") as one, open_on("other") as other:
        assert one.wait_indexed(30)
        assert other.wait_indexed(30)
        slowest = 0.0
        for number in range(2):  # there and back
            writer, reader = (one, other) if number % 2 else (other, one)
            assert writer.put(make_key(number), [make_value(1000)]).result is PutResult.STORED
            started = time.monotonic()
            wait_until(lambda n=number, r=reader: r.where(make_key(n)) is Where.HERE, "found", 60)
            slowest = max(slowest, time.monotonic() - started)
            writer.delete(make_key(number))
            wait_until(
                lambda n=number, r=reader: r.where(make_key(n)) is not Where.HERE, "forgotten", 60
            )
        assert slowest < 30  # on a machine that is four times slower, too


def test_a_probe_finds_at_once_what_the_other_stored(machine, bench):
    one, other = machine("one"), machine("other")
    one.maintain()
    other.maintain()
    for number in range(3):
        one.put(make_key(number), [make_value(1000)])
    other.probe([make_key(number) for number in range(4)])
    other.upkeep.step()
    assert [other.where(make_key(number)) is Where.HERE for number in range(4)] == [True] * 3 + [
        False
    ]


def test_keys_that_are_asked_for_again_come_as_the_other_stores_them(machine, bench):
    """In turn, as a prefill stores the chunks of a prompt; no directory is listed for that."""
    one, other = machine("one"), machine("other")
    one.maintain()
    other.maintain()
    bench.io.calls.clear()
    keys = [make_key(number) for number in range(3)]

    def has_come(number):
        assert one.probe(keys[number:], again=True) is Where.COMING
        one.upkeep.step()
        return one.where(keys[number]) is Where.HERE

    for number, key in enumerate(keys):
        assert not has_come(number)
        assert other.put(key, [make_value(1000, number)]).result is PutResult.STORED
        assert has_come(number)
        assert read_value(one, key) == make_value(1000, number)
    assert bench.io.calls["listdir"] == 0


def test_an_old_listing_beside_a_new_time_is_not_the_last(machine, bench, monkeypatch):
    one = machine("one")
    other = machine("other", wall=FakeClock(time.time() + 10))
    other.maintain()
    assert one.put(make_key(), [make_value(1000)]).result is PutResult.STORED
    with monkeypatch.context() as cached:
        cached.setattr(directory.Directory, "list_shard", lambda *_: set())
        look(other, bench)
        assert other.where(make_key()) is not Where.HERE
    look(other, bench)
    assert other.where(make_key()) is Where.HERE


def test_a_lock_of_another_mount_of_this_machine_is_not_believed(machine, bench, monkeypatch):
    one, other = machine("one"), machine("other")
    writing = begin(one, make_key(), make_value(1000))
    monkeypatch.setattr(directory, "machine_of", lambda fd: "0" * 8)
    monkeypatch.setattr(fcntl, "flock", lambda *_: None)  # it sees none
    other.maintain()
    assert finish(one, writing) is PutResult.STORED


def test_where_hard_links_get_lost_records_are_renamed(machine, bench, monkeypatch):
    monkeypatch.setattr(directory, "file_system", lambda root: "fuse.seaweedfs")
    one, other = machine("one"), machine("other")
    writings = [begin(store, make_key(), make_value(1000)) for store in (one, other)]
    results = [
        finish(store, writing) for store, writing in zip((one, other), writings, strict=True)
    ]
    assert results == [PutResult.STORED, PutResult.EXISTS]
    assert read_value(other, make_key()) == make_value(1000)
    assert bench.io.calls["link"] == 0
    assert os.listdir(bench.root / "writing") == []


@pytest.mark.parametrize("way", ["evicts", "deletes", "discards"])
def test_what_the_other_took_out_is_a_miss_and_is_forgotten(machine, bench, way):
    one, other = machine("one"), machine("other", max_bytes=10_000)
    one.put(make_key(), [make_value(4000)])
    one.maintain()
    other.maintain()
    if way == "deletes":
        assert other.delete(make_key())
    elif way == "discards":
        other.discard(make_key(), "bad_checksum")
    else:
        for number in range(1, 4):
            bench.wall.advance(10)
            assert other.put(make_key(number), [make_value(4000)]).result is PutResult.STORED
    assert one.where(make_key()) is Where.HERE  # nobody told it
    assert one.read(make_key(), ()) is None
    assert one.where(make_key()) is not Where.HERE
    look(one, bench)
    assert one.where(make_key()) is not Where.HERE
    assert make_key() not in {entry.key for entry in one.catalogue().scan()}
    one.maintain()
    assert one.stat().used_bytes == stored_bytes(bench.root)


def test_the_quota_is_exceeded_by_no_more_than_the_other_wrote_and_is_kept_again(machine, bench):
    quota = 50_000
    one, other = machine("one", max_bytes=quota), machine("other", max_bytes=quota)
    one.maintain()
    other.maintain()
    for number in range(12):
        assert one.put(make_key(number), [make_value(4000)]).result is PutResult.STORED
    for number in range(12, 24):  # before it looks again
        assert other.put(make_key(number), [make_value(4000)]).result is PutResult.STORED
    assert quota < stored_bytes(bench.root) <= 2 * quota
    look(one, bench)
    assert stored_bytes(bench.root) <= quota
    look(other, bench)
    one.maintain()
    for store in (one, other):
        assert store.stat().used_bytes == stored_bytes(bench.root) >= quota // 2
    for number in range(24, 36):
        store = (one, other)[number % 2]
        assert store.put(make_key(number), [make_value(4000)]).result is PutResult.STORED
        look(one, bench)
        look(other, bench)
        assert stored_bytes(bench.root) <= quota


@pytest.mark.parametrize("ahead", [700.0, -700.0, 3000.0])
def test_a_clock_that_goes_wrong_harms_no_live_writer(machine, bench, ahead):
    strange = FakeClock(time.time() + ahead)
    one, other = machine("one", max_bytes=100_000), machine("other", wall=strange)
    writing = begin(one, make_key(), make_value(1000))
    gone = machine("dead", wall=strange)
    dead = begin(gone, make_key(1), make_value(1000)).path
    for path in (writing.path, dead):  # the server's clock is as far from that of this machine
        os.utime(path, (time.time() - ahead,) * 2)
    for store in (other, one, other):
        bench.clock.advance(120)
        store.maintain()
        store.upkeep.clean()
    assert os.path.exists(dead)
    assert finish(one, writing) is PutResult.STORED
    other.maintain()
    assert other.where(make_key()) is Where.HERE
    assert other.put(make_key(2), [make_value(1000)]).result is PutResult.STORED
    assert other.where(make_key(1)) is not Where.HERE


def test_what_a_dead_machine_was_writing_goes_after_an_hour(machine, bench):
    one, other = machine("one"), machine("other")
    writings = {
        name: begin(other, make_key(n), make_value(1000)) for n, name in enumerate(["old", "young"])
    }
    sessions = {name: os.path.basename(writing.path) for name, writing in writings.items()}
    for writing in writings.values():  # its process is killed: only the files stay
        writing.path = ""
        writing.close()
    files = {}
    for name, age in (("old", HOUR + 60), ("young", HOUR - 600)):
        key, machine, rest = sessions[name].split(".")
        files[name] = f"{key}.{machine[::-1]}.{rest}"
        at = time.time() - age
        os.utime(bench.root / "writing" / sessions[name], (at, at))
        (bench.root / "writing" / sessions[name]).rename(bench.root / "writing" / files[name])
    bench.clock.advance(120)
    one.maintain()
    assert os.listdir(bench.root / "writing") == [files["young"]]


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP])
def test_where_files_cannot_be_locked_abandoned_ones_go_after_an_hour(
    machine, bench, monkeypatch, number
):
    def fail(*_):
        raise OSError(number, "no locks here")

    monkeypatch.setattr(fcntl, "flock", fail)
    one, other = machine("one"), machine("other")
    sessions = [begin(other, make_key(n), make_value(1000)).path for n in range(2)]
    for session, age in zip(sessions, (HOUR + 60, HOUR - 600), strict=True):
        os.utime(session, (time.time() - age,) * 2)
    one.maintain()
    assert os.listdir(bench.root / "writing") == [os.path.basename(sessions[1])]


def test_the_own_files_of_a_dead_process_go_at_once(machine, bench, tmp_path):
    one = machine("one", max_bytes=10_000)
    one.maintain()
    pid = os.fork()
    if pid == 0:
        settings = FileSettings(index_file=tmp_path / "one" / "index.sqlite3")
        with FileStore(bench.root, max_bytes=10_000, background=False, settings=settings) as dying:
            dying.maintain()
            begin(dying, make_key(1), make_value(9000))
            os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0
    assert one.put(make_key(2), [make_value(5000)]).result is PutResult.STORED
    one.maintain()
    assert os.listdir(bench.root / "writing") == []
    assert one.stat().used_bytes == 5000


def a_file_in_the_way(tmp_path, _monkeypatch):
    (tmp_path / "cache").write_bytes(b"no folder")


def a_home_that_cannot_be_written(tmp_path, monkeypatch):
    makedirs = os.makedirs

    def fail(path, *args, **named):
        if str(path).startswith(str(tmp_path / "cache")):
            raise OSError(errno.EROFS, "read-only file system")
        makedirs(path, *args, **named)

    monkeypatch.setattr(os, "makedirs", fail)


def an_unknown_home(tmp_path, monkeypatch):
    def unknown(uid):
        raise KeyError(uid)

    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.setattr(pwd, "getpwuid", unknown)


@pytest.mark.parametrize("quota", [None, 20_000])
@pytest.mark.parametrize(
    "cause", [a_file_in_the_way, a_home_that_cannot_be_written, an_unknown_home]
)
def test_without_a_place_for_its_index_a_store_keeps_it_in_memory(
    bench, tmp_path, monkeypatch, cause, quota
):
    """Its place is in the user's cache directory."""
    monkeypatch.setattr(filesystem, "file_system", lambda root: "nfs4")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    cause(tmp_path, monkeypatch)
    before = set(os.listdir(tmp_path))
    counters = Counters()
    store = bench.open(max_bytes=quota, observer=counters)
    store.maintain()
    for number in range(10):
        assert store.put(make_key(number), [make_value(4000)]).result is PutResult.STORED
    assert store.where(make_key(9)) is Where.HERE
    assert counters["store_open_failed"] == (cause is not an_unknown_home)
    for options in ({"max_bytes": quota}, {"read_only": True}):
        again = bench.open(**options)
        again.maintain()
        assert again.where(make_key(9)) is Where.HERE
        assert again.stat().used_bytes == stored_bytes(bench.root)
    assert set(os.listdir(tmp_path)) - before <= {bench.root.name}
    assert not (bench.root / "index.sqlite3").exists()

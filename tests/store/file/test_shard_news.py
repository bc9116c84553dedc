"""An index that is kept fresh: by what the system tells of directories, or by listing them."""

from __future__ import annotations

import builtins
import errno
import io
import os
import shutil
import threading
import time

import pytest

from kvferry.store.file import inotify, shard_news
from kvferry.store.file.index import KeyIndex
from kvferry.store.file.layout import NUM_SHARDS
from kvferry.testing.stores import make_key


@pytest.fixture
def told(monkeypatch):
    """Whatever file system the tests run on, nobody else changes it."""
    monkeypatch.setattr(shard_news, "tells_all", lambda _directory: True)


def refuse(*_args: object, **_options: object) -> int:
    raise OSError(errno.EMFILE, "no more of these")


@pytest.fixture(params=["told", "from elsewhere", "no queue left", "no watch left"])
def ways(request, monkeypatch):
    """The ways to learn of changes."""
    tells_all = request.param != "from elsewhere"
    monkeypatch.setattr(shard_news, "tells_all", lambda _directory: tells_all)
    if request.param == "no queue left":
        monkeypatch.setattr(shard_news, "Inotify", refuse)
    if request.param == "no watch left":
        monkeypatch.setattr(shard_news.Inotify, "add", refuse)


def step(store, times: int = 1) -> None:
    for _ in range(times):
        while store._volume.upkeep.refresh.step() == 0.0:
            pass


@pytest.mark.usefixtures("ways")
def test_what_others_store_and_remove_is_noticed(bench):
    ours, theirs = bench.open(), bench.open()
    ours.maintain()
    for _ in range(2):  # the first time there is no directory yet
        theirs.put(make_key(1), [b"value"])
        assert not ours.contains(make_key(1))
        ours.maintain()
        assert ours.contains(make_key(1))
        theirs.delete(make_key(1))
        ours.maintain()
        assert not ours.contains(make_key(1))


@pytest.mark.usefixtures("ways")
def test_what_a_user_moves_in_and_out_is_noticed(bench, tmp_path):
    store = bench.open()
    store.put(make_key(1), [b"value"])
    store.maintain()
    bench.path(make_key(1)).rename(tmp_path / "elsewhere")
    store.maintain()
    assert not store.contains(make_key(1))
    (tmp_path / "elsewhere").rename(bench.path(make_key(1)))
    (bench.path(make_key(1)).parent / "foreign").write_bytes(b"")
    other_shard = bytes([make_key(1)[0] ^ 0x80]) + make_key(1)[1:]
    bench.path(make_key(1)).with_name(bench.path(other_shard).name).write_bytes(b"")
    store.maintain()
    assert store.contains(make_key(1))
    assert store.stat().num_records == 1


@pytest.mark.usefixtures("ways")
def test_shards_that_did_not_change_are_not_listed_again(bench):
    store = bench.open()
    store.put(make_key(1), [b"value"])
    old = time.time() - 100
    os.utime(bench.path(make_key(1)).parent, (old, old))
    store.maintain()
    before = bench.io.calls["listdir"]
    step(store, 3)
    assert bench.io.calls["listdir"] == before


@pytest.mark.usefixtures("told")
def test_shards_that_changed_are_not_listed_again_if_told_of(bench):
    ours, theirs = bench.open(), bench.open()
    keys = [make_key(number) for number in range(300)]
    assert len({key[0] >> 3 for key in keys[:200]}) == NUM_SHARDS
    for key in keys[:200]:
        theirs.put(key, [b"value"])
    ours.maintain()
    for key in keys[200:]:
        theirs.put(key, [b"value"])
    theirs.delete(keys[0])
    before = bench.io.calls.copy()
    step(ours)
    assert bench.io.calls - before == {"lstat": 1}
    assert [ours.contains(key) for key in keys] == [False] + [True] * 299


@pytest.mark.usefixtures("told")
@pytest.mark.parametrize("lost", ["overflow", "closed"])
def test_news_that_were_lost_have_all_listed_again(bench, monkeypatch, lost):
    ours, theirs = bench.open(), bench.open()
    theirs.put(make_key(1), [b"value"])
    theirs.put(make_key(2), [b"value"])
    ours.maintain()
    theirs.delete(make_key(1))
    theirs.put(make_key(3), [b"value"])
    with monkeypatch.context() as patch:
        lose = inotify._EVENT.pack(-1, inotify.OVERFLOW, 0, 0)
        if lost == "overflow":
            patch.setattr(inotify.os, "read", lambda fd, size: (os_read(fd, size), lose)[1])
        else:
            patch.setattr(inotify.os, "read", refuse)
        step(ours)
    step(ours)
    assert [ours.contains(make_key(number)) for number in (1, 2, 3)] == [False, True, True]
    theirs.delete(make_key(2))
    step(ours)
    assert not ours.contains(make_key(2))


os_read = os.read


@pytest.mark.usefixtures("told")
def test_a_flood_of_news_is_followed_to_its_end(bench):
    store = bench.open()
    store.put(make_key(1), [b"value"])
    store.maintain()
    shard = bench.path(make_key(1)).parent
    for number in range(3000):
        (shard / f"foreign-{number}").write_bytes(b"")
    bench.path(make_key(1)).unlink()
    step(store)
    assert not store.contains(make_key(1))


@pytest.mark.usefixtures("ways")
@pytest.mark.parametrize("what", ["shard", "records", "all"])
@pytest.mark.parametrize("how", ["removed", "moved"])
def test_directories_that_go_and_come_again(bench, what, how):
    ours, theirs = bench.open(), bench.open()
    theirs.put(make_key(1), [b"value"])
    ours.maintain()
    assert ours.contains(make_key(1))
    path = {"shard": bench.path(make_key(1)).parent, "records": bench.root / "records"}
    directory = path.get(what, bench.root)
    if how == "removed":
        shutil.rmtree(directory)
    else:
        directory.rename(directory.with_name("1f-moved"))
    other = bench.open()  # makes what is missing, in time before anybody looks
    other.put(make_key(2), [b"value"])
    step(ours, NUM_SHARDS + 2)
    assert not ours.contains(make_key(1))
    assert ours.contains(make_key(2))
    other.delete(make_key(2))
    other.put(make_key(1), [b"value"])
    step(ours, 2)
    assert ours.contains(make_key(1))
    assert not ours.contains(make_key(2))
    # What happens in the old one is no news.
    if how == "moved" and what == "shard":
        (directory.with_name("1f-moved") / bench.path(make_key(1)).name).unlink()
        step(ours)
        assert ours.contains(make_key(1))


@pytest.mark.usefixtures("ways")
def test_a_listing_that_failed_is_made_again(bench):
    ours, theirs = bench.open(), bench.open()
    theirs.put(make_key(1), [b"value"])
    bench.io.fail["listdir"] = errno.EIO
    bench.io.only_in = "records"
    ours.maintain()
    assert not ours.contains(make_key(1))
    bench.io.fail.clear()
    bench.clock.advance(20)
    ours.maintain()
    ours.maintain()
    assert ours.contains(make_key(1))


@pytest.mark.usefixtures("told")
def test_news_do_not_bring_back_a_broken_record_that_cannot_be_taken_out(bench):
    ours, theirs = bench.open(), bench.open()
    ours.put(make_key(2), [b"value"])
    ours.maintain()
    ours._volume.index.ban(make_key(1))
    theirs.put(make_key(1), [b"value"])
    step(ours)
    assert not ours.contains(make_key(1))


def test_what_is_discarded_while_news_are_taken_is_not_brought_back():
    index = KeyIndex()
    threads = []

    def take():
        # What a reader does that finds no record.
        thread = threading.Thread(target=index.discard, args=(make_key(1),))
        threads.append(thread)
        thread.start()
        thread.join(0.1)
        return [(make_key(1), True)], True

    assert index.learn(take)
    threads[0].join(10)
    assert not index.contains(make_key(1))


@pytest.mark.usefixtures("told")
def test_a_closed_store_listens_no_longer_and_one_without_index_never_does(bench, monkeypatch):
    queues = []
    make = shard_news.Inotify

    def count():
        queues.append(make())
        return queues[-1]

    monkeypatch.setattr(shard_news, "Inotify", count)
    with bench.open(index=False) as store:
        store.put(make_key(1), [b"value"])
        store.maintain()
    assert not queues
    with bench.open() as store:
        store.maintain()
        store.maintain()
    assert len(queues) == 1
    with pytest.raises(OSError, match="not listening"):
        queues[0].take()
    store._volume.upkeep.refresh.step()  # nobody should; it is not opened again
    assert len(queues) == 1


@pytest.mark.parametrize(
    ("kind", "tells"),
    [("ext4", True), ("tmpfs", True), ("nfs4", False), ("fuse.sshfs", False), ("9p", False)],
)
def test_which_file_systems_tell_all(tmp_path, monkeypatch, kind, tells):
    device = os.stat(tmp_path).st_dev
    mounts = (
        "22 1 0:0 / /other rw shared:1 - ext4 /dev/other rw\n"
        f"23 1 {os.major(device)}:{os.minor(device)} / /a\\040- rw master:2 - {kind} x rw\n"
    )
    monkeypatch.setattr(builtins, "open", lambda *_args, **_kwargs: io.StringIO(mounts))
    assert inotify.tells_all(str(tmp_path)) == tells


def test_of_unknown_file_systems_not_all_is_told(tmp_path, monkeypatch):
    assert not inotify.tells_all(str(tmp_path / "absent"))
    monkeypatch.setattr(builtins, "open", lambda *_args, **_kwargs: io.StringIO(""))
    assert not inotify.tells_all(str(tmp_path))
    monkeypatch.setattr(builtins, "open", refuse)
    assert not inotify.tells_all(str(tmp_path))

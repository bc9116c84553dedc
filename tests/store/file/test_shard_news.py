"""An index that is kept fresh: by what the system tells of directories, or by listing them."""

from __future__ import annotations

import errno
import os
import shutil
import threading
import time
from pathlib import Path

import pytest

from kvferry.store.file import inotify, shard_news
from kvferry.store.file import mounts as mounts_module
from kvferry.store.file import refresh as refresh_module
from kvferry.store.file.index import KeyIndex
from kvferry.store.file.layout import NUM_SHARDS
from kvferry.store.file.shard_news import ShardNews
from kvferry.testing.stores import make_key


@pytest.fixture(autouse=True)
def _only_if_needed(monkeypatch, request):
    """Nothing is listed again only because that was long ago, unless a test is about this."""
    if "lists_again" not in request.fixturenames:
        monkeypatch.setattr(refresh_module.IndexRefresh, "_list_one_again", lambda *_args: None)


@pytest.fixture
def lists_again():
    """Each step lists one shard again."""


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
    return request.param


os_read = os.read


def step(store, times: int = 1) -> None:
    for _ in range(times):
        while store._volume.upkeep.refresh.step() == 0.0:
            pass


def num_watches(store) -> int:
    """What the kernel listens to."""
    queue = store._volume.upkeep.refresh._news._inotify
    if queue is None:
        return 0
    with open(f"/proc/self/fdinfo/{queue._fd}") as file:
        return sum(line.startswith("inotify wd") for line in file)


def shards(bench):
    return list(bench.root.glob("records/*"))


def test_shards_are_listened_to_where_all_is_told(bench, ways):
    store = bench.open()
    for number in range(100):
        store.put(make_key(number), [b"value"])
    step(store)
    assert num_watches(store) == (len(shards(bench)) if ways == "told" else 0)


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
    assert bench.io.calls == before
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


def remove(directory: Path) -> None:
    shutil.rmtree(directory)


def move(directory: Path) -> None:
    directory.rename(directory.with_name("elsewhere"))


@pytest.mark.usefixtures("ways")
@pytest.mark.parametrize("go", [remove, move])
def test_a_directory_that_goes_and_comes_again_is_another_one(bench, go):
    ours, theirs = bench.open(), bench.open()
    theirs.put(make_key(1), [b"value"])
    ours.maintain()
    shard = bench.path(make_key(1)).parent
    before = num_watches(ours)
    go(shard)
    step(ours)
    assert not ours.contains(make_key(1))
    assert num_watches(ours) == max(0, before - 1)
    theirs.put(make_key(1), [b"value"])
    step(ours)
    assert ours.contains(make_key(1))
    if go is move:
        (shard.with_name("elsewhere") / bench.path(make_key(1)).name).unlink()
        step(ours)
        assert ours.contains(make_key(1))
    theirs.delete(make_key(1))
    step(ours)
    assert not ours.contains(make_key(1))


@pytest.mark.usefixtures("told")
@pytest.mark.parametrize("go", [remove, move])
def test_a_directory_made_anew_before_anybody_looks_is_another_one(bench, go):
    ours, theirs = bench.open(), bench.open()
    theirs.put(make_key(1), [b"value"])
    ours.maintain()
    before = num_watches(ours)
    go(bench.path(make_key(1)).parent)
    theirs.put(make_key(1), [b"value"])
    step(ours)
    assert ours.contains(make_key(1))
    assert num_watches(ours) == before
    theirs.delete(make_key(1))
    step(ours)
    assert not ours.contains(make_key(1))


@pytest.mark.usefixtures("ways", "lists_again")
@pytest.mark.parametrize("go", [remove, move])
@pytest.mark.parametrize("name", ["records", "."])
def test_a_directory_above_that_goes_and_comes_again_is_noticed_in_time(bench, go, name):
    ours, theirs = bench.open(), bench.open()
    theirs.put(make_key(1), [b"value"])
    ours.maintain()
    go(bench.root / name)
    other = bench.open()
    other.put(make_key(2), [b"value"])
    step(ours, NUM_SHARDS + 1)
    assert not ours.contains(make_key(1))
    assert ours.contains(make_key(2))
    other.delete(make_key(2))
    other.put(make_key(1), [b"value"])
    step(ours)
    assert ours.contains(make_key(1))
    assert not ours.contains(make_key(2))


@pytest.mark.usefixtures("told", "lists_again")
def test_a_note_that_comes_after_the_news_is_mended_in_time(bench):
    store = bench.open()
    for number in range(200):
        store.put(make_key(number), [b"value"])
    step(store)
    wrong = [key for key in map(make_key, range(200, 400)) if key[0] >> 3 in (0, NUM_SHARDS - 1)]
    for key in wrong:
        store.note_stored(key)
    store._volume.index.discard(make_key(1))
    before = bench.io.calls["listdir"]
    step(store)
    assert bench.io.calls["listdir"] == before + 1
    step(store, NUM_SHARDS - 1)
    assert bench.io.calls["listdir"] == before + NUM_SHARDS
    assert store.contains(make_key(1))
    assert not any(map(store.contains, wrong))
    assert num_watches(store) == len(shards(bench))


@pytest.mark.usefixtures("told", "lists_again")
def test_the_more_a_store_holds_the_more_seldom_it_is_listed_again(bench, monkeypatch):
    store = bench.open()
    for number in range(100):
        store.put(make_key(number), [b"value"])
    step(store)
    listdir = bench.io.listdir
    monkeypatch.setattr(
        bench.io, "listdir", lambda path: (bench.clock.advance(0.01), listdir(path))[1]
    )
    before = bench.io.calls["listdir"]
    for _ in range(50):
        step(store)
        bench.clock.advance(1.0)
    assert 8 <= bench.io.calls["listdir"] - before <= 11


@pytest.mark.usefixtures("told")
def test_news_are_taken_while_listing_rests(bench, monkeypatch):
    ours, theirs = bench.open(), bench.open()
    for number in range(100):
        theirs.put(make_key(number), [b"value"])
    listdir = bench.io.listdir
    monkeypatch.setattr(
        bench.io, "listdir", lambda path: (bench.clock.advance(0.1), listdir(path))[1]
    )
    step(ours)
    theirs.delete(make_key(1))
    bench.clock.advance(1.0)
    assert ours._volume.upkeep.refresh.step() == 1.0
    assert not ours.contains(make_key(1))


@pytest.mark.usefixtures("told")
def test_a_directory_that_became_another_shard_unnoticed_is_not_listened_to(bench):
    with bench.open() as store:
        layout = store._volume.layout
    news = ShardNews(bench.io, layout)
    os.mkdir(layout.shard(0))
    assert news.follow(0)
    os.rename(layout.shard(0), layout.shard(1))
    assert not news.follow(1)
    assert news.take() == ([], True)
    assert not news.is_told_of(0)
    assert news.follow(1)
    news.close()


@pytest.mark.parametrize("ways", ["from elsewhere"], indirect=True)
def test_listing_for_a_while_is_followed_by_a_rest(bench, monkeypatch, ways):
    ours, theirs = bench.open(), bench.open()
    theirs.put(make_key(1), [b"value"])
    listdir = bench.io.listdir
    with monkeypatch.context() as patch:
        patch.setattr(
            bench.io, "listdir", lambda path: (bench.clock.advance(0.1), listdir(path))[1]
        )
        step(ours)
    theirs.delete(make_key(1))
    bench.clock.advance(20 * 0.1 * NUM_SHARDS - 1)
    step(ours)
    assert ours.contains(make_key(1))
    bench.clock.advance(2)
    step(ours)
    assert not ours.contains(make_key(1))


@pytest.mark.usefixtures("told")
def test_a_shard_that_is_a_link_is_not_listened_to(bench, tmp_path):
    ours, theirs = bench.open(), bench.open()
    theirs.put(make_key(1), [b"value"])
    shard = bench.path(make_key(1)).parent
    shard.rename(tmp_path / "elsewhere")
    shard.symlink_to(tmp_path / "elsewhere")
    step(ours)
    assert ours.contains(make_key(1))
    assert num_watches(ours) == 0


@pytest.mark.usefixtures("ways")
def test_a_listing_that_failed_is_made_again(bench):
    ours, theirs = bench.open(), bench.open()
    theirs.put(make_key(1), [b"value"])
    bench.io.fail["listdir"] = errno.EIO
    bench.io.only_in = str(bench.path(make_key(1)).parent)
    ours.maintain()
    assert not ours.contains(make_key(1))
    bench.io.fail.clear()
    bench.clock.advance(20)
    ours.maintain()
    assert ours.contains(make_key(1))


@pytest.mark.usefixtures("ways")
def test_what_comes_while_a_directory_is_listed_is_noticed(bench, monkeypatch):
    ours, theirs = bench.open(), bench.open()
    theirs.put(make_key(1), [b"value"])
    listdir = bench.io.listdir

    def then_remove(path):
        names = listdir(path)
        bench.path(make_key(1)).unlink(missing_ok=True)
        return names

    with monkeypatch.context() as patch:
        patch.setattr(bench.io, "listdir", then_remove)
        step(ours)
    step(ours)
    assert not ours.contains(make_key(1))


@pytest.mark.usefixtures("told")
def test_news_do_not_bring_back_a_broken_record_that_cannot_be_taken_out(bench):
    ours, theirs = bench.open(), bench.open()
    theirs.put(make_key(1), [b"value"])
    step(ours)
    theirs.delete(make_key(1))
    ours._volume.index.ban(make_key(1))
    theirs.put(make_key(1), [b"value"])
    step(ours)
    assert not ours.contains(make_key(1))
    theirs.delete(make_key(1))
    ours.put(make_key(1), [b"value"])
    step(ours)
    assert ours.contains(make_key(1))


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
def test_a_forked_process_leaves_the_watches_to_its_parent(bench):
    store = bench.open()
    store.put(make_key(1), [b"value"])
    step(store)
    before = num_watches(store)
    child = os.fork()
    if child == 0:
        store._volume.upkeep.refresh.close()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert num_watches(store) == before == 1


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
        queues[0].take(4096)
    store._volume.upkeep.refresh.step()  # nobody should; it is not opened again
    assert len(queues) == 1


@pytest.mark.parametrize(
    ("kind", "tells"),
    [("ext4", True), ("tmpfs", True), ("nfs4", False), ("fuse.sshfs", False), ("9p", False)],
)
def test_which_file_systems_tell_all(tmp_path, monkeypatch, kind, tells):
    read = mounts_module._read
    other = "nfs4" if tells else "ext4"

    def with_mounts(path: str) -> str:
        if "fdinfo" in path:
            read(path)
            return "pos:\t0\nflags:\t02100000\nmnt_id:\t23\nino:\t2\n"
        return (
            f"22 23 0:0 / /other rw shared:23 - {other} /dev/other rw\n\nodd\n"
            f"23 1 8:1 / /a\\040- rw shared:1 master:2 - {kind} x rw\n"
        )

    monkeypatch.setattr(mounts_module, "_read", with_mounts)
    assert inotify.tells_all(str(tmp_path)) == tells


def test_the_mount_of_a_directory_is_found():
    assert not inotify.tells_all("/proc")
    mounts = mounts_module._read("/proc/self/mountinfo").splitlines()
    tmpfs = [line.split()[4] for line in mounts if line.partition(" - ")[2].startswith("tmpfs ")]
    readable = [path for path in tmpfs if os.access(path, os.R_OK | os.X_OK)]
    # One may be mounted over.
    assert not readable or any(map(inotify.tells_all, readable))


@pytest.mark.parametrize("mounts", ["", "odd", "\n\n", "x - "])
def test_of_unknown_file_systems_not_all_is_told(tmp_path, monkeypatch, mounts):
    assert not inotify.tells_all(str(tmp_path / "absent"))
    monkeypatch.setattr(mounts_module, "_read", lambda _path: mounts)
    assert not inotify.tells_all(str(tmp_path))
    monkeypatch.setattr(
        mounts_module, "_read", lambda path: "mnt_id: 1" if "fd" in path else mounts
    )
    assert not inotify.tells_all(str(tmp_path))
    monkeypatch.setattr(mounts_module, "_read", refuse)
    assert not inotify.tells_all(str(tmp_path))

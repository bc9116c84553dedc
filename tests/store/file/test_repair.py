"""Unusual damage to an index, and races around it: the quota holds, and all files are found."""

from __future__ import annotations

import errno
import os
import shutil
import sqlite3
import threading
import time
from contextlib import closing

import pytest

from kvferry.store.base import PutResult, Where
from kvferry.store.file import index as index_module
from kvferry.store.file.database import IndexUnavailable
from kvferry.store.file.settings import FileBounds
from kvferry.store.file.writing import Writing
from kvferry.testing.stores import make_key, make_value
from kvferry.testing.stores.hooks import wait_until
from kvferry.types import ChunkKey
from tests.store.file.halves import begin, finish
from tests.store.file.storing import assert_index_agrees, disk_bytes

QUOTA = 100_000
SIZE = 4000


def key_in(shard: int, number: int) -> ChunkKey:
    key = make_key(number)
    return ChunkKey(bytes([shard << 3 | key[0] & 7]) + key[1:])


def fill(store, numbers):
    for number in numbers:
        store.put(make_key(number), [make_value(SIZE)])


def test_an_older_copy_moved_into_place_does_not_void_the_quota(bench):
    store = bench.open(max_bytes=QUOTA)
    fill(store, range(3))
    store.maintain()
    shutil.copy(bench.root / "index.sqlite3", bench.root / "older")
    fill(store, range(3, 24))
    os.replace(bench.root / "older", bench.root / "index.sqlite3")
    for number in range(100, 160):
        fill(store, [number])
        assert disk_bytes(bench.root) <= QUOTA
        store.upkeep.step()
        bench.clock.advance(1)
    assert store.put(make_key(200), [make_value(SIZE)]).result is PutResult.STORED
    assert disk_bytes(bench.root) <= QUOTA


def test_a_listing_leaves_the_index_to_others(bench):
    """A thread that never waits keeps the GIL for 5 ms at each row, and a listing of rows one by
    one would keep this process from storing for all that time."""
    store = bench.open()
    for number in range(2000):
        store.put(make_key(number), [b"value"])
    entries = sorted(store.catalogue().scan())
    stop, took = threading.Event(), []

    def compute():
        while not stop.is_set():
            pass

    thread = threading.Thread(target=compute)
    thread.start()
    try:
        for _ in range(3):
            started = time.monotonic()
            assert sorted(store.catalogue().recent(5000)) == entries
            took.append(time.monotonic() - started)
    finally:
        stop.set()
        thread.join()
    assert min(took) <= FileBounds().lock_seconds  # a fault makes all slow, a busy machine one


def test_a_listing_of_many_slices_is_in_order_and_whole(bench):
    """Whatever times records share, and wherever a slice ends."""
    store = bench.open()
    rows = "WITH RECURSIVE rows (i) AS (SELECT 0 UNION ALL SELECT i + 1 FROM rows LIMIT 6000) "
    insert = "INSERT INTO records (key, num_bytes, last_used, namespace, pinned_until) "
    used = "iif(i < 2500, 700000000.1, 700000000.1 + i * 7919 % 250)"
    with closing(sqlite3.connect(bench.root / "index.sqlite3")) as db, db:
        db.execute(
            f"{insert} {rows} SELECT randomblob(32), i, {used}, x'', iif(i % 2, 1e9 + i % 7, 0.0) "
            "FROM rows"
        )
    entries = list(store.catalogue().scan())
    assert len(entries) == len({entry.key for entry in entries}) == 6000
    recent = list(store.catalogue().recent(10_000))
    assert set(recent) == set(entries)
    times = [entry.last_used for entry in recent]
    assert times == sorted(times, reverse=True)
    assert list(store.catalogue().recent(7)) == recent[:7]


def test_records_that_cannot_be_removed_do_not_stop_eviction(bench, monkeypatch):
    store = bench.open(max_bytes=700 * 100)
    for number in range(600):
        store.put(key_in(3, number), [make_value(100)])
    remove = store.directory.remove

    def refuse(key):
        if key[0] >> 3 == 3:
            raise OSError(errno.EACCES, "Permission denied")
        return remove(key)

    monkeypatch.setattr(store.directory, "remove", refuse)
    results = []
    for number in range(1000, 1300):
        bench.wall.advance(1)
        results.append(store.put(key_in(5, number), [make_value(100)]).result)
    assert results.count(PutResult.STORED) >= 298
    assert disk_bytes(bench.root) <= 700 * 100


@pytest.mark.parametrize("read_only", [False, True])
def test_records_that_may_not_be_listed_are_no_reason_not_to_open(bench, monkeypatch, read_only):
    bench.open().put(make_key(), [b"value"])
    (bench.root / "index.sqlite3").unlink()
    bench.io.fail["listdir"] = errno.EACCES
    store = bench.open(read_only=read_only)
    store.maintain()
    assert store.where(make_key()) is not Where.HERE


def test_notes_may_come_while_others_are_written(bench):
    """Threads that never wait leave the GIL only when they must, 5 ms later: a statement for each
    key would keep other processes from the index longer than they wait."""
    store = bench.open()
    keys = [make_key(number) for number in range(1000)]
    stop, touched = threading.Event(), []

    def touch():
        while not stop.is_set():
            store.touch(keys)
            touched.append(None)

    threads = [threading.Thread(target=touch) for _ in range(2)]
    for thread in threads:
        thread.start()
    took = []
    try:
        for _ in range(3):
            goal = len(touched) + 20
            wait_until(lambda goal=goal: len(touched) >= goal, "notes come")
            started = time.monotonic()
            store.index.flush()
            took.append(time.monotonic() - started)
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert min(took) <= FileBounds().lock_seconds  # a fault makes all slow, a busy machine one


def test_a_record_placed_by_hand_while_its_key_was_written_is_found(bench):
    store = bench.open(max_bytes=QUOTA, wall=time.time)
    store.maintain()
    writing = begin(store, make_key(), make_value(SIZE))
    path = bench.path(make_key())
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(make_value(SIZE))
    long_ago = time.time() - 100
    os.utime(path.parent, (long_ago, long_ago))
    store.maintain()
    assert finish(store, writing) is PutResult.EXISTS
    for _ in range(3):
        store.upkeep.step(rests=False)
    assert store.stat().num_records == 1
    assert_index_agrees(bench.root)


def test_a_folder_that_is_replaced_all_the_time_keeps_no_other_waiting(bench):
    store = bench.open()
    for number in range(64):
        store.put(key_in(number % 32, number), [make_value(100)])
    store.maintain()
    next((bench.root / "records" / "10").iterdir()).unlink()
    for number in range(80):
        folder = bench.root / "records" / "05"
        folder.rename(bench.root / "writing" / f"old{number}")
        folder.mkdir()
        bench.clock.advance(100)
        store.upkeep.step()
    assert store.stat().num_records == 64 - 2 - 1


def test_a_record_removed_by_hand_as_it_is_stored_leaves_no_row(bench, monkeypatch):
    store = bench.open()
    place = Writing.place

    def vanishing(writing):
        won = place(writing)
        bench.path(writing.key).unlink()
        return won

    monkeypatch.setattr(Writing, "place", vanishing)
    store.put(make_key(), [b"value"])
    store.maintain()
    assert store.stat().num_records == 0


@pytest.mark.parametrize("what", ["place", "execute"])
def test_what_the_index_cannot_count_is_not_stored(bench, monkeypatch, what):
    store = bench.open()
    place = Writing.place

    def failing(*arguments):
        if what == "place":  # a network file system that lost the answer
            place(*arguments)
        raise IndexUnavailable(errno.EIO, "after the link")

    patched = Writing if what == "place" else index_module
    with monkeypatch.context() as patch:
        patch.setattr(patched, what, failing)
        assert store.put(make_key(), [b"value"]).result is PutResult.FAILED
    assert store.where(make_key()) is not Where.HERE
    assert disk_bytes(bench.root) == 0
    assert store.put(make_key(), [b"value"]).result is PutResult.STORED
    assert_index_agrees(bench.root)


def test_a_put_that_would_have_to_evict_for_long_gives_up(bench, monkeypatch):
    store = bench.open(max_bytes=QUOTA)
    store.maintain()

    def more_to_evict(*arguments):
        bench.clock.advance(1.0)
        return []

    with monkeypatch.context() as patch:
        patch.setattr(store.index, "add_written", more_to_evict)
        assert store.put(make_key(), [b"value"]).result is PutResult.NO_SPACE
    assert disk_bytes(bench.root) == 0
    assert store.put(make_key(), [b"value"]).result is PutResult.STORED


def test_a_put_without_room_keeps_what_its_eviction_did(bench):
    store = bench.open(max_bytes=1000)
    for number in range(5):
        store.put(make_key(number), [make_value(100)])
    store.catalogue().pin([make_key(number) for number in range(4)], bench.wall() + 1000)
    store.discard(make_key(4), "bad_checksum")
    assert store.put(make_key(9), [make_value(700)]).result is PutResult.NO_SPACE
    assert bench.counters["store_put_no_space"] == 1
    assert_index_agrees(bench.root)
    assert store.stat().used_bytes == 400


def test_values_put_together_evict_for_what_is_stored_alone(bench):
    store = bench.open(max_bytes=10 * SIZE)
    fill(store, range(10))
    assert [each.result for each in store.put_all([(make_key(99), [make_value(SIZE)])] * 8)] == [
        PutResult.STORED,
        *[PutResult.EXISTS] * 7,
    ]
    assert store.stat().num_records == 10
    assert_index_agrees(bench.root)


def test_values_put_together_on_a_medium_that_refuses_names_evict_for_one(bench):
    store = bench.open(max_bytes=10 * SIZE)
    fill(store, range(10))
    bench.io.fail["link"] = errno.EIO
    values = [(make_key(number), [make_value(SIZE)]) for number in range(20, 28)]
    assert [each.result for each in store.put_all(values)] == [PutResult.FAILED] * 8
    assert store.stat().num_records == 9
    assert_index_agrees(bench.root)


@pytest.mark.parametrize("is_late", [False, True])
def test_what_a_network_file_system_says_at_close_is_an_answer(bench, monkeypatch, is_late):
    """Of the value's descriptor, or only of the one that was made to ask early."""
    store = bench.open()
    close, dup = os.close, os.dup
    values: list[int] = []

    def failing(fd):
        close(fd)
        if fd in values:
            values.clear()
            raise OSError(errno.EDQUOT, "delayed write")

    def noted(fd):
        values.append(fd if is_late else dup(fd))
        return dup(fd) if is_late else values[-1]

    with monkeypatch.context() as patch:
        patch.setattr(os, "close", failing)
        patch.setattr(os, "dup", noted)
        stored = store.put(make_key(), [b"value"])
    assert stored.result is (PutResult.STORED if is_late else PutResult.NO_SPACE)
    assert disk_bytes(bench.root) == (5 if is_late else 0)


def test_a_failed_put_does_not_hide_what_another_process_stored(bench, monkeypatch):
    store, other = bench.open(), bench.open()

    def full(*arguments):
        patch.undo()
        other.put(make_key(), [b"value"])
        store.maintain()
        assert store.where(make_key()) is Where.HERE
        raise OSError(errno.ENOSPC, "full")

    with monkeypatch.context() as patch:
        patch.setattr(Writing, "write", full)
        full_write = store.put(make_key(), [b"value"])
    assert full_write.result is PutResult.NO_SPACE
    store.maintain()
    assert store.where(make_key()) is Where.HERE


class TestAKeyThatAnotherProcessRemovesMeanwhile:
    """Between the file and what is known of it, the removal is learned from the index."""

    @pytest.fixture
    def removed_by(self, bench):
        """A call that goes on after another process removed the key, and this one has heard."""
        other = bench.open()

        def remove_after(call, store):
            def late(*arguments):
                answer = call(*arguments)
                other.delete(make_key())
                store.maintain()
                return answer

            return late

        return remove_after

    def test_is_not_known_when_it_was_just_stored(self, bench, monkeypatch, removed_by):
        store = bench.open()
        add_written = store.index.add_written
        monkeypatch.setattr(store.index, "add_written", removed_by(add_written, store))
        assert store.put(make_key(), [b"value"]).result is PutResult.STORED
        assert store.where(make_key()) is not Where.HERE

    def test_nor_when_it_was_stored_before_the_first_look(self, bench):
        store, other = bench.open(), bench.open()
        assert store.put(make_key(), [b"value"]).result is PutResult.STORED
        assert other.delete(make_key())
        store.maintain()
        assert store.where(make_key()) is not Where.HERE

    def test_nor_when_it_was_there_before(self, bench, monkeypatch, removed_by):
        store = bench.open()
        bench.open().put(make_key(), [b"value"])
        monkeypatch.setattr(Writing, "is_taken", removed_by(Writing.is_taken, store))
        assert store.put(make_key(), [b"value"]).result is PutResult.EXISTS
        monkeypatch.undo()
        store.maintain()
        assert store.where(make_key()) is not Where.HERE


def test_a_key_that_was_gone_and_is_stored_again_is_known(bench, monkeypatch):
    store, other = bench.open(), bench.open()
    other.put(make_key(), [b"value"])
    store.maintain()
    other.delete(make_key())
    open_record = store.directory.open_record

    def early(key):
        found = open_record(key)
        other.put(key, [b"value"])
        store.index.follow()
        return found

    monkeypatch.setattr(store.directory, "open_record", early)
    assert store.read(make_key(), ()) is None
    monkeypatch.undo()
    store.maintain()
    assert store.where(make_key()) is Where.HERE


def test_a_disk_without_room_for_one_file_can_be_made_smaller(bench, monkeypatch):
    store = bench.open(max_bytes=QUOTA)
    fill(store, range(10))
    dead = bench.root / "writing" / ("ab" * 16)
    dead.write_bytes(b"left by a dead process")
    os.utime(dead, (1, 1))

    def full(self):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Writing, "begin", full)
    report = store.catalogue().gc(max_bytes=SIZE * 3)
    assert report.removed_records == 7

"""Index, recency, eviction, quarantine and correction: what a store does on its own."""

from __future__ import annotations

import logging
import math
import os
import random
import sys
import threading
import time

import pytest

from kvferry.store.base import PutResult
from kvferry.store.file import FileStore
from kvferry.store.file.background import Background, Job
from kvferry.store.file.index import KeyIndex
from kvferry.store.file.layout import NUM_SHARDS
from kvferry.store.file.ledger import Ledger, Owner, encode
from kvferry.testing.stores import make_key, make_value, read_value
from kvferry.types import ChunkKey


def make_keys(num_keys):
    rng = random.Random(1)
    return [ChunkKey(rng.randbytes(32)) for _ in range(num_keys)]


def test_the_index_takes_at_most_150_bytes_per_key():
    index = KeyIndex()
    keys = make_keys(100_000)
    for key in keys:
        index.add(key)
    # A bytes object of 31 bytes is 64 bytes: nothing is lost to the allocator's 16-byte steps.
    one = -(-sys.getsizeof(keys[0][1:]) // 16) * 16
    tables = sum(sys.getsizeof(shard) for shard in index._shards)
    assert len(index) == len(keys)
    assert one + tables / len(keys) <= 150


def test_the_index_knows_better_than_a_listing_that_began_before(bench):
    index = KeyIndex()
    old, new, gone, banned = (ChunkKey(bytes([7 << 3]) + bytes([n] * 31)) for n in range(4))
    index.add(gone)
    index.start_listing(7)
    index.add(new)
    index.discard(gone)
    index.ban(banned)
    index.end_listing([old, gone, banned])
    assert [index.contains(key) for key in (old, new, gone, banned)] == [True, True, False, False]
    index.add(banned)
    assert not index.contains(banned)
    index.add(banned, stored=True)
    assert index.contains(banned)


def test_opening_does_not_wait_for_the_index(bench):
    bench.open().put(make_key(), [b"value"])
    store = bench.open()
    assert not store.stat().index_complete
    assert not store.wait_indexed(0.0)
    assert not store.contains(make_key())
    store.maintain()
    assert store.wait_indexed(0.0)
    assert store.contains(make_key())


def test_contains_touch_and_stat_make_no_system_call(bench):
    store = bench.open(max_bytes=100_000)
    store.put(make_key(1), [b"value"])
    before = bench.io.calls.total()
    store.contains(make_key(1))
    store.contains(make_key(2))
    store.touch([make_key(1)])
    store.probe([make_key(1)])
    store.stat()
    assert bench.io.calls.total() == before


def test_touched_records_are_written_back_in_batches_and_on_close(bench):
    store = bench.open()
    keys = [make_key(number) for number in range(3)]
    for key in keys:
        store.put(key, [b"value"])
    store.touch(keys)
    store.close()
    times = [bench.path(key).stat().st_mtime for key in keys]
    assert times == sorted(times, reverse=True)
    assert max(times) == pytest.approx(bench.wall(), abs=1)


def test_a_large_store_evicts_old_records_first_from_a_sample(bench):
    store = bench.open()
    keys = make_keys(3000)
    for age, key in enumerate(keys):
        store.put(key, [b"v"])
        os.utime(bench.path(key), (1e9 + age, 1e9 + age))
    small = bench.open(max_bytes=2990, rng=random.Random(3))
    assert small.put(make_key(1), [b"v"]) is PutResult.STORED
    evicted = [age for age, key in enumerate(keys) if not bench.path(key).exists()]
    assert len(evicted) >= 11
    assert max(evicted) < 1000


def test_quarantine_goes_first_and_is_bounded(bench):
    store = bench.open()
    for number in range(70):
        store.put(make_key(number), [make_value(100)])
        store.discard(make_key(number), "bad_leaf")
    kept = os.listdir(bench.root / "quarantine")
    assert len(kept) == 64
    assert all(".bad_leaf." in name for name in kept)
    assert store.stat().used_bytes == 6400
    store.put(make_key(100), [make_value(100)])
    small = bench.open(max_bytes=5000)
    assert small.put(make_key(101), [make_value(100)]) is PutResult.STORED
    assert small.stat().used_bytes <= 5000
    assert read_value(small, make_key(100)) == make_value(100)


def test_counts_are_corrected_when_files_were_changed_from_outside(bench, caplog):
    store = bench.open(max_bytes=10_000)
    for number in range(2):
        store.put(make_key(number), [make_value(4000)])
    bench.path(make_key(0)).unlink()
    os.truncate(bench.path(make_key(1)), 1000)
    store.close()
    again = bench.open(max_bytes=10_000)
    again.maintain()
    assert again.stat().used_bytes == 1000
    assert "-7000" in caplog.text


def test_a_store_that_only_seems_full_finds_out(bench):
    store = bench.open(max_bytes=10_000)
    store.maintain()
    for number in range(2):
        store.put(make_key(number), [make_value(5000)])
    for number in range(2):
        bench.path(make_key(number)).unlink()
    assert store.put(make_key(2), [make_value(5000)]) is PutResult.NO_SPACE
    bench.clock.advance(60)
    store.maintain()
    assert store.put(make_key(2), [make_value(5000)]) is PutResult.STORED
    assert store.stat().used_bytes == 5000


def test_a_store_without_an_index_lists_nothing_and_does_not_grow(bench):
    store = bench.open(index=False)
    keys = make_keys(50)
    for key in keys:
        store.put(key, [make_value(10)])
    store.maintain()
    bench.io.calls.clear()
    bench.clock.advance(60)
    store.maintain()
    assert bench.io.calls["lstat"] < NUM_SHARDS
    assert not store.contains(keys[0])
    assert not store.wait_indexed(60.0)
    assert store.stat().num_records == len(store._volume.index) == 0
    assert store.put(keys[0], [make_value(10)]) is PutResult.EXISTS
    assert read_value(store, keys[1]) == make_value(10)
    assert {entry.key for entry in store.scan()} == set(keys)


def test_a_store_without_an_index_that_only_seems_full_finds_out(bench):
    store = bench.open(max_bytes=10_000, index=False)
    for number in range(2):
        store.put(make_key(number), [make_value(5000)])
    for number in range(2):
        bench.path(make_key(number)).unlink()
    store.maintain()
    assert store.put(make_key(2), [make_value(5000)]) is PutResult.NO_SPACE
    bench.clock.advance(60)
    store.maintain()
    assert store.put(make_key(2), [make_value(5000)]) is PutResult.STORED


def test_nothing_is_corrected_while_a_write_is_pending(bench):
    store, other = bench.open(), bench.open()
    session = other.begin(make_key(), 5000)
    store.maintain()
    assert bench.counters["store_corrected_bytes"] == 0
    assert other.commit(session, bytes(10)) is PutResult.STORED
    assert other.stat().used_bytes == 5000


def test_the_thread_goes_on_after_a_job_failed(caplog):
    done = threading.Event()
    failures = []

    def fail() -> float:
        raise OSError("disk on fire")

    def break_down() -> float:
        raise RuntimeError("a bug")

    def work() -> float:
        done.set()
        return math.inf

    jobs = [
        Job("fail", fail, lambda name, error: failures.append((name, str(error)))),
        Job("break", break_down, lambda name, error: None),
        Job("work", work, lambda name, error: None),
    ]
    background = Background(jobs, lambda: None, time.monotonic)
    background.start()
    assert done.wait(10)
    background.stop(10)
    assert failures == [("fail", "disk on fire")]
    assert [r.levelno for r in caplog.records] == [logging.ERROR]


def test_close_does_not_wait_for_a_system_call_that_hangs(tmp_path, monkeypatch):
    from kvferry.store.file import store as module
    from kvferry.store.file.fileio import FileIO

    monkeypatch.setattr(module, "CLOSE_SECONDS", 0.05)
    release = threading.Event()
    hanging = threading.Event()

    class Hanging(FileIO):
        def utime(self, path, nanoseconds):
            hanging.set()
            release.wait(30)

    store = FileStore(tmp_path / "store", io=Hanging())
    store.put(make_key(), [b"value"])
    store.touch([make_key()])
    assert hanging.wait(20)
    started = time.monotonic()
    store.close()
    assert time.monotonic() - started < 5
    release.set()


def test_close_does_not_wait_for_open_sessions_on_a_disk_that_hangs(tmp_path, monkeypatch):
    from kvferry.store.file import store as module
    from kvferry.store.file.fileio import FileIO

    monkeypatch.setattr(module, "CLOSE_SECONDS", 0.05)
    release = threading.Event()

    class Hanging(FileIO):
        is_hanging = False

        def pwritev(self, fd, buffers, offset):
            if self.is_hanging:
                release.wait(30)
            return super().pwritev(fd, buffers, offset)

    io = Hanging()
    store = FileStore(tmp_path / "store", io=io)
    session = store.begin(make_key(), 1000)
    io.is_hanging = True
    started = time.monotonic()
    store.close()
    assert time.monotonic() - started < 5
    assert store.commit(session, b"head") is PutResult.FAILED
    release.set()


@pytest.mark.parametrize("is_absorbed", [False, True])
def test_nothing_is_corrected_while_a_removal_of_a_dead_writer_waits(bench, is_absorbed):
    store = bench.open()
    store.put(make_key(), [make_value(5000)])
    [writer] = (bench.root / "writers").iterdir()
    dead = writer / "absorbed" / "0123456789abcdef" if is_absorbed else writer
    batch = dead / "trash" / "1"
    batch.mkdir(parents=True)
    if is_absorbed:
        (dead / "ledger").write_bytes(2 * encode(Ledger(owner=Owner(b"h" * 16, 1, 1))))
    bench.path(make_key()).rename(batch / "record")
    assert store._volume.quota.refresh().num_bytes == 5000
    assert bench.open().repair().corrected_bytes is None

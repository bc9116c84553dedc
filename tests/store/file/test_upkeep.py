"""What a store does on its own: follow the index, compare it, note uses, bound quarantine."""

from __future__ import annotations

import os
import random
import sys
import threading
import time
import tracemalloc
from collections import OrderedDict

import pytest

from kvferry.store.base import PutResult, Where
from kvferry.store.file import FileStore
from kvferry.store.file.index import KnownKeys
from kvferry.store.file.settings import FileBounds, FileSettings
from kvferry.testing.stores import make_key, make_value, read_value
from kvferry.testing.stores.hooks import wait_until
from kvferry.types import ChunkKey
from tests.store.file.halves import begin, finish


def make_keys(num_keys):
    rng = random.Random(1)
    return [ChunkKey(rng.randbytes(32)) for _ in range(num_keys)]


def test_known_keys_take_at_most_150_bytes_each():
    known = KnownKeys()
    keys = make_keys(100_000)
    one = -(-sys.getsizeof(keys[0]) // 16) * 16  # the allocator's steps
    tracemalloc.start()
    for key in keys:
        known.add(key)
    of_all, _peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert known.contains(keys[-1])
    assert one + of_all / len(keys) <= 150


def test_opening_does_not_wait_for_the_index(bench):
    bench.open().put(make_key(), [b"value"])
    store = bench.open()
    assert not store.stat().index_complete
    assert not store.wait_indexed(0.0)
    assert store.where(make_key()) is not Where.HERE
    store.maintain()
    assert store.wait_indexed(0.0)
    assert store.where(make_key()) is Where.HERE


def test_contains_touch_and_stat_make_no_system_call(bench):
    store = bench.open(max_bytes=100_000)
    store.put(make_key(1), [b"value"])
    before = bench.io.calls.total()
    store.where(make_key(1))
    store.where(make_key(2))
    store.touch([make_key(1)])
    store.probe([make_key(1)])
    store.stat()
    assert bench.io.calls.total() == before


def test_touched_records_are_written_back_in_batches_and_on_close(bench):
    store = bench.open()
    keys = [make_key(number) for number in range(3)]
    for key in keys:
        store.put(key, [b"value"])
    bench.wall.advance(50)
    store.touch(keys)
    store.close()
    used = {entry.key: entry.last_used for entry in bench.open().catalogue().scan()}
    assert [used[key] for key in keys] == sorted(used.values(), reverse=True)
    assert max(used.values()) == pytest.approx(bench.wall(), abs=1)


@pytest.mark.parametrize("seed", range(2))
def test_prefixes_leave_in_the_order_of_the_host_pool(bench, seed):
    choose, capacity = random.Random(seed), 12
    store, order = bench.open(max_bytes=capacity), OrderedDict[ChunkKey, None]()

    def use(keys):
        store.touch(keys)
        for key in reversed(keys):  # the root counts as used last
            if key in order:
                order.move_to_end(key)
        bench.clock.advance(60)  # uses are written back from time to time
        store.maintain()
        bench.wall.advance(1)

    num_evicted = 0
    for _ in range(60):
        # Prompts of a tree: the first chunks are shared.
        path = [choose.randrange(2) for _ in range(choose.randrange(1, 8))]
        prefix = [make_key(int("1" + "".join(map(str, path[:end])), 2)) for end in range(len(path))]
        use(prefix)
        for key in prefix:
            if key not in order:
                if len(order) == capacity:
                    order.popitem(last=False)
                    num_evicted += 1
                order[key] = None
                assert store.put(key, [b"v"]).result is PutResult.STORED
                bench.wall.advance(0.01)
        use(prefix)
        stored = {entry.key for entry in store.catalogue().scan()}
        assert stored == {key for key in map(make_key, range(1, 128)) if key in order}
    assert num_evicted > 20


def test_quarantine_is_bounded_and_evicts_nothing(bench):
    store = bench.open()
    for number in range(70):
        store.put(make_key(number), [make_value(100)])
        store.discard(make_key(number), "bad_checksum")
    kept = os.listdir(bench.root / "quarantine")
    assert len(kept) == 64
    assert all(".bad_checksum." in name for name in kept)
    assert store.stat().used_bytes == 0
    store.put(make_key(100), [make_value(4900)])
    small = bench.open(max_bytes=5000)
    assert small.put(make_key(101), [make_value(100)]).result is PutResult.STORED
    assert read_value(small, make_key(100)) == make_value(4900)
    small.maintain()
    assert len(os.listdir(bench.root / "quarantine")) == 2  # a twentieth of the quota
    small.put(make_key(102), [make_value(300)])
    small.discard(make_key(102), "bad_checksum")
    assert len(os.listdir(bench.root / "quarantine")) == 1  # the newest, though it is larger
    small.catalogue().gc(max_bytes=300)
    assert len(os.listdir(bench.root / "quarantine")) == 1
    small.catalogue().gc(max_bytes=0)
    assert os.listdir(bench.root / "quarantine") == []


def test_counts_are_corrected_when_files_were_taken_from_outside(bench):
    store = bench.open(max_bytes=10_000)
    for number in range(2):
        store.put(make_key(number), [make_value(4000)])
    bench.path(make_key(0)).unlink()
    store.close()
    again = bench.open(max_bytes=10_000)
    again.maintain()
    assert again.stat().used_bytes == 4000
    assert bench.counters["store_index_corrected"] == 1
    assert [removal.reason for removal in again.catalogue().removals(9)] == ["vanished"]
    assert again.where(make_key(0)) is not Where.HERE


def test_a_store_that_only_seems_full_has_room(bench):
    store = bench.open(max_bytes=10_000)
    for number in range(2):
        store.put(make_key(number), [make_value(5000)])
    for number in range(2):
        bench.path(make_key(number)).unlink()
    assert store.put(make_key(2), [make_value(5000)]).result is PutResult.STORED
    store.maintain()
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
    assert bench.io.calls["listdir"] <= 3  # what is being written, and quarantine twice
    assert not any(store.where(each) is Where.HERE for each in keys)
    assert all(map(store.catalogue().lists, keys))
    assert not store.catalogue().lists(bytes(32))
    assert store.wait_indexed(0.1)
    assert store.put(keys[0], [make_value(10)]).result is PutResult.EXISTS
    assert read_value(store, keys[1]) == make_value(10)
    assert {entry.key for entry in store.catalogue().scan()} == set(keys)


def test_a_write_is_counted_once_it_has_ended(bench):
    store, other = bench.open(), bench.open()
    writing = begin(other, make_key(), make_value(5000))
    store.maintain()
    assert store.stat().used_bytes == 0
    assert finish(other, writing) is PutResult.STORED
    store.maintain()
    assert other.stat().used_bytes == store.stat().used_bytes == 5000
    assert bench.counters["store_index_corrected"] == 0


def test_the_thread_goes_on_after_a_job_failed(tmp_path, monkeypatch, caplog):
    with FileStore(tmp_path / "store") as store, FileStore(tmp_path / "store") as other:
        assert store.wait_indexed(60)

        def break_down(*arguments):
            raise RuntimeError("a bug")

        def fail(*arguments):
            raise OSError("disk on fire")

        monkeypatch.setattr(store.upkeep, "_clean", break_down)
        monkeypatch.setattr(store.upkeep, "_flush", fail)
        wait_until(lambda: "a bug" in caplog.text, "a job has failed")
        other.put(make_key(), [b"value"])
        wait_until(lambda: store.where(make_key()) is Where.HERE, "the other's value is known")
    assert "RuntimeError: a bug" in caplog.text


def test_close_does_not_wait_for_a_disk_that_hangs(tmp_path, monkeypatch):
    release = threading.Event()
    settings = FileSettings(bounds=FileBounds(close_seconds=0.05))
    store = FileStore(tmp_path / "store", settings=settings)
    assert store.wait_indexed(60)
    monkeypatch.setattr(store.index, "flush", lambda: release.wait(60))
    store.touch([make_key()])
    started = time.monotonic()
    store.close()
    assert time.monotonic() - started < 30
    assert store.put(make_key(), [b"value"]).result is PutResult.FAILED
    release.set()

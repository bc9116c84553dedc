"""Things in the tree that no store put there."""

from __future__ import annotations

import os

import pytest

from kvferry.store.base import PutResult
from kvferry.testing.stores import make_key, make_value, read_value


def make_directory(path, outside):
    path.mkdir()


def make_fifo(path, outside):
    os.mkfifo(path)


def make_link(path, outside):
    path.symlink_to(outside)


def make_dangling_link(path, outside):
    path.symlink_to(outside.parent / "nowhere")


@pytest.mark.parametrize("make", [make_directory, make_fifo, make_link, make_dangling_link])
@pytest.mark.parametrize("first", ["read", "write", "evict"])
def test_what_is_no_file_is_a_miss_and_makes_way(bench, tmp_path, make, first):
    outside = tmp_path / "outside"
    outside.write_bytes(b"not a record")
    store = bench.open(max_bytes=10_000)
    path = bench.path(make_key())
    path.parent.mkdir(parents=True)
    make(path, outside)
    store.maintain()
    if first == "read":
        assert store.open_read(make_key()) is None
    elif first == "evict":
        for number in range(1, 5):
            assert store.put(make_key(number), [make_value(4000)]) is PutResult.STORED
    assert store.put(make_key(), [b"value"]) is PutResult.STORED
    assert read_value(store, make_key()) == b"value"
    assert list((bench.root / "quarantine").iterdir()) == []
    assert outside.read_bytes() == b"not a record"
    assert store.stat().used_bytes == sum(entry.num_bytes for entry in store.scan())


def test_foreign_names_are_neither_listed_nor_evicted(bench):
    store = bench.open(max_bytes=10_000)
    shard = bench.root / "records" / "ab"
    shard.mkdir(parents=True)
    foreign = [shard / "notes.txt", shard / ("A" * 64 + ".safetensors"), shard / "ab.safetensors"]
    for path in foreign:
        path.write_bytes(b"x" * 100)
    for number in range(5):
        assert store.put(make_key(number), [make_value(4000)]) is PutResult.STORED
    store.maintain()
    assert all(path.exists() for path in foreign)
    assert {entry.key for entry in store.scan()} <= {make_key(number) for number in range(5)}


def test_a_key_of_another_length_is_refused(bench):
    store = bench.open()
    for key in (b"", b"short", bytes(33)):
        with pytest.raises(ValueError, match="32 bytes"):
            store.put(key, [b"value"])
        with pytest.raises(ValueError, match="32 bytes"):
            store.open_read(key)


def test_strange_writer_directories_harm_nobody(bench):
    store = bench.open(max_bytes=10_000)
    writers = bench.root / "writers"
    (writers / "file").write_text("x")
    (writers / "0123456789abcdef").mkdir()
    (writers / "fedcba9876543210").mkdir()
    (writers / "fedcba9876543210" / "ledger").write_bytes(os.urandom(8192))
    store.put(make_key(0), [make_value(4000)])
    store.maintain()
    assert store.put(make_key(1), [make_value(4000)]) is PutResult.STORED
    assert store.put(make_key(2), [make_value(4000)]) is PutResult.STORED
    assert store.stat().used_bytes == 8000

"""Things in the tree that no store put there."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from kvferry.store.base import PutResult
from kvferry.store.file.fileio import FileIO, remove_tree
from kvferry.store.file.ledger import Intent, Ledger, Net, Owner, encode, host_digest
from kvferry.testing.stores import make_key, make_value, read_value


def make_directory(path, outside):
    path.mkdir()


def make_fifo(path, outside=None):
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


def make_dead_writer(bench, **fields):
    """A directory that a process of this host left, which is no more."""
    owner = Owner(host_digest(), 2**22 - 3, 12345)
    directory = bench.root / "writers" / "0123456789abcdef"
    for name in ("tmp", "trash"):
        (directory / name).mkdir(parents=True)
    ledger = Ledger(**({"owner": owner, "sequence": 1, "heartbeat": bench.wall()} | fields))
    (directory / "ledger").write_bytes(2 * encode(ledger))
    return directory


def replace_by(make, name):
    def change(directory, outside):
        path = directory / name
        remove_tree(FileIO(), str(path))
        make(path, outside)

    return change


def add_foreign_batch(directory, outside):
    (directory / "trash" / "notes").mkdir()


CHANGES = {
    f"{name} is {make.__name__.removeprefix('make_')}": replace_by(make, name)
    for name in ("ledger", "tmp", "trash", "absorbed", "trash/1", "tmp/0000000000000001-ab")
    for make in (make_fifo, make_link, make_dangling_link)
} | {
    "no tmp": lambda directory, outside: (directory / "tmp").rmdir(),
    "no trash": lambda directory, outside: (directory / "trash").rmdir(),
    "foreign batch": add_foreign_batch,
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_dead_writer_that_is_not_whole_is_taken_over_all_the_same(bench, tmp_path, name):
    outside = tmp_path / "outside" / "7"
    outside.mkdir(parents=True)
    (outside / "thesis.tex").write_text("precious")
    store = bench.open(max_bytes=10_000)
    net = Net(added_bytes=9000, added_records=1)
    CHANGES[name](make_dead_writer(bench, net=net, pending={1: 9000}), outside.parent)
    for _ in range(3):
        store.maintain()
        bench.clock.advance(61.0)
    for number in range(4):
        assert store.put(make_key(number), [make_value(4000)]) is PutResult.STORED
    assert len(os.listdir(bench.root / "writers")) == 1
    assert (outside / "thesis.tex").read_text() == "precious"


@pytest.mark.parametrize(
    "fields",
    [
        {"owner": Owner(host_digest(), 2**40, 1)},
        {"owner": Owner(host_digest(), 2**64 - 1, 1)},
        {"owner": Owner(host_digest(), 0, 1)},
        {"net": Net(added_bytes=2**63 - 1)},
        {"net": Net(removed_bytes=2**63 - 1)},
        {"net": Net(added_bytes=-5)},
        {"intent": Intent(1, -(2**63), 1)},
    ],
)
def test_a_ledger_that_no_store_writes_counts_nothing(bench, fields):
    store = bench.open(max_bytes=10_000)
    make_dead_writer(bench, **fields)
    for _ in range(3):
        for number in range(4):
            store.put(make_key(number), [make_value(4000)])
        assert store.stat().used_bytes == sum(entry.num_bytes for entry in store.scan()) == 8000
        store.maintain()
        bench.clock.advance(61.0)
    assert len(os.listdir(bench.root / "writers")) == 1


@pytest.mark.parametrize("make", [make_fifo, make_link, Path.touch])
def test_what_is_named_like_a_writer_and_is_none_is_left_alone(bench, tmp_path, make):
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "thesis.tex").write_text("precious")
    store = bench.open(max_bytes=10_000)
    path = bench.root / "writers" / "0123456789abcdef"
    make(path, *([outside] if make is not Path.touch else []))
    for number in range(4):
        assert store.put(make_key(number), [make_value(4000)]) is PutResult.STORED
        store.maintain()
        bench.clock.advance(61.0)
    assert path.is_symlink() or path.exists()
    assert os.listdir(outside) == ["thesis.tex"]


def test_gc_by_age_leaves_foreign_names_alone(bench):
    store = bench.open()
    store.put(make_key(), [b"value"])
    foreign = bench.path(make_key()).parent / "notes.txt"
    foreign.write_text("mine")
    bench.wall.advance(1e9)
    assert store.gc(older_than_seconds=1.0).removed_records == 1
    assert foreign.exists()

"""Things in the tree that no store put there."""

from __future__ import annotations

import hashlib
import os
import shutil
import socket
import subprocess
from contextlib import suppress

import pytest

from kvferry.errors import ConfigError, StoreError
from kvferry.store.base import Put, PutResult, Where
from kvferry.store.maintenance import verify
from kvferry.testing.stores import make_key, make_value, read_value


def make_fifo(path, outside=None):
    os.mkfifo(path)


def make_link(path, outside):
    path.symlink_to(outside)


def make_dangling_link(path, outside):
    path.symlink_to(outside.parent / "nowhere")


def test_a_key_of_another_length_is_refused(bench):
    store = bench.open()
    for key in (b"", b"short", bytes(33)):
        with pytest.raises(ValueError, match="32 bytes"):
            store.put(key, [b"value"])
        with pytest.raises(ValueError, match="32 bytes"):
            store.read(key, ())


def make_tree(path, outside=None):
    path.mkdir()
    (path / "file").write_bytes(b"in here")
    (path / "link").symlink_to(outside or "/")
    (path / "empty").mkdir()


def make_deep_tree(path, outside=None, depth=100):
    """Deeper than any path may be long."""
    path.mkdir()
    at = os.open(path, os.O_RDONLY)
    for _ in range(depth):
        os.close(os.open("file", os.O_CREAT | os.O_WRONLY, dir_fd=at))
        os.mkdir("deep" * 12, dir_fd=at)
        inner = os.open("deep" * 12, os.O_RDONLY, dir_fd=at)
        os.close(at)
        at = inner
    os.close(at)


def make_socket(path, outside=None):
    with socket.socket(socket.AF_UNIX) as made:
        here = os.getcwd()
        os.chdir(path.parent)  # the whole path may be too long
        try:
            made.bind(path.name)
        finally:
            os.chdir(here)


def make_rubbish(path, outside=None):
    path.write_bytes(b"\xff\x00{" * 100_000)


MAKERS = [
    make_tree,
    make_deep_tree,
    make_fifo,
    make_link,
    make_dangling_link,
    make_socket,
    make_rubbish,
]


def snapshot(root):
    """All that can be told of a tree without changing it."""
    found = {}
    for directory, folders, files in os.walk(root):
        for name in [".", *folders, *files]:
            path = os.path.join(directory, name)
            about = os.lstat(path)
            content = ""
            if os.path.islink(path):
                content = os.readlink(path)
            elif os.path.isfile(path):
                with open(path, "rb") as file:
                    content = hashlib.sha256(file.read()).hexdigest()
            found[path] = (about.st_mode, about.st_ino, about.st_nlink, about.st_mtime_ns, content)
    return found


@pytest.fixture
def outside(bench, tmp_path):
    """What no store may touch: it looks like parts of one."""
    root = tmp_path / "outside"
    shard = root / "records" / "0a"
    shard.mkdir(parents=True)
    for folder in (root, shard, root / "writing", root / "quarantine", root / "namespaces"):
        folder.mkdir(exist_ok=True)
        (folder / f"{make_key().hex()}.safetensors").write_bytes(b"mine")
        (folder / ("0" * 32)).write_bytes(b"mine")
        (folder / f"{bytes(32).hex()}.bad_checksum.{'0' * 16}").write_bytes(b"mine")
    (root / "index.sqlite3").write_bytes(b"")
    before = snapshot(root)
    yield root
    assert snapshot(root) == before
    for store in bench.stores:
        store.close()
    # Too deep for Python, which clears away what tests leave.
    subprocess.run(["rm", "-rf", str(bench.root)], check=True)


def use_all(store):
    """Everything a store can do; nothing of it raises but what says so."""
    for number in range(40):
        assert isinstance(store.put(make_key(number), [make_value(3000)]), Put)
    store.maintain()
    for number in range(40):
        store.probe([make_key(number)])
        with suppress(StoreError):
            store.read(make_key(number), ())
    store.touch([make_key(1)])
    store.discard(make_key(1), "bad leaf/../..")
    store.delete(make_key(2))
    store.describe(bytes(32), "{}")
    for action in (
        lambda: store.catalogue().gc(max_bytes=50_000, older_than_seconds=1e6),
        lambda: verify(store, store.catalogue().stored()),
        lambda: list(store.catalogue().scan()),
        store.catalogue().namespaces,
        lambda: store.catalogue().removals(100),
    ):
        with suppress(StoreError):
            action()
    store.maintain()
    store.stat()
    store.close()


OWN_NAMES = [
    "records",
    "records/0a",
    "writing",
    "quarantine",
    "namespaces",
    f"namespaces/{bytes(32).hex()}.json",
    "index.sqlite3",
    "index.sqlite3-journal",
    "index.sqlite3-wal",
    "index.sqlite3.lock",
    "index.sqlite3.broken",
    "kvferry.json",
    f"writing/{'0' * 32}",
    f"quarantine/{bytes(32).hex()}.bad_checksum.{'0' * 16}",
]


@pytest.mark.parametrize("make", MAKERS)
@pytest.mark.parametrize("name", OWN_NAMES)
def test_whatever_stands_in_the_place_of_its_own_files(bench, caplog, outside, name, make):
    bench.open(max_bytes=100_000).close()
    path = bench.root / name
    path.parent.mkdir(exist_ok=True)
    if path.is_dir():
        shutil.rmtree(path)
    path.unlink(missing_ok=True)
    # A link leads to what would fit there.
    inside = outside / name
    make(path, inside if inside.exists() else outside)
    if name == "kvferry.json":
        for options in ({}, {"read_only": True}):
            with pytest.raises(ConfigError):
                bench.open(**options)
        return
    use_all(bench.open(max_bytes=100_000))
    bench.clock.advance(10_000)
    bench.wall.advance(10_000)
    store = bench.open(max_bytes=100_000)
    use_all(store)
    use_all(bench.open(read_only=True))
    assert "Traceback" not in caplog.text
    assert [record for record in caplog.records if record.exc_info] == []


@pytest.mark.parametrize("make", MAKERS)
@pytest.mark.parametrize("name", ["index.sqlite3", "index.sqlite3-journal", "index.sqlite3.lock"])
def test_an_index_that_is_no_database_is_rebuilt(bench, outside, name, make):
    first = bench.open(max_bytes=100_000)
    first.put(make_key(), [make_value(1000)])
    first.close()
    (bench.root / name).unlink(missing_ok=True)
    make(bench.root / name, outside)
    store = bench.open(max_bytes=100_000)
    store.maintain()
    assert store.where(make_key()) is Where.HERE
    assert store.put(make_key(1), [make_value(1000)]).result is PutResult.STORED
    assert store.stat().used_bytes == 2000
    for path in bench.root.glob("index.sqlite3*"):
        if path.is_file() and not path.is_symlink() and "broken" not in path.name:
            assert path.stat().st_mode & 0o077 == 0 or path.name.endswith(".lock")


@pytest.mark.parametrize("make", MAKERS[:-1])
@pytest.mark.parametrize("first", ["read", "write", "evict", "delete"])
def test_what_stands_in_a_records_place_is_a_miss_and_makes_way(bench, outside, make, first):
    store = bench.open(max_bytes=10_000)
    path = bench.path(make_key())
    path.parent.mkdir(parents=True)
    make(path, outside)
    store.maintain()
    if first == "read":
        assert store.read(make_key(), ()) is None
    elif first == "evict":
        for number in range(1, 5):
            assert store.put(make_key(number), [make_value(4000)]).result is PutResult.STORED
    elif first == "delete":
        assert store.delete(make_key())
        assert not os.path.lexists(path)
    assert store.put(make_key(), [b"value"]).result is PutResult.STORED
    assert read_value(store, make_key()) == b"value"
    assert list(bench.root.glob("quarantine/*")) == []
    assert store.stat().used_bytes == sum(entry.stored_bytes for entry in store.catalogue().scan())


def test_a_tree_too_deep_to_be_removed_costs_its_record_only(bench):
    store = bench.open(max_bytes=100_000)
    bench.path(make_key()).parent.mkdir(parents=True)
    make_deep_tree(bench.path(make_key()), depth=1200)
    assert store.put(make_key(), [b"value"]).result is PutResult.FAILED
    assert not store.delete(make_key())
    store.maintain()
    assert store.put(make_key(1), [b"value"]).result is PutResult.STORED
    assert store.stat().used_bytes == 5
    subprocess.run(["rm", "-rf", bench.path(make_key())], check=True)  # which pytest could not


NAMES = [
    b"\xff\xfe",
    b"a\nb",
    b"'; DROP TABLE records; --",
    b"x" * 255,
    b"-rf",
    b"\x1b[31m",
    "\u202e".encode(),
    b"0" * 31 + b"\n",
    b"0" * 64 + b".bad_checksum." + b"0" * 15 + b"\n",
    b"0" * 64 + b".\xff." + b"0" * 16,
    b"0" * 64 + b".safetensors\n",
]


@pytest.mark.parametrize("folder", ["writing", "quarantine", "records/0a", "namespaces", "records"])
def test_hostile_names_are_left_alone(bench, caplog, outside, folder):
    bench.open().close()
    place = os.fsencode(bench.root / folder)
    os.makedirs(place, exist_ok=True)
    for name in NAMES:
        with open(place + b"/" + name, "wb") as file:
            file.write(b"mine")
        os.utime(place + b"/" + name, (1e9, 1e9))
    use_all(bench.open(max_bytes=100_000))
    store = bench.open(max_bytes=10_000)
    use_all(store)
    assert [record for record in caplog.records if record.exc_info] == []
    assert set(NAMES) <= set(os.listdir(place))


def test_abandoned_entries_in_writing_are_removed_whatever_they_are(bench, outside):
    store = bench.open(max_bytes=100_000)
    (bench.root / "writing").mkdir(exist_ok=True)
    for number, make in enumerate(MAKERS):
        path = bench.root / "writing" / f"{number:064x}.{number:08x}.{number:024x}"
        make(path, outside)
        os.utime(path, (1e9, 1e9), follow_symlinks=False)
    store.maintain()
    assert os.listdir(bench.root / "writing") == []


@pytest.mark.parametrize("content", [b"\xff\x00" * 10, b"[" * 100_000, b"", b"x" * (64 << 20)])
def test_a_namespace_is_described_by_a_little_text_at_most(bench, content):
    store = bench.open()
    (bench.root / "namespaces").mkdir()
    (bench.root / "namespaces" / f"{bytes(32).hex()}.json").write_bytes(content)
    assert len(store.catalogue().description(bytes(32))) <= 1 << 20
    store.describe(bytes(32), "{}")
    assert store.catalogue().description(bytes(32)) == "{}"

"""Measuring a store says how fast it is and leaves nothing behind."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvferry.store.file.store import FileStore
from kvferry.store.memory import MemoryStore
from kvferry.store.servers.remote import RemoteStore
from kvferry.store.speed import StoreSpeed, measure
from kvferry.types import ChunkKey
from tests.store.servers.remote_client import DictClient


def test_a_directory_is_written_and_read_and_as_it_was(tmp_path: Path):
    with FileStore(tmp_path / "s", background=False) as store:
        empty = measure(store, 1 << 16)
        assert empty.write is not None
        assert empty.read is None
        store.put(ChunkKey(b"k" * 32), [b"v" * 5000])
        before = store.stat()
        speed = measure(store, 1 << 16)
        assert min(speed) > 0
        assert store.stat() == before
        assert len(list(store.scan())) == 1


def test_a_store_that_cannot_be_written_has_no_speed(tmp_path: Path):
    with FileStore(tmp_path / "s", background=False) as store:
        pass
    assert measure(store, 1 << 16) == StoreSpeed(None, None)


def test_nothing_is_evicted_for_a_sample(tmp_path: Path):
    with FileStore(tmp_path / "s", max_bytes=1 << 17, background=False) as store:
        for number in range(20):
            store.put(ChunkKey(bytes([number]) * 32), [b"v" * 5000])
        before = {entry.key for entry in store.scan()}
        assert measure(store, 1 << 16).write is None
        assert {entry.key for entry in store.scan()} == before


@pytest.mark.parametrize("max_bytes", [None, 1 << 20])
def test_memory_is_only_read(max_bytes):
    with MemoryStore("speed", max_bytes) as store:
        store.put(ChunkKey(b"k" * 32), [b"v" * 5000])
        speed = measure(store, 1 << 16)
    assert speed.read is not None
    assert speed.read > 0


def test_a_server_is_not_measured_and_not_touched():
    client = DictClient()
    with RemoteStore("s3://bucket", client) as store:
        store.put(ChunkKey(b"k" * 32), [b"v" * 5000])
        assert measure(store, 1 << 16) == StoreSpeed(None, None)
    assert client.asked == []

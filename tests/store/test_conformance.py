"""Every store of the package runs the conformance suite."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from hypothesis import settings

from kvferry.config import parse_store_url
from kvferry.store.file.store import FileStore
from kvferry.store.memory import MemoryStore, _Value
from kvferry.store.wrappers import WrapperStore
from kvferry.testing.stores import (
    ProbeTests,
    ScanTests,
    ShardedWriteTests,
    StampTests,
    StoreTests,
    WatchTests,
    store_machine,
)


class TestMemoryStore(ScanTests, StoreTests):
    def make_store(self, tmp_path, **options):
        return MemoryStore(tmp_path.name, **options)

    def poke(self, store, key, value):
        store.delete(key)  # keeps the counts: there is nothing behind a dict
        if value is not None:
            store._values[key] = _Value(value, 0.0)
            store._used_bytes += len(value)

    def peek(self, store, key):
        value = store._values.get(key)
        return None if value is None else value.content


class TestWrappedStore(TestMemoryStore):
    """A wrapper that changes nothing is a store like the one inside."""

    def make_store(self, tmp_path, **options):
        return WrapperStore(super().make_store(tmp_path, **options))

    def poke(self, store, key, value):
        super().poke(store.inner, key, value)

    def peek(self, store, key):
        return super().peek(store.inner, key)


TestMemoryStoreMachine = store_machine(TestMemoryStore()).TestCase
TestMemoryStoreMachine.settings = settings(max_examples=60, deadline=None)


class TestFileStore(ScanTests, ProbeTests, StampTests, WatchTests, ShardedWriteTests, StoreTests):
    persistent = True

    def make_store(self, tmp_path, **options):
        return FileStore(tmp_path / "store", **options)

    def settle(self, store):
        store._volume.upkeep.recency.flush()
        time.sleep(0.01)  # file times come from a clock that ticks every few milliseconds

    def poke(self, store, key, value):
        path = self.path(store, key)
        path.unlink(missing_ok=True)
        if value is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(value)

    def peek(self, store, key):
        path = self.path(store, key)
        return path.read_bytes() if path.exists() else None

    def path(self, store, key):
        name = key.hex()
        root = Path(parse_store_url(store.url).path)
        return root / "records" / f"{int(name[:2], 16) >> 3:02x}" / f"{name}.safetensors"


class FileStoreWithoutThread(TestFileStore):
    """All upkeep is done by the tests, so that every run of the machine is the same."""

    __test__ = False

    def make_store(self, tmp_path, **options):
        return super().make_store(tmp_path, background=False, **options)

    def settle(self, store):
        store.maintain()  # fills the index
        store.maintain()  # then compares the counts with what is there


TestFileStoreMachine = pytest.mark.slow(store_machine(FileStoreWithoutThread()).TestCase)
TestFileStoreMachine.settings = settings(max_examples=30, stateful_step_count=25, deadline=None)

"""Every store of the package runs the conformance suite."""

from __future__ import annotations

from hypothesis import settings

from kvferry.store.memory import MemoryStore, _Value
from kvferry.store.wrappers import WrapperStore
from kvferry.testing.stores import (
    ScanTests,
    StoreTests,
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

"""Every store of the package runs the conformance suite."""

from __future__ import annotations

from hypothesis import settings

from kvferry.store.memory import MemoryStore
from kvferry.testing.stores import (
    ScanTests,
    StoreTests,
    store_machine,
)
from kvferry.testing.wrappers import WrapperStore
from tests.store.memory_hooks import MemoryHooks


class TestMemoryStore(MemoryHooks, ScanTests, StoreTests):
    def make_store(self, tmp_path, **options):
        return MemoryStore(tmp_path.name, **options)


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

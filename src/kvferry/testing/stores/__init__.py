"""The conformance suite of stores: subclass, give the hooks, run pytest.

    import pytest
    from kvferry.testing.stores import ScanTests, StoreTests

    class TestMyStore(ScanTests, StoreTests):
        def make_store(self, tmp_path, *, max_bytes=None, observer=None):
            return MyStore(tmp_path, max_bytes=max_bytes, observer=observer)

        def poke(self, store, key, value): ...      # behind the API: write, or remove if None
        def peek(self, store, key): ...             # behind the API: the bytes, or None

    TestMyStoreMachine = store_machine(TestMyStore()).TestCase

`ScanTests`, `ProbeTests` and `ShardedWriteTests` are for the optional abilities; a store that has
an ability and does not run its tests fails `test_every_ability_is_tested`. Asserts read better
after `pytest.register_assert_rewrite("kvferry.testing.stores")` in a `conftest.py`."""

from kvferry.testing.stores.abilities import ProbeTests, ScanTests
from kvferry.testing.stores.hooks import (
    StoreHooks,
    awkward_sizes,
    make_key,
    make_value,
    read_value,
)
from kvferry.testing.stores.lifecycle import LifecycleTests
from kvferry.testing.stores.machine import StoreMachine, store_machine
from kvferry.testing.stores.quota import QuotaTests
from kvferry.testing.stores.races import RaceTests
from kvferry.testing.stores.sharded import ShardedWriteTests
from kvferry.testing.stores.values import ValueTests

__all__ = [
    "LifecycleTests",
    "ProbeTests",
    "QuotaTests",
    "RaceTests",
    "ScanTests",
    "ShardedWriteTests",
    "StoreHooks",
    "StoreMachine",
    "StoreTests",
    "ValueTests",
    "awkward_sizes",
    "make_key",
    "make_value",
    "read_value",
    "store_machine",
]


class StoreTests(ValueTests, QuotaTests, RaceTests, LifecycleTests):
    """What every store must pass."""

"""The conformance suite of stores: subclass, give the hooks, run pytest.

    import pytest
    from kvferry.testing.stores import ScanTests, StoreTests

    class TestMyStore(ScanTests, StoreTests):
        def make_store(self, tmp_path, *, max_bytes=None, observer=None):
            return MyStore(tmp_path, max_bytes=max_bytes, observer=observer)

        def poke(self, store, key, value): ...      # behind the API: write, or remove if None
        def peek(self, store, key): ...             # behind the API: the bytes, or None

    TestMyStoreMachine = store_machine(TestMyStore()).TestCase

Run `ScanTests` exactly if the store lists its values, and `ProbeTests` exactly if several processes
can share it; else `test_every_ability_is_tested` fails. `IndexTests` are for shared stores whose
index lists what is there. `RemoteStoreTests` replace `StoreTests` where the server has its own
quota.

It needs the extra `conformance`: pytest and hypothesis.
"""

from kvferry.errors import install_hint

try:
    from kvferry.testing.stores.abilities import (
        IndexTests,
        ProbeTests,
        ScanTests,
        StoreMachine,
        store_machine,
    )
except ModuleNotFoundError as missing:
    if missing.name not in ("pytest", "hypothesis"):
        raise
    raise ImportError(
        f"the suite of stores needs pytest and hypothesis: {install_hint('conformance')}"
    ) from missing
from kvferry.testing.stores.hooks import StoreHooks, make_key, make_value, read_value
from kvferry.testing.stores.required import EmptyValueTests, RemoteStoreTests, StoreTests

__all__ = [
    "EmptyValueTests",
    "IndexTests",
    "ProbeTests",
    "RemoteStoreTests",
    "ScanTests",
    "StoreHooks",
    "StoreMachine",
    "StoreTests",
    "make_key",
    "make_value",
    "read_value",
    "store_machine",
]

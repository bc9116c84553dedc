"""The directory store is a store: the conformance suite, abilities and state machine included."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import settings

from kvferry.observe import Observer
from kvferry.store.file import FileStore
from kvferry.testing.stores import (
    EmptyValueTests,
    IndexTests,
    ProbeTests,
    ScanTests,
    StoreTests,
    store_machine,
)
from tests.store.file.settings import PATIENT


class TestFileStore(
    ScanTests,
    ProbeTests,
    IndexTests,
    EmptyValueTests,
    StoreTests,
):
    persistent = True

    def make_store(self, tmp_path, *, max_bytes=None, observer=None):
        return FileStore(
            tmp_path / "store",
            max_bytes=max_bytes,
            observer=observer or Observer(),
            settings=PATIENT,
        )

    def _path(self, store, key) -> Path:
        name = key.hex()
        root = Path(store.url.removeprefix("file://"))
        return root / "records" / f"{int(name[:2], 16) >> 3:02x}" / f"{name}.safetensors"

    def poke(self, store, key, value):
        path = self._path(store, key)
        if value is None:
            path.unlink(missing_ok=True)
        else:
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(value)

    def peek(self, store, key):
        try:
            return self._path(store, key).read_bytes()
        except FileNotFoundError:
            return None

    def settle(self, store):
        store.maintain()


class FileStoreWithoutThread(TestFileStore):
    """All upkeep is done by the tests, so that every run of the machine is the same."""

    __test__ = False

    def make_store(self, tmp_path, **options):
        return FileStore(tmp_path / "store", background=False, **options)


TestFileStoreMachine = pytest.mark.slow(store_machine(FileStoreWithoutThread()).TestCase)
TestFileStoreMachine.settings = settings(max_examples=30, stateful_step_count=25, deadline=None)

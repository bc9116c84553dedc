"""Pages and stores that hang: every call ends, and no late byte reaches the host's memory."""

from __future__ import annotations

import threading

import pytest

from kvferry.adapters.sglang import pages
from kvferry.adapters.sglang.pages import PageRecords
from kvferry.errors import FaultKind, StoreError
from kvferry.observe import Counters
from kvferry.record.schema import RecordSchema
from kvferry.store.base import CLOSED, Where
from kvferry.store.file.store import FileStore
from kvferry.store.kind import Opening
from kvferry.store.memory import MemoryStore
from kvferry.store.servers.remote import RemoteStore
from kvferry.store.tiers.tiered import TieredStore
from kvferry.testing.faults import Gate, StallingStore
from tests.store.servers.remote_client import DictClient

ROW_BYTES = 100
SCHEMA = RecordSchema.for_rows(namespace=bytes(32), chunk_tokens=16, row_bytes=ROW_BYTES)
KEYS = ["a", "b", "c"]


class Host:
    def __init__(self, store, load_seconds: float) -> None:
        self.rows = [bytearray(ROW_BYTES) for _ in KEYS]
        self.counts = Counters()
        self.records = PageRecords(
            store, SCHEMA, self.counts, io_threads=2, load_seconds=load_seconds
        )

    def load(self) -> list[bool]:
        def land(place: int, payload: memoryview) -> None:
            self.rows[place][:] = payload

        return self.records.load(KEYS, land)

    def store(self) -> list[bool]:
        def fill(place: int, payload: memoryview) -> None:
            payload[:] = bytes([place + 1]) * ROW_BYTES

        return self.records.store(KEYS, fill)


@pytest.fixture
def gate():
    made = Gate()
    yield made
    made.release()


def test_a_read_that_hangs_ends_with_its_deadline_and_reaches_no_memory(gate):
    inner = MemoryStore()
    sound = Host(inner, load_seconds=60.0)
    assert sound.store() == [True] * 3
    host = Host(StallingStore(inner, gate=gate, operations=("read",)), load_seconds=0.05)
    assert host.load() == [False] * 3
    assert host.counts["loads_late"] == 1
    gate.release()
    host.records.close(30.0)
    assert host.rows == [bytearray(ROW_BYTES)] * 3


def test_a_store_that_brought_nothing_is_not_asked_again_at_once(gate):
    inner = MemoryStore()
    assert Host(inner, load_seconds=60.0).store() == [True] * 3
    host = Host(StallingStore(inner, gate=gate, operations=("read",)), load_seconds=0.05)
    assert host.records.exists(KEYS) == [True] * 3
    assert host.load() == [False] * 3
    assert host.records.exists(KEYS) == [False] * 3
    host.load()
    assert host.counts["loads_skipped"] == 1


class Open(MemoryStore):
    """Keeps its values when it is closed."""

    def close(self) -> None:
        pass


def test_closing_ends_a_load_of_another_thread_and_no_late_byte_comes(gate):
    inner = Open()
    assert Host(inner, load_seconds=60.0).store() == [True] * 3
    host = Host(StallingStore(inner, gate=gate, operations=("read",)), load_seconds=60.0)
    found = []
    loading = threading.Thread(target=lambda: found.append(host.load()))
    loading.start()
    assert gate.wait_for_arrival()
    host.records.close(0.05)
    loading.join(30.0)
    assert found == [[False] * 3]
    gate.release()
    host.records.close(30.0)
    assert host.rows == [bytearray(ROW_BYTES)] * 3


def test_closing_ends_a_load_that_begins_meanwhile(gate, monkeypatch):
    inner = Open()
    assert Host(inner, load_seconds=60.0).store() == [True] * 3
    host = Host(StallingStore(inner, gate=gate, operations=("read",)), load_seconds=60.0)
    closing = threading.Thread(target=host.records.close, args=(0.05,))
    get = host.records._cache._client.get

    def get_as_it_closes(*arguments):
        batch = get(*arguments)
        assert gate.wait_for_arrival()
        closing.start()
        closing.join(0.5)
        if not closing.is_alive():  # it must not end before it knows of this batch
            gate.release()
        return batch

    monkeypatch.setattr(host.records._cache._client, "get", get_as_it_closes)
    assert host.load() == [False] * 3
    closing.join(30.0)
    gate.release()
    host.records.close(30.0)
    assert host.rows == [bytearray(ROW_BYTES)] * 3


class Unlistable(MemoryStore):
    def __init__(self, error: Exception, gate: Gate) -> None:
        super().__init__()
        self._error, self._gate = error, gate

    def catalogues(self):
        self._gate.pass_through()
        raise self._error


@pytest.mark.parametrize("error", [StoreError(FaultKind.UNLISTED, "no list"), OSError("no list")])
@pytest.mark.parametrize("is_late", [False, True])
def test_what_fails_to_clear_is_logged(gate, error, is_late, monkeypatch, caplog):
    if is_late:
        monkeypatch.setattr(pages, "CLEAR_SECONDS", 0.01)
    else:
        gate.release()
    host = Host(Unlistable(error, gate), load_seconds=60.0)
    host.records.clear()
    gate.release()
    assert host.records._clearing.close(30.0)
    (record,) = caplog.records
    assert record.getMessage().endswith("are not deleted: no list")


@pytest.mark.parametrize("kind", ["directory", "server", "memory", "a tier of a server"])
@pytest.mark.parametrize("num_epochs", [0, 1, 2])
def test_clearing_deletes_the_pages_of_this_epoch_alone(kind, num_epochs, tmp_path):
    """Weights that change begin an epoch; a server was opened for the first."""
    remote = RemoteStore("valkey://h/kv", DictClient(), Opening(namespace=bytes(32)))
    stores = {
        "directory": lambda: FileStore(tmp_path / "kv"),
        "server": lambda: remote,
        "memory": MemoryStore,
        "a tier of a server": lambda: TieredStore([remote]),
    }
    host = Host(stores[kind](), load_seconds=60.0)
    for _ in range(num_epochs):
        assert host.store() == [True] * 3
        host.records.begin_epoch()
    assert host.store() == [True] * 3
    assert len(list(host.records._store.catalogue().scan())) == 3 * (num_epochs + 1)
    host.records.clear()
    assert host.load() == [False] * 3
    assert len(list(host.records._store.catalogue().scan())) == 3 * num_epochs
    host.records.close(30.0)


def test_clearing_without_a_thread_raises(monkeypatch):
    def start(_thread) -> None:
        raise RuntimeError("can't start new thread")

    host = Host(MemoryStore(), load_seconds=60.0)
    monkeypatch.setattr(threading.Thread, "start", start)
    with pytest.raises(RuntimeError, match="start new thread"):
        host.records.clear()


class Unanswered(MemoryStore):
    """Asks its medium, which does not answer."""

    def where(self, key):
        return Where.ASKED


def test_a_question_without_an_answer_is_a_miss():
    host = Host(Unanswered(), load_seconds=60.0)
    assert host.records.exists(KEYS) == [False] * 3
    assert host.counts["lookup_deadline"] == 1


class Late(MemoryStore):
    """Answers the second question."""

    asked = 0

    def where(self, key):
        self.asked += 1
        return Where.ASKED if self.asked <= len(KEYS) else super().where(key)


def test_an_answer_that_comes_later_is_waited_for():
    store = Late()
    host = Host(store, load_seconds=60.0)
    Host(store, load_seconds=60.0).store()
    store.asked = 0
    assert host.records.exists(KEYS) == [True] * 3


class Full(MemoryStore):
    def accepts(self):
        return CLOSED


def test_a_store_that_takes_nothing_is_given_nothing():
    host = Host(Full(), load_seconds=60.0)
    assert host.store() == [False] * 3
    assert host.counts["stores_dropped"] == 3

"""Errors of every kind at every door of a store: each ends in its operation, as a count and a line.

Tables: errors that nobody foresaw x doors of a directory, and x calls of a client; answers that are
none. `tests/cli/test_unforeseen.py` has the commands, `tests/cache/test_journal.py` the journal.
"""

from __future__ import annotations

import logging
import sqlite3
import threading

import pytest

from kvferry.errors import StoreError
from kvferry.observe import Counters
from kvferry.store.base import PutResult, Where
from kvferry.store.faults import Faults
from kvferry.store.file import database, directory, store
from kvferry.store.file.store import FileStore
from kvferry.store.kind import Opening, ServerBounds
from kvferry.store.memory import MemoryStore
from kvferry.store.servers.remote import RemoteStore
from kvferry.store.tiers.health import Patience
from kvferry.store.tiers.tiered import TieredStore
from kvferry.testing.clock import FakeClock
from kvferry.testing.faults import INJECTED
from kvferry.testing.stores import make_key, read_value
from kvferry.testing.stores.hooks import wait_until
from tests.store.errors import Odd, error, io
from tests.store.servers.remote_client import DictClient
from tests.store.tiers.states import rest, state

__all__ = ["error", "io"]

SPACE = b"n" * 32
QUICK = Patience(look_seconds=0.01)


@pytest.fixture
def counts():
    return Counters()


@pytest.fixture
def made(tmp_path, counts, io):
    """A directory store with one record, without a thread."""
    with FileStore(tmp_path / "kv", max_bytes=1 << 20, observer=counts, background=False) as made:
        made.put(make_key(), [b"value"])
        yield made


def faults(counts: Counters) -> dict[str, int]:
    return {name: number for name, number in counts.snapshot().items() if "failed" in name}


def put(made: FileStore) -> object:
    return made.put(make_key(1), [b"other"]).result


def read(made: FileStore) -> object:
    return made.read(make_key(), [(0, memoryview(bytearray(5)))])


DOORS = {
    # name: (system call that fails, operation, its answer, count)
    "write": ("pwritev", put, PutResult.FAILED, "put"),
    "place": ("link", put, PutResult.FAILED, "put"),
    "open a record": ("open", read, StoreError, "read"),
    "read": ("preadv", read, StoreError, "read"),
    "delete": ("unlink", lambda made: made.delete(make_key()), False, "delete"),
    "discard": ("rename", lambda made: made.discard(make_key(), "why"), None, "quarantine"),
    "read a description": (
        "open",
        lambda made: made.catalogue().description(SPACE),
        StoreError,
        "describe",
    ),
    "describe": ("open", lambda made: made.describe(SPACE, "text"), None, "describe"),
    "list": ("listdir", lambda made: list(made.catalogue().stored()), StoreError, "list"),
    "facts": ("listdir", lambda made: made.catalogue().facts(), StoreError, "list"),
    "gc": ("listdir", lambda made: made.catalogue().gc(0), StoreError, "gc"),
}


@pytest.mark.parametrize("door", DOORS)
def test_an_error_at_a_door_of_a_directory_ends_there(made, io, counts, caplog, error, door):
    call, operate, answer, counted = DOORS[door]
    io.fail[call] = error
    for _ in range(2):
        if answer is StoreError:
            with pytest.raises(StoreError):
                operate(made)
        else:
            assert operate(made) is answer
    io.fail.clear()
    assert faults(counts).get(f"store_{counted}_failed") == 2
    assert len(caplog.messages) <= 1, "one line a minute"
    assert all("\n" not in line for line in caplog.messages)
    assert put(made) is PutResult.STORED
    assert read_value(made, make_key(1)) == b"other"


@pytest.mark.parametrize("at", ["its start", "each step"])
def test_an_error_of_the_index_is_one_of_the_index(tmp_path, monkeypatch, caplog, error, at):
    clock, counts, failing = FakeClock(), Counters(), at == "its start"
    connect = database.Database._connect

    def fail(self):
        if failing:
            raise error
        return connect(self)

    monkeypatch.setattr(database.Database, "_connect", fail)
    settings = store.FileSettings(clock=clock)
    with FileStore(tmp_path / "kv", observer=counts, background=False, settings=settings) as made:
        if at == "each step":
            with made.index.database._locked():
                made.index.database._close()
            failing = True
        for _ in range(3):
            made.maintain()
            assert not made.put(make_key(), [b"value"]).is_there
        assert len(caplog.messages) == len(set(caplog.messages)) <= 4, "each is said once"
        assert faults(counts)["store_upkeep_failed"] >= 3
        failing = False
        made.maintain()
        assert made.put(make_key(), [b"value"]).result is PutResult.STORED


def test_an_error_in_one_shard_leaves_the_others_compared(tmp_path, monkeypatch, caplog, error):
    with FileStore(tmp_path / "kv", background=False) as made:
        keys = [make_key(number) for number in range(64)]
        for key in keys:
            made.put(key, [b"value"])
    for each in (tmp_path / "kv").glob("index*"):
        each.unlink()
    bad = directory.shard_of(keys[0])
    find = directory.Directory.find

    def fail(self, key):
        if directory.shard_of(key) == bad:
            raise error
        return find(self, key)

    monkeypatch.setattr(directory.Directory, "find", fail)
    with FileStore(tmp_path / "kv", background=False) as made:
        made.maintain()
        there = {key for key in keys if made.where(key) is Where.HERE}
    assert there == {key for key in keys if directory.shard_of(key) != bad}
    assert len([line for line in caplog.messages if "upkeep failed" in line]) == 1


def test_the_line_is_logged_again_after_a_minute_and_the_debug_log_has_the_traceback(caplog):
    clock = FakeClock()
    boundary = Faults("kind://place", Counters(), clock)
    caplog.set_level(logging.DEBUG, "kvferry.store.faults")
    for seconds in (0, 30, 29, 1, 1):
        clock.advance(seconds)
        with pytest.raises(StoreError), boundary.guard("read"):
            raise TypeError("a bug")
    lines = [each.getMessage() for each in caplog.records if each.levelno == logging.WARNING]
    assert lines == 2 * [
        "store kind://place: read failed: TypeError: a bug; kvferry works without it"
    ]
    assert any(each.exc_info for each in caplog.records if each.levelno == logging.DEBUG)


# -- clients --------------------------------------------------------------------------------------


CALLS = ("read", "put", "exists", "delete", "scan")


@pytest.fixture
def odd():
    return Odd()


@pytest.fixture
def opened(odd, counts):
    opening = Opening(namespace=SPACE, observer=counts, bounds=ServerBounds(probe_seconds=20.0))
    remote = RemoteStore("odd://host", odd, opening)
    with TieredStore([remote], counts, clock=FakeClock(), patience=QUICK) as made:
        assert made.put(make_key(), [b"value"]).is_there
        yield made


def use(made: TieredStore, call: str) -> None:
    """Do what a store does by this call of its client."""
    if call == "read":
        with pytest.raises(StoreError):
            made.read(make_key(), ())
    elif call == "put":
        assert made.put(make_key(1), [b"value"]).result is PutResult.FAILED
    elif call == "exists":
        made.probe([make_key(2)])
        wait_until(lambda: made.where(make_key(2)) is Where.ABSENT, "it is answered")
    elif call == "delete":
        assert made.delete(make_key()) is False
    else:
        with pytest.raises(StoreError):
            list(made.catalogue().scan())


def check(odd, made, counts, caplog, call, *, said):
    odd.method = call
    use(made, call)
    # The trial that follows is a read or a write of its own, and may have failed already.
    assert counts[f"store_client_{call}_failed"] in ((1, 2) if call in ("read", "put") else (1,))
    lines = [line for line in caplog.messages if line.endswith("kvferry works without it")]
    assert len(lines) == 1
    assert f"Odd.{call} failed: " in lines[0]
    assert said in lines[0]
    assert "secret" not in caplog.text
    rest(made)
    num_faults = counts[f"store_client_{call}_failed"]
    use(made, call)
    assert counts[f"store_client_{call}_failed"] <= num_faults + 2, "no spin"
    again = [line for line in caplog.messages if line.endswith("kvferry works without it")]
    assert again == lines
    odd.method = ""
    assert made.read(make_key(), ()) == 5 or call == "delete"


@pytest.mark.parametrize("call", CALLS)
def test_an_error_of_a_client_is_named_by_class_and_method(
    odd, opened, counts, caplog, error, call
):
    odd.error = type(error)(*error.args[:-1], "http://user:secret@host")
    if isinstance(error, OSError):
        odd.error = error
    is_of_system = isinstance(error, OSError | sqlite3.Error)
    if isinstance(error, sqlite3.Error):
        odd.error = error
    said = str(error.strerror if isinstance(error, OSError) else error)
    check(
        odd,
        opened,
        counts,
        caplog,
        call,
        said=said if is_of_system else f"{type(error).__name__} (errors.py, line ",
    )


@pytest.mark.parametrize(
    ("call", "answer"),
    [
        ("read", "5"),
        ("read", True),
        ("read", -1),
        ("put", None),
        ("put", True),
        ("exists", None),
        ("exists", []),
        ("exists", [True, False]),
        ("exists", ["no"]),
        ("exists", [None]),
        ("exists", True),
        ("delete", None),
        ("scan", None),
        ("scan", [("name", 5)]),
        ("scan", [None]),
        ("scan", [("name", "5", 0.0)]),
    ],
)
def test_what_is_no_answer_is_named_by_class_and_method(odd, opened, counts, caplog, call, answer):
    odd.answer = answer
    check(odd, opened, counts, caplog, call, said="")


def test_a_trial_of_a_store_that_breaks_its_contract_does_not_spin(counts, caplog):
    """As one of ours may, by a mistake: a client's is named before."""

    class Broken(RemoteStore):
        num_reads = 0

        def read(self, key, ranges, deadline=0.0):
            self.num_reads += 1
            raise TypeError("a bug")

        def put(self, key, buffers, deadline=0.0):
            return INJECTED

    clock = FakeClock()
    broken = Broken("odd://host", DictClient(), Opening(observer=counts))
    patience = Patience(look_seconds=5.0)
    with TieredStore([broken], counts, clock=clock, patience=patience) as made:
        made.put(make_key(), [b"value"])
        wait_until(lambda: broken.num_reads, "it is tried")
        wait_until(lambda: state(made) == "away", "it is not used")
        assert "TypeError: a bug" in caplog.text
        assert broken.num_reads == 1


def test_a_thread_whose_store_breaks_its_contract_at_every_call_rests_and_ends(counts, caplog):
    class Broken(MemoryStore):
        num_asked = 0

        def accepts(self):
            if threading.current_thread().name == "kvferry-tier":
                self.num_asked += 1
                raise TypeError("a bug")
            return super().accepts()

    broken = Broken("far")
    patience = Patience(look_seconds=60.0, close_seconds=60.0)
    with TieredStore([MemoryStore(), broken], counts, patience=patience) as made:
        assert made.put(make_key(), [b"value"]).is_there
        wait_until(lambda: broken.num_asked, "its thread asks")
        for number in range(2000):  # while it could spin
            made.where(make_key(number))
        assert broken.num_asked == 1
        thread = made._threads[1]._thread
    assert not thread.is_alive(), "a close ends it at once"
    assert broken.num_asked <= 3
    assert len([line for line in caplog.messages if "TypeError: a bug" in line]) == 1

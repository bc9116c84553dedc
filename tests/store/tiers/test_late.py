"""A store that takes long to open: start-up goes on, and it is used once it is there."""

from __future__ import annotations

import threading
import time

import pytest

from kvferry.errors import ConfigError, StoreError
from kvferry.store.base import PutResult
from kvferry.store.memory import MemoryStore
from kvferry.store.tiers import late as late_module
from kvferry.store.tiers.late import LateStore
from kvferry.types import ChunkKey

KEY = ChunkKey(b"k" * 32)


class Opening:
    """An `open_store` that returns when it is let."""

    def __init__(self, error=None):
        self.go = threading.Event()
        self.store = MemoryStore("late", None)
        self.error = error

    def __call__(self, may_create):
        assert self.go.wait(20)
        if self.error is not None:
            raise self.error
        return self.store


def wait_until(condition):
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_a_store_that_opens_in_time_is_handed_out_itself():
    opening = Opening()
    opening.go.set()
    with LateStore("memory://late", opening, 20.0) as late:
        assert late.opened is opening.store


def test_an_error_in_time_is_raised():
    opening = Opening(ConfigError("no such place"))
    opening.go.set()
    with pytest.raises(ConfigError, match="no such place"):
        LateStore("memory://late", opening, 20.0)


def test_until_it_is_open_everything_is_a_miss(caplog):
    opening = Opening()
    late = LateStore("memory://late", opening, 0.01)
    assert "did not open within 0.01 s" in caplog.text
    assert late.opened is None
    assert not late.contains(KEY)
    assert late.put(KEY, [b"x"]) is PutResult.FAILED
    assert late.begin(KEY, 1) is PutResult.FAILED
    assert not late.write_at("s", 0, [b"x"])
    assert late.commit("s", b"h") is PutResult.FAILED
    assert not late.delete(KEY)
    assert not late.wait_indexed(0.0)
    assert late.stat().num_records == 0
    with pytest.raises(StoreError, match="not open yet"):
        late.read(KEY, ())
    for call in (
        lambda: late.touch([KEY]),
        lambda: late.probe([KEY]),
        lambda: late.note_stored(KEY),
        lambda: late.discard(KEY, "broken"),
        lambda: late.abort("s"),
    ):
        call()
    opening.go.set()
    late.close()


def test_once_it_is_open_it_is_used():
    opening = Opening()
    late = LateStore("memory://late", opening, 0.0)
    opening.go.set()
    wait_until(lambda: late.opened is not None)
    assert late.put(KEY, [b"bytes"]) is PutResult.STORED
    assert late.contains(KEY)
    assert late.stat().num_records == 1
    late.close()
    assert opening.store.put(KEY, [b"x"]) is PutResult.FAILED


def test_an_error_after_the_time_is_logged_and_stays_a_miss(caplog):
    opening = Opening(ConfigError("mount went away"))
    late = LateStore("memory://late", opening, 0.0)
    opening.go.set()
    wait_until(lambda: "mount went away" in caplog.text)
    assert late.put(KEY, [b"x"]) is PutResult.FAILED
    late.close()


def test_a_store_that_opens_after_close_is_closed():
    opening = Opening()
    late = LateStore("memory://late", opening, 0.0)
    late.close()
    opening.go.set()
    wait_until(lambda: opening.store.put(KEY, [b"x"]) is PutResult.FAILED)
    assert late.put(KEY, [b"x"]) is PutResult.FAILED


def test_credentials_are_shown_nowhere(caplog):
    opening = Opening(ConfigError("no server"))
    late = LateStore("valkey://me:secret@host/kv", opening, 0.01)
    opening.go.set()
    wait_until(lambda: "cannot be opened" in caplog.text)
    assert "store valkey://***@host/kv did not open" in caplog.text
    assert "secret" not in f"{late.url} {caplog.text}"


class Away:
    """An `open_store` of a medium that answers when it is let."""

    def __init__(self):
        self.error = StoreError("it does not answer")
        self.store = MemoryStore("late", None)
        self.num_tried = 0

    def __call__(self, may_create):
        self.num_tried += 1
        self.may_create = may_create
        if self.error is not None:
            raise self.error
        return self.store


def test_a_medium_that_does_not_answer_is_tried_again(caplog, monkeypatch):
    monkeypatch.setattr(late_module, "RETRY_SECONDS", 0.01)
    opening = Away()
    started = time.monotonic()
    late = LateStore("memory://late", opening, 20.0)
    assert time.monotonic() - started < 10, "it goes on at once"
    wait_until(lambda: opening.num_tried > 3)
    assert late.put(KEY, [b"x"]) is PutResult.FAILED
    assert not late.takes_values
    opening.error = None
    wait_until(lambda: late.opened is not None)
    assert late.takes_values
    assert not opening.may_create, "below a mount that is away may be an empty directory"
    assert late.put(KEY, [b"x"]) is PutResult.STORED
    wait_until(lambda: len(caplog.records) == 2)
    assert "cannot be opened: it does not answer: serving without it" in caplog.messages[0]
    assert "opened after" in caplog.messages[1]
    late.close()


def test_what_is_found_below_a_mount_that_is_away_does_not_end_the_tries(monkeypatch):
    monkeypatch.setattr(late_module, "RETRY_SECONDS", 0.01)
    opening = Away()
    late = LateStore("memory://late", opening, 20.0)
    opening.error = ConfigError("it is not a kvferry store")
    num_tried = opening.num_tried
    wait_until(lambda: opening.num_tried > num_tried + 3)
    opening.error = None
    wait_until(lambda: late.opened is not None)
    late.close()


def test_a_close_ends_the_tries(monkeypatch):
    monkeypatch.setattr(late_module, "RETRY_SECONDS", 0.01)
    opening = Away()
    LateStore("memory://late", opening, 20.0).close()
    time.sleep(0.1)
    num_tried = opening.num_tried
    time.sleep(0.1)
    assert opening.num_tried == num_tried


@pytest.mark.parametrize("is_late", [False, True])
def test_what_a_server_answers_is_heard(is_late, monkeypatch):
    class Server(MemoryStore):
        def on_result(self, heard):
            heard(None)

    monkeypatch.setattr(late_module, "RETRY_SECONDS", 0.01)
    opening, heard = Away(), []
    opening.store = Server()
    if not is_late:
        opening.error = None
    late = LateStore("memory://late", opening, 20.0)
    late.on_result(heard.append)
    assert bool(heard) is not is_late
    opening.error = None
    wait_until(lambda: heard)
    late.close()

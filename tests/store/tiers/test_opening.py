"""Stores that take long to open, or cannot be opened yet: the start goes on, and they are used once
they are open."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace

import pytest

from kvferry.errors import ConfigError, FaultKind, StoreError, StorePlaceError
from kvferry.store.base import PutResult, Where
from kvferry.store.memory import MemoryStore
from kvferry.store.servers import valkey
from kvferry.store.tiers.health import Patience
from kvferry.store.tiers.tier import Unopened
from kvferry.store.tiers.tiered import TieredStore
from kvferry.store.url import open_store
from kvferry.testing.clock import FakeClock
from kvferry.testing.stores import make_key
from kvferry.testing.stores.hooks import wait_until
from tests.store.tiers.states import state

KEY = make_key()


class Opening:
    """Opens a store when it is let."""

    def __init__(self):
        self.go = threading.Event()
        self.is_begun = threading.Event()
        self.store = MemoryStore("late", None)

    def __call__(self, may_create):
        self.is_begun.set()
        assert self.go.wait(60)
        return self.store


class Away:
    """Raises until the medium answers."""

    def __init__(self):
        self.error = StoreError(FaultKind.AWAY, "it does not answer")
        self.store = MemoryStore("late", None)
        self.tries = []

    def __call__(self, may_create):
        error = self.error  # of this try, whatever a test sets once it sees the try
        self.tries.append(may_create)
        if error is not None:
            raise error
        return self.store


@pytest.fixture
def opened():
    stores = []

    def make(opening, start_seconds=0.0, url="memory://late", **options):
        patience = Patience(start_seconds=start_seconds, look_seconds=0.01)
        stores.append(TieredStore([Unopened(url, opening)], patience=patience, **options))
        return stores[-1]

    yield make
    for store in stores:
        store.close()


def advance(store, clock):
    """To the next try: its time counts from the end of the one before."""
    (tier,) = store._tiers
    wait_until(lambda: tier.next_try < math.inf, "the last try has ended")
    clock.advance(5.0)


def is_open(store):
    return state(store) == "up"


def test_until_it_is_open_nothing_is_there(opened, caplog):
    opening = Opening()
    late = opened(opening, 0.01)
    assert "did not open within 0.01 s" in caplog.text
    assert late.where(KEY) is Where.ABSENT
    with pytest.raises(StoreError, match=r"^memory opening: does not answer$"):
        late.read(KEY, ())
    assert late.put(KEY, [b"x"]).result is PutResult.FAILED
    assert not late.delete(KEY)
    assert not late.wait_indexed(0.0)
    assert late.accepts() is not None
    assert late.stat().num_records == 0
    assert late.tier_of(KEY) == "memory"
    for call in (
        lambda: late.touch([KEY]),
        lambda: late.probe([KEY]),
        lambda: late.learn([KEY]),
        lambda: late.discard(KEY, "broken"),
    ):
        call()
    opening.go.set()


def test_a_store_that_opens_after_close_is_closed(opened):
    opening = Opening()
    late = opened(opening)
    assert opening.is_begun.wait(60)
    late.close()
    opening.go.set()
    wait_until(lambda: opening.store.put(KEY, [b"x"]).result is PutResult.FAILED, "it is closed")
    assert late.put(KEY, [b"x"]).result is PutResult.FAILED


def test_a_medium_that_does_not_answer_is_tried_again(opened, caplog):
    opening, clock = Away(), FakeClock()
    late = opened(opening, 60.0, clock=clock)
    assert len(opening.tries) == 1, "the start goes on at once"
    for count in range(2, 5):
        advance(late, clock)
        wait_until(lambda at=count: len(opening.tries) == at, "it is tried")
        assert late.put(KEY, [b"x"]).result is PutResult.FAILED
    opening.error = None
    advance(late, clock)
    wait_until(lambda: is_open(late), "it is open")
    assert late.accepts() is None
    # Below a mount that is away may be an empty directory.
    assert opening.tries == [True, False, False, False, False]
    wait_until(lambda: len(caplog.records) == 2, "both are logged")
    assert "cannot be opened: it does not answer: serving without it" in caplog.messages[0]
    assert "opened after 20.0 s" in caplog.messages[1]


@pytest.mark.parametrize("start_seconds", [60.0, None])
@pytest.mark.parametrize("refused", [0, 1])
def test_of_several_stores_one_that_is_refused_is_left_out(
    tmp_path, caplog, refused, start_seconds
):
    roots = [tmp_path / "near", tmp_path / "far"]
    roots[refused].mkdir()
    (roots[refused] / "letter").write_text("dear")
    urls = [root.as_uri() for root in roots]
    with open_store(urls, start_seconds=start_seconds) as store:
        assert caplog.text.count("serving without it until it can") == 1
        assert f"store {urls[refused]} cannot be opened" in caplog.text
        assert "'letter' is in it" in caplog.text
        assert store.put(KEY, [b"value"]).result is PutResult.STORED
        assert store.read(KEY, ()) == 5
        state = store.tiers()[refused]
        assert (state.state, "is not empty" in state.because.text) == ("opening", True)
    assert os.listdir(roots[refused]) == ["letter"]
    (roots[1 - refused] / "kvferry.json").write_text("[]")
    with pytest.raises(ConfigError, match=roots[0].name):
        open_store(urls, start_seconds=start_seconds)


def test_a_store_that_was_left_out_is_used_once_people_made_room(opened, caplog):
    clock, place = FakeClock(), Away()
    place.error = StorePlaceError("a letter is in it")
    patience = Patience(look_seconds=0.01)
    other = Unopened("memory://other", lambda _may_create: MemoryStore("other", None))
    tiers = [Unopened("file:///late", place), other]
    with TieredStore(tiers, patience=patience, clock=clock) as store:
        tier = store._tiers[0]
        for count in range(2, 4):
            wait_until(lambda: tier.next_try < math.inf, "the last try has ended")
            clock.advance(5.0)
            wait_until(lambda at=count: len(place.tries) == at, "it is tried")
        wait_until(lambda: tier.next_try < math.inf, "the last try has ended")
        place.error = None
        clock.advance(5.0)
        wait_until(lambda: tier.up is not None, "it is open")
        assert store.put(KEY, [b"x"]).result is PutResult.STORED
        assert place.store.where(KEY) is Where.HERE
    assert set(place.tries) == {True}, "people may have emptied it"
    assert [line.split(": ")[-1] for line in caplog.messages] == [
        "serving without it until it can",
        "opened after 15.0 s",
    ]


@pytest.mark.parametrize("is_late", [False, True])
def test_what_a_server_answers_counts(opened, is_late):
    """Also of one that opens late."""

    class Server(MemoryStore):
        def on_result(self, heard):
            self.heard = heard

        def check_medium(self, deadline):
            raise StoreError(FaultKind.AWAY, "down")

    opening = Opening()
    opening.store = Server()
    if not is_late:
        opening.go.set()
    store = opened(opening, 0.0 if is_late else 60.0, clock=FakeClock())
    opening.go.set()
    wait_until(lambda: is_open(store), "it is open")
    for _ in range(Patience().max_failures):
        opening.store.heard(StoreError(FaultKind.AWAY, "down"))
    wait_until(lambda: state(store) == "away", "it was tried")


def test_credentials_are_shown_nowhere(caplog, monkeypatch):
    go = threading.Event()

    def fails(_url, _options, _opening):
        assert go.wait(60)
        raise ConfigError("no server")

    monkeypatch.setattr(valkey, "KIND", replace(valkey.KIND, open=fails))
    store = open_store("valkey://me:secret@host/kv", start_seconds=0.01)
    go.set()
    wait_until(lambda: "cannot be opened" in caplog.text, "it is logged")
    assert "store valkey://host/kv did not open" in caplog.text
    assert "secret" not in f"{store.url} {store!r} {caplog.text}"
    store.close()


_HANGS = r"""
import os, threading
from dataclasses import replace
from kvferry.store import memory
from tests.store.tiers.states import state
from kvferry.store.url import open_store

def hangs(url, options, opening):
    os.write(1, b"opening\n")
    threading.Event().wait()

memory.KIND = replace(memory.KIND, open=hangs)
open_store(["memory://a", "memory://b"])
"""


def test_an_interrupted_start_does_not_wait_for_stores_that_hang():
    with subprocess.Popen(
        [sys.executable, "-c", _HANGS], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            for _ in range(2):
                assert process.stdout.readline() == "opening\n"
            started = time.monotonic()
            os.kill(process.pid, signal.SIGINT)
            _, errors = process.communicate(timeout=120)
            assert time.monotonic() - started < 60
            assert errors.rstrip().endswith("KeyboardInterrupt")
        finally:
            process.kill()


def test_an_opener_that_panics_ends_the_start():
    class Panic(BaseException):
        """As those of libraries that are not written in Python."""

    def opened(may_create):
        raise Panic

    with pytest.raises(Panic):
        TieredStore([Unopened("late://x", opened)])

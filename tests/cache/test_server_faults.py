"""Servers that fail while a host serves from them: a miss, right, said once, and used again.

Each request is checked to the byte. Of two, one asks for what is stored, and one for what is new.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from contextlib import contextmanager

import pytest

from kvferry.cache.deciding import policy
from kvferry.testing.stores.hooks import wait_until
from tests.servers.places import (
    FAULT_SECONDS,
    FAULTS,
    Place,
    assert_said_if_busy,
    assert_said_once,
    mooncake_place,
    mooncake_values_place,
    name_of,
    s3_place,
    valkey_place,
)
from tests.servers.valkey import ask

pytestmark = pytest.mark.slow

LENGTH, HIT = 41, 40
STORED = [list(range(1000 * number, 1000 * number + LENGTH)) for number in range(3)]
SECONDS = 90.0
"""Late from for ever."""


@pytest.fixture(autouse=True)
def patient(monkeypatch):
    """A load is cut short and refused only where it is very slow: the servers' faults are what is
    tested, and not how busy the machine is."""
    monkeypatch.setattr(policy, "MIN_WAIT_SECONDS", 1.0)
    monkeypatch.setattr(policy, "SLACK_SECONDS", 1.0)


class Traffic:
    """Requests to one host, one at a time."""

    def __init__(self, host) -> None:
        self._host = host
        self._turns = itertools.count()

    def round(self) -> bool:
        """Ask for the next one of the stored prompts. Return whether the store brought all of
        it."""
        turn, host = next(self._turns), self._host
        host.forget_memory()
        found = host.run(f"stored {turn}", STORED[turn % len(STORED)]).num_external_tokens
        new = range(10_000 + turn * LENGTH, 10_000 + (turn + 1) * LENGTH)
        assert host.run(f"new {turn}", new).num_external_tokens == 0
        host.run_for(0.2)
        return found == HIT

    def until(self, is_so: Callable[[], bool], what: str) -> None:
        """Ask for as long as a fault lasts at least."""
        end = time.monotonic() + FAULT_SECONDS

        def is_over() -> bool:
            self.round()
            return time.monotonic() > end and is_so()

        wait_until(is_over, what, FAULT_SECONDS + SECONDS)

    def wait_used(self) -> None:
        """Until all stored prompts are found in a row."""
        wait_until(lambda: all(self.round() for _ in STORED), "the store is used", SECONDS)


@contextmanager
def broken(place, how):
    begin, end = how
    begin(place)
    try:
        yield
    finally:
        end(place)


@pytest.fixture
def valkey():
    with valkey_place() as place:
        yield place


@pytest.fixture
def s3(seaweed, monkeypatch, request):
    for name, value in seaweed.environment.items():
        monkeypatch.setenv(name, value)
    with s3_place(seaweed, name_of(request.node.name)) as place:
        yield place


@pytest.fixture
def memory_of_others(mooncake, request):
    with mooncake_place(mooncake, name_of(request.node.name)) as place:
        yield place


@pytest.fixture
def values_of_others(tmp_path):
    with mooncake_values_place(tmp_path) as place:
        yield place


@pytest.fixture(params=["valkey", "s3", "memory_of_others"])
def place(request) -> Place:
    return request.getfixturevalue(request.param)


@pytest.fixture
def serve(make_host):
    """Factory of traffic to a host over a store."""

    def make(url, **options) -> Traffic:
        return Traffic(make_host(store=url, load_timeout_seconds=1.0, **options))

    return make


def change_password(place):
    place.server.ask("CONFIG", "SET", "requirepass", "new")
    # Connections that stand stay logged in.
    ask(place.server.port, "CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes", password="new")


ALL_FAULTS = FAULTS | {
    "another password": (
        change_password,
        lambda place: ask(place.server.port, "CONFIG", "SET", "requirepass", "", password="new"),
    ),
}
SAID = {"full": "answers, but"} | dict.fromkeys(
    ("killed", "stopped", "cut", "another password"), "not used until"
)
"""By fault: what is said of it. Of the others nothing is, unless the machine is busy."""

CELLS = [
    *((fault, "valkey") for fault in ALL_FAULTS),
    *((fault, place) for fault in ("killed", "stopped") for place in ("s3", "memory_of_others")),
    *(("cut", place) for place in ("s3", "values_of_others")),
]


@pytest.mark.parametrize(("fault", "place"), CELLS, indirect=["place"])
def test_a_server_that_fails_costs_its_hits_says_it_once_and_is_used_again(
    serve, fault, place, caplog
):
    traffic, text = serve(place.url), SAID.get(fault, "")
    traffic.wait_used()  # where the machine is busy, it may be left alone before it fails, too
    with broken(place, ALL_FAULTS[fault]):
        traffic.until(lambda: text in caplog.text, f"it says {text!r}")
    traffic.wait_used()
    if text == "not used until":
        assert_said_once(caplog.messages)
    else:
        assert_said_if_busy(caplog.messages, "it has no room for a value")


def test_a_host_of_two_ranks_ends_while_its_server_is_stopped(make_host, place, caplog):
    host = make_host(store=place.url, world_size=2, load_timeout_seconds=1.0)
    host.run("stored", STORED[0])
    with broken(place, FAULTS["stopped"]):
        host.run("saves it, or tries to", STORED[1])
        began = time.monotonic()
        host.close()
        for part in host.parts:
            part.store.close()
        assert time.monotonic() - began < SECONDS
    said = ("did not finish within", "abandoned at close")
    late, abandoned = assert_said_if_busy(caplog.messages, *said, num_stores=2)
    assert late <= 2, caplog.messages
    assert abandoned <= 3, caplog.messages  # by each rank, and by who writes for both


def test_another_tier_serves_while_one_is_stopped(serve, valkey, s3, caplog):
    traffic = serve([valkey.url, s3.url])
    traffic.wait_used()
    with broken(valkey, FAULTS["stopped"]):
        traffic.until(lambda: f"{valkey.url}: not used" in caplog.text, "one is left alone")
        traffic.wait_used()  # the other tier has all that was found
    traffic.until(lambda: f"{valkey.url}: used again" in caplog.text, "it is used again")
    of_valkey = [line for line in caplog.messages if valkey.url in line]
    assert_said_once(of_valkey)
    assert_said_if_busy([line for line in caplog.messages if line not in of_valkey])

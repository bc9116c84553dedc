"""A first look-up against a server waits for the answer, hits, and never waits long."""

from __future__ import annotations

import itertools

import pytest

from kvferry.store.base import ASK_SECONDS
from kvferry.store.kind import Opening, ServerBounds
from kvferry.store.servers.remote import RemoteStore
from kvferry.store.tiers.health import Patience
from kvferry.store.tiers.tiered import TieredStore
from kvferry.testing.clock import FakeClock
from kvferry.testing.stores.hooks import wait_until
from tests.store.errors import Stuck
from tests.store.servers.remote_client import DictClient

PROMPT = list(range(41))


@pytest.fixture
def server(make_host):
    """The values of a server on which the prompt is stored."""
    client = DictClient()
    host = make_host(store=RemoteStore("memory://server", client))
    host.run("writer", PROMPT)
    host.settle()
    assert len(client.values) == 5
    return client.values


@pytest.fixture
def make_reader(make_host):
    """A host over a server, by whose clock no answer is late."""

    def make(client):
        clock = FakeClock()
        return make_host(store=RemoteStore("memory://server", client, clock=clock), clock=clock)

    return make


def test_a_host_that_announces_no_requests_hits_too(make_reader, server):
    host = make_reader(DictClient(server))
    host.scheduler.on_new_request = lambda _request: None
    assert host.run("reader", PROMPT).num_external_tokens == 40


@pytest.mark.parametrize("num_later", [0, 10])
def test_a_server_that_does_not_answer_delays_a_request_by_the_limit_only(
    make_host, server, num_later
):
    """Also while others of its prefix keep coming: each asks for the same chunks."""
    client = DictClient(server)
    clock = FakeClock()
    host = make_host(store=RemoteStore("memory://server", client, clock=clock), clock=clock)
    client.gate.clear()
    first = host.add("first", PROMPT)
    assert host.scheduler.lookup(first, 0).num_tokens is None
    for number in range(num_later):
        clock.advance(ASK_SECONDS / 20)
        host.scheduler.on_new_request(host.add(f"later {number}", [*PROMPT, number]))
    assert host.scheduler.lookup(first, 0).num_tokens is None
    clock.advance(ASK_SECONDS)
    assert host.scheduler.lookup(first, 0) == (0, False, "away")
    client.gate.set()


def test_a_request_that_waited_long_has_the_server_asked_again(make_host, server):
    client = DictClient(server)
    clock = FakeClock()
    store = RemoteStore("memory://server", client, clock=clock)
    host = make_host(store=store, clock=clock)
    request = host.add("queued", PROMPT)
    host.scheduler.on_new_request(request)
    wait_until(lambda: store.stat().num_records, "the answer came")
    clock.advance(400.0)
    while host.scheduler.lookup(request, 0).num_tokens is None:
        host.step([])
    assert host.scheduler.lookup(request, 0).num_tokens == 40


@pytest.mark.parametrize("method", ["exists", "put", "read"])
def test_a_client_that_hangs_stops_no_engine(make_host, server, caplog, method):
    """Its prompts are served, and the reason of their misses names class and method."""
    stuck = Stuck(method)
    stuck.values = server
    bounds = ServerBounds(probe_seconds=0.05, quick_seconds=0.05, close_seconds=0.05)
    remote = RemoteStore("memory://server", stuck, Opening(bounds=bounds))
    patience = Patience(hang_seconds=0.05, write_seconds=0.05, close_seconds=0.1)
    host = make_host(store=TieredStore([remote], patience=patience), load_timeout_seconds=0.2)
    said = f"Stuck.{method} does not end"
    turns = itertools.count()

    def is_named():
        turn = next(turns)
        hit = host.run(f"stored {turn}", PROMPT).num_external_tokens
        assert hit == (40 if method == "put" else 0)
        new = [1000 + turn] * 41
        assert host.run(f"new {turn}", new).num_external_tokens == 0
        return said in caplog.text

    try:
        wait_until(is_named, "it is named", 60.0)
        if method != "put":  # which explains no miss
            (tier,) = host.parts[0].store.tiers()
            assert said in tier.fault.text
    finally:
        stuck.ends.set()

"""A first look-up against a server waits for the answer, hits, and never waits long."""

from __future__ import annotations

import itertools

import pytest

from kvferry.record.check import namespace_of
from kvferry.store.base import ASK_SECONDS
from kvferry.store.kind import Opening, ServerBounds
from kvferry.store.memory import MemoryStore
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


def test_the_first_request_of_another_process_hits(make_reader, server):
    client = DictClient(server)
    host = make_reader(client)
    assert host.run("reader", PROMPT).num_external_tokens == 40
    assert len(client.asked) == 1


def test_a_prompt_that_the_server_has_not_is_computed(make_reader, server):
    host = make_reader(DictClient(server))
    assert host.run("reader", [7] * 41).num_external_tokens == 0
    assert host.observer["miss_tokens/absent"] == 40


def test_the_part_that_the_server_has_is_a_hit(make_reader, server):
    host = make_reader(DictClient(server))
    assert host.run("reader", [*PROMPT[:24], *[7] * 30]).num_external_tokens == 24


def test_a_server_that_goes_between_the_answer_and_the_read_is_a_miss(make_reader, server):
    class Goes(DictClient):
        def read(self, name, ranges, deadline):
            self.down = True
            return super().read(name, ranges, deadline)

    host = make_reader(Goes(server))
    assert host.run("reader", PROMPT).num_external_tokens == 0
    assert host.observer["miss_io_error"] >= 1


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


def test_what_the_server_evicted_since_it_was_asked_is_a_miss(make_reader, server):
    host = make_reader(DictClient(server))
    assert host.run("reader", PROMPT).num_external_tokens == 40
    host.forget_memory()
    server.clear()
    assert host.run("again", PROMPT).num_external_tokens == 0
    assert host.observer["miss_absent"] >= 1


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


@pytest.mark.parametrize("has_tiers", [False, True])
@pytest.mark.parametrize("world_size", [1, 2])
def test_records_of_each_epoch_lie_under_the_namespace_that_their_heads_say(
    make_host, world_size, has_tiers
):
    """Weights that change begin an epoch. A server was opened for the first."""
    client, opening = DictClient(), Opening(namespace=b"o" * 32)
    remote = RemoteStore("memory://server", client, opening)
    store = TieredStore([MemoryStore("near"), remote]) if has_tiers else remote
    stores = [store] * world_size
    host = make_host(store=store.url, rank_stores=stores, world_size=world_size)
    spaces = set()
    for number in (1, 2):
        host.run(f"writer {number}", PROMPT)
        host.settle()
        spaces.add(host.scheduler.requests.namespace.hex())
        wait_until(lambda size=5 * number: len(client.values) == size, "all are there")
        for name, value in client.values.items():
            assert name.partition("/")[0] == namespace_of(value[:512]).hex()
        host.forget_memory()
        assert host.run(f"reader {number}", PROMPT).num_external_tokens == 40
        assert host.scheduler.reset()
    assert {name.partition("/")[0] for name in client.values} == spaces
    assert len(spaces) == 2

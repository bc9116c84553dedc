"""The phases of a request's search, and its end."""

from __future__ import annotations

from typing import Any

from kvferry.cache.deciding.search import Asking, Fetching, Settled
from kvferry.contract.messages import LookupMiss
from kvferry.store.base import ASK_SECONDS, Where
from kvferry.testing.clock import FakeClock
from kvferry.testing.wrappers import WrapperStore
from kvferry.types import ChunkKey
from tests.cache.keeping import PROMPT, open_store


class AsksLong(WrapperStore):
    """Knows of no record yet, while it `asks`."""

    asks = False

    def where(self, key: ChunkKey) -> Where:
        return Where.ASKED if self.asks else self.inner.where(key)


def waiting(host: Any) -> tuple[Any, Any]:
    """A request for a prompt that is stored and not in memory, with its state."""
    host.run("writer", PROMPT)
    host.settle()
    host.forget_memory()
    return host.add("reader", PROMPT), host.scheduler.requests.by_id["reader"]


def test_a_search_asks_then_fetches_then_settles_and_ends_when_its_request_is_admitted(
    make_host, tmp_path
):
    store = AsksLong(open_store(tmp_path))
    host = make_host(store=store)
    request, state = waiting(host)
    assert state.search is None
    store.asks = True
    assert host.scheduler.lookup(request, 0).num_tokens is None
    assert isinstance(state.search.state, Asking)
    assert not host.pool.has_work
    store.asks = False
    assert host.scheduler.lookup(request, 0).num_tokens is None
    assert isinstance(state.search.state, Fetching)
    assert host.admit(request) == 40
    assert state.search is None
    host.prefill(request)
    assert not host.invalid_block_ids


def test_a_store_has_its_time_to_answer_from_the_arrival_of_a_request_on(make_host, tmp_path):
    """A request that waited for a place to run does not wait for the store as long again."""
    store, clock = AsksLong(open_store(tmp_path)), FakeClock()
    host = make_host(store=store, clock=clock)
    request, _state = waiting(host)
    store.asks = True
    clock.advance(0.9 * ASK_SECONDS)
    assert host.scheduler.lookup(request, 0).num_tokens is None
    clock.advance(0.2 * ASK_SECONDS)
    assert host.scheduler.lookup(request, 0) == (0, False, LookupMiss.AWAY)


def test_a_search_that_gave_up_fetches_no_more_and_the_next_one_does(make_host):
    clock = FakeClock()
    host = make_host(clock=clock, load_timeout_seconds=5.0)
    request, state = waiting(host)
    assert host.scheduler.lookup(request, 0).num_tokens is None
    clock.advance(6)
    late = host.scheduler.lookup(request, 0)
    assert (late.num_tokens, late.reason) == (0, LookupMiss.DEADLINE)
    assert isinstance(state.search.state, Settled)
    host.settle()
    host.forget_memory()
    assert host.scheduler.lookup(request, 0).num_tokens == 0
    host.scheduler.update_after_alloc(request, request.block_ids, 0)
    assert host.scheduler.lookup(request, 0).num_tokens is None
    assert isinstance(state.search.state, Fetching)

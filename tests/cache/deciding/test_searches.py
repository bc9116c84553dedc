"""The invariants of a search (`kvferry.cache.deciding.search.Search`), whatever happens to it."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.host import HostStep
from kvferry.cache.deciding.handovers import MOST_WAITS
from kvferry.cache.deciding.search import Awaiting, Fetching
from kvferry.cache.deciding.searches import FIRST_PAUSE_SECONDS, LAST_PAUSE_SECONDS
from kvferry.cache.messages import CacheMeta, Filled, RankReport
from kvferry.contract.messages import ASK_AGAIN, WorkerOutput
from kvferry.store.base import ASK_SECONDS, Where
from tests.cache.deciding.events import (
    ALL,
    CHUNK,
    PATIENCE,
    SLOTS,
    Events,
    awaited,
    search_of,
)

EVENTS = st.lists(
    st.tuples(st.integers(0, 15), st.integers(0, 5), st.integers(0, 7)), min_size=60, max_size=90
)


@pytest.mark.parametrize("audit", ["off", "first", pytest.param(0.5, marks=pytest.mark.slow)])
@pytest.mark.parametrize("window", [None, 9])
@settings(max_examples=120)
@given(events=EVENTS, seed=st.integers(0, 99))
def test_searches_keep_their_promises_and_their_time(audit, window, events, seed):
    Events(window, audit, seed).run(events)


def test_what_a_peer_turns_out_to_lack_is_asked_for_once_in_the_order_of_the_prompt():
    """A peer that started again lacks hundreds of chunks. A question for each would make as many
    requests to a bucket beside it."""
    events = Events(None, "off", 0)
    events.arrive(0, 3)
    events.store_some(0, 4)
    events.look_up(0, 0)
    slots = [slot for kind, slot in events.ends if kind == "fetch"]
    assert len(slots) == 4
    asked = []
    events.store.probe = lambda keys, **how: asked.append((list(keys), how)) or Where.ABSENT
    filled = tuple(Filled(slot, "absent") for slot in reversed(slots))
    report = RankReport(rank=0, pool=events.role.pool.pool_id, filled=filled)
    events.role.update_output(WorkerOutput(meta=CacheMeta(reports=(report,))))
    search = search_of(events)
    assert asked == [(list(search.wanted.keys), {"again": True})]


def some_come(events: Events) -> None:
    events.store_some(0, 2)
    events.clock.advance(FIRST_PAUSE_SECONDS)


def next_wait(events: Events) -> float:
    """How long the next request waits for a producer."""
    events.arrive(2, 1)
    request = events.requests[-1]
    assert events.role.lookup(request, 0).num_tokens is None
    return search_of(events, request).state.until - events.clock()


@pytest.mark.parametrize(
    ("how", "comes", "expected"),
    [(1, False, ASK_SECONDS), (3, False, PATIENCE), (1, True, PATIENCE)],
    ids=["nothing came", "of a peer, which says itself what it lacks", "some chunks came"],
)
def test_after_a_wait_in_vain_requests_only_look(how, comes, expected):
    events, request = awaited(how=how)
    if comes:
        some_come(events)
    events.check_end(request, 0)
    assert next_wait(events) == pytest.approx(expected)


DOUBTS = {"what comes": PATIENCE, "what is there": ASK_SECONDS, "what the host has": ASK_SECONDS}


@pytest.mark.parametrize("case", DOUBTS)
def test_only_what_comes_while_a_request_waits_ends_the_doubt(case):
    events, request = awaited()
    events.check_end(request, 0)
    if case == "what is there":
        some_come(events)
    events.arrive(0, 1)
    request = events.requests[-1]
    assert events.role.lookup(request, 0).num_tokens is None
    if case == "what comes":
        some_come(events)
    events.role.lookup(request, 16 * (case == "what the host has"))
    assert next_wait(events) == pytest.approx(DOUBTS[case])


def test_the_store_is_asked_again_after_longer_and_longer_pauses_until_a_chunk_comes():
    events, request = awaited()
    looks, pauses = search_of(events, request).looks, []
    for _ in range(7):
        pauses.append(looks.pause)
        events.clock.advance(looks.pause)
        events.role.lookup(request, 0)
    assert pauses == [0.01, 0.02, 0.04, 0.08, 0.16, LAST_PAUSE_SECONDS, LAST_PAUSE_SECONDS]
    some_come(events)
    events.role.lookup(request, 0)
    assert looks.pause == FIRST_PAUSE_SECONDS


def test_what_comes_one_by_one_is_waited_for_up_to_a_latest_time():
    events, request = awaited()
    assert search_of(events, request).wanted.plan.latest == events.clock() + MOST_WAITS * PATIENCE


def test_requests_in_the_queue_are_fetched_before_the_host_looks_them_up():
    """And leave half of the slots."""
    events = Events(None, "off", 0)
    for which in range(3):
        events.arrive(which, 1)
        events.store_some(which, 5)
    for _ in range(3):
        events.step(0, 0)
        events.end(0, 0)
    assert events.role.pool.num_taken == 4
    assert events.role.lookup(events.requests[0], 0).num_tokens == 32


def test_a_step_looks_up_a_few_of_a_long_queue_and_each_in_its_turn(monkeypatch):
    events, looked = Events(None, "off", 0), []
    monkeypatch.setattr("kvferry.cache.deciding.scheduler.EARLY_PER_STEP", 2)
    monkeypatch.setattr(
        events.role, "_look_up", lambda view, *_: looked.append(view.request_id) or ASK_AGAIN
    )
    for _ in range(5):
        events.arrive(0, 1)
    for count in range(2, 12, 2):
        events.step(0, 0)
        assert len(looked) == count
    assert looked == [*"1234512345"]


def test_what_the_host_has_itself_need_not_be_in_the_store():
    events = Events(None, "off", 0)
    events.arrive(0, 1)
    events.store_some(0, 4)
    (request,) = events.requests
    del events.store.says[events.role.requests.by_id["1"].keys.keys[0]]
    assert events.role.lookup(request, CHUNK).num_tokens is None
    events.build(HostStep())
    events.end(0, 0)
    assert events.role.lookup(request, CHUNK).num_tokens == 24


def to_be_asked_late(events: Events) -> None:
    search_of(events).looks.until = events.clock() + 1000.0


LOOKED = {
    "nothing": (lambda events, key: None, 0, 1),
    "a pause not over": (
        lambda events, key: events.clock.advance(FIRST_PAUSE_SECONDS - 0.001),
        0,
        1,
    ),
    "a question under way": (lambda events, key: events.store.says.update({key: None}), 0, 1),
    "a pause": (lambda events, key: events.clock.advance(FIRST_PAUSE_SECONDS), 0, 4),
    "a chunk in the store": (lambda events, key: events.store.says.update({key: True}), 0, 4),
    "a chunk in memory": (lambda events, key: events.role.pool.fetch(key, 24, ALL), 0, 4),
    "tokens of the host": (lambda events, key: None, 4, 4),
    "the deadline": (
        lambda events, key: (to_be_asked_late(events), events.clock.advance(PATIENCE)),
        0,
        4,
    ),
}
"""What happens between two look-ups of a search that awaits its fourth chunk; the tokens that the
host has itself at the second, and how many chunks this goes through."""


@pytest.mark.parametrize("what", LOOKED)
def test_a_search_that_awaits_goes_through_all_chunks_only_if_something_has_changed(what):
    events = Events(None, "off", 0)
    events.arrive(0, 1)
    events.store_some(0, 3)
    events.look_up(0, 0)
    search = search_of(events)
    assert isinstance(search.state, Awaiting)
    happens, num_local, count = LOOKED[what]
    happens(events, search.wanted.keys[3])
    looked, find = set(), events.role.pool.find
    events.role.pool.find = lambda key: looked.add(key) or find(key)
    events.role.lookup(events.requests[0], num_local)
    assert len(looked) == count


@pytest.mark.parametrize(("which", "num_local"), [(0, 32), (4, 16)])
def test_a_search_whose_host_has_all_that_was_awaited_waits_no_more(which, num_local):
    """Also if the host has no place for the request, and looks it up again and again."""
    events, request = awaited(which)
    for _ in range(3):
        assert events.role.lookup(request, num_local).num_tokens == 0


def test_nothing_is_awaited_while_there_is_no_store_to_ask():
    """Also if the host has no place for the request, and looks it up again and again."""
    events = Events(None, "off", 0)
    events.store.probe = lambda keys, **how: Where.ABSENT
    events.arrive(0, 1)
    (request,) = events.requests
    for _ in range(3):
        assert events.role.lookup(request, 0).num_tokens == 0


def test_if_a_peer_lacks_a_chunk_other_stores_have_some_time_to_get_it():
    events, request = awaited(how=3)
    events.store.has_peer = False
    events.clock.advance(0.9 * ASK_SECONDS)
    assert events.role.lookup(request, 0).num_tokens is None
    events.clock.advance(0.1 * ASK_SECONDS)
    assert events.role.lookup(request, 0) == (0, False, "not_produced")


def test_a_read_that_fails_is_tried_again_however_long_the_chunks_took_to_come():
    events = Events(None, "off", 0)
    events.arrive(0, 1)
    (request,) = events.requests
    for num_known in range(4):
        events.store_some(0, num_known)
        events.look_up(0, 0)
        events.clock.advance(0.9 * PATIENCE)
    events.store_some(0, 4)
    while events.ends:
        events.end_one(0)
    events.look_up(0, 0)
    search = search_of(events)
    assert isinstance(search.state, Fetching)
    assert events.clock() > search.wanted.plan.until
    events.end_one(6)  # the last chunk
    events.look_up(0, 0)
    events.end_one(0)
    assert events.role.lookup(request, 0).num_tokens == 32


@pytest.mark.parametrize("num_known", [0, 1])
def test_a_search_that_waits_asks_again_for_the_next_chunks_only(num_known, monkeypatch):
    """The scheduler's thread goes through what it asks for."""
    monkeypatch.setattr("kvferry.cache.deciding.lookup.MAX_ASKED", 2)
    events, asked = Events(None, "off", 0), []
    events.arrive(0, 1)
    events.store_some(0, num_known)
    events.store.probe = lambda keys, **how: asked.append((list(keys), how)) or Where.ASKED
    events.look_up(0, 0)
    keys = search_of(events).wanted.keys
    assert asked == [(list(keys[num_known : num_known + 2]), {"again": True})]


@pytest.mark.parametrize("are_released", [False, True])
def test_a_hit_waits_for_slots_that_others_have_until_its_deadline(are_released):
    events = Events(None, "off", 0)
    pool = events.role.pool
    others = [pool.spare(0) for _ in range(SLOTS)]
    events.arrive(0, 0)
    events.store_some(0, 4)
    (request,) = events.requests
    assert events.role.lookup(request, 0).num_tokens is None
    assert not pool.has_work
    if are_released:
        pool.unpin_all(others)
    else:
        events.clock.advance(PATIENCE)
    expected = (None, False, None) if are_released else (0, False, "no_memory")
    assert events.role.lookup(request, 0) == expected
    assert pool.has_work == are_released


def test_a_store_has_its_time_to_answer_from_the_arrival_of_a_request_on():
    """A request that waited for a place to run does not wait for the store as long again."""
    events = Events(None, "off", 0)
    events.arrive(0, 0)
    (request,) = events.requests
    events.store.says[events.role.requests.by_id["1"].keys.keys[0]] = None  # it begins to ask
    events.clock.advance(0.9 * ASK_SECONDS)
    assert events.role.lookup(request, 0).num_tokens is None
    assert not events.role.pool.has_work
    events.clock.advance(0.2 * ASK_SECONDS)
    assert events.role.lookup(request, 0).num_tokens == 0

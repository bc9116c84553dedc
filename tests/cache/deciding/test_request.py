"""Each event of a request ends all that it ends, and nothing else."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kvferry.cache.deciding.audits import Audit
from kvferry.cache.deciding.hold import Hold
from kvferry.cache.deciding.host_pool import HostPool
from kvferry.cache.deciding.request import Request
from kvferry.cache.deciding.search import Fetching, Hit, Search, Settled
from kvferry.cache.messages import Load
from kvferry.journal import JournalAnswer
from kvferry.keys import ChunkKeys
from kvferry.store.backoff import Backoff
from kvferry.testing.stores import make_key
from kvferry.types import NO_EXTRA_KEYS
from tests.cache.pools import check_pool

LOAD = Load("r", (), 0, 8, ())
ANSWER = JournalAnswer(0, {}, {}, "")
OF = ChunkKeys(bytes(32), 8), (NO_EXTRA_KEYS, 9)
ALL = {"search", "load", "audit", "saves", "turn"}

EVENTS: dict[str, tuple[Callable[[Request], None], set[str]]] = {
    "grow": (lambda request: request.grow(*OF), {"load", "audit", "turn"}),
    "admit": (lambda request: request.admit(), {"search"}),
    "admit, its async load being over": (
        lambda request: (request.end_search(), request.admit()),
        {"audit"},
    ),
    "admit_uncached": (lambda request: request.admit_uncached(ANSWER), ALL),
    "become_cacheable": (lambda request: request.become_cacheable(), ALL - {"turn"}),
    "lose_blocks": (
        lambda request: request.lose_blocks(is_admitted=False),
        ALL - {"load", "audit"},
    ),
    "lose_blocks, and get others": (lambda request: request.lose_blocks(is_admitted=True), ALL),
    "block_saves": (lambda request: request.block_saves(), ALL - {"saves"}),
    "erase": (lambda request: request.erase(), ALL - {"saves", "search"}),
    "save": (lambda request: request.save(0), ALL),
    "queue": (lambda request: request.queue(), ALL),
    "end_search": (lambda request: request.end_search(), ALL - {"search"}),
    "drop_load": (lambda request: request.drop_load(), ALL - {"load"}),
    "drop_audit": (lambda request: request.drop_audit(), ALL - {"audit"}),
    "outlive_epoch": (lambda request: request.outlive_epoch(), set()),
    "give_back": (lambda request: request.give_back(), set()),
}
"""Events, and what of a request that has everything is left behind them."""


def hold_of(pool: HostPool, number: int) -> Hold:
    hold = Hold(pool)
    slot = pool.fetch(make_key(number), 0, frozenset([0]))
    assert slot is not None
    hold.add(slot)
    return hold


def audit_of(pool: HostPool, number: int, unchecked: list[Load]) -> Audit:
    hold = hold_of(pool, number)
    (record,) = hold
    copy = hold.add_spare(0)
    assert copy is not None
    return Audit(hold, record, copy, True, (), unchecked, load=LOAD)


def busy(pool: HostPool, unchecked: list[Load]) -> tuple[Request, dict[str, Hold]]:
    """A request that has everything at once, and the pins of each part."""
    request = Request(None, *OF, 0.0, {})  # type: ignore[arg-type]
    promised = audit_of(pool, 1, [])
    hit = Hit(0, 8, range(1), range(1), 0, promised)
    state = Settled(hit, Fetching(2.0, 1.0))
    request.search = Search(hold_of(pool, 2), Backoff(lambda: 0.0, 1.0), state=state)
    request.promise(LOAD, hold_of(pool, 3))
    request.expect(audit_of(pool, 4, unchecked))
    request.save(0)
    request.queue()
    assert request.load is not None
    assert request.audit is not None
    holds = {"search": request.search.pinned, "hit": promised.hold}
    return request, holds | {"load": request.load[1], "audit": request.audit.hold}


def left_of(request: Request) -> set[str]:
    found = {
        "search": request.search is not None,
        "load": request.load is not None,
        "audit": request.audit is not None and request.audit.is_expected,
        "saves": request.is_saving,
        "turn": request.is_queued,
    }
    return {name for name, is_left in found.items() if is_left}


@pytest.mark.parametrize("event", EVENTS)
def test_an_event_ends_all_that_it_ends_and_nothing_else(event):
    pool, unchecked = HostPool(10, 1, frozenset([0])), []
    request, holds = busy(pool, unchecked)
    assert left_of(request) == ALL
    happens, expected = EVENTS[event]
    for _ in range(2):
        happens(request)
        assert left_of(request) == expected
        pinned = {name for name, hold in holds.items() if len(hold)}
        assert pinned == {name for name in holds if {"hit": "search"}.get(name, name) in expected}
        check_pool(pool, holds.values())
        assert unchecked == ([] if "audit" in expected else [LOAD])
        assert request.has_work == bool(expected - {"search"})
        assert request in request.at_work or not request.has_work
    request.give_back()
    assert (pool.num_pins, request.at_work) == (0, {})


def test_all_events_are_in_the_table():
    methods = {
        name
        for name, each in vars(Request).items()
        if callable(each) and not name.startswith("_") and name not in ("is_of", "holds", "promise")
    }
    assert methods - {"expect"} == {event.partition(",")[0] for event in EVENTS}


def test_a_second_load_or_audit_takes_the_place_of_the_first():
    pool = HostPool(10, 1, frozenset([0]))
    request, holds = busy(pool, unchecked := [])
    request.promise(LOAD, hold_of(pool, 5))
    request.expect(audit_of(pool, 6, []))
    assert (len(holds["load"]), len(holds["audit"]), unchecked) == (0, 0, [LOAD])
    request.give_back()
    assert pool.num_pins == 0


def test_what_is_expected_no_more_is_work_no_more():
    pool = HostPool(10, 1, frozenset([0]))
    request, _holds = busy(pool, [])
    request.admit()
    assert request.search is not None
    request.expect(audit_of(pool, 5, []))
    assert request.has_work
    assert request.audit is not None
    request.audit.is_expected = False  # its copy is planned
    assert not request.has_work
    request.lose_blocks(is_admitted=False)
    assert pool.num_pins == 5  # of the search and its hit (3), and of the audit that runs (2)

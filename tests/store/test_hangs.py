"""Code of a store's author that does not end: no scheduler runs any, and each call that hangs is
named by class and method, also at the start. What `doctor` says: `tests/cli/test_unforeseen.py`."""

from __future__ import annotations

import threading
from contextlib import suppress

import pytest

from kvferry.errors import FaultKind, StoreError
from kvferry.observe import Counters
from kvferry.store.base import Store, Where
from kvferry.store.kind import Opening, ServerBounds
from kvferry.store.servers.remote import RemoteClient, RemoteStore
from kvferry.store.tiers.health import Patience
from kvferry.store.tiers.tier import Unopened
from kvferry.store.tiers.tiered import TieredStore
from kvferry.testing.clock import FakeClock
from kvferry.testing.stores import make_key
from kvferry.testing.stores.hooks import wait_until
from tests.store.errors import METHODS, Stuck
from tests.store.tiers.test_tiered import QUICK

SPACE, OTHER = b"n" * 32, b"o" * 32
KEY = make_key()
IN_MEMORY = {
    "accepts": lambda store: store.accepts(),
    "catalogue": lambda store: store.catalogue(),
    "catalogues": lambda store: store.catalogues(),
    "erased_since": lambda store: store.erased_since(0),
    "in_namespace": lambda store: store.in_namespace(OTHER).where(KEY),
    "learn": lambda store: store.learn([KEY]),
    "on_result": lambda store: store.on_result(lambda _fault: None),
    "probe": lambda store: store.probe([KEY], again=True),
    "stat": lambda store: store.stat(),
    "tier_of": lambda store: store.tier_of(KEY),
    "tiers": lambda store: store.tiers(),
    "touch": lambda store: store.touch([KEY]),
    "values_per_put": lambda store: store.values_per_put,
    "where": lambda store: store.where(KEY),
}
"""What a scheduler may call."""

BLOCKING = {
    "check_medium", "close", "delete", "describe", "discard", "put", "put_all", "read",
    "wait_indexed",
}  # fmt: skip


def test_the_tables_have_every_method():
    assert IN_MEMORY.keys() | BLOCKING == {name for name in vars(Store) if name[0] != "_"} - {
        "multi_process",
        "quarantines",
        "url",
    }
    assert {name for name in vars(RemoteClient) if name[0] != "_"} == METHODS


@pytest.mark.parametrize("name", IN_MEMORY)
@pytest.mark.parametrize("has_tiers", [False, True])
def test_what_a_scheduler_calls_runs_no_code_of_a_store_s_author(name, has_tiers):
    client = Stuck()
    store = RemoteStore("odd://host", client, Opening(namespace=SPACE))
    if has_tiers:
        store = TieredStore([store])
    IN_MEMORY[name](store)
    assert threading.get_ident() not in client.threads
    store.close()


USES = {
    "delete": lambda made, _until: made.delete(KEY),
    "exists": lambda made, _until: made.probe([make_key(2)]),
    "facts": lambda made, _until: made.catalogue().facts(),
    "put": lambda made, _until: made.put(make_key(1), [b"value"]),
    "read": lambda made, until: made.read(KEY, (), until),
    "scan": lambda made, _until: list(made.catalogue().scan()),
}
"""Of each call but close, what makes a store do it."""


def operate(use, made, until):
    with suppress(StoreError):
        use(made, until)


@pytest.mark.parametrize("call", USES)
def test_a_call_that_does_not_end_is_named_once_and_the_engine_serves_on(caplog, call):
    clock, counts, stuck = FakeClock(), Counters(), Stuck()
    opening = Opening(namespace=SPACE, observer=counts)
    remote = RemoteStore("odd://host", stuck, opening, clock=clock)
    with TieredStore([remote], counts, clock=clock, patience=QUICK) as made:
        assert made.put(KEY, [b"value"]).is_there
        stuck.method = call
        thread = threading.Thread(
            target=operate, args=(USES[call], made, clock() + 1.0), daemon=True
        )
        thread.start()
        assert stuck.entered.wait(60)
        made.probe([])
        assert caplog.messages == []
        assert call in opening.calls.names()[0]
        clock.advance(60.0)
        made.probe([])
        named = f"Stuck.{call} does not end"
        assert made.tiers()[0].fault.text.endswith(named)  # what `explain` says of a miss
        for _ in range(3):  # as each look-up
            for each in IN_MEMORY.values():
                with suppress(StoreError):  # of a tier that is away
                    each(made)
        lines = [line for line in caplog.messages if "kvferry works without it" in line]
        assert lines == [f"store odd://host: {named}; kvferry works without it"]
        # A notice may be read meanwhile, too.
        assert counts[f"store_client_{call}_failed"] in ((1, 2) if call == "read" else (1,))
        assert made.tiers()[0].state == ("away" if call == "read" else "up")
        stuck.method = ""
        stuck.ends.set()
        thread.join(60)
        clock.advance(QUICK.longest_pause_seconds)
        wait_until(lambda: made.put(make_key(4), [b"value"]).is_there, "it serves on")


def test_a_close_that_does_not_end_holds_nobody(caplog):
    counts, stuck = Counters(), Stuck("close")
    bounds = ServerBounds(close_seconds=0.05)
    opening = Opening(namespace=SPACE, observer=counts, bounds=bounds)
    made = TieredStore([RemoteStore("odd://host", stuck, opening)], counts)
    assert made.put(KEY, [b"value"]).is_there
    made.close()
    said = "store odd://host: Stuck.close does not end; kvferry works without it"
    assert caplog.messages == [said]
    assert counts["store_client_close_failed"] == 1
    made.close()
    assert caplog.messages == [said]
    stuck.ends.set()


# -- at the start ---------------------------------------------------------------------------------


@pytest.mark.parametrize("seconds", [0.0, 0.2])
@pytest.mark.parametrize("call", ["opens", "put", "read"])
def test_a_call_that_hangs_at_the_start_is_named_once(caplog, call, seconds):
    """Of a start that waits, when it goes on; else once it is late."""
    clock, counts, stuck = FakeClock(), Counters(), Stuck(call)
    opening = Opening(observer=counts)
    count = "store_open_failed" if call == "opens" else f"store_client_{call}_failed"

    def opens(_may_create):
        name = "odd.opens"
        with opening.calls.begun(name, "open", clock() + 30.0):
            if call == "opens":
                stuck.entered.set()
                stuck.ends.wait(120)
        store = RemoteStore("odd://host", stuck, opening, clock=clock)
        store.describe(SPACE, "what it is")
        return store

    patience = Patience(start_seconds=seconds)
    given = Unopened("odd://host", opens, opening.calls)
    with TieredStore([given], counts, clock=clock, patience=patience) as made:
        said = "odd.opens" if call == "opens" else f"Stuck.{call}"
        assert stuck.entered.wait(60)
        clock.advance(60.0)
        for _ in range(2):
            made.probe([KEY])
            assert made.where(KEY) is Where.ABSENT
        lines = [line for line in caplog.messages if said in line]
        assert len(lines) == 1
        assert counts[count] == 1
        why = made.tiers()[0].fault
        assert said in why.text
        assert why.kind in (FaultKind.LATE, FaultKind.BUG)
        stuck.method = ""
        stuck.ends.set()
        wait_until(lambda: made.tiers()[0].state == "up", "it is used after all")

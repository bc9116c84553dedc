"""A store and its catalogue that somebody else wrote: what a method raises or returns that is no
answer is named by class and method, counted, and is an answer of the call's kind. Tables over all
methods: a new one is refused here until it is guarded."""

from __future__ import annotations

import logging

import pytest

from kvferry.errors import Fault, FaultKind, StoreError
from kvferry.observe import Counters
from kvferry.store.base import NO_DEADLINE, PutResult, Store, Where
from kvferry.store.catalogue import Catalogue
from kvferry.store.faults import Faults, Guard
from kvferry.store.guarded import GuardedStore, guarded
from kvferry.store.memory import MemoryCatalogue, MemoryStore
from kvferry.store.tiers.tiered import TieredStore
from kvferry.testing.clock import FakeClock
from kvferry.testing.stores import ScanTests, StoreTests, make_key

KEY = make_key()
ASKED = {
    "accepts": lambda store: store.accepts(),
    "values_per_put": lambda store: store.values_per_put,
    "where": lambda store: store.where(KEY),
    "read": lambda store: store.read(KEY, ()),
    "check_medium": lambda store: store.check_medium(NO_DEADLINE),
    "put": lambda store: store.put(KEY, [b"value"]).result,
    "put_all": lambda store: [each.result for each in store.put_all([(KEY, [b"value"])])],
    "discard": lambda store: store.discard(KEY, "wrong"),
    "delete": lambda store: store.delete(KEY),
    "touch": lambda store: store.touch([KEY]),
    "describe": lambda store: store.describe(bytes(32), "text"),
    "stat": lambda store: store.stat().num_records,
    "close": lambda store: store.close(),
    "probe": lambda store: store.probe([KEY]),
    "learn": lambda store: store.learn([KEY]),
    "wait_indexed": lambda store: store.wait_indexed(0.0),
    "on_result": lambda store: store.on_result(lambda _fault: None),
    "tiers": lambda store: store.tiers(),
    "tier_of": lambda store: store.tier_of(KEY),
    "erased_since": lambda store: list(store.erased_since(0)),
    "in_namespace": lambda store: store.in_namespace(bytes(32)).accepts(),
    "catalogues": lambda store: store.catalogues(),
}
SAFE = {
    "where": Where.ABSENT,
    "probe": Where.ABSENT,
    "put": PutResult.FAILED,
    "put_all": [PutResult.FAILED],
    "values_per_put": 1,
    "stat": 0,
    "tiers": [],
    "tier_of": "memory",
    "erased_since": [],
    **dict.fromkeys(("delete", "learn", "wait_indexed"), False),
    **dict.fromkeys(("discard", "touch", "describe", "close", "on_result")),
}
"""What is answered in place of a fault, by calls that do not raise it or are not it."""

OF_CATALOGUE = {
    "lists": lambda asked: asked.lists(KEY),
    "scan": lambda asked: list(asked.scan()),
    "stored": lambda asked: list(asked.stored()),
    "recent": lambda asked: list(asked.recent(1)),
    "namespaces": lambda asked: asked.namespaces(),
    "described": lambda asked: asked.described(),
    "description": lambda asked: asked.description(bytes(32)),
    "notice": lambda asked: asked.notice(),
    "removals": lambda asked: asked.removals(1),
    "facts": lambda asked: asked.facts(),
    "gc": lambda asked: asked.gc(),
    "pin": lambda asked: asked.pin([KEY], 1.0),
}
NO_ANSWER = {"discard", "touch", "describe", "close", "on_result", "check_medium"}
"""Calls without an answer, of which none is wrong."""


def fails(_self, *_args, **_options):
    raise ValueError("user:secret")


def answers_nonsense(_self, *_args, **_options):
    return object()


FAULTS = {
    "raises": (fails, "ValueError (test_guarded.py, line "),
    "nonsense": (answers_nonsense, ""),
}


def made_of(base: type, name: str, what):
    return type("Theirs", (base,), {name: what})


@pytest.fixture
def counts():
    return Counters()


@pytest.fixture
def guard_of(counts):
    return lambda store: guarded(store, Faults("odd://x", counts, FakeClock(), is_of_client=True))


def test_the_tables_have_every_method():
    assert {name for name in vars(Store) if name[0] != "_"} - {"catalogue"} <= ASKED.keys() | {
        "multi_process", "quarantines", "url",
    }  # fmt: skip
    assert {name for name in vars(Catalogue) if name[0] != "_"} == OF_CATALOGUE.keys()
    assert ASKED.keys() <= vars(GuardedStore).keys()


@pytest.mark.parametrize("how", FAULTS)
@pytest.mark.parametrize("name", ASKED)
def test_a_fault_of_a_store_is_named_and_answered(guard_of, counts, caplog, name, how):
    if how == "nonsense" and name in NO_ANSWER:
        return
    what, said = FAULTS[how]
    if name == "values_per_put":
        what = property(what)
    store = guard_of(made_of(MemoryStore, name, what)())
    said = f"Theirs.{name} failed: {said or 'it returned a object, which is no answer to it'}"
    for _ in range(3):
        try:
            answer = ASKED[name](store)
        except StoreError as error:
            assert name in ("read", "check_medium")
            answer = error.fault
        if name == "catalogues":
            (answer,) = answer
        if name in SAFE:
            assert answer == SAFE[name]
        else:
            assert isinstance(answer, Fault)
            assert answer.kind is FaultKind.BUG
            assert said in answer.text
    assert counts[f"store_client_{name}_failed"] == 3
    lines = [each for each in caplog.records if each.levelno >= logging.WARNING]
    assert len(lines) == 1
    assert said in lines[0].getMessage()
    assert "secret" not in caplog.text.split("Traceback")[0]


@pytest.mark.parametrize("how", FAULTS)
@pytest.mark.parametrize("name", OF_CATALOGUE)
def test_a_fault_of_a_catalogue_is_named_by_class_and_method(guard_of, caplog, name, how):
    what, said = FAULTS[how]
    theirs = made_of(MemoryCatalogue, name, what)

    class Store(MemoryStore):
        def catalogues(self):
            return [theirs(self)]

    said = f"Theirs.{name} failed: {said}"
    asked = guard_of(Store()).catalogue()
    if name == "notice":
        assert OF_CATALOGUE[name](asked) is None
    else:
        with pytest.raises(StoreError) as error:
            OF_CATALOGUE[name](asked)
        assert error.value.fault.kind is FaultKind.BUG
        assert said in str(error.value)
    assert any(said in line for line in caplog.messages)


@pytest.mark.parametrize("name", ["where", "probe", "put", "read"])
def test_a_tier_says_what_is_wrong_and_the_others_serve(guard_of, name):
    bad = guard_of(made_of(MemoryStore, name, fails)())
    near = MemoryStore()
    for store in (bad.inner, near) if name != "put" else (near,):
        store.put(KEY, [b"value"])
    with TieredStore([bad, near], clock=FakeClock()) as tiers:
        assert tiers.put(make_key(1), [b"value"]).is_there
        tiers.probe([KEY])
        assert tiers.where(KEY) is Where.HERE
        if name == "read":
            assert tiers.read(KEY, ()) == 5
        if name != "put":  # a write that fails says nothing of reads
            assert f"Theirs.{name} failed" in str(tiers.tiers()[0].fault)
        assert tiers.read(KEY, ()) == 5


def test_a_call_that_does_not_end_is_known_by_class_and_method(counts):
    guard = Guard(MemoryStore(), Faults("odd://x", counts, FakeClock(), is_of_client=True))
    with guard("read", 5.0):
        assert list(guard.calls.values()) == [("MemoryStore.read", 5.0)]
    assert not guard.calls


class TestGuarded(ScanTests, StoreTests):
    """What is right passes unchanged."""

    def make_store(self, tmp_path, *, max_bytes=None, observer=None):
        store = MemoryStore("guarded", max_bytes, observer)
        return guarded(store, Faults("odd://x", Counters(), FakeClock(), is_of_client=True))

    def poke(self, store, key, value):
        store.inner.delete(key)
        if value is not None:
            store.inner.put(key, [value])

    def peek(self, store, key):
        size = store.inner.read(key, ())
        if size is None:
            return None
        value = bytearray(size)
        store.inner.read(key, [(0, memoryview(value))])
        return bytes(value)

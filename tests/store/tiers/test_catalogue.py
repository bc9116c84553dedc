"""What commands ask of tiers: a single tier answers as its store does, several refuse."""

from __future__ import annotations

import pytest

from kvferry.errors import FaultKind, StoreError
from kvferry.record.check import MissReason
from kvferry.store.base import Catalogue
from kvferry.store.file.store import FileStore
from kvferry.store.kind import Opening
from kvferry.store.maintenance import clear, inspect, verify
from kvferry.store.memory import MemoryStore
from kvferry.store.servers.remote import RemoteStore
from kvferry.store.tiers.tiered import TieredStore
from kvferry.testing.clock import FakeClock
from kvferry.testing.stores import make_key
from tests.store.servers.remote_client import DictClient

HERE, THERE = b"a" * 32, b"b" * 32


@pytest.fixture
def remote():
    """A server with a wrong record in each of two namespaces. It was opened for the first."""
    made = RemoteStore("valkey://h/kv", DictClient(), Opening(namespace=HERE))
    for namespace in (HERE, THERE):
        made.of(namespace).put(make_key(namespace[0]), [b"wrong"])
        made.describe(namespace, f"text of {namespace[:1]}")
    return made


@pytest.fixture
def tiered(remote):
    with TieredStore([remote], clock=FakeClock()) as made:
        yield made


def test_records_of_every_namespace_are_verified_through_a_tier(remote, tiered):
    found = verify(tiered, tiered.scan(), discards=False)
    assert (found.num_records, len(found.bad), found.num_unreadable) == (2, 2, 0)
    assert {inspect(tiered, each) for each in tiered.scan()} == {MissReason.WRONG_SIZE}


def test_records_of_every_namespace_are_removed_through_a_tier(remote, tiered):
    assert clear(tiered, tiered.scan()).removed_records == 2
    assert list(remote.scan()) == []


def keys(entries):
    return sorted((each.namespace, each.key, each.num_bytes) for each in entries)


ASKED = {
    "of": lambda store: store.of(THERE).read(make_key(THERE[0]), ()),
    "lists": lambda store: store.lists(make_key(HERE[0])),
    "scan": lambda store: keys(store.scan()),
    "stored": lambda store: keys(store.stored()),
    "recent": lambda store: keys(store.recent(1)),
    "namespaces": lambda store: store.namespaces(),
    "described": lambda store: sorted(store.described()),
    "describe": lambda store: store.describe(THERE),
    "notice": lambda store: store.notice("{}"),
    "removals": lambda store: store.removals(9),
    "facts": lambda store: store.facts(),
    "gc": lambda store: store.gc(0),
    "pin": lambda store: store.pin([make_key(HERE[0])], 1.0, by_client=True),
}


def answer(store, ask):
    try:
        return ask(store)
    except (StoreError, ValueError) as error:
        return str(error)


@pytest.mark.parametrize("kind", ["server", "directory", "memory"])
@pytest.mark.parametrize("ask", ASKED)
def test_a_single_tier_answers_as_its_store_does(remote, tmp_path, kind, ask):
    directory = FileStore(tmp_path / "kv", max_bytes=1 << 20, background=False)
    store = {"server": remote, "directory": directory, "memory": MemoryStore()}[kind]
    if kind != "server":
        store.put(make_key(HERE[0]), [b"value"])
        store.describe(THERE, "text")
    with TieredStore([store], clock=FakeClock()) as tiered:
        asked = answer(tiered, ASKED[ask])
        if ask == "gc" and kind != "memory":  # what is gone is not removed again
            assert (asked.removed_records > 0, list(store.scan())) == (True, [])
        else:
            assert asked == answer(store, ASKED[ask])
    directory.close()


def test_nothing_of_a_catalogue_is_answered_by_a_default():
    """A new method of catalogues is one of tiers, too, and stands in the table above."""
    methods = {name for name in vars(Catalogue) if not name.startswith("_")}
    assert methods == ASKED.keys()
    assert methods <= vars(TieredStore).keys()


def test_a_single_tier_that_is_away_says_so(tiered):
    tiered.close()
    for name in ("of", "scan", "namespaces", "facts", "gc", "removals"):
        with pytest.raises(StoreError, match=r"^valkey closed: ") as error:
            ASKED[name](tiered)
        assert error.value.fault.kind is FaultKind.CLOSED


def test_several_tiers_are_no_view_of_another_namespace(remote):
    with TieredStore([MemoryStore(), remote], clock=FakeClock()) as tiered:
        with pytest.raises(StoreError, match="several stores") as error:
            tiered.of(THERE)
        assert error.value.fault.kind is FaultKind.UNUSABLE
    with TieredStore([MemoryStore(), MemoryStore()], clock=FakeClock()) as tiered:
        assert tiered.of(THERE) is tiered

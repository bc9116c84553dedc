"""What commands ask of tiers: a single tier answers as its store does, several refuse."""

from __future__ import annotations

import pytest

from kvferry.errors import Fault, FaultKind, StoreError
from kvferry.record.check import ReadFault
from kvferry.store.catalogue import Catalogue, Indexed
from kvferry.store.file.store import FileStore
from kvferry.store.kind import Opening
from kvferry.store.maintenance import clear, inspect, verify
from kvferry.store.memory import MemoryStore
from kvferry.store.servers.peer import PeerStore
from kvferry.store.servers.remote import RemoteStore
from kvferry.store.tiers.tiered import TieredStore
from kvferry.testing.clock import FakeClock
from kvferry.testing.stores import make_key
from kvferry.transfer.auth import SharedKey
from kvferry.transfer.client import PeerClient
from tests.store.servers.remote_client import DictClient

HERE, THERE = b"a" * 32, b"b" * 32


@pytest.fixture
def remote():
    """A server with a wrong record in each of two namespaces. It was opened for the first."""
    made = RemoteStore("valkey://h/kv", DictClient(), Opening(namespace=HERE))
    for namespace in (HERE, THERE):
        made.in_namespace(namespace).put(make_key(namespace[0]), [b"wrong"])
        made.describe(namespace, f"text of {namespace[:1]}")
    return made


@pytest.fixture
def tiered(remote):
    with TieredStore([remote], clock=FakeClock()) as made:
        yield made


def test_records_of_every_namespace_are_verified_through_a_tier(remote, tiered):
    found = verify(tiered, tiered.catalogue().scan(), discards=False)
    assert (found.num_records, len(found.bad), found.num_unreadable) == (2, 2, 0)
    assert {inspect(tiered, each) for each in tiered.catalogue().scan()} == {ReadFault.WRONG_SIZE}


def test_records_of_every_namespace_are_removed_through_a_tier(remote, tiered):
    assert clear(tiered, tiered.catalogue().scan()).removed_records == 2
    assert list(remote.catalogue().scan()) == []


def keys(entries):
    return sorted((each.namespace, each.key, each.stored_bytes) for each in entries)


def index(store):
    return Indexed.of(store, "has no index")


ASKED = {
    "in_namespace": lambda store: store.in_namespace(THERE).read(make_key(THERE[0]), ()),
    "lists": lambda store: index(store).lists(make_key(HERE[0])),
    "scan": lambda store: keys(store.catalogue().scan()),
    "stored": lambda store: keys(store.catalogue().stored()),
    "recent": lambda store: keys(index(store).recent(1)),
    "namespaces": lambda store: store.catalogue().namespaces(),
    "described": lambda store: sorted(store.catalogue().described()),
    "description": lambda store: store.catalogue().description(THERE),
    "notice": lambda store: store.catalogue().notice("{}"),
    "removals": lambda store: index(store).removals(9),
    "facts": lambda store: store.catalogue().facts(),
    "gc": lambda store: store.catalogue().gc(0),
    "pin": lambda store: index(store).pin([make_key(HERE[0])], 1.0, by_client=True),
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
            assert (asked.removed_records > 0, list(store.catalogue().scan())) == (True, [])
        else:
            assert asked == answer(store, ASKED[ask])
    directory.close()


def test_every_method_of_a_catalogue_stands_in_the_table():
    names = {name for of in (Catalogue, Indexed) for name in vars(of) if name[0] != "_"}
    assert names - {"find", "of"} == ASKED.keys() - {"in_namespace"}


def test_a_single_tier_that_is_away_says_so(tiered):
    tiered.close()
    for name in ASKED.keys() - {"in_namespace"}:
        with pytest.raises(StoreError, match=r"^valkey closed: ") as error:
            ASKED[name](tiered)
        assert error.value.fault.kind is FaultKind.CLOSED


def test_several_tiers_have_a_catalogue_each_and_none_together(remote):
    near = MemoryStore()
    near.put(make_key(7), [b"value"])
    with TieredStore([near, remote], clock=FakeClock()) as tiered:
        for name in ASKED.keys() - {"in_namespace"}:
            with pytest.raises(StoreError, match="several stores; give one of them") as error:
                ASKED[name](tiered)
            assert error.value.fault.kind is FaultKind.UNLISTED
        assert [len(list(each.scan())) for each in tiered.catalogues()] == [1, 2]


def test_a_tier_that_is_away_and_a_peer_say_why_they_have_none(remote):
    peer = PeerStore(PeerClient("127.0.0.1", 1, HERE, SharedKey(b"k" * 32)), Opening())
    with TieredStore([remote, peer], clock=FakeClock()) as tiered:
        listed, why = tiered.catalogues()
        assert len(list(listed.scan())) == 2
        assert why == Fault(FaultKind.UNLISTED, "peer://127.0.0.1:1 cannot list its values")
    assert [each.kind for each in tiered.catalogues()] == [FaultKind.CLOSED] * 2

"""A record never lies under another namespace than its head says, whoever wrote or copied it, and
also after weights changed, which begins an epoch with a namespace of its own."""

from __future__ import annotations

import ast
import gc
import re
import time
import warnings
from pathlib import Path

import pytest

import kvferry
from kvferry.adapters.row_cache import RowCache
from kvferry.observe import Counters
from kvferry.record.check import ReadFault, namespace_of
from kvferry.record.schema import RecordSchema, leaf_digests
from kvferry.store.base import Where
from kvferry.store.erasures import add_to_notice, name_of_namespace
from kvferry.store.kind import Opening
from kvferry.store.maintenance import verify
from kvferry.store.memory import MemoryStore
from kvferry.store.recordio import put_record, value_check
from kvferry.store.servers.remote import RemoteStore
from kvferry.store.tiers.health import Patience
from kvferry.store.tiers.tier import Unopened
from kvferry.store.tiers.tiered import TieredStore
from kvferry.testing.faults import Gate
from kvferry.testing.stores.hooks import make_key, wait_until
from kvferry.testing.wrappers import WrapperStore
from tests.store.servers.remote_client import DictClient

SRC = Path(kvferry.__file__).parent
STORES_OF_SRC = {"store", "_store", "values", "_values", "source", "target", "own", "other"}
"""What stores are called."""

FIRST, LATER = b"1" * 32, b"2" * 32
SCHEMA = RecordSchema.for_rows(namespace=FIRST, chunk_tokens=16, row_bytes=4096)

STORES = {
    "a server": lambda server: server,
    "a tier": lambda server: TieredStore([server]),
    "a tier behind another": lambda server: TieredStore([MemoryStore(), server]),
    "a wrapper": WrapperStore,
    "tiers in a tier": lambda server: TieredStore([TieredStore([MemoryStore(), server])]),
}


def check_names(client: DictClient) -> set[bytes]:
    """Compare where each record lies with what its head says; return the namespaces."""
    found = set()
    for name, value in client.values.items():
        said = namespace_of(value[:512])
        if said is not None:  # no description
            assert name.partition("/")[0] == said.hex()
            found.add(said)
    return found


@pytest.fixture
def client():
    return DictClient()


@pytest.fixture
def make_store(client):
    made = []

    def make(kind):
        server = RemoteStore("dict://h", client, Opening(namespace=FIRST))
        made.append(STORES[kind](server))
        return made[-1]

    yield make
    for store in made:
        store.close()


def put(store, namespace, key):
    schema = SCHEMA.with_namespace(namespace)
    image = memoryview(bytearray(schema.record_bytes))
    component, start = schema.components[0], schema.component_offsets[0]
    table = leaf_digests(component, image[start : start + component.num_bytes])
    assert put_record(store, schema, key, 0, table, image).is_there


def store_row(rows):
    batch = rows.store([rows.record(b"row")], lambda *_: None, time.monotonic() + 30)
    assert batch.wait(30)


def load_row(rows):
    batch = rows.load([rows.record(b"row")], lambda *_: None, time.monotonic() + 30)
    assert batch.wait(30)
    return batch.results


@pytest.mark.parametrize("kind", STORES)
def test_rows_of_each_epoch_lie_under_their_namespace_and_are_found(make_store, client, kind):
    rows = RowCache(make_store(kind), SCHEMA, Counters(), io_threads=2, threads="test")
    store_row(rows)
    rows.begin_epoch(LATER)
    assert load_row(rows) == [ReadFault.ABSENT]
    store_row(rows)
    assert load_row(rows) == [None]
    wait_until(lambda: check_names(client) == {FIRST, LATER}, "both are there")
    rows.close(30)
    # Another process, which has stored nothing, asks the server and reads there.
    other = RowCache(make_store(kind), SCHEMA, Counters(), io_threads=2, threads="test")
    for namespace in (LATER, FIRST):
        other.begin_epoch(namespace)
        where, record = other.values.where, other.record(b"row")
        other.values.probe([record])
        wait_until(lambda ask=where, key=record: ask(key) is Where.HERE, "it is known")
        assert load_row(other) == [None]
    other.close(30)


@pytest.mark.parametrize("kind", STORES)
def test_a_record_is_discarded_and_deleted_where_it_lies(make_store, client, kind):
    store, key = make_store(kind), make_key(1)
    put(store, LATER, key)
    wait_until(lambda: check_names(client) == {LATER}, "it is there")
    store.in_namespace(FIRST).delete(key)
    assert check_names(client) == {LATER}
    assert store.in_namespace(LATER).delete(key)
    assert check_names(client) == set()


def test_a_copy_from_tier_to_tier_lies_where_its_head_says(client):
    near = DictClient()
    stores = [RemoteStore("dict://h", each, Opening(namespace=FIRST)) for each in (near, client)]
    with TieredStore(stores, check=value_check(SCHEMA)) as tiers:
        put(tiers, LATER, make_key(1))
        wait_until(lambda: check_names(client) == {LATER}, "it is behind")
        near.values.clear()
        values = tiers.in_namespace(LATER)
        assert values.read(make_key(1), ()) is not None
        wait_until(lambda: check_names(near) == {LATER}, "it is near again")
        found = verify(stores[0], stores[0].catalogue().scan())
        assert (found.num_records, found.bad) == (1, ())


def test_a_record_under_another_namespace_than_its_own_is_found_wrong(client):
    """As an earlier release left records of later epochs on servers. Nobody reads it there."""
    server = RemoteStore("dict://h", client, Opening(namespace=FIRST))
    put(server, LATER, make_key(1))
    ((name, value),) = client.values.items()
    client.values = {name.replace(LATER.hex(), FIRST.hex()): value}
    ((entry, why),) = verify(server, server.catalogue().scan()).bad
    assert (entry.namespace, why) == (FIRST, ReadFault.OTHER_RECORD)
    assert client.values == {}, "it is removed"


def test_what_was_erased_is_taken_back_where_it_lies(client):
    server = RemoteStore("dict://h", client, Opening(namespace=FIRST))
    with TieredStore([server]) as tiers:
        tiers._erasures.close(5.0)  # looks are made here
        tiers._erasures.look()
        put(tiers, LATER, make_key(1))
        server.catalogue().notice(add_to_notice(None, [name_of_namespace(LATER)], 1.0))
        tiers._erasures.look()
        assert check_names(client) == set()


def test_a_view_lives_as_long_as_its_store_and_no_longer(client):
    """Dropping the store that it came from closes no tier of it; closing closes all views."""
    views = TieredStore([RemoteStore("dict://h", client, Opening(namespace=FIRST))])
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        views = views.in_namespace(LATER)
        gc.collect()
    assert said == []
    put(views, LATER, make_key(1))
    first = views.in_namespace(FIRST)
    views.close()
    assert not first.put(make_key(2), [b"late"]).is_there
    assert first.read(make_key(1), ()) is None
    assert client.is_closed


def test_a_tier_that_opens_later_is_asked_in_the_namespace_of_the_view(client):
    gate = Gate()

    def opened(_may_create):
        gate.pass_through()
        return RemoteStore("dict://h", client, Opening(namespace=FIRST))

    with TieredStore([Unopened("dict://h", opened)], patience=Patience(start_seconds=0.0)) as tiers:
        view = tiers.in_namespace(LATER)
        assert view.where(make_key(1)) is Where.ABSENT
        gate.release()
        wait_until(lambda: view.accepts() is None, "it is open")
        put(view, LATER, make_key(1))
        assert view.where(make_key(1)) is Where.HERE
        assert check_names(client) == {LATER}


def test_whoever_stores_a_record_names_its_namespace_with_the_put():
    """A store that was handed on may be of another namespace: no code but that of media and tiers
    puts a value there. (A put of a store by itself has none: a value is bytes.)"""
    named = set()
    for file in sorted(SRC.rglob("*.py")):
        where = file.relative_to(SRC).as_posix()
        if where.startswith(("store/file/", "store/servers/", "store/tiers/", "testing/")):
            continue
        for call in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Attribute):
                continue
            whose = ast.unparse(call.func.value)
            if call.func.attr in ("put", "put_all") and "in_namespace(" in whose:
                named.add(where)
            elif call.func.attr in ("put", "put_all"):
                assert not set(re.findall(r"\w+", whose)) & STORES_OF_SRC, f"{where}: {whose}"
    writers = {"cli/copy.py", "cache/moving/drafts.py", "store/record_client.py"}
    assert named == writers | {"store/recordio.py"}

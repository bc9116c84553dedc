"""A codec below `RemoteStore` keeps less than what records have, and nothing above it knows: stored
bytes and record bytes are never taken for each other. zlib stands for any codec."""

from __future__ import annotations

import zlib

import pytest

from kvferry.observe import Counters, Observer
from kvferry.record.schema import RecordSchema, RowRange, leaf_digests
from kvferry.store.base import PutResult
from kvferry.store.kind import Opening
from kvferry.store.maintenance import estimate, shrink, verify
from kvferry.store.memory import MemoryStore, copy_ranges
from kvferry.store.recordio import RecordRead, put_record, read_record, value_check
from kvferry.store.servers.remote import RemoteStore
from kvferry.store.tiers.tiered import TieredStore
from kvferry.testing.stores import ProbeTests, RemoteStoreTests, ScanTests, make_key
from kvferry.testing.stores.hooks import wait_until
from tests.store.servers.remote_client import DictClient

SPACE = b"n" * 32
SCHEMA = RecordSchema.for_rows(namespace=SPACE, chunk_tokens=16, row_bytes=64 << 10)
MAGIC = b"zlib"


class Codec(DictClient):
    """What `store/codec.py` would be: the client of a server, with a codec in front of it."""

    def read(self, name, ranges, deadline):
        self._enter(deadline)
        value = self.values.get(name)
        return None if value is None else copy_ranges(decoded(value), ranges)

    def put(self, name, buffers, deadline, *, replaces=False):
        return super().put(name, [encoded(b"".join(buffers))], deadline, replaces=replaces)


def encoded(value: bytes) -> bytes:
    return MAGIC + zlib.compress(value)


def decoded(value: bytes) -> bytes:
    """A store may hold values of readers without the option."""
    return zlib.decompress(value[len(MAGIC) :]) if value.startswith(MAGIC) else value


class TestCodec(ScanTests, ProbeTests, RemoteStoreTests):
    persistent = True

    @pytest.fixture(autouse=True)
    def _values(self):
        self.values = {}

    def make_store(self, tmp_path, *, max_bytes=None, observer=None):
        client = Codec(self.values.setdefault(tmp_path, {}))
        opening = Opening(namespace=SPACE, observer=observer or Observer())
        store = RemoteStore("dict://test", client, opening)
        store.values = client.values
        return store

    def takes(self, value):
        return len(encoded(value))

    def poke(self, store, key, value):
        if value is None:
            store.values.pop(store.name_of(key), None)
        else:
            store.values[store.name_of(key)] = encoded(value)

    def peek(self, store, key):
        value = store.values.get(store.name_of(key))
        return None if value is None else decoded(value)


def put(store, number):
    image = memoryview(bytearray(SCHEMA.record_bytes))
    component, start = SCHEMA.components[0], SCHEMA.component_offsets[0]
    table = leaf_digests(component, image[start : start + component.num_bytes])
    return put_record(store, SCHEMA, make_key(number), 0, table, image).result


@pytest.fixture
def store():
    opening = Opening(namespace=SPACE, record_bytes=value_check(SCHEMA).record_bytes)
    return RemoteStore("dict://test", Codec(), opening)


def test_listings_and_limits_are_of_stored_bytes_and_reads_of_record_bytes(store):
    assert [put(store, number) for number in range(4)] == [PutResult.STORED] * 4
    stored = sum(map(len, store._client.inner.values.values()))
    assert stored < SCHEMA.record_bytes  # all four take less than one record has
    catalogue = store.catalogue()
    assert sum(each.stored_bytes for each in catalogue.scan()) == stored
    assert catalogue.namespaces() == {SPACE: (4, stored)}
    found = verify(store, catalogue.scan())
    assert (found.num_records, found.num_bytes, found.bad) == (4, 4 * SCHEMA.record_bytes, ())
    assert store.read(make_key(0), ()) == SCHEMA.record_bytes
    assert estimate(store, catalogue.scan(), stored, None).removed_records == 0
    assert shrink(store, stored - 1, None).removed_records == 1


def test_a_right_record_is_not_replaced_for_its_size_and_a_wrong_one_is(store):
    values = store._client.inner.values
    assert put(store, 1) is PutResult.STORED
    before = dict(values)
    assert put(store, 1) is PutResult.EXISTS
    assert values == before
    values[store.name_of(make_key(1))] = encoded(b"wrong")
    assert put(store, 1) is PutResult.STORED
    assert values == before


def test_parts_of_a_record_are_read_and_verified_and_damage_is_a_miss(store):
    put(store, 1)
    wanted = RowRange(0, 0, SCHEMA.components[0].num_rows)

    def read():
        head = memoryview(bytearray(SCHEMA.head_bytes))
        rows = [(wanted, memoryview(bytearray(SCHEMA.num_bytes_of(wanted))))]
        record = RecordRead(key=make_key(1), first_token=0, head=head, rows=rows)
        return read_record(store, SCHEMA, record, Counters())

    assert read() is None
    (name,) = store._client.inner.values
    store._client.inner.values[name] = encoded(bytes(SCHEMA.record_bytes))
    assert read().is_corruption


def test_copies_between_tiers_have_the_bytes_of_the_record(store):
    near = MemoryStore()
    with TieredStore([near, store], check=value_check(SCHEMA)) as tiers:
        put(tiers, 1)
        wait_until(lambda: store._client.inner.values, "it is behind")
        near.delete(make_key(1))
        assert tiers.read(make_key(1), ()) == SCHEMA.record_bytes
        wait_until(lambda: near.read(make_key(1), ()) == SCHEMA.record_bytes, "it is near again")

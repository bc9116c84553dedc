"""A name whose value is no sound record heals: on every server the next save replaces it."""

from __future__ import annotations

import time

import pytest

from kvferry.observe import Counters
from kvferry.record.schema import RowRange, leaf_digests
from kvferry.store.base import PutResult
from kvferry.store.kind import Opening
from kvferry.store.recordio import RecordRead, put_record, read_record, value_check
from kvferry.store.url import open_one, open_store
from kvferry.testing.stores import make_key
from tests.record.samples import schema_of
from tests.servers.places import AllServers, client_of, name_of

SCHEMA = schema_of([(2, 2, 16, "float32", None)], 128)
ROWS = RowRange(0, 0, 4)
WRONG = {
    "empty": b"",
    "one byte": b"x",
    "cut": b"x" * (SCHEMA.record_bytes - 1),
    "long": b"x" * (SCHEMA.record_bytes + 1),
    "whole": b"x" * SCHEMA.record_bytes,
}


@pytest.fixture(params=["valkey", "cluster", "s3", "mooncake"])
def url(request, valkey_server, valkey_cluster, seaweed, mooncake, tmp_path, monkeypatch):
    for name, value in seaweed.environment.items():
        monkeypatch.setenv(name, value)
    servers = AllServers(valkey_server, valkey_cluster, seaweed, mooncake, tmp_path)
    return servers.urls(name_of(request.node.name))[request.param]


def save(store, key, *, fill=7):
    image = memoryview(bytearray(SCHEMA.record_bytes))
    payload = image[SCHEMA.head_bytes :]
    payload[:] = bytes([fill]) * len(payload)
    table = leaf_digests(SCHEMA.components[0], payload)
    return put_record(store, SCHEMA, key, 0, table, image, time.monotonic() + 20).result


def load(store, key):
    head = memoryview(bytearray(SCHEMA.head_bytes))
    rows = memoryview(bytearray(SCHEMA.payload_bytes))
    wanted = RecordRead(key=key, first_token=0, head=head, rows=[(ROWS, rows)])
    return read_record(store, SCHEMA, wanted, Counters(), time.monotonic() + 20)


@pytest.mark.parametrize("is_read", [True, False], ids=["read first", "saved at once"])
@pytest.mark.parametrize("wrong", WRONG.values(), ids=WRONG)
def test_the_next_save_replaces_a_wrong_value(url, wrong, is_read):
    key, until = make_key(), time.monotonic() + 30
    with open_one(url, Opening(namespace=SCHEMA.namespace)) as store:
        if wrong or "mooncake" not in url:  # its library keeps no empty value
            client_of(store).put(store.name_of(key), [wrong], until)
    with open_store(url, namespace=SCHEMA.namespace, check=value_check(SCHEMA)) as store:
        is_unread_and_whole = not is_read and len(wrong) == SCHEMA.record_bytes
        if is_read or is_unread_and_whole:  # only its reader can tell what has the right size
            assert load(store, key) is not None
        assert save(store, key) is PutResult.STORED
        assert load(store, key) is None


def test_a_right_value_stays(url):
    with open_store(url, namespace=SCHEMA.namespace, check=value_check(SCHEMA)) as store:
        assert save(store, make_key()) is PutResult.STORED
        assert save(store, make_key(), fill=8) is PutResult.EXISTS
        assert load(store, make_key()) is None

"""Copies between tiers, where a far tier lies: only a whole, right record is copied."""

from __future__ import annotations

import tracemalloc

import pytest

from kvferry.observe import Counters
from kvferry.record.check import ReadFault, check_record
from kvferry.record.schema import leaf_digests
from kvferry.store.base import Where
from kvferry.store.file.store import FileStore
from kvferry.store.kind import Opening
from kvferry.store.memory import MemoryStore
from kvferry.store.recordio import put_record, value_check
from kvferry.store.servers.remote import RemoteStore
from kvferry.store.tiers.tiered import TieredStore
from kvferry.testing.stores import make_key, read_value
from kvferry.testing.stores.hooks import wait_until
from kvferry.testing.wrappers import WrapperStore
from tests.record.samples import schema_of
from tests.store.servers.remote_client import DictClient

SCHEMA = schema_of([(2, 2, 64, "float32", None)], 100)  # records of 100 kB
NUM_NEAR = 90
LIAR = make_key(NUM_NEAR)


class LyingStore(WrapperStore):
    """Answers the first read that moves bytes rightly, and later ones with a value of `num_bytes`
    bytes, damaged at `at`."""

    def __init__(self, inner, num_bytes, at=0):
        super().__init__(inner)
        self.num_bytes, self.at, self.is_lying = num_bytes, at, False

    def read(self, key, ranges, deadline=0.0):
        size = self.inner.read(key, ranges)
        if size is None or not self.is_lying:
            self.is_lying |= size is not None and bool(ranges)
            return size
        for start, buffer in ranges:
            if start <= self.at < start + len(buffer):
                buffer[self.at - start] ^= 1
        return self.num_bytes


def put(store, key):
    image = bytearray(SCHEMA.record_bytes)
    view = memoryview(image)
    component, start = SCHEMA.components[0], SCHEMA.component_offsets[0]
    view[start : start + component.num_bytes] = bytes(key)[:1] * component.num_bytes
    table = leaf_digests(component, view[start : start + component.num_bytes])
    put_record(store, SCHEMA, key, 0, table, view)
    return image


@pytest.mark.parametrize(
    ("num_bytes", "at"),
    [
        (8_000_000, 0),
        (900_000_000, 0),
        (SCHEMA.record_bytes - 1, 1 << 40),
        (0, 1 << 40),
        (SCHEMA.record_bytes, 0),
        (SCHEMA.record_bytes, SCHEMA.record_bytes - SCHEMA.payload_bytes),
    ],
    ids=["8 MB", "900 MB", "cut", "empty", "bad head", "bad payload"],
)
def test_a_lie_of_a_far_tier_is_not_copied_and_evicts_nothing(tmp_path, num_bytes, at):
    near = FileStore(tmp_path, max_bytes=(NUM_NEAR + 5) * (SCHEMA.record_bytes + 4096))
    for number in range(NUM_NEAR):
        put(near, make_key(number))
    inner = MemoryStore()
    image = put(inner, LIAR)
    counts = Counters()
    with TieredStore(
        [near, LyingStore(inner, num_bytes, at)], counts, check=value_check(SCHEMA)
    ) as store:
        tracemalloc.start()
        try:
            # In one read, as readers do: theirs is right, and that of the copy is not.
            landed = bytearray(len(image))
            assert store.read(LIAR, [(0, memoryview(landed))]) == len(image)
            assert landed == image
            wait_until(lambda: counts["tier_copies/file/failed"], "the copy was tried")
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert peak < 64 << 20
        assert [near.where(make_key(number)) is Where.HERE for number in range(NUM_NEAR)] == [
            True
        ] * NUM_NEAR
        assert near.where(LIAR) is not Where.HERE
        assert counts["records_corrupt"] == 1
        assert inner.where(LIAR) is not Where.HERE


def test_a_right_record_is_copied(tmp_path):
    near, far = FileStore(tmp_path), MemoryStore()
    image = put(far, LIAR)
    with TieredStore([near, far], check=value_check(SCHEMA)) as store:
        assert read_value(store, LIAR) == image
        wait_until(lambda: near.where(LIAR) is Where.HERE, "it is near")
        assert read_value(near, LIAR) == image


@pytest.mark.parametrize("wrong", [b"", b"x"], ids=["empty", "cut"])
def test_a_wrong_value_behind_is_replaced_by_a_copy(wrong):
    server = DictClient()
    far = RemoteStore(
        "dict://far", server, Opening(namespace=SCHEMA.namespace, record_bytes=SCHEMA.record_bytes)
    )
    server.values[far.name_of(LIAR)] = wrong
    with TieredStore([MemoryStore(), far], check=value_check(SCHEMA)) as store:
        image = put(store, LIAR)
        wait_until(lambda: server.values.get(far.name_of(LIAR)) == image, "it is replaced")


def test_a_whole_record_is_checked_against_the_key_asked_for():
    value = memoryview(put(MemoryStore(), LIAR))
    assert check_record(SCHEMA, LIAR, value, len(value)) is None
    assert check_record(SCHEMA, make_key(0), value, len(value)) is ReadFault.OTHER_RECORD
    other = schema_of([(2, 2, 32, "float32", None)], 200)
    assert check_record(other, LIAR, value, len(value)) is ReadFault.OTHER_RECORD

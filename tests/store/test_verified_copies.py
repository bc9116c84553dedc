"""Copies between tiers: only verified records, at the cost of one record."""

from __future__ import annotations

import tracemalloc

import pytest

from kvferry.observe import Counters
from kvferry.record.schema import leaf_digests
from kvferry.store.base import PutResult
from kvferry.store.file.store import FileStore
from kvferry.store.recordio import put_record, value_check
from kvferry.store.remote import RemoteStore
from kvferry.store.tiered import TieredStore
from kvferry.testing.stores import make_key, read_value
from kvferry.testing.stores.hooks import wait_until
from tests.record.samples import schema_of
from tests.store.remote_client import DictClient

SCHEMA = schema_of([(3, 6, 16, "float32", None)], 128)
NUM_GOOD = 69


class Lying(DictClient):
    """Answers the first read of a value rightly, and every later one with another value of the
    size that it was told; it makes no more bytes than it is asked for."""

    def __init__(self, size):
        super().__init__()
        self.size = size
        self.num_reads = 0

    def read(self, name, ranges, deadline):
        self.num_reads += 1
        if self.num_reads == 1:
            return super().read(name, ranges, deadline)
        for _, buffer in ranges:
            buffer[:] = b"l" * len(buffer)
        return self.size


def image_of(key):
    image = bytearray(SCHEMA.record_bytes)
    payload = memoryview(image)[SCHEMA.head_bytes :]
    payload[:] = (key * (len(payload) // len(key) + 1))[: len(payload)]
    table = leaf_digests(SCHEMA.components[0], payload)
    image[: SCHEMA.head_bytes] = SCHEMA.encode_head(key, 0, table)
    return image


@pytest.fixture
def near(tmp_path):
    """Full of good records."""
    store = FileStore(tmp_path / "near", max_bytes=NUM_GOOD * (SCHEMA.record_bytes + 4096))
    for number in range(1, NUM_GOOD + 1):
        assert store.put(make_key(number), [image_of(make_key(number))]) is PutResult.STORED
    return store


def good(store):
    return sum(read_value(store, make_key(number)) is not None for number in range(1, NUM_GOOD + 1))


@pytest.mark.parametrize("size", [8_000_000, 900_000_000, SCHEMA.record_bytes, 1])
def test_a_tier_that_lies_to_a_copy_costs_no_good_record_and_no_memory(near, size):
    client, counts = Lying(size), Counters()
    far = RemoteStore("far://test", client)
    assert far.put(make_key(0), [image_of(make_key(0))]) is PutResult.STORED
    num_good = good(near)
    assert num_good > NUM_GOOD // 2
    client.num_reads = 0
    with TieredStore([near, far], counts, check=value_check(SCHEMA)) as store:
        head = memoryview(bytearray(SCHEMA.record_bytes))
        tracemalloc.start()
        assert store.read(make_key(0), [(0, head)]) == SCHEMA.record_bytes
        wait_until(lambda: counts["tier0_behind_failed"], "the copy ended")
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < 10 * SCHEMA.record_bytes + (1 << 20)
        assert good(near) == num_good
        assert read_value(near, make_key(0)) is None
        assert counts["records_corrupt"] == 1
        assert not client.values, "what is wrong was discarded where it was read"


def test_a_right_record_is_copied():
    near, far = (RemoteStore(f"{name}://test", DictClient()) for name in ("near", "far"))
    image, check = image_of(make_key()), value_check(SCHEMA)
    with TieredStore([near, far], check=check) as store:
        table = leaf_digests(SCHEMA.components[0], memoryview(image)[SCHEMA.head_bytes :])
        put_record(far, SCHEMA, make_key(), 0, table, memoryview(image))
        assert read_value(store, make_key()) == bytes(image)
        wait_until(lambda: read_value(near, make_key()) is not None, "it is brought nearer")
        assert read_value(near, make_key()) == bytes(image)


@pytest.mark.parametrize("change", ["key", "bit", "shape", "namespace"])
def test_the_check_tells_what_is_wrong(change):
    schema = SCHEMA.with_namespace(b"e" * 32)  # of another epoch, which may be copied, too
    check, image = value_check(schema), image_of(make_key())
    key = make_key(1) if change == "key" else make_key()
    if change == "bit":
        image[-1] ^= 1
    if change == "shape":
        check = value_check(schema_of([(3, 6, 8, "float32", None)], 128))
    why = check.why_wrong(key, memoryview(image), len(image))
    expected = {"key": "wrong_key", "bit": "bad_leaf", "shape": "wrong_shape", "namespace": None}
    assert why == expected[change]

"""Records read from a store: the rows asked for, verified."""

from __future__ import annotations

import time

import pytest

from kvferry.observe import Counters
from kvferry.record.check import ReadFault
from kvferry.record.schema import RowRange, leaf_digests
from kvferry.store.base import Where
from kvferry.store.memory import MemoryStore
from kvferry.store.recordio import RecordRead, put_record, read_record
from kvferry.testing.faults import CorruptingStore, FailingStore, truncate
from kvferry.testing.stores import read_value
from kvferry.testing.wrappers import WrapperStore
from tests.record.samples import KEY, schema_of

SCHEMA = schema_of([(3, 6, 128, "float32", None)], 128)  # rows of 64 KiB
EVERY = RowRange(0, 0, 18)


def stored(store):
    """The record's payload, after it was stored."""
    image = bytearray(SCHEMA.record_bytes)
    payload = memoryview(image)[SCHEMA.head_bytes :]
    payload[:] = bytes(range(251)) * (len(payload) // 251) + bytes(len(payload) % 251)
    table = leaf_digests(SCHEMA.components[0], payload)
    put_record(store, SCHEMA, KEY, 0, table, memoryview(image))
    return payload


def read(store, *ranges, deadline=None):
    """Why not, and the payload as far as it was read."""
    landed = memoryview(bytearray(SCHEMA.record_bytes))
    rows = []
    for each in ranges:
        start = SCHEMA.offset_of(each)
        rows.append((each, landed[start : start + SCHEMA.num_bytes_of(each)]))
    wanted = RecordRead(key=KEY, first_token=0, head=landed[: SCHEMA.head_bytes], rows=rows)
    deadline = time.monotonic() + 10.0 if deadline is None else deadline
    return read_record(store, SCHEMA, wanted, Counters(), deadline), landed[SCHEMA.head_bytes :]


def test_a_record_is_read_whole():
    store = MemoryStore()
    payload = stored(store)
    assert read(store, EVERY) == (None, payload)


def test_only_the_rows_asked_for_are_read():
    store = MemoryStore()
    payload = stored(store)
    ranges = [RowRange(0, 1, 3), RowRange(0, 7, 9)]
    reason, landed = read(store, *ranges)
    assert reason is None
    for rows in ranges:
        part = slice(rows.start << 16, rows.stop << 16)
        assert landed[part] == payload[part]
    assert not any(landed[9 << 16 :])


@pytest.mark.parametrize("damaged", range(18))
def test_each_of_the_rows_in_runs_is_verified_and_none_between_them(damaged):
    held = [2, 3, 8, 9, 14, 15]  # two of six heads in each of three layers
    rows = RowRange(0, 2, 4, num_runs=3, stride=6)
    store = MemoryStore()
    payload = stored(store)
    image = bytearray(read_value(store, KEY))
    image[SCHEMA.head_bytes + (damaged << 16) + 5] ^= 1
    store.delete(KEY)
    store.put(KEY, [image])
    landed = memoryview(bytearray(SCHEMA.num_bytes_of(rows)))
    head = memoryview(bytearray(SCHEMA.head_bytes))
    wanted = RecordRead(key=KEY, first_token=0, head=head, rows=[(rows, landed)])
    reason = read_record(store, SCHEMA, wanted, Counters())
    assert reason == (ReadFault.BAD_CHECKSUM if damaged in held else None)
    if reason is None:
        assert landed == b"".join(payload[row << 16 : (row + 1) << 16] for row in held)


def test_a_wrong_leaf_at_the_end_is_a_miss_and_the_record_goes():
    store = MemoryStore()
    stored(store)
    image = bytearray(read_value(store, KEY))
    image[-1] ^= 1
    store.delete(KEY)
    store.put(KEY, [image])
    assert read(store, RowRange(0, 0, 17))[0] is None
    assert read(store, EVERY)[0] is ReadFault.BAD_CHECKSUM
    assert store.where(KEY) is not Where.HERE


def test_a_value_shorter_than_its_head_is_a_miss():
    store = MemoryStore()
    stored(store)
    for size in (1, 100, SCHEMA.head_bytes - 1, SCHEMA.head_bytes, -1):
        assert read(CorruptingStore(store, damage=truncate(size)), EVERY)[0] in (
            ReadFault.WRONG_SIZE,
            ReadFault.BAD_HEADER,
        )
        stored(store)


class ReplacedMeanwhile(WrapperStore):
    """Another process finds the first value wrong, too, and stores a right one after its read."""

    def __init__(self, inner, right):
        super().__init__(inner)
        self.right = right

    def read(self, key, ranges, deadline):
        size = self.inner.read(key, ranges, deadline)
        if self.right is not None:
            self.inner.delete(key)
            self.inner.put(key, [self.right])
            self.right = None
        return size


def test_a_right_record_that_replaced_a_wrong_one_is_served_and_stays():
    store = MemoryStore()
    payload = stored(store)
    right = bytes(read_value(store, KEY))
    store.delete(KEY)
    store.put(KEY, [right[:-1] + bytes([right[-1] ^ 1])])
    assert read(ReplacedMeanwhile(store, right), EVERY) == (None, payload)
    assert store.where(KEY) is Where.HERE


def test_a_medium_that_fails_says_nothing_against_the_record():
    store = MemoryStore()
    stored(store)
    assert read(FailingStore(store, operations={"read"}), EVERY)[0] is ReadFault.IO_ERROR
    assert read(store, EVERY)[0] is None

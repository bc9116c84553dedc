"""Records read from a store: in which pieces, and verified."""

from __future__ import annotations

import pytest

from kvferry.observe import Counters
from kvferry.record.check import MissReason
from kvferry.record.schema import RowRange, leaf_digests
from kvferry.store.memory import MemoryStore
from kvferry.store.recordio import PIECE_BYTES, RecordRead, parts_of, put_record, read_record
from tests.record.samples import KEY, schema_of

SCHEMA = schema_of([(3, 6, 128, "float32", None)], 128)  # rows of 64 KiB
EVERY = RowRange(0, 0, 18)


class ColdStore(MemoryStore):
    """One whose records come from a medium."""

    def open_read(self, key):
        source = super().open_read(key)
        source.is_cached = lambda: False
        return source


def stored(store):
    """The record's payload, after it was stored."""
    image = bytearray(SCHEMA.record_bytes)
    payload = memoryview(image)[SCHEMA.head_bytes :]
    payload[:] = bytes(range(251)) * (len(payload) // 251) + bytes(len(payload) % 251)
    table = leaf_digests(SCHEMA.components[0], payload)
    put_record(store, SCHEMA, KEY, 0, table, memoryview(image))
    return payload


def read(store, parts):
    """Why not, what was read, and in which pieces."""
    landed = memoryview(bytearray(SCHEMA.record_bytes))
    asked = []

    def buffer_for(rows):
        asked.append(rows)
        start = SCHEMA.offset_of(rows)
        return landed[start : start + SCHEMA.num_bytes_of(rows)]

    wanted = RecordRead(
        key=KEY, first_token=0, head=landed[: SCHEMA.head_bytes], buffer_for=buffer_for, parts=parts
    )
    return read_record(store, SCHEMA, wanted, Counters()), landed[SCHEMA.head_bytes :], asked


@pytest.mark.parametrize("make_store", [MemoryStore, ColdStore])
def test_a_record_is_read_in_small_pieces_from_memory_and_whole_from_a_medium(make_store):
    store = make_store()
    payload = stored(store)
    reason, landed, asked = read(store, parts_of(SCHEMA, [EVERY]))
    assert reason is None
    assert landed == payload
    if make_store is ColdStore:
        assert asked == [EVERY]
    else:
        assert max(map(SCHEMA.num_bytes_of, asked)) <= PIECE_BYTES < SCHEMA.payload_bytes
        assert [rows.start for rows in asked[1:]] == [rows.stop for rows in asked[:-1]]


@pytest.mark.parametrize("make_store", [MemoryStore, ColdStore])
def test_only_the_ranges_asked_for_are_read(make_store):
    store = make_store()
    payload = stored(store)
    ranges = [RowRange(0, 1, 3), RowRange(0, 7, 9)]
    reason, landed, asked = read(store, parts_of(SCHEMA, ranges))
    assert (reason, asked) == (None, ranges)
    for rows in ranges:
        part = slice(rows.start << 16, rows.stop << 16)
        assert landed[part] == payload[part]
    assert not any(landed[9 << 16 :])


def test_a_wrong_leaf_in_the_last_piece_is_a_miss_and_the_record_goes():
    store = MemoryStore()
    payload = stored(store)
    image = bytearray(SCHEMA.record_bytes)
    with store.open_read(KEY) as source:
        source.read_into(memoryview(image), 0)
    image[-1] ^= 1
    store.delete(KEY)
    store.put(KEY, [image])
    reason, landed, asked = read(store, parts_of(SCHEMA, [EVERY]))
    assert reason is MissReason.BAD_LEAF
    assert asked[-1].stop == EVERY.stop
    assert landed[:PIECE_BYTES] == payload[:PIECE_BYTES]
    assert not store.contains(KEY)

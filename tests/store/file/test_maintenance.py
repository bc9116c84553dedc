"""Verify, repair and gc, on real records."""

from __future__ import annotations

import os
import tracemalloc

import pytest

from kvferry.errors import StoreError
from kvferry.record.check import ReadFault
from kvferry.record.schema import Component, RecordSchema, leaf_digests
from kvferry.store.base import Where
from kvferry.store.maintenance import verify
from kvferry.testing.stores import make_key, make_value, read_value


def make_schema(**changes):
    return RecordSchema(
        **{
            "namespace": bytes(32),
            "chunk_tokens": 5,
            "components": (
                Component(name="kv.0", dtype="F32", shape=(2, 3, 5, 1111)),
                Component(name="kv.1", dtype="U8", shape=(1, 1, 5, 40_000)),
            ),
            **changes,
        }
    )


def make_record(key, schema=None):
    schema = make_schema() if schema is None else schema
    # No number with such bytes has an exponent of ones alone: all are finite.
    payload = [
        bytes(each % 127 for each in make_value(component.num_bytes))
        for component in schema.components
    ]
    leaves = b"".join(
        leaf_digests(component, memoryview(part))
        for component, part in zip(schema.components, payload, strict=True)
    )
    return schema.encode_head(key, 10, leaves) + b"".join(payload)


def test_sound_records_are_found_sound(bench):
    store = bench.open()
    for number in range(3):
        store.put(make_key(number), [make_record(make_key(number))])
    seen = []
    report = verify(store, store.catalogue().stored(), lambda *progress: seen.append(progress))
    size = make_schema().record_bytes
    assert (report.num_records, report.num_bytes, report.bad) == (3, 3 * size, ())
    assert report.num_unreadable == 0
    assert seen == [(n, n * size) for n in (1, 2, 3)]


def damaged(record, position):
    return record[:position] + bytes([record[position] ^ 4]) + record[position + 1 :]


SCHEMA = make_schema()
RECORD = make_record(make_key(0))


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", ReadFault.WRONG_SIZE),
        (RECORD[:-1], ReadFault.WRONG_SIZE),
        (RECORD[:100], ReadFault.WRONG_SIZE),
        (RECORD + b"x", ReadFault.WRONG_SIZE),
        (damaged(RECORD, 30), ReadFault.BAD_HEADER),
        (damaged(RECORD, SCHEMA.header_bytes), ReadFault.BAD_CHECKSUM),
        (damaged(RECORD, SCHEMA.header_bytes + 20), ReadFault.BAD_CHECKSUM),
        (damaged(RECORD, SCHEMA.head_bytes), ReadFault.BAD_CHECKSUM),
        (damaged(RECORD, SCHEMA.component_offsets[1] + 70_000), ReadFault.BAD_CHECKSUM),
        (damaged(RECORD, len(RECORD) - 1), ReadFault.BAD_CHECKSUM),
        (make_record(make_key(1)), ReadFault.OTHER_RECORD),
        ((1 << 60).to_bytes(8, "little") + bytes(100), ReadFault.BAD_HEADER),
    ],
    ids=range(12),
)
def test_bad_records_are_named_and_quarantined(bench, content, reason):
    store = bench.open()
    store.put(make_key(0), [content])
    store.put(make_key(1), [make_record(make_key(1))])
    report = verify(store, store.catalogue().stored())
    assert [(entry.key, why) for entry, why in report.bad] == [(make_key(0), reason)]
    assert store.where(make_key(0)) is not Where.HERE
    assert store.read(make_key(0), ()) is None
    assert len(os.listdir(bench.root / "quarantine")) == 1
    assert verify(store, store.catalogue().stored()).bad == ()


def test_checking_a_large_record_takes_little_memory(bench):
    schema = make_schema(
        components=(Component(name="kv.0", dtype="U8", shape=(1, 1, 5, 10 << 20)),)
    )
    store = bench.open()
    store.put(make_key(), [make_record(make_key(), schema)])
    tracemalloc.start()
    assert verify(store, store.catalogue().stored()).bad == ()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 8 << 20


def test_a_read_only_store_is_verified_but_not_changed(bench):
    bench.open().put(make_key(), [b"rotten"])
    with bench.open(read_only=True) as store:
        assert len(verify(store, store.catalogue().stored()).bad) == 1
        with pytest.raises(StoreError, match="read-only"):
            store.catalogue().gc()
    assert bench.path(make_key()).exists()


def test_gc_removes_what_is_old_and_then_what_does_not_fit(bench):
    store = bench.open()
    for number in reversed(range(6)):
        store.put(make_key(number), [make_value(1000)])
        bench.wall.advance(100)
    report = store.catalogue().gc(older_than_seconds=550)
    assert (report.removed_records, report.removed_bytes, report.used_bytes) == (1, 1000, 5000)
    report = store.catalogue().gc(max_bytes=2500)
    assert report.used_bytes == 2000
    assert {entry.key for entry in store.catalogue().scan()} == {make_key(0), make_key(1)}
    assert not bench.path(make_key(3)).exists()
    assert not any(store.where(make_key(number)) is Where.HERE for number in (2, 3, 5))
    store.touch([make_key(1)])
    assert store.catalogue().gc(max_bytes=1000).used_bytes == 1000
    assert read_value(store, make_key(1)) is not None, "what waited to be written back counted"

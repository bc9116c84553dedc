"""A load that came too late is a stall of the store if it brought nothing at all."""

from __future__ import annotations

import pytest

from kvferry.adapters.row_cache import RowCache
from kvferry.observe import Counters
from kvferry.record.check import ReadFault
from kvferry.record.schema import RecordSchema
from kvferry.store.base import PutResult
from kvferry.store.memory import MemoryStore
from kvferry.store.record_client import Batch

SCHEMA = RecordSchema.for_rows(namespace=bytes(32), chunk_tokens=16, row_bytes=4096)


@pytest.fixture
def counts():
    return Counters()


@pytest.fixture
def rows(counts):
    with MemoryStore() as store:
        cache = RowCache(store, SCHEMA, counts, io_threads=1, threads="kvferry-test")
        yield cache
        cache.close(5.0)


@pytest.mark.parametrize(
    ("ended", "is_stall"),
    [
        ([], True),
        ([ReadFault.DEADLINE], True),
        ([ReadFault.ABSENT], False),
        ([None], False),
        ([ReadFault.DEADLINE, None], False),
    ],
)
def test_what_a_late_load_brought_says_whether_the_store_is_stalled(rows, counts, ended, is_stall):
    batch: Batch[ReadFault] = Batch(3)
    for place, result in enumerate(ended):
        batch.end(place, result)
    rows.give_up_load(batch)
    assert batch.poll()
    assert batch.results == [*ended, *[ReadFault.DEADLINE] * (3 - len(ended))]
    assert rows.is_stalled is is_stall
    assert counts["loads_late"] == 1


def test_rows_come_back_under_their_namespace_alone(rows):
    stored: list[bytes] = []
    key = rows.record(b"key")
    batch = rows.store([key], lambda _place, payload: fill(payload, 7), 1e12)
    assert batch.wait(60)
    assert batch.results == [PutResult.STORED]
    found = rows.load([key], lambda _place, payload: stored.append(bytes(payload)), 1e12)
    assert found.wait(60)
    assert (found.results, stored) == ([None], [b"\7" * rows.row_bytes])
    rows.begin_epoch(b"e" * 32)
    assert rows.record(b"key") != key
    found = rows.load([rows.record(b"key")], lambda _place, _payload: None, 1e12)
    assert found.wait(60)
    assert found.results == [ReadFault.ABSENT]


def fill(payload: memoryview, value: int) -> None:
    payload[:] = bytes([value]) * len(payload)

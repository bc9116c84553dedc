"""Every way to a record, and every check of a whole one, refuses values that are not finite: of
each dtype by its own meaning, wherever they stand. Integers and bytes are never refused."""

from __future__ import annotations

import math
import time

import pytest
import torch

from kvferry.cli.copy import _Copying, _Item
from kvferry.observe import Counters
from kvferry.record import schema as schemas
from kvferry.record.check import ReadFault
from kvferry.record.schema import SAFETENSORS_DTYPE, RecordSchema, leaf_digests
from kvferry.store import maintenance
from kvferry.store.base import PutResult, Where
from kvferry.store.catalogue import Entry
from kvferry.store.memory import MemoryStore
from kvferry.store.record_client import RecordClient
from kvferry.store.recordio import RecordRead, put_record, read_record, value_check
from kvferry.store.tiers.tiered import TieredStore
from kvferry.testing.stores.hooks import wait_until
from kvferry.types import ChunkKey
from tests.record.samples import schema_of

SECONDS = 60.0
KEY = ChunkKey(b"k" * 32)
NEXT = ChunkKey(b"n" * 32)
VALUES = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf, "largest": None, "0": 0.0}
KINDS = tuple(SAFETENSORS_DTYPE)
HOSTS = (*KINDS, "float8_e5m2", "")
"""Dtypes of rows of a host, whose records are opaque; empty: not known."""


def bits_of(dtype: str, value: float | None) -> tuple[bytes, bool]:
    """One value as bytes, and whether it is finite. None: the largest. What is no float gets bits
    that are NaN in every float8."""
    if dtype in ("uint8", ""):
        return b"\xff\x7f", True
    kind = getattr(torch, dtype)
    number = torch.tensor([torch.finfo(kind).max if value is None else value]).to(kind)
    return bytes(number.view(torch.uint8).tolist()), bool(number.float().isfinite()[0])


def kv_schema(dtype: str) -> RecordSchema:
    """Two groups, of which the last layer of the second gets the value."""
    return schema_of([(2, 2, 8, "float32", None), (2, 3, 10, dtype, None)], 5)


def row_schema(dtype: str) -> RecordSchema:
    return RecordSchema.for_rows(
        namespace=bytes(32), chunk_tokens=5, row_bytes=70_000, values=dtype
    )


def image_of(schema: RecordSchema, value: bytes) -> memoryview:
    """A record without its head, with a value in the last head of its last layer."""
    image = memoryview(bytearray(schema.record_bytes))
    at = schema.record_bytes - len(value) - 12  # within the last token
    image[at : at + len(value)] = value
    return image


def stored(store, schema: RecordSchema, image: memoryview, key: ChunkKey = KEY) -> None:
    """Store a record as older releases did, without a look at its values."""
    table = b"".join(
        leaf_digests(component, image[start : start + component.num_bytes])
        for component, start in zip(schema.components, schema.component_offsets, strict=True)
    )
    assert put_record(store, schema, key, 0, table, image).result is PutResult.STORED


class Target(MemoryStore):
    """Stays open when the tiers close."""

    def close(self) -> None:
        pass


# ---- ways to a record: each returns whether it got there, and what was counted


def by_put(schema, image, target):
    def fill(_place, memory):
        memory[:] = image

    counts = Counters()
    client = RecordClient(target, schema, counts, 2)
    batch = client.put([KEY, NEXT], [0, 5], fill, time.monotonic() + SECONDS)
    assert batch.wait(SECONDS)
    assert client.close(SECONDS)
    is_there = batch.results == [PutResult.STORED] * 2
    assert is_there or batch.results == [PutResult.NOT_FINITE] * 2
    assert counts["save_not_finite"] == 2 * (not is_there)
    assert counts["put_stored"] == 2 * is_there


def by_put_all(schema, image, target):
    counts = Counters()
    client = RecordClient(target, schema, counts, 2)
    good = image_of(schema, b"")
    num = client.put_all([(KEY, 0, image), (NEXT, 5, good)], time.monotonic() + SECONDS)
    assert client.close(SECONDS)
    assert target.where(NEXT) is Where.HERE  # one bad record costs no other
    assert num == counts["put_stored"] == 2 - counts["save_not_finite"]


def by_copy(schema, image, target):
    source = MemoryStore("memory://source")
    stored(source, schema, image)
    copying = _Copying(source, target, skips=False)
    copying.copy(_Item(b"", KEY, [Entry(KEY, len(image), 0.0)]))
    assert [why for _, why in copying.bad] == [ReadFault.NOT_FINITE] * (not copying.copied)


def by_tiers(schema, image, target):
    """A hit in a far tier is copied to the near one."""
    far, counts = Target("memory://far"), Counters()
    stored(far, schema, image)
    with TieredStore([target, far], observer=counts, check=value_check(schema)) as tiers:
        tiers.read(KEY, [(0, memoryview(bytearray(len(image))))])
        wait_until(lambda: counts["tier_copies"] or counts["records_corrupt"], "the copy")
    assert (far.where(KEY) is Where.HERE) == (
        target.where(KEY) is Where.HERE
    )  # a wrong one goes there, too


WAYS = {way.__name__: way for way in (by_put, by_put_all, by_copy, by_tiers)}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("value", VALUES)
@pytest.mark.parametrize("dtype", KINDS)
def test_no_way_brings_kv_that_is_not_finite_into_a_store(dtype, value, way):
    bits, is_finite = bits_of(dtype, VALUES[value])
    schema, target = kv_schema(dtype), Target("memory://target")
    WAYS[way](schema, image_of(schema, bits), target)
    assert (target.where(KEY) is Where.HERE) == is_finite


@pytest.mark.parametrize("way", ["by_put", "by_tiers"])
@pytest.mark.parametrize("value", VALUES)
@pytest.mark.parametrize("dtype", HOSTS)
def test_rows_of_a_host_are_refused_where_it_is_known_what_they_hold(dtype, value, way):
    bits, is_finite = bits_of(dtype, VALUES[value])
    schema, target = row_schema(dtype), Target("memory://target")
    WAYS[way](schema, image_of(schema, bits), target)
    assert (target.where(KEY) is Where.HERE) == is_finite


def test_what_a_row_holds_changes_no_byte_of_its_record():
    known, unknown = row_schema("float16"), row_schema("")
    assert known.encode_header(KEY, 0) == unknown.encode_header(KEY, 0)
    assert known.components == unknown.components


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("value", VALUES)
@pytest.mark.parametrize("dtype", KINDS)
def test_verify_and_audited_reads_find_what_older_releases_stored(
    dtype, value, compiled, monkeypatch
):
    if not compiled:
        monkeypatch.setattr(schemas, "native_leaves", lambda: None)
    bits, is_finite = bits_of(dtype, VALUES[value])
    schema, store, counts = kv_schema(dtype), MemoryStore("memory://old"), Counters()
    stored(store, schema, image_of(schema, bits))
    entry = Entry(KEY, schema.record_bytes, 0.0)
    report = maintenance.verify(store, [entry], discards=False)
    expected = None if is_finite else ReadFault.NOT_FINITE
    assert [why for _, why in report.bad] == [expected] * (not is_finite)
    image = memoryview(bytearray(schema.record_bytes))
    rows = [
        (schemas.RowRange(index, 0, component.num_rows), image[start : start + component.num_bytes])
        for index, (component, start) in enumerate(
            zip(schema.components, schema.component_offsets, strict=True)
        )
    ]
    for looks in (False, True):
        read = RecordRead(
            key=KEY, first_token=0, head=image, rows=rows, image=image, looks_at_values=looks
        )
        reason = read_record(store, schema, read, counts)
        assert reason == (expected if looks else None)
    assert (store.where(KEY) is Where.HERE) == is_finite
    assert counts["records_corrupt"] == (not is_finite)


def test_a_warning_says_once_that_values_are_not_finite(caplog):
    schema = kv_schema("float16")
    client = RecordClient(MemoryStore("memory://w"), schema, Counters(), 2)
    bits, _ = bits_of("float16", math.inf)
    for _ in range(2):
        client.put_all([(KEY, 15, image_of(schema, bits))], time.monotonic() + SECONDS)
    assert client.close(SECONDS)
    assert caplog.text.count("has NaN or Inf: it is not stored") == 1
    assert "first at token 15" in caplog.text

"""Which bytes of a record a rank holds, and where they lie in its slot."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.blocks.rows import RankRows
from kvferry.layout.shards import tensor_parallel_shard
from kvferry.record.checksum import CHECKSUM
from kvferry.record.leaves import Leaves
from kvferry.record.schema import RecordSchema, RowRange, leaf_digests
from kvferry.types import GroupShard, KVGroup, RankShard


@st.composite
def groups_and_ranks(draw) -> tuple[tuple[KVGroup, ...], int]:
    """Groups that so many ranks share; where a group has fewer heads, ranks replicate them."""
    groups = tuple(
        KVGroup(
            num_layers=draw(st.integers(1, 4)),
            num_kv_heads=draw(st.sampled_from((1, 2, 4))),
            content_size=draw(st.sampled_from((2, 6, 64))),
            dtype=draw(st.sampled_from(("float32", "bfloat16"))),
            block_size=4,
        )
        for _ in range(draw(st.integers(1, 3)))
    )
    return groups, draw(st.sampled_from((1, 2, 4)))


def schema_of(groups: tuple[KVGroup, ...], chunk_tokens: int) -> RecordSchema:
    return RecordSchema.for_groups(namespace=bytes(32), chunk_tokens=chunk_tokens, groups=groups)


def ranks_of(groups: tuple[KVGroup, ...], world_size: int, schema: RecordSchema) -> list[RankRows]:
    return [
        RankRows(groups, tensor_parallel_shard(groups, rank, world_size), schema)
        for rank in range(world_size)
    ]


def record_of(schema: RecordSchema, seed: int = 1) -> bytearray:
    """Some bytes, as long as a record."""
    values = np.random.default_rng(seed).integers(0, 256, schema.record_bytes, dtype=np.uint8)
    return bytearray(values.tobytes())


def slot_of(rows: RankRows, schema: RecordSchema, record: bytearray) -> bytearray:
    """What a rank's slot holds after it has read all its rows of a record."""
    slot = bytearray(rows.slot_bytes)
    view = memoryview(slot)
    rows.head_of(view)[:] = record[: schema.head_bytes]
    for each, part in rows.rows_of(view, rows.all_groups):
        for run, start, stop in schema.runs_of(each):
            offset = schema.offset_of(run)
            part[start:stop] = record[offset : offset + stop - start]
    return slot


CASES = given(case=groups_and_ranks(), chunk=st.sampled_from((1, 7, 32)))


@CASES
def test_ranks_write_what_they_read_no_byte_lost_or_doubled(case, chunk: int):
    groups, world_size = case
    schema = schema_of(groups, chunk)
    record = record_of(schema)
    written = bytearray(schema.record_bytes)
    times = np.zeros(schema.record_bytes, dtype=int)
    for rows in ranks_of(groups, world_size, schema):
        slot = slot_of(rows, schema, record)
        for ranges, start, stop in rows.spans():
            offset = schema.offset_of(ranges)
            written[offset : offset + stop - start] = slot[start:stop]
            times[offset : offset + stop - start] += 1
    assert not times[: schema.head_bytes].any()
    payload = np.zeros(schema.record_bytes, dtype=bool)
    for index, component in enumerate(schema.components):
        start = schema.offset_of(RowRange(index, 0, component.num_rows))
        payload[start : start + component.num_bytes] = True
    assert (times == payload).all()
    assert (np.frombuffer(written, np.uint8) == np.frombuffer(record, np.uint8))[payload].all()


@CASES
def test_rows_fill_a_slot_without_gap_or_overlap(case, chunk: int):
    groups, world_size = case
    schema = schema_of(groups, chunk)
    for rows in ranks_of(groups, world_size, schema):
        filled = np.zeros(rows.slot_bytes, dtype=np.uint8)
        view = memoryview(filled)
        np.frombuffer(rows.head_of(view), np.uint8)[:] += 1
        for group in range(len(groups)):
            for each, part in rows.rows_of(view, {group}):
                assert each.component == group
                assert len(part) == schema.num_bytes_of(each)
                np.frombuffer(part, np.uint8)[:] += 1
        assert (filled == 1).all()
        assert len(rows.image_of(memoryview(bytearray(rows.slot_bytes + 9)))) == rows.slot_bytes


@CASES
def test_the_rows_of_a_group_are_its_layers_and_heads_of_this_rank(case, chunk: int):
    groups, world_size = case
    schema = schema_of(groups, chunk)
    record = record_of(schema)
    for rank, rows in enumerate(ranks_of(groups, world_size, schema)):
        slot = slot_of(rows, schema, record)
        shard = tensor_parallel_shard(groups, rank, world_size)
        for index, (group, held) in enumerate(zip(groups, shard.groups, strict=True)):
            component = schema.components[index]
            start = schema.offset_of(RowRange(index, 0, component.num_rows))
            whole = np.frombuffer(record, np.uint8, component.num_bytes, start).reshape(
                group.num_layers, group.num_kv_heads, chunk, -1
            )
            memory = rows.group_rows(memoryview(slot), index)
            shape = rows.group_shape(index)
            expected = whole[slice(*held.layers), slice(*held.heads)]
            assert shape[:3] == expected.shape[:3]
            assert shape[3] == group.content_size
            assert bytes(memory) == expected.tobytes()


@CASES
def test_digests_of_all_ranks_are_the_leaf_table_of_the_record(case, chunk: int):
    groups, world_size = case
    schema = schema_of(groups, chunk)
    record = record_of(schema)
    table = bytearray(CHECKSUM.num_bytes * schema.num_leaves)
    named = np.zeros(len(table), dtype=int)
    for rows in ranks_of(groups, world_size, schema):
        digests = rows.leaves(memoryview(slot_of(rows, schema, record)), {}).digests
        at = 0
        for written, _, _ in rows.spans():
            where = schema.leaf_slice(written)
            size = where.stop - where.start
            table[where] = digests[at : at + size]
            named[where] += 1
            at += size
        assert at == len(digests)
    assert (named == 1).all()
    expected = b"".join(
        leaf_digests(component, memoryview(record)[start : start + component.num_bytes])
        for index, component in enumerate(schema.components)
        for start in [schema.offset_of(RowRange(index, 0, component.num_rows))]
    )
    assert bytes(table) == expected


def test_what_a_device_has_hashed_is_not_hashed_again():
    groups = (KVGroup(num_layers=1, num_kv_heads=1, content_size=2, dtype="float32", block_size=4),)
    schema = schema_of(groups, 4)
    (rows,) = ranks_of(groups, 1, schema)
    slot = memoryview(slot_of(rows, schema, record_of(schema)))
    for are_finite in (True, False):
        known = Leaves(b"d" * CHECKSUM.num_bytes * schema.num_leaves, are_finite)
        assert rows.leaves(slot, {0: lambda known=known: known}) == known


@pytest.mark.parametrize("chunk", [1, 128])
def test_the_slot_of_a_rank_that_holds_all_is_the_image_of_the_record(chunk: int):
    groups = tuple(
        KVGroup(num_layers=3, num_kv_heads=heads, content_size=64, dtype="float32", block_size=4)
        for heads in (2, 5)
    )
    schema = schema_of(groups, chunk)
    (rows,) = ranks_of(groups, 1, schema)
    record = record_of(schema)
    assert rows.slot_bytes == schema.record_bytes
    assert bytes(rows.image_of(memoryview(slot_of(rows, schema, record)))) == record


def test_a_rank_without_a_layer_of_a_group_has_no_bytes_of_it():
    """The first of two pipeline stages."""
    groups = tuple(
        KVGroup(num_layers=2, num_kv_heads=2, content_size=4, dtype="float32", block_size=4)
        for _ in range(2)
    )
    schema = schema_of(groups, 8)
    shard = RankShard(
        rank=0,
        world_size=2,
        groups=(
            GroupShard(layers=(0, 2), heads=(0, 2)),
            GroupShard(layers=(0, 0), heads=(0, 2)),
        ),
    )
    rows = RankRows(groups, shard, schema)
    assert rows.rows_of(memoryview(bytearray(rows.slot_bytes)), {1}) == []
    assert rows.group_shape(1) == (0, 2, 8, 4)
    assert len(rows.group_rows(memoryview(bytearray(rows.slot_bytes)), 1)) == 0
    assert rows.slot_bytes == schema.head_bytes + schema.components[0].num_bytes

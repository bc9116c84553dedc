"""Shards of a record make the very record that was divided, or nothing."""

import random

import pytest

from kvferry.errors import LayoutError
from kvferry.keys import ShardKeys
from kvferry.record.check import parse_head
from kvferry.record.join import joined
from kvferry.record.schema import Component, RecordSchema, RowRange
from kvferry.types import ShardRows
from tests.record.samples import (
    GOLDEN,
    MARK,
    NAMESPACE,
    WHOLE_KEY,
    encode,
    payload_of,
    schema_of,
    shard_of,
)

WHOLE = schema_of(*GOLDEN["groups"][:2])
"""Layers and heads of its groups: 3 and 2, 2 and 1, 1 and 5."""

TWO_RANKS = [
    [((0, 3), (0, 1)), ((0, 2), (0, 1)), ((0, 1), (0, 3))],
    [((0, 3), (1, 2)), ((0, 2), (0, 1)), ((0, 1), (3, 5))],
]
STAGES = [
    [((0, 1), (0, 2)), ((0, 2), (0, 1)), ((0, 0), (0, 0))],
    [((1, 3), (0, 2)), ((0, 0), (0, 0)), ((0, 1), (0, 5))],
]
BOTH = [
    [((0, 1), (0, 1)), ((0, 1), (0, 1)), ((0, 0), (0, 0))],
    [((0, 1), (1, 2)), ((0, 1), (0, 1)), ((0, 0), (0, 0))],
    [((1, 3), (0, 1)), ((1, 2), (0, 1)), ((0, 1), (0, 4))],
    [((1, 3), (1, 2)), ((1, 2), (0, 1)), ((0, 1), (4, 5))],
]
SPLITS = {
    "ranks": TWO_RANKS,
    "stages": STAGES,
    "both": BOTH,
    "ranks and half the stages": [*TWO_RANKS, STAGES[0]],
    "a rank and all stages": [TWO_RANKS[0], *STAGES],
    "a rank, a stage and the rest": [TWO_RANKS[0], STAGES[1], BOTH[1]],
}


def record_of(schema, *, first_token=35, mark=b"", seed=7):
    return encode(
        schema, payload_of(schema, seed=seed), key=WHOLE_KEY, first_token=first_token, mark=mark
    )


def cut(schema, record, ranges, *, of=WHOLE_KEY):
    """Return the record of a shard of `record`, with its header, as a rank writes it."""
    info = parse_head(memoryview(record), len(record))
    shard, payload = shard_of(schema, ranges), bytearray()
    for number, rows in enumerate(shard.shard):
        for layer in range(*rows.layers):
            for head in range(*rows.heads):
                row = layer * rows.num_heads + head
                start = schema.offset_of(RowRange(number, row, row + 1))
                payload += record[start : start + schema.components[number].row_bytes]
    key = ShardKeys(shard.shard).of(of)
    data = memoryview(
        encode(shard, bytes(payload), key=key, first_token=info.first_token, mark=info.mark, of=of)
    )
    return parse_head(data, len(data)), data


@pytest.mark.parametrize("mark", [b"", MARK], ids=["plain", "marked"])
@pytest.mark.parametrize("split", SPLITS)
def test_shards_in_any_order_make_the_record(split, mark):
    record = record_of(WHOLE, mark=mark)
    shards = [cut(WHOLE, record, ranges) for ranges in SPLITS[split]]
    random.Random(split).shuffle(shards)
    assert joined(shards) == record


def test_rows_of_several_leaves_keep_their_checksums():
    schema = schema_of(*GOLDEN["split"][:2])
    record = record_of(schema)
    shards = [cut(schema, record, [((0, 1), (head, head + 1))]) for head in range(2)]
    assert joined(shards) == record


def of_other(**other):
    """The second rank's shard of another record."""
    return cut(WHOLE, record_of(WHOLE, **other), TWO_RANKS[1])


def of_other_shape(groups, chunk_tokens=5):
    schema = schema_of(groups, chunk_tokens)
    return cut(schema, record_of(schema), TWO_RANKS[1])


GROUPS = GOLDEN["groups"][0]
FIRST = cut(WHOLE, record_of(WHOLE), TWO_RANKS[0])
FAULTS = {
    "one rank alone": ([], "3 of 6 rows of kv.0 are in no shard, first layer 0, head 1"),
    "a stage is lacking": (
        [cut(WHOLE, record_of(WHOLE), BOTH[1])],
        "2 of 6 rows of kv.0 are in no shard, first layer 1, head 1",
    ),
    "of another chunk": (
        [cut(WHOLE, record_of(WHOLE), TWO_RANKS[1], of=bytes(32))],
        "different sizes, positions or salts",
    ),
    "of another place": ([of_other(first_token=40)], "different sizes, positions or salts"),
    "of another salt": ([of_other(mark=MARK)], "different sizes, positions or salts"),
    "of another size of chunks": ([of_other_shape(GROUPS, 6)], "different sizes"),
    "of more layers": (
        [of_other_shape([(4, 2, 10, "bfloat16", None), *GROUPS[1:]])],
        "different sizes",
    ),
    "of other content": (
        [of_other_shape([(3, 2, 11, "bfloat16", None), *GROUPS[1:]])],
        "different kv.0",
    ),
    "of another dtype": (
        [of_other_shape([(3, 2, 10, "float16", None), *GROUPS[1:]])],
        "different kv.0",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_shards_that_are_not_all_of_one_record_make_none(fault):
    others, says = FAULTS[fault]
    for shards in ([FIRST, *others], [*others, FIRST]):
        with pytest.raises(LayoutError, match=says) as raised:
            joined(shards)
        assert "\n" not in str(raised.value)


def test_a_component_of_which_no_shard_has_a_row_is_lacking():
    with pytest.raises(LayoutError, match="no shard has a row of component 2"):
        joined([cut(WHOLE, record_of(WHOLE), STAGES[0])])


def test_a_header_that_claims_rows_without_end_allocates_nothing():
    huge = schema_of([(1 << 20, 1, 1 << 16, "float32", None)], 1)
    shard = shard_of(huge, [((0, 1), (0, 1))])
    data = memoryview(encode(shard, payload_of(shard)))
    with pytest.raises(LayoutError, match="1048575 of 1048576 rows"):
        joined([(parse_head(data, len(data)), data)])


def claim(num_layers, num_heads, namespace=NAMESPACE, *, of=WHOLE_KEY, name="kv.0"):
    """Return a sound shard of one row of a record of these layers and heads."""
    rows = (ShardRows((0, 1), num_layers, (0, 1), num_heads),)
    part = Component(name=name, dtype="F32", shape=(1, 1, 5, 8))
    schema = RecordSchema(namespace=namespace, chunk_tokens=5, components=(part,), shard=rows)
    data = encode(schema, payload_of(schema), key=ShardKeys(rows).of(of), of=of)
    return parse_head(memoryview(data), len(data)), memoryview(data)


CLAIMS = {
    "more bytes than a component": (999_999_999, 999_999_999),
    "more leaves than a record": (999_999_999, 1),
    "more leaves, by heads": (1, 99_999_999),
    "no more than a record": (1 << 20, 1),
}


@pytest.mark.parametrize("claimed", CLAIMS)
def test_a_sound_shard_may_claim_a_record_that_cannot_be(claimed):
    with pytest.raises(LayoutError, match=r"make no record|are in no shard"):
        joined([claim(*CLAIMS[claimed])])

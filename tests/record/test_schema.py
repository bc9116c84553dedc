from dataclasses import replace
from operator import ne

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvferry.errors import ConfigError, ContractError
from kvferry.keys import salt_mark
from kvferry.record.check import check_rows, mark_of
from kvferry.record.checksum import CHECKSUM
from kvferry.record.schema import (
    ALIGN,
    CHUNK_BYTES,
    LEAF_BYTES,
    MAX_HEADER_BYTES,
    MAX_LEAVES,
    Component,
    RecordSchema,
    RowRange,
    default_chunk_tokens,
    leaf_digests,
    leaf_spans,
)
from kvferry.types import KVGroup
from tests.record.samples import (
    KEY,
    NAMESPACE,
    encode,
    groups_of,
    payload_of,
    read,
    read_unknown,
    schema_of,
    shard_of,
)

SIZES = st.sampled_from([1, 2, 3, 5, 7])
GROUPS = st.lists(
    st.tuples(
        SIZES,
        SIZES,
        st.sampled_from([1, 2, 13, 64]),
        st.sampled_from(["float32", "bfloat16", "float16", "float8_e4m3fn"]),
        st.sampled_from([None, 8]),
    ),
    min_size=1,
    max_size=3,
)


def component(*, name="kv.0", dtype="F32", shape=(1, 1, 1, 1)):
    return Component(name=name, dtype=dtype, shape=shape)


@given(groups=GROUPS, chunk_tokens=st.sampled_from([1, 3, 16, 37]), first=st.integers(0, 2**63 - 1))
def test_what_is_encoded_reads_back(groups, chunk_tokens, first):
    schema = schema_of(groups, chunk_tokens)
    data = encode(schema, payload_of(schema), first_token=first)
    assert len(data) == schema.record_bytes
    assert schema.head_bytes % ALIGN == 0
    assert read(schema, data, first_token=first) is None
    assert read_unknown(data) is None


@given(groups=GROUPS, chunk_tokens=st.sampled_from([1, 3, 16, 37]), salt=st.text())
def test_a_mark_changes_no_size_and_reads_back_by_its_namespace_and_salt(
    groups, chunk_tokens, salt
):
    schema, mark = schema_of(groups, chunk_tokens), salt_mark(NAMESPACE, salt)
    data = encode(schema, payload_of(schema), first_token=2**63 - 1, mark=mark)
    assert len(data) == schema.record_bytes
    assert data[schema.head_bytes :] == payload_of(schema)
    assert read(schema, data, first_token=2**63 - 1) is None
    assert read_unknown(data) is None
    assert mark_of(data) == mark != salt_mark(bytes(32), salt)
    plain = encode(schema, payload_of(schema), first_token=2**63 - 1)[: schema.header_bytes]
    is_anywhere = len(salt) < 9 or salt.encode() in plain
    assert is_anywhere or salt.encode() not in data[: schema.header_bytes]
    assert mark_of(encode(schema, payload_of(schema))) == b"" == salt_mark(NAMESPACE, None)


@given(
    row_bytes=st.sampled_from([1, 24, LEAF_BYTES - 1, LEAF_BYTES, LEAF_BYTES + 1, 2 * LEAF_BYTES]),
    num_rows=st.integers(0, 3),
)
def test_leaves_tile_the_rows_and_cross_none(row_bytes, num_rows):
    part = component(dtype="U8", shape=(3, 1, row_bytes, 1))
    spans = list(leaf_spans(part, num_rows))
    assert len(spans) == num_rows * part.leaves_per_row
    assert [at for span in spans for at in range(*span)] == list(range(num_rows * row_bytes))
    for start, stop in spans:
        assert 0 < stop - start <= LEAF_BYTES
        assert start // row_bytes == (stop - 1) // row_bytes
    payload = memoryview(bytes(num_rows * row_bytes))
    digests = leaf_digests(part, payload)
    assert len(digests) == CHECKSUM.num_bytes * len(spans)
    assert check_rows(part, payload, memoryview(digests))


def test_a_range_of_rows_verifies_alone_and_only_where_it_belongs():
    schema = schema_of([(2, 3, 70, "float32", None), (1, 1, 2, "float16", None)], 250)
    data = memoryview(encode(schema, payload_of(schema)))
    table = data[schema.header_bytes + CHECKSUM.num_bytes : schema.head_bytes]
    assert schema.components[0].leaves_per_row == 2
    for start in range(6):
        rows = RowRange(0, start, start + 1)
        at = schema.offset_of(rows)
        piece = data[at : at + schema.num_bytes_of(rows)]
        for other in range(6):
            digests = table[schema.leaf_slice(RowRange(0, other, other + 1))]
            assert check_rows(schema.components[0], piece, digests) == (start == other)
    assert schema.offset_of(RowRange(1, 0, 1)) == schema.component_offsets[1]


def test_rows_stand_in_canonical_order():
    schema = schema_of([(2, 3, 4, "float32", None)], 5)
    kv = torch.arange(2 * 3 * 5 * 4, dtype=torch.float32).reshape(2, 3, 5, 4)
    data = encode(schema, kv.numpy().tobytes())
    rows = RowRange(0, 1 * 3 + 2, 1 * 3 + 3)  # layer 1, head 2
    at = schema.offset_of(rows)
    assert data[at : at + schema.num_bytes_of(rows)] == kv[1, 2].numpy().tobytes()


def test_a_payload_that_ends_inside_a_row_is_never_right():
    part = component(dtype="U8", shape=(2, 1, 3, 1))
    digests = memoryview(leaf_digests(part, memoryview(b"abc")))
    assert check_rows(part, memoryview(b"abc"), digests)
    assert not check_rows(part, memoryview(b"abcd"), digests)
    assert not check_rows(part, memoryview(b"abcabc"), digests)
    assert not check_rows(part, memoryview(b""), digests)
    assert not check_rows(part, memoryview(b"abc"), memoryview(bytes(digests) + bytes(16)))
    with pytest.raises(ContractError, match="4 bytes are no whole number of rows of 3"):
        leaf_digests(part, memoryview(b"abcd"))


def test_every_record_of_a_schema_has_one_size():
    schema = schema_of([(1, 1, 2, "float32", None)], 3)
    heads = {len(schema.encode_header(KEY, first)) for first in (0, 9, 10**18, 2**63 - 1)}
    assert heads == {schema.header_bytes}


@pytest.mark.parametrize(
    ("key", "first_token"), [(b"short", 0), (KEY + b"x", 0), (KEY, -1), (KEY, 2**63)]
)
def test_a_head_for_no_possible_chunk_is_refused(key, first_token):
    schema = schema_of([(1, 1, 2, "float32", None)], 3)
    with pytest.raises(ContractError, match="key of 32 bytes and a position"):
        schema.encode_header(key, first_token)


def test_a_leaf_table_of_another_size_is_refused():
    schema = schema_of([(1, 1, 2, "float32", None)], 3)
    with pytest.raises(ContractError, match="leaf table has 15 bytes, the schema needs 16"):
        schema.encode_head(KEY, 0, bytes(15))


@pytest.mark.parametrize(
    "name",
    ["", "root", "leaves", "__metadata__", "Kv", "0", "a b", 'a"', "é", "a<", "a\n", "a" * 65],
)
def test_names_that_a_header_could_confuse_are_refused(name):
    with pytest.raises(ConfigError, match="component name"):
        component(name=name)


@pytest.mark.parametrize(
    "shape", [(0, 1, 1, 1), (1, 1, -1, 1), (2**60, 1, 1, 1), (2**20,) * 4, (10**4000,) * 4]
)
def test_impossible_shapes_are_refused(shape):
    with pytest.raises(ConfigError, match=r"empty shape|more than \d+ bytes"):
        component(shape=shape)


def schema_with(*, namespace=NAMESPACE, chunk_tokens=3, components=None):
    return RecordSchema(
        namespace=namespace,
        chunk_tokens=chunk_tokens,
        components=components if components is not None else (component(),),
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"namespace": b"short"}, "32 bytes, not 5"),
        ({"chunk_tokens": 0}, "chunk_tokens"),
        ({"chunk_tokens": 2**32}, "chunk_tokens"),
        ({"components": ()}, "at least one component"),
        ({"components": (component(), component())}, "its own name"),
        ({"components": (component(shape=(MAX_LEAVES + 1, 1, 1, 1)),)}, "smaller chunks"),
        ({"components": tuple(component(name=f"kv.{i}") for i in range(1500))}, "above the bound"),
    ],
)
def test_impossible_records_are_refused(arguments, message):
    with pytest.raises(ConfigError, match=message):
        schema_with(**arguments)


def test_the_largest_header_that_is_written_is_also_read():
    count = 500
    schema = schema_with(components=tuple(component(name=f"kv.{i}") for i in range(count)))
    assert MAX_HEADER_BYTES // 2 < schema.header_bytes <= MAX_HEADER_BYTES + 8
    assert read_unknown(encode(schema, payload_of(schema))) is None


def test_a_dtype_that_cannot_be_stored_is_refused():
    group = KVGroup(num_layers=1, num_kv_heads=1, content_size=2, dtype="int4", block_size=16)
    with pytest.raises(ConfigError, match="KV dtype 'int4' cannot be stored"):
        RecordSchema.for_groups(namespace=NAMESPACE, chunk_tokens=4, groups=(group,))


# -- the size of a chunk that nobody set -----------------------------------------------------------

EIGHT_B = (32, 8, 256, "bfloat16", None)


@pytest.mark.parametrize(
    ("groups", "multiple", "tokens"),
    {
        "8B: 8 MiB, to the byte": ([EIGHT_B], 1, 64),
        "a layer more": ([(33, *EIGHT_B[1:])], 1, 32),
        "8B, KV of a byte": ([(32, 8, 256, "float8_e4m3fn", None)], 1, 128),
        "8B, KV of four": ([(32, 8, 256, "float32", None)], 1, 32),
        "70B": ([(80, *EIGHT_B[1:])], 1, 16),
        "16 tokens are more than 8 MiB": ([(1000, *EIGHT_B[1:])], 1, 16),
        "a tiny model": ([(2, 1, 8, "float32", None)], 1, 128),
        "latents": ([(61, 1, 576, "bfloat16", None)], 1, 64),
        "latents and an indexer": (
            [(61, 1, 576, "bfloat16", None), (61, 1, 132, "uint8", None)], 64, 64,
        ),
        "windows count as all tokens": ([EIGHT_B, (32, 8, 256, "bfloat16", 16)], 1, 32),
        "blocks that divide it": ([EIGHT_B], 16, 64),
        "blocks that do not": ([EIGHT_B], 48, 96),
        "blocks above it": ([(80, *EIGHT_B[1:])], 128, 128),
        "blocks above all": ([(2, 1, 8, "float32", None)], 784, 784),
    }.values(),
)  # fmt: skip
def test_a_chunk_is_the_most_tokens_of_a_power_of_two_that_fit(groups, multiple, tokens):
    assert default_chunk_tokens(groups_of(groups), multiple) == tokens


@given(groups=GROUPS, layers=st.sampled_from([1, 50, 3000]), data=st.data())
def test_a_chunk_is_as_large_as_its_bound_allows_whatever_its_blocks_and_windows(
    groups, layers, data
):
    groups = [(number * layers, *others) for number, *others in groups]
    tokens = default_chunk_tokens(groups_of(groups))

    def fits(tokens):
        return schema_of(groups, tokens).payload_bytes <= CHUNK_BYTES

    assert tokens in (16, 32, 64, 128)
    assert tokens == 16 or fits(tokens)
    assert tokens == 128 or not fits(2 * tokens)
    others = data.draw(st.permutations([(*group[:4], 5) for group in groups]))
    blocks = data.draw(st.sampled_from([1, 16, 784]))
    changed = tuple(replace(group, block_size=blocks) for group in groups_of(others))
    assert default_chunk_tokens(changed) == tokens


@st.composite
def shards(draw):
    groups = draw(GROUPS)

    def some(size):
        start = draw(st.integers(0, size))
        return start, draw(st.integers(start, size))

    return groups, [(some(layers), some(heads)) for layers, heads, *_ in groups]


@given(case=shards(), first=st.integers(0, 2**63 - 1))
def test_a_shard_has_the_rows_of_its_ranges_and_says_which(case, first):
    groups, ranges = case
    whole = schema_of(groups, 3)
    schema = shard_of(whole, ranges)
    sizes = [
        (layers[1] - layers[0]) * (heads[1] - heads[0]) * component.row_bytes
        for (layers, heads), component in zip(ranges, whole.components, strict=True)
    ]
    if not any(sizes):
        assert schema is None
    elif sum(sizes) == whole.payload_bytes:
        assert schema is whole
    else:
        assert [component.num_bytes for component in schema.components] == list(filter(None, sizes))
        data = encode(schema, payload_of(schema), first_token=first)
        assert len(data) == schema.record_bytes
        assert schema.head_bytes % ALIGN == 0
        assert read(schema, data, first_token=first) is None
        assert read_unknown(data) is None
        held = [
            (rows.layers, rows.heads) if all(map(ne, *zip(*ranges[number], strict=True))) else None
            for number, rows in enumerate(schema.shard)
        ]
        assert held == [each if size else None for each, size in zip(ranges, sizes, strict=True)]
        other = schema.with_namespace(bytes(32))
        assert (other.shard, other.record_bytes) == (schema.shard, schema.record_bytes)


def test_only_a_shard_is_of_another_record():
    whole = schema_of([(2, 2, 2, "float32", None)], 3)
    shard = shard_of(whole, [((0, 1), (0, 2))])
    for schema, of in ((whole, KEY), (shard, b""), (shard, KEY[:-1])):
        with pytest.raises(ContractError, match="shard"):
            schema.encode_header(KEY, 0, of=of)

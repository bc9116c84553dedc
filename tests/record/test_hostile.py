"""Bytes from a medium are hostile: each fault is a miss with a reason, never an exception."""

import json
import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.record.check import ReadFault, check_head, parse_head
from kvferry.record.schema import MAX_HEADER_BYTES
from kvferry.record.shards import shard_text
from tests.record.samples import (
    GOLDEN,
    KEY,
    MARK,
    NAMESPACE,
    SHARDS,
    WHOLE_KEY,
    encode,
    golden,
    payload_of,
    read,
    read_unknown,
    schema_of,
    shard_of,
)

SCHEMA, _, RECORD = golden("tiny")
HEADER = json.loads(RECORD[8 : SCHEMA.header_bytes])
MARKED = encode(SCHEMA, payload_of(SCHEMA), mark=MARK)


def with_header(text, *, size=None, rest=RECORD[SCHEMA.header_bytes :]):
    """A value with another header text in place of the right one, padded to the same length."""
    text = text.encode() if isinstance(text, str) else text
    text = text.ljust(SCHEMA.header_bytes - 8, b" ")
    return (len(text) if size is None else size).to_bytes(8, "little") + text + rest


def with_metadata(**fields):
    header = {**HEADER, "__metadata__": {**HEADER["__metadata__"], **fields}}
    return with_header(json.dumps(header, separators=(",", ":")))


def is_corruption(reason):
    return isinstance(reason, ReadFault) and reason.is_corruption


def test_the_record_itself_is_right():
    assert read(SCHEMA, RECORD) is None
    assert read_unknown(RECORD) is None
    assert with_metadata() == RECORD


def test_every_single_bit_flip_is_found():
    data = bytearray(RECORD)
    for bit in range(8 * len(data)):
        data[bit // 8] ^= 1 << bit % 8
        assert is_corruption(read(SCHEMA, data)), f"bit {bit} flipped and served"
        data[bit // 8] ^= 1 << bit % 8
    assert bytes(data) == RECORD


def test_every_single_bit_flip_is_found_in_a_head_with_a_mark():
    data = bytearray(MARKED)
    assert read(SCHEMA, data) is None
    assert read_unknown(data) is None
    for at in [*range(8 + 600), *range(SCHEMA.header_bytes, SCHEMA.head_bytes)]:
        for bit in range(8):
            data[at] ^= 1 << bit
            assert is_corruption(read(SCHEMA, data)), f"bit {bit} of byte {at} flipped and served"
            data[at] ^= 1 << bit
    assert bytes(data) == MARKED


@pytest.mark.parametrize("mark", ["", "00", "zz" * 16, "AA" * 16, "0" * 33])
def test_a_mark_that_no_writer_makes_is_refused(mark):
    text = MARKED[8 : SCHEMA.header_bytes].rstrip(b" ").decode()
    wrong = with_header(text.replace(MARK.hex(), mark))
    assert read_unknown(wrong) is ReadFault.BAD_HEADER
    assert is_corruption(read(SCHEMA, wrong))


@pytest.mark.parametrize("name", ["shard", "marked_shard"])
def test_every_single_bit_flip_is_found_in_the_head_of_a_shard(name):
    schema, first_token, data = golden(name)
    data = bytearray(data)
    for at in [*range(8 + 900), *range(schema.header_bytes, schema.head_bytes)]:
        for bit in range(8):
            data[at] ^= 1 << bit
            wrong = read(schema, data, first_token=first_token)
            assert is_corruption(wrong), f"bit {bit} of byte {at} flipped and served"
            data[at] ^= 1 << bit
    assert bytes(data) == golden(name)[2]


SHARD_SCHEMA, SHARD_AT, SHARD = golden("shard")
SAID = shard_text(SHARD_SCHEMA.shard)


@pytest.mark.parametrize(
    ("what", "instead"),
    [
        (SAID, ""),
        (SAID, SAID + " "),
        (SAID, SAID.replace(" ", "  ")),
        (SAID, SAID.replace(" ", "\t")),
        (SAID, SAID + " 0-0/1,0-0/1 x"),
        (SAID, "0-3/3,0-2/2 0-2/2,0-1/1 0-1/1,0-5/5"),
        ("0-3/3", "00-3/3"),
        ("0-3/3", "0-3/2"),
        ("0-3/3", "1-3/3"),
        ("0-3/3", "0-3"),
        ("0-3/3", "-1-3/3"),
        ("0-3/3", "0-3/9999999999"),
        ("1-2/2,0-1/1", "2-1/2,0-1/1"),
        ("1-2/2,0-1/1", "1-2/2,0-2/1"),
        ("0-0/1,0-0/5", "0-0/0,0-0/5"),
        ("0-0/1,0-0/5", "1-1/1,0-0/5"),
        ("0-0/1,0-0/5", "0-0/1,0-5/5"),
        ("0-0/1,0-0/5", "0-1/1,0-5/5"),
        (WHOLE_KEY.hex(), ""),
        (WHOLE_KEY.hex(), WHOLE_KEY.hex()[2:]),
        (WHOLE_KEY.hex(), WHOLE_KEY.hex().upper()),
        ('"of":', '"off":'),
        ('"version":"3"', '"version":"1"'),
        ('"version":"3"', '"version":"2"'),
        ('"kv.1"', '"kv.2"'),
    ],
)
def test_a_shard_that_no_writer_makes_is_refused(what, instead):
    text = SHARD[8 : SHARD_SCHEMA.header_bytes].rstrip(b" ").decode()
    assert what in text
    size = SHARD_SCHEMA.header_bytes - 8
    wrong = text.replace(what, instead, 1).encode().ljust(size, b" ")
    wrong = SHARD[:8] + wrong + SHARD[SHARD_SCHEMA.header_bytes :]
    assert read_unknown(wrong) is ReadFault.BAD_HEADER
    assert is_corruption(read(SHARD_SCHEMA, wrong, first_token=SHARD_AT))


OTHER_RANGES = [((0, 3), (0, 1)), ((1, 2), (0, 1)), ((0, 0), (0, 5))]


@pytest.mark.parametrize(
    ("key", "of", "first_token", "ranges"),
    [
        (KEY, bytes(32), 35, SHARDS["shard"]),
        (bytes(32), WHOLE_KEY, 35, SHARDS["shard"]),
        (KEY, WHOLE_KEY, 30, SHARDS["shard"]),
        (KEY, WHOLE_KEY, 35, OTHER_RANGES),
    ],
    ids=["another chunk", "another name", "another place", "other rows of the same size"],
)
def test_a_reader_takes_no_other_shard(key, of, first_token, ranges):
    schema = shard_of(schema_of(*GOLDEN["shard"][:2]), ranges)
    wrong = encode(schema, payload_of(schema), key=key, first_token=first_token, of=of)
    assert len(wrong) == len(SHARD)
    assert read(SHARD_SCHEMA, wrong, first_token=SHARD_AT) is ReadFault.OTHER_RECORD


def test_every_single_bit_flip_is_found_by_a_reader_that_knows_nothing():
    # The header is parsed anew per flip: every bit of the text, of root, leaves and payload, and of
    # some of the padding, which is all alike.
    data = bytearray(RECORD)
    text = 8 + len(RECORD[8 : SCHEMA.header_bytes].rstrip(b" "))
    padding = range(text + 8, SCHEMA.header_bytes, 251)
    for at in [*range(text + 8), *padding, *range(SCHEMA.header_bytes, len(data))]:
        for bit in range(8):
            data[at] ^= 1 << bit
            assert is_corruption(read_unknown(data)), f"bit {bit} of byte {at} flipped and served"
            data[at] ^= 1 << bit
    assert bytes(data) == RECORD


def test_every_truncation_is_found():
    for length in range(len(RECORD)):
        assert read(SCHEMA, RECORD[:length]) is ReadFault.WRONG_SIZE
        assert read_unknown(RECORD[:length]) is ReadFault.WRONG_SIZE


def test_a_head_that_ends_early_is_found_whatever_size_was_said():
    """The file was cut after its size was asked."""
    for length in range(SCHEMA.head_bytes):
        head = memoryview(RECORD)[:length]
        reason = check_head(SCHEMA, KEY, 0, SCHEMA.record_bytes, head)
        assert reason is ReadFault.WRONG_SIZE


@pytest.mark.parametrize("extra", [b"\0", b" " * 4096, RECORD])
def test_trailing_bytes_are_found(extra):
    assert read(SCHEMA, RECORD + extra) is ReadFault.WRONG_SIZE
    assert read_unknown(RECORD + extra) is ReadFault.WRONG_SIZE


@pytest.mark.parametrize("size", [MAX_HEADER_BYTES + 1, 2**31, 2**32, 2**60, 2**63, 2**64 - 1])
def test_an_oversized_header_is_found(size):
    data = with_header("{}", size=size)
    assert read(SCHEMA, data) is ReadFault.BAD_HEADER
    assert read_unknown(data) is ReadFault.BAD_HEADER


def test_a_header_longer_than_the_expected_one_is_not_taken_for_a_truncation():
    longer = with_header(RECORD[8:].ljust(3 * 4096, b" "), rest=bytes(4096))
    assert len(longer) > SCHEMA.record_bytes
    assert read(SCHEMA, longer) is ReadFault.BAD_HEADER


def other(*, namespace=NAMESPACE, key=KEY, first_token=0, groups=None, chunk_tokens=3):
    schema = schema_of(groups or [(1, 1, 2, "float32", None)], chunk_tokens, namespace=namespace)
    return encode(schema, payload_of(schema), key=key, first_token=first_token)


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (other(key=bytes(32)), ReadFault.OTHER_RECORD),
        (other(namespace=bytes(32)), ReadFault.OTHER_RECORD),
        (other(first_token=3), ReadFault.OTHER_RECORD),
        (other(groups=[(1, 1, 3, "float32", None)]), ReadFault.OTHER_RECORD),
        (other(groups=[(1, 1, 4, "float16", None)]), ReadFault.OTHER_RECORD),
        (other(groups=[(1, 1, 1, "float32", None)] * 2), ReadFault.OTHER_RECORD),
        (other(chunk_tokens=4), ReadFault.OTHER_RECORD),
        (with_metadata(version="4"), ReadFault.WRONG_VERSION),
        (with_metadata(version="4", anything="new"), ReadFault.WRONG_VERSION),
        (with_metadata(version=1), ReadFault.WRONG_VERSION),
        (with_metadata(format="other"), ReadFault.BAD_HEADER),
        (with_metadata(leaf_bytes="1"), ReadFault.BAD_HEADER),
        (with_metadata(checksum="none"), ReadFault.BAD_HEADER),
        (with_metadata(key="00" * 31), ReadFault.BAD_HEADER),
        (with_metadata(key="zz" * 32), ReadFault.BAD_HEADER),
        (with_metadata(key=" " + KEY.hex()), ReadFault.BAD_HEADER),
        (with_metadata(key=KEY.hex().upper()), ReadFault.BAD_HEADER),
        (with_metadata(namespace=""), ReadFault.BAD_HEADER),
        (with_metadata(first_token="-1"), ReadFault.BAD_HEADER),
        (with_metadata(first_token="0_0"), ReadFault.BAD_HEADER),
        (with_metadata(first_token="٣"), ReadFault.BAD_HEADER),
        (with_metadata(first_token=str(2**63)), ReadFault.BAD_HEADER),
        (with_metadata(first_token="9" * 3500), ReadFault.BAD_HEADER),
        (with_metadata(chunk_tokens="1e3"), ReadFault.BAD_HEADER),
        (with_metadata(invented="field"), ReadFault.BAD_HEADER),
        (with_metadata(version="3"), ReadFault.BAD_HEADER),
        (with_metadata(of="00" * 32, shard="0-1/1,0-1/1"), ReadFault.BAD_HEADER),
        (golden("shard")[2], ReadFault.OTHER_RECORD),
    ],
)
def test_what_is_wrong_is_named(data, reason):
    assert read(SCHEMA, data) is reason
    assert is_corruption(read_unknown(data)) or read_unknown(data) is None


def renamed(old, new):
    return RECORD[8 : SCHEMA.header_bytes].rstrip().replace(old.encode(), new.encode(), 1)


@pytest.mark.parametrize(
    "text",
    [
        renamed('"kv.0"', '"root"'),
        renamed('"kv.0"', '"leaves"'),
        renamed('"kv.0"', '"__metadata__"'),
        renamed('"kv.0"', '"kv.\\u0030"'),
        renamed('"kv.0"', '"../../etc"'),
        renamed('"root":', '"r00t":'),
        renamed("[1,1,3,2]", "[1,1,3,2.0]"),
        renamed("[1,1,3,2]", "[true,1,3,2]"),
        renamed("[1,1,3,2]", "[1,1,3]"),
        renamed("[1,1,3,2]", "[1,1,3,-2]"),
        renamed("[1,1,3,2]", "[0,1,3,2]"),
        renamed("[1,1,3,2]", f"[{2**60},1,3,2]"),
        renamed("[1,1,3,2]", "[1048576,1048576,1048576,1048576]"),
        renamed("[1,1,3,2]", f"[{'9' * 3000},1,3,2]"),
        renamed("[1,1,3,2]", f"[{10**30},1,3,2]"),
        renamed("[1,1,3,2]", "[NaN,1,3,2]"),
        renamed("[1,1,3,2]", "[Infinity,1,3,2]"),
        renamed("[1,1,3,2]", "null"),
        renamed("[1,1,3,2]", '"1132"'),
        renamed('"F32"', '"F64"'),
        renamed('"F32"', "[]"),
        renamed("[32,56]", "[32,57]"),
        renamed("[32,56]", "[0,24]"),
        renamed("{", '{"kv.0":{"dtype":"F32","shape":[1,1,3,2],"data_offsets":[32,56]},'),
        renamed("{", '{"__metadata__":{},'),
        renamed("{", " {"),
        renamed(",", ", "),
        b"\xef\xbb\xbf" + RECORD[8 : SCHEMA.header_bytes].rstrip(),
        RECORD[8 : SCHEMA.header_bytes].rstrip().decode().encode("utf-16"),
        RECORD[8 : SCHEMA.header_bytes].rstrip() + b"\0",
        b"",
        b"null",
        b"[]",
        b"3",
        b'"text"',
        b"{}",
        b'{"__metadata__":null}',
        b'{"__metadata__":"format"}',
        b'{"__metadata__":[]}',
        b'{"__metadata__":{"format":"kvferry"}}',
        b"[" * 4000,
        b'{"a":' * 800,
        b"1" * 4000,
        b"\xff" * 100,
        b'"\\ud800"',
    ],
)
def test_a_header_that_no_writer_makes_is_refused(text):
    data = with_header(text)
    reason = read(SCHEMA, data)
    assert reason in (ReadFault.BAD_HEADER, ReadFault.WRONG_VERSION)
    assert read_unknown(data) is reason


def test_another_component_name_is_found():
    data = with_header(renamed('"kv.0"', '"kv.1"'))
    assert read(SCHEMA, data) is ReadFault.OTHER_RECORD
    assert read_unknown(data) is ReadFault.BAD_CHECKSUM


def test_swapped_rows_are_found():
    schema = schema_of([(2, 2, 3, "float32", None)], 5)
    data = encode(schema, payload_of(schema))
    row = schema.components[0].row_bytes
    at = schema.head_bytes
    swapped = data[:at] + data[at + row : at + 2 * row] + data[at : at + row] + data[at + 2 * row :]
    assert read(schema, data) is None
    assert read(schema, swapped) is ReadFault.BAD_CHECKSUM


def test_a_leaf_table_with_its_own_payload_but_anothers_root_is_found():
    schema = schema_of([(1, 1, 2, "float32", None)], 3)
    a = encode(schema, payload_of(schema, seed=1))
    b = encode(schema, payload_of(schema, seed=2))
    root = slice(schema.header_bytes, schema.header_bytes + 16)
    mixed = b[: root.start] + a[root] + b[root.stop :]
    assert read(schema, mixed) is ReadFault.BAD_CHECKSUM


@given(data=st.binary(max_size=300))
def test_any_bytes_are_a_miss(data):
    assert is_corruption(read(SCHEMA, data))
    assert is_corruption(read_unknown(data))


@given(text=st.binary(max_size=SCHEMA.header_bytes - 8))
def test_any_header_text_is_a_miss(text):
    assert is_corruption(read(SCHEMA, with_header(text)))
    assert is_corruption(read_unknown(with_header(text)))


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=3)
    ),
    max_leaves=6,
)


@given(
    section=st.sampled_from(["__metadata__", "root", "leaves", "kv.0", "new"]),
    field=st.sampled_from([None, *HEADER["__metadata__"], *HEADER["kv.0"], "new"]),
    value=JSON,
)
def test_any_value_in_any_field_is_a_miss(section, field, value):
    header = json.loads(json.dumps(HEADER))
    if field is None:
        header[section] = value
    else:
        header.setdefault(section, {})[field] = value
    data = with_header(json.dumps(header, separators=(",", ":")))
    if data == RECORD:
        return
    assert is_corruption(read(SCHEMA, data))
    assert is_corruption(read_unknown(data))


@pytest.mark.parametrize(
    "data",
    [
        with_header("{}", size=2**60),
        with_header(renamed("[1,1,3,2]", f"[{2**60},1,1,1]")),
        with_header(renamed("[1,1,3,2]", f"[1,1,1,{2**38}]")),
        with_header(renamed("[1,1,3,2]", f"[{2**22},1,1,1]")),
        with_header(b"[" + b"[]," * 1300 + b"1]"),
        (MAX_HEADER_BYTES).to_bytes(8, "little") + (b"[" + b"{}," * 21840).ljust(65536, b"1"),
        (MAX_HEADER_BYTES).to_bytes(8, "little") + (b"[" + b"[]," * 21844 + b"1]").ljust(65536),
    ],
)
def test_memory_is_bounded_whatever_a_header_claims(data):
    view = memoryview(data)
    tracemalloc.start()
    try:
        assert isinstance(parse_head(view, 2**62), ReadFault)
        assert is_corruption(check_head(SCHEMA, KEY, 0, 2**62, view))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 4 * 1024 * 1024


def test_a_sparse_giant_that_is_consistent_allocates_nothing_either():
    schema = schema_of([(1, 1, 2**17, "float32", None)], 2**18)
    header = schema.encode_header(KEY, 0)
    tracemalloc.start()
    try:
        info = parse_head(memoryview(header), schema.record_bytes)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert not isinstance(info, ReadFault)
    assert info.schema.payload_bytes == 2**37
    assert peak < 1024 * 1024


def test_misses_that_are_no_corruption_leave_the_record_alone():
    kept = {reason for reason in ReadFault if not reason.is_corruption}
    assert kept == {
        ReadFault.ABSENT,
        ReadFault.IO_ERROR,
        ReadFault.DEADLINE,
        ReadFault.CANCELLED,
    }

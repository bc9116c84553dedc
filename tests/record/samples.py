"""Sample records for tests: geometries, deterministic payloads, and a reader that checks it all."""

from kvferry.record.check import ReadFault, check_head, check_rows, parse_head
from kvferry.record.checksum import CHECKSUM
from kvferry.record.schema import RecordSchema, RowRange, leaf_digests
from kvferry.types import GroupShard, KVGroup

NAMESPACE = bytes(range(32))
KEY = bytes(range(100, 132))

GOLDEN = {
    # One head, prime sizes: smaller than any alignment.
    "tiny": ([(1, 1, 2, "float32", None)], 3, 0),
    # Several groups of different dtypes and windows; the last has an odd number of bytes.
    "groups": (
        [(3, 2, 10, "bfloat16", None), (2, 1, 7, "float16", 64), (1, 5, 3, "float8_e4m3fn", 8)],
        5,
        35,
    ),
    # Rows of 65,560 bytes: one leaf of 64 KiB and one of 24 bytes each.
    "split": ([(1, 2, 149, "float32", None)], 110, 2**63 - 1),
    # An opaque row, given by its size: one leaf of 64 KiB and one of 3 bytes.
    "row": (65_539, 128, 0),
    # With the mark of a salt.
    "marked": ([(1, 1, 2, "float32", None)], 3, 6),
    # A shard: heads of one group, layers of another, nothing of the third.
    "shard": (
        [(3, 2, 10, "bfloat16", None), (2, 1, 7, "float16", 64), (1, 5, 3, "float8_e4m3fn", 8)],
        5,
        35,
    ),
    # A shard of a record with a mark.
    "marked_shard": ([(2, 2, 2, "float32", None)], 3, 6),
}
SHARDS = {
    "shard": [((0, 3), (1, 2)), ((1, 2), (0, 1)), ((0, 0), (0, 5))],
    "marked_shard": [((1, 2), (0, 2))],
}
"""Layers and heads by group, of those that are shards."""

WHOLE_KEY = bytes(range(200, 232))
"""Of the records that these are shards of."""

MARK = bytes.fromhex("f2920659d19a086b45e5d372c3e15a7f")
"""Of the salt "alice" in `NAMESPACE`."""


def groups_of(groups):
    return tuple(
        KVGroup(
            num_layers=layers,
            num_kv_heads=heads,
            content_size=content,
            dtype=dtype,
            block_size=16,
            window=window,
        )
        for layers, heads, content, dtype, window in groups
    )


def schema_of(groups, chunk_tokens, *, namespace=NAMESPACE):
    return RecordSchema.for_groups(
        namespace=namespace, chunk_tokens=chunk_tokens, groups=groups_of(groups)
    )


def payload_of(schema, *, seed=7):
    """Return bytes that repeat only after 251 * 256, so that no two rows or leaves are equal."""
    return bytes((i * 31 + i // 251 + seed) % 256 for i in range(schema.payload_bytes))


def shard_of(schema, ranges):
    held = [GroupShard(layers=layers, heads=heads) for layers, heads in ranges]
    return schema.of_shard(held)


def of_key(schema):
    """The key of the whole record, of a shard."""
    return WHOLE_KEY if schema.shard else b""


def encode(schema, payload, *, key=KEY, first_token=0, mark=b"", of=None):
    view = memoryview(payload)
    table = []
    for component, offset in zip(schema.components, schema.component_offsets, strict=True):
        start = offset - schema.head_bytes
        table.append(leaf_digests(component, view[start : start + component.num_bytes]))
    of = of_key(schema) if of is None else of
    return schema.encode_head(key, first_token, b"".join(table), mark, of) + payload


def golden(name):
    """Make a golden record anew; return its schema, first token and bytes."""
    groups, chunk_tokens, first_token = GOLDEN[name]
    if isinstance(groups, int):
        schema = RecordSchema.for_rows(
            namespace=NAMESPACE, chunk_tokens=chunk_tokens, row_bytes=groups
        )
    else:
        schema = schema_of(groups, chunk_tokens)
    if name in SHARDS:
        schema = shard_of(schema, SHARDS[name])
    mark = mark_of_golden(name)
    data = encode(schema, payload_of(schema), first_token=first_token, mark=mark)
    return schema, first_token, data


def mark_of_golden(name):
    return MARK if name.startswith("marked") else b""


def read(schema, data, *, key=KEY, first_token=0):
    """Check `data` as a reader that knows the schema; return None or the reason of the miss."""
    view = memoryview(data)
    head = view[: schema.head_bytes]
    reason = check_head(schema, key, first_token, len(data), head, of_key(schema))
    if reason is not None:
        return reason
    table = view[schema.header_bytes + CHECKSUM.num_bytes : schema.head_bytes]
    for rows in (RowRange(i, 0, c.num_rows) for i, c in enumerate(schema.components)):
        start = schema.offset_of(rows)
        piece = view[start : start + schema.num_bytes_of(rows)]
        if not check_rows(schema.components[rows.component], piece, table[schema.leaf_slice(rows)]):
            return ReadFault.BAD_CHECKSUM
    return None


def read_unknown(data):
    """Check `data` as a reader that knows only what the header says."""
    info = parse_head(memoryview(data), len(data))
    if isinstance(info, ReadFault):
        return info
    return read(info.schema, data, key=info.key, first_token=info.first_token)

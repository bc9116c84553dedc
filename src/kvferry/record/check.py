"""Checks whether bytes are the record that they should be. A wrong record gives a `ReadFault`.

There are two kinds of readers. The serving path knows the schema and compares bytes; commands
(`kvferry verify`, `ls`) know nothing and parse. Input is hostile: no check raises for bad bytes
or allocates what a header claims.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from enum import StrEnum

from kvferry.errors import ConfigError
from kvferry.record.checksum import CHECKSUM
from kvferry.record.schema import (
    FORMAT_NAME,
    LEAF_BYTES,
    MARK_BYTES,
    MARKED_VERSION,
    MAX_HEADER_BYTES,
    SHARD_VERSION,
    Component,
    RecordSchema,
    RowRange,
    leaf_digests,
    leaves_of,
)
from kvferry.record.shards import parse_shard
from kvferry.types import FORMAT_VERSION, ChunkKey, ShardRows


class ReadFault(StrEnum):
    """Why stored bytes were not served."""

    ABSENT = "absent"
    WRONG_SIZE = "wrong_size"
    BAD_HEADER = "bad_header"
    WRONG_VERSION = "wrong_version"
    OTHER_RECORD = "other_record"
    """It is a record, but of another key, namespace, shape or position in a prompt."""
    BAD_CHECKSUM = "bad_checksum"
    NOT_FINITE = "not_finite"
    """It is what its writer wrote, but has NaN or Inf: no model computes that rightly."""
    IO_ERROR = "io_error"
    DEADLINE = "deadline"
    CANCELLED = "cancelled"

    @property
    def is_corruption(self) -> bool:
        """Whether the bytes themselves are wrong, so that the record must be taken out."""
        return self not in SOUND


_MARK = re.compile(rb',"mark":"([0-9a-f]{32})"(?:\},"root":|,"of":)')
_OF = re.compile(rb',"of":"([0-9a-f]{64})","shard":"')
_NAMESPACE = re.compile(rb'"format":"kvferry",[^{}]{0,200}"namespace":"([0-9a-f]{64})"')

SOUND = (ReadFault.ABSENT, ReadFault.IO_ERROR, ReadFault.DEADLINE, ReadFault.CANCELLED)
"""Reasons that do not mean that the bytes are wrong."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordInfo:
    """The fields of a record's header, after its header was parsed and its size checked. Checksums
    were not checked: call `check_head` and `check_rows` with `schema` for that."""

    key: ChunkKey
    first_token: int
    schema: RecordSchema
    mark: bytes = b""
    """`kvferry.keys.salt_mark` of its salt; empty if it says none."""
    of: bytes = b""
    """Of a shard: the key of the whole record. Of a drafter's record: the chunk's key. Empty: this
    is a whole one."""

    @property
    def is_shard(self) -> bool:
        """Whether it has some rows of a record."""
        return self.of != b"" and not self.schema.drafter


def mark_of(head: bytes | memoryview) -> bytes:
    """Return the mark that a record's first bytes name, unchecked; empty if they name none.

    Args:
        head: the first 512 bytes of the value, or more.
    """
    found = _MARK.search(head, 0, 1024)
    return b"" if found is None else bytes.fromhex(found[1].decode())


def whole_key_of(head: bytes | memoryview) -> bytes:
    """Return the key of the whole record, as the first bytes of a shard name it, unchecked; empty
    if they name none.

    Args:
        head: the first 1024 bytes of the value, or more.
    """
    found = _OF.search(head, 0, 1024)
    return b"" if found is None else bytes.fromhex(found[1].decode())


def namespace_of(head: bytes) -> bytes | None:
    """Return the namespace that a record's first bytes name, unchecked; None if they are no record.

    Args:
        head: the first 512 bytes of the value, or more.
    """
    found = _NAMESPACE.search(head)
    return None if found is None else bytes.fromhex(found[1].decode())


def check_head(
    schema: RecordSchema,
    key: ChunkKey,
    first_token: int,
    size: int,
    head: memoryview,
    of: bytes = b"",
) -> ReadFault | None:
    """Verify everything before the payload against the reader's schema, key and position.

    Args:
        size: size of the stored value in bytes.
        head: the first `min(size, schema.head_bytes)` bytes; what follows them is ignored.
        of: of a shard, the key of the whole record.

    Returns:
        None if the head is right; then `head[header_bytes + 16:]` is the trusted leaf table.
    """
    header_bytes = schema.header_bytes
    # One copy, because bytes compare at memory speed, but memoryviews item by item.
    data = bytes(head[: schema.head_bytes])
    header = schema.encode_header(key, first_token, of=of)
    if not data.startswith(header):
        # A reader that knows the key need not know the salt that is hashed into it.
        header = schema.encode_header(key, first_token, mark_of(data), of)
    if not data.startswith(header):
        return _why_header_differs(schema, size, data)
    if len(data) < schema.head_bytes or size != schema.record_bytes:
        return ReadFault.WRONG_SIZE
    leaf_table = data[header_bytes + CHECKSUM.num_bytes :]
    if CHECKSUM.of(header + leaf_table) != data[header_bytes : header_bytes + CHECKSUM.num_bytes]:
        return ReadFault.BAD_CHECKSUM
    return None


def check_rows(component: Component, payload: memoryview, leaf_table: bytes | memoryview) -> bool:
    """Whether `payload`, whole rows of `component`, matches `leaf_table`: exactly the digests of
    these rows in a trusted table, `table[schema.leaf_slice(rows)]`. Values are not looked at."""
    if len(payload) % component.row_bytes:
        return False
    return leaf_digests(component, payload) == bytes(leaf_table)


def check_record(
    schema: RecordSchema, key: ChunkKey, value: memoryview, size: int
) -> ReadFault | None:
    """Verify a whole record and its values. It may have any namespace and any position in a prompt,
    but must have this key and the shape of `schema`. `value` has the first `schema.record_bytes`
    bytes of the stored value, or all that there are; `size` is the size of the stored value."""
    info = parse_head(value, size)
    if isinstance(info, ReadFault):
        return info
    found = info.schema
    shape = schema.chunk_tokens, schema.components, schema.shard
    if (found.chunk_tokens, found.components, found.shard) != shape:
        return ReadFault.OTHER_RECORD
    reason = check_head(found, key, info.first_token, size, value, info.of)
    if reason is not None:
        return reason
    table = value[found.header_bytes + CHECKSUM.num_bytes : found.head_bytes]
    for index, component in enumerate(schema.components):  # which know what opaque bytes are
        rows = RowRange(index, 0, component.num_rows)
        start = found.offset_of(rows)
        payload = value[start : start + component.num_bytes]
        digests, are_finite = leaves_of(component, payload)
        if digests != bytes(table[found.leaf_slice(rows)]):
            return ReadFault.BAD_CHECKSUM
        if not are_finite:
            return ReadFault.NOT_FINITE
    return None


def parse_head(head: memoryview, size: int) -> RecordInfo | ReadFault:
    """Parse an untrusted header. `head` has the first bytes of a value of `size` bytes: at least
    its whole header, unless that is above `MAX_HEADER_BYTES`.

    The header must be, byte for byte, what a writer of this version makes of the values in it. So
    duplicate or missing fields, other orders, number formats and paddings are all refused.
    """
    if len(head) < 8:
        return ReadFault.WRONG_SIZE
    header_size = int.from_bytes(head[:8], "little")
    if header_size > MAX_HEADER_BYTES:
        return ReadFault.BAD_HEADER
    if len(head) < 8 + header_size:
        return ReadFault.WRONG_SIZE
    data = bytes(head[: 8 + header_size])
    try:
        info = _info_from_json(json.loads(data[8:].decode("ascii")))
    except (ValueError, RecursionError):
        # ConfigError is a ValueError: an impossible component or schema is a bad header.
        return ReadFault.BAD_HEADER
    if isinstance(info, ReadFault):
        return info
    schema = info.schema
    if schema.encode_header(info.key, info.first_token, info.mark, info.of) != data:
        return ReadFault.BAD_HEADER
    return info if size == schema.record_bytes else ReadFault.WRONG_SIZE


def _why_header_differs(schema: RecordSchema, size: int, data: bytes) -> ReadFault:
    parsed = parse_head(memoryview(data), size)
    if not isinstance(parsed, ReadFault):
        return ReadFault.OTHER_RECORD
    # If the value goes on after a whole head, it is not cut: its header claims too much.
    reaches_past = parsed is ReadFault.WRONG_SIZE and size > len(data) >= schema.head_bytes
    return ReadFault.BAD_HEADER if reaches_past else parsed


def _info_from_json(tensors: object) -> RecordInfo | ReadFault:
    """Read the fields of a decoded header. Raises ValueError for something impossible."""
    metadata = _mapping(_mapping(tensors).pop("__metadata__", None))
    if metadata.get("format") != FORMAT_NAME:
        return ReadFault.BAD_HEADER
    version = metadata.get("version")
    mark = of = b""
    shard: tuple[ShardRows, ...] = ()
    if version == str(SHARD_VERSION):
        of, shard = bytes.fromhex(_string(metadata, "of")), parse_shard(_string(metadata, "shard"))
        if len(of) != 32:
            return ReadFault.BAD_HEADER
    if version == str(MARKED_VERSION) or (shard and "mark" in metadata):
        mark = bytes.fromhex(_string(metadata, "mark"))
        if len(mark) != MARK_BYTES:
            return ReadFault.BAD_HEADER
    elif not shard and version != str(FORMAT_VERSION):
        return ReadFault.WRONG_VERSION
    elif metadata.get("leaf_bytes") != str(LEAF_BYTES) or metadata.get("checksum") != CHECKSUM.name:
        return ReadFault.BAD_HEADER
    key = bytes.fromhex(_string(metadata, "key"))
    first_token = int(_string(metadata, "first_token"))
    if len(key) != 32 or not 0 <= first_token < 2**63:
        return ReadFault.BAD_HEADER
    schema = RecordSchema(
        namespace=bytes.fromhex(_string(metadata, "namespace")),
        chunk_tokens=int(_string(metadata, "chunk_tokens")),
        components=tuple(
            _component(name, _mapping(tensor))
            for name, tensor in _mapping(tensors).items()
            if name not in ("root", "leaves")
        ),
        shard=shard,
    )
    return RecordInfo(key=ChunkKey(key), first_token=first_token, schema=schema, mark=mark, of=of)


def _component(name: str, tensor: dict[str, object]) -> Component:
    shape = tensor.get("shape")
    if not isinstance(shape, list) or len(shape) != 4 or not all(type(n) is int for n in shape):
        raise ConfigError(f"component {name!r} has no shape of four integers")
    layers, heads, tokens, content = shape
    return Component(
        name=name, dtype=_string(tensor, "dtype"), shape=(layers, heads, tokens, content)
    )


def _mapping(value: object) -> dict[str, object]:
    if not isinstance(value, dict):
        raise ConfigError(f"expected a JSON object, found {type(value).__name__}")
    return value


def _string(fields: dict[str, object], name: str) -> str:
    value = fields.get(name)
    if not isinstance(value, str):
        raise ConfigError(f"field {name!r} is not a string")
    return value

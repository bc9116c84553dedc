"""Whether bytes are the record they are said to be. Input is hostile; answers are reasons.

Two readers: one that knows the schema and compares (the serving path), one that knows nothing and
parses (`kvferry verify`, `show`). Neither raises for bad bytes and neither allocates what a header
claims.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from kvferry.errors import ConfigError
from kvferry.record.schema import (
    ALIGN,
    DIGEST_BYTES,
    FORMAT_VERSION,
    ITEM_BYTES,
    LEAF_BYTES,
    MAX_HEADER_BYTES,
    Component,
    RecordSchema,
    digest,
    leaf_spans,
)
from kvferry.types import ChunkKey


class MissReason(StrEnum):
    """Why stored bytes were not served."""

    ABSENT = "absent"
    TRUNCATED = "truncated"
    TRAILING_BYTES = "trailing_bytes"
    BAD_HEADER = "bad_header"
    WRONG_VERSION = "wrong_version"
    WRONG_KEY = "wrong_key"
    WRONG_NAMESPACE = "wrong_namespace"
    WRONG_SHAPE = "wrong_shape"
    BAD_ROOT = "bad_root"
    BAD_LEAF = "bad_leaf"
    IO_ERROR = "io_error"
    DEADLINE = "deadline"
    CANCELLED = "cancelled"
    NO_STAGING = "no_staging"

    @property
    def is_corruption(self) -> bool:
        """True if the bytes themselves are wrong, so that the record must be taken out."""
        return self in _CORRUPTION


_CORRUPTION = frozenset(
    {
        MissReason.TRUNCATED,
        MissReason.TRAILING_BYTES,
        MissReason.BAD_HEADER,
        MissReason.WRONG_VERSION,
        MissReason.WRONG_KEY,
        MissReason.WRONG_NAMESPACE,
        MissReason.WRONG_SHAPE,
        MissReason.BAD_ROOT,
        MissReason.BAD_LEAF,
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordInfo:
    """What a record says of itself, after its header parsed and its sizes were checked."""

    key: ChunkKey
    first_token: int
    schema: RecordSchema


def check_head(
    schema: RecordSchema, key: ChunkKey, first_token: int, size: int, head: memoryview
) -> MissReason | None:
    """Verify everything before the payload against what the reader expects.

    Args:
        schema: schema of the reader's namespace.
        key: key that was asked for.
        first_token: position of the chunk in its prompt.
        size: size of the stored value in bytes.
        head: the first `min(size, schema.head_bytes)` bytes.

    Returns:
        None if the head is right; then `head[header_bytes + 16:]` is the trusted leaf table.
    """
    if len(head) < schema.head_bytes:
        return MissReason.TRUNCATED
    header_bytes = schema.header_bytes
    if head[:header_bytes] != schema.encode_header(key, first_token):
        return _why_header_differs(schema, key, size, head)
    root = head[header_bytes : header_bytes + DIGEST_BYTES]
    state = bytes(head[:header_bytes]) + bytes(head[header_bytes + DIGEST_BYTES :])
    if digest(state) != root:
        return MissReason.BAD_ROOT
    if size != schema.record_bytes:
        short = size < schema.record_bytes
        return MissReason.TRUNCATED if short else MissReason.TRAILING_BYTES
    return None


def check_rows(component: Component, payload: memoryview, leaf_table: memoryview) -> bool:
    """Whether `payload` (whole rows) matches its part of the leaf table, leaf by leaf."""
    num_rows = len(payload) // component.row_bytes
    at = 0
    for start, stop in leaf_spans(component, num_rows):
        if digest(payload[start:stop]) != leaf_table[at : at + DIGEST_BYTES]:
            return False
        at += DIGEST_BYTES
    return True


def _why_header_differs(
    schema: RecordSchema, key: ChunkKey, size: int, head: memoryview
) -> MissReason:
    parsed = parse_head(head, size)
    if isinstance(parsed, MissReason):
        return parsed
    if parsed.schema.namespace != schema.namespace:
        return MissReason.WRONG_NAMESPACE
    if parsed.key != key:
        return MissReason.WRONG_KEY
    return MissReason.WRONG_SHAPE


def parse_head(head: memoryview, size: int) -> RecordInfo | MissReason:
    """Parse a header nobody vouches for.

    Args:
        head: the first bytes of the value, at least its header if that is below the bound.
        size: size of the whole value; compared with what the header describes.
    """
    if len(head) < 8:
        return MissReason.TRUNCATED
    header_size = int.from_bytes(head[:8], "little")
    if header_size > MAX_HEADER_BYTES:
        return MissReason.BAD_HEADER
    if len(head) < 8 + header_size:
        return MissReason.TRUNCATED
    try:
        tensors = json.loads(bytes(head[8 : 8 + header_size]))
        info = _info_from_json(tensors)
    except (ValueError, KeyError, TypeError, RecursionError, OverflowError):
        # ConfigError is a ValueError: an impossible component is a bad header.
        return MissReason.BAD_HEADER
    if isinstance(info, MissReason):
        return info
    schema = info.schema
    if schema.header_bytes != 8 + header_size or head[:8 + header_size] != schema.encode_header(
        info.key, info.first_token
    ):
        return MissReason.BAD_HEADER
    if size != schema.record_bytes:
        short = size < schema.record_bytes
        return MissReason.TRUNCATED if short else MissReason.TRAILING_BYTES
    return info


def _info_from_json(tensors: Mapping[str, Mapping[str, object]]) -> RecordInfo | MissReason:
    metadata = tensors["__metadata__"]
    if metadata["format"] != "kvferry":
        return MissReason.BAD_HEADER
    if metadata["version"] != str(FORMAT_VERSION):
        return MissReason.WRONG_VERSION
    if metadata["leaf_bytes"] != str(LEAF_BYTES) or metadata["checksum"] != "xxh3_128":
        return MissReason.BAD_HEADER
    components = []
    for name, tensor in tensors.items():
        if name in ("__metadata__", "root", "leaves"):
            continue
        shape = tensor["shape"]
        if not isinstance(shape, list) or len(shape) != 4 or not all(type(n) is int for n in shape):
            return MissReason.BAD_HEADER
        dtype = str(tensor["dtype"])
        component = Component(name=name, dtype=dtype, shape=(*shape,))
        if component.num_bytes > MAX_PAYLOAD_BYTES:
            return MissReason.BAD_HEADER
        components.append(component)
    key = bytes.fromhex(str(metadata["key"]))
    first_token = int(str(metadata["first_token"]))
    if len(key) != 32 or not 0 <= first_token < 2**63:
        return MissReason.BAD_HEADER
    return RecordInfo(
        key=ChunkKey(key),
        first_token=first_token,
        schema=RecordSchema(
            namespace=bytes.fromhex(str(metadata["namespace"])),
            chunk_tokens=int(str(metadata["chunk_tokens"])),
            components=tuple(components),
        ),
    )


MAX_PAYLOAD_BYTES = 1 << 40
"""Larger components are a lie: bounds the arithmetic on claimed shapes, allocates nothing."""

__all__ = [
    "ALIGN",
    "ITEM_BYTES",
    "ConfigError",
    "MissReason",
    "RecordInfo",
    "check_head",
    "check_rows",
    "parse_head",
]

"""Reading records nobody vouches for: what one says of itself, and whether all of it is right."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from kvferry.errors import StoreError
from kvferry.record.check import MissReason, RecordInfo, check_head, parse_head
from kvferry.record.schema import (
    DIGEST_BYTES,
    MAX_HEADER_BYTES,
    RecordSchema,
    digest,
    leaf_spans,
)
from kvferry.store.base import Entry, Source, Store

T = TypeVar("T")

MAX_HEAD_BYTES = 256 * 1024 * 1024
"""A head beyond this is refused: its leaf table would describe terabytes of payload."""

WINDOW_BYTES = 1024 * 1024
"""Payload read at a time; at least one leaf."""


def inspect(store: Store, entry: Entry) -> RecordInfo | MissReason:
    """Read the header of a value; hostile bytes and a failing medium become a reason."""
    return _with_source(store, entry, _read_info)


def verify(store: Store, entry: Entry) -> MissReason | None:
    """Read all of a value and compare every checksum; None if it is right.

    Beyond the head it holds `WINDOW_BYTES` in memory, whatever the header claims.
    """
    return _with_source(store, entry, _verify)


def _with_source(store: Store, entry: Entry, read: Callable[[Source, Entry], T]) -> T | MissReason:
    try:
        source = store.open_read(entry.key)
        if source is None:
            return MissReason.ABSENT
        with source:
            return read(source, entry)
    except StoreError:
        return MissReason.IO_ERROR


def _read_info(source: Source, entry: Entry) -> RecordInfo | MissReason:
    prefix = memoryview(bytearray(8))
    got = source.read_into(prefix, 0)
    header_size = int.from_bytes(prefix[:got], "little")
    if got < 8 or header_size > MAX_HEADER_BYTES:
        return parse_head(prefix[:got], source.size)
    head = memoryview(bytearray(8 + header_size))
    got = source.read_into(head, 0)
    info = parse_head(head[:got], source.size)
    if isinstance(info, RecordInfo) and info.key != entry.key:
        return MissReason.WRONG_KEY
    return info


def _verify(source: Source, entry: Entry) -> MissReason | None:
    info = _read_info(source, entry)
    if isinstance(info, MissReason):
        return info
    schema = info.schema
    if schema.head_bytes > MAX_HEAD_BYTES:
        return MissReason.BAD_HEADER
    head = memoryview(bytearray(schema.head_bytes))
    got = source.read_into(head, 0)
    reason = check_head(schema, info.key, info.first_token, source.size, head[:got])
    return reason or _verify_payload(source, schema, head)


def _verify_payload(source: Source, schema: RecordSchema, head: memoryview) -> MissReason | None:
    """Leaf by leaf, through a window: a row may be as long as the file, a leaf may not."""
    window = memoryview(bytearray(WINDOW_BYTES))
    at = schema.header_bytes + DIGEST_BYTES
    for component, offset in zip(schema.components, schema.component_offsets, strict=True):
        begin = end = 0  # the part of the component that stands in the window
        for start, stop in leaf_spans(component, component.num_rows):
            if stop > end:
                begin, end = start, min(start + WINDOW_BYTES, component.num_bytes)
                if source.read_into(window[: end - begin], offset + begin) < end - begin:
                    return MissReason.TRUNCATED
            if digest(window[start - begin : stop - begin]) != head[at : at + DIGEST_BYTES]:
                return MissReason.BAD_LEAF
            at += DIGEST_BYTES
    return None

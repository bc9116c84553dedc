"""Reading records nobody vouches for: what one says of itself, and whether all of it is right."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from kvferry.errors import StoreError
from kvferry.record.check import MissReason, RecordInfo, parse_head
from kvferry.record.schema import MAX_HEADER_BYTES
from kvferry.store.base import Entry, Source, Store

T = TypeVar("T")

_WINDOW_BYTES = 1024 * 1024


def inspect(store: Store, entry: Entry) -> RecordInfo | MissReason:
    """Read the header of a value; hostile bytes and a failing medium become a reason."""
    return _with_source(store, entry, _read_info)


def check(store: Store, entry: Entry) -> MissReason | None:
    """Read all of a value and compare every checksum; None if it is right. Changes nothing."""
    return _with_source(store, entry, _check)


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
    head = memoryview(bytearray(min(source.size, 8 + MAX_HEADER_BYTES)))
    got = source.read_into(head, 0)
    info = parse_head(head[:got], source.size)
    if isinstance(info, RecordInfo) and info.key != entry.key:
        return MissReason.WRONG_KEY
    return info


def _check(source: Source, entry: Entry) -> MissReason | None:
    # Not at the top: all commands, and the help, would wait for it.
    from kvferry.store.checking import check_source

    return check_source(source, entry.key, memoryview(bytearray(_WINDOW_BYTES)))

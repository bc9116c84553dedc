"""Stored records against their own checksums, for readers that know no schema beforehand."""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterable
from typing import NamedTuple

from kvferry.errors import StoreError
from kvferry.record.check import MissReason, check_head, parse_head
from kvferry.record.schema import DIGEST_BYTES, digest, leaf_spans
from kvferry.store.base import Entry, Store
from kvferry.types import ChunkKey

Progress = Callable[[int, int], None]
"""Called after each record with the number of records and of bytes checked so far."""

_WINDOW_BYTES = 4 << 20
_MAX_HEAD_BYTES = 64 << 20
"""A head beyond this is called bad: bounds what checking a hostile file can cost in memory."""


class VerifyReport(NamedTuple):
    """What `verify` found."""

    num_records: int
    num_bytes: int
    bad: tuple[tuple[Entry, MissReason], ...]
    """Every record that is not what it should be."""
    num_unreadable: int
    """Records that could not be read; neither counted as records nor as bad."""


def verify(
    store: Store,
    entries: Iterable[Entry],
    progress: Progress | None = None,
    *,
    discards: bool = True,
) -> VerifyReport:
    """Check every record completely, and discard what is wrong.

    Memory stays below 72 MiB, whatever the records claim. Safe while the store is in use. Raises
    what `entries` raises.

    Args:
        discards: False leaves what is wrong, as a read-only store does in any case.
    """
    window = memoryview(mmap.mmap(-1, _WINDOW_BYTES))
    bad: list[tuple[Entry, MissReason]] = []
    num_records = num_bytes = num_unreadable = 0
    for entry in entries:
        values = store.of(entry.namespace)
        try:
            checked = check_record(values, entry.key, window)
        except StoreError:
            num_unreadable += 1
            continue
        if checked is None:
            continue
        size, reason = checked
        num_records += 1
        num_bytes += size
        if reason is not None:
            bad.append((entry, reason))
            if discards:
                values.discard(entry.key, reason)
        if progress is not None:
            progress(num_records, num_bytes)
    return VerifyReport(num_records, num_bytes, tuple(bad), num_unreadable)


def check_record(
    store: Store, key: ChunkKey, window: memoryview
) -> tuple[int, MissReason | None] | None:
    """Check every checksum of an untrusted record.

    Args:
        key: the key that it must have.
        window: scratch that holds at least one leaf and the longest header.

    Returns:
        The size in bytes, and why the record is wrong, None if it is right; None if it is absent.

    Raises:
        StoreError: the medium failed.
    """
    size = store.read(key, [(0, window)])
    return None if size is None else (size, _check(store, key, size, window))


def _check(store: Store, key: ChunkKey, size: int, window: memoryview) -> MissReason | None:
    """Check a record whose first bytes are in `window`."""
    info = parse_head(window[:size], size)
    if isinstance(info, MissReason):
        return info
    schema = info.schema
    if schema.head_bytes > _MAX_HEAD_BYTES:
        return MissReason.BAD_HEADER
    trusted = memoryview(bytearray(schema.head_bytes))
    if store.read(key, [(0, trusted)]) != size:
        return MissReason.TRUNCATED
    reason = check_head(schema, key, info.first_token, size, trusted)
    if reason is not None:
        return reason
    at = schema.header_bytes + DIGEST_BYTES
    for component, offset in zip(schema.components, schema.component_offsets, strict=True):
        start_of_window = end_of_window = 0
        for start, stop in leaf_spans(component, component.num_rows):
            if stop > end_of_window:
                start_of_window = start
                end_of_window = min(start + window.nbytes, component.num_bytes)
                wanted = window[: end_of_window - start]
                if store.read(key, [(offset + start, wanted)]) != size:
                    return MissReason.TRUNCATED
            leaf = window[start - start_of_window : stop - start_of_window]
            if digest(leaf) != trusted[at : at + DIGEST_BYTES]:
                return MissReason.BAD_LEAF
            at += DIGEST_BYTES
    return None

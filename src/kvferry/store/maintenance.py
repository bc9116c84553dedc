"""Work on whole stores: verify every record, shrink a store that does not evict, delete chosen
values.

Commands, `RemoteStore.gc` and SGLang's back end call it, on threads that may block. To verify a
record needs no schema: the record's own header gives its layout and checksums.
"""

from __future__ import annotations

import logging
import mmap
import time
from array import array
from collections.abc import Callable, Iterable
from itertools import compress
from typing import NamedTuple

from kvferry.errors import ConfigError, FaultKind, StoreError
from kvferry.keys import ShardKeys
from kvferry.record.check import ReadFault, RecordInfo, check_head, parse_head
from kvferry.record.checksum import CHECKSUM
from kvferry.record.schema import MAX_HEADER_BYTES, leaf_spans, one_leaf
from kvferry.store.base import Store
from kvferry.store.catalogue import Entry, GcReport
from kvferry.types import ChunkKey

logger = logging.getLogger(__name__)

Progress = Callable[[int, int], None]
"""Called after each record with the number of records and of bytes checked so far."""

_WINDOW_BYTES = 4 << 20
_HEADER_BYTES = 4096
"""What is read of a header at first: enough for most."""

_MAX_HEAD_BYTES = 64 << 20
"""A larger head is called bad. So a hostile file can take no more memory than this."""


class VerifyReport(NamedTuple):
    """What `verify` found."""

    num_records: int
    num_bytes: int
    bad: tuple[tuple[Entry, ReadFault], ...]
    """Every wrong record, and why it is wrong."""
    num_unreadable: int
    """Records that could not be read. They are neither in `num_records` nor in `bad`."""


def verify(
    store: Store,
    entries: Iterable[Entry],
    progress: Progress | None = None,
    *,
    discards: bool = True,
) -> VerifyReport:
    """Check every record completely, and discard wrong ones.

    Takes less than 72 MiB of memory, whatever the records claim. Safe while the store is in use.
    Raises what `entries` raises.

    Args:
        discards: False leaves wrong records in place, as a read-only store always does.
    """
    window = memoryview(mmap.mmap(-1, _WINDOW_BYTES))
    bad: list[tuple[Entry, ReadFault]] = []
    num_records = num_bytes = num_unreadable = 0
    for entry in entries:
        values = store.in_namespace(entry.namespace)
        try:
            size = values.read(entry.key, [(0, window)])
            reason = None if size is None else _why_wrong(values, entry, size, window)
        except StoreError:
            num_unreadable += 1
            continue
        if size is None:
            continue
        num_records += 1
        num_bytes += size
        if reason is not None:
            bad.append((entry, reason))
            if discards:
                values.discard(entry.key, reason)
        if progress is not None:
            progress(num_records, num_bytes)
    return VerifyReport(num_records, num_bytes, tuple(bad), num_unreadable)


def inspect(store: Store, entry: Entry) -> RecordInfo | ReadFault:
    """Read the header of a record; hostile bytes and a failing medium become a reason."""
    try:
        return read_header(store.in_namespace(entry.namespace), entry.key)
    except StoreError:
        return ReadFault.IO_ERROR


def read_header(store: Store, key: ChunkKey) -> RecordInfo | ReadFault:
    """Read the header of a record; hostile bytes become a reason. Raises StoreError if the medium
    failed."""
    head = memoryview(bytearray(_HEADER_BYTES))
    size = store.read(key, [(0, head)])
    if size is not None and head.nbytes < 8 + int.from_bytes(head[:8], "little") <= size:
        head = memoryview(bytearray(8 + MAX_HEADER_BYTES))
        size = store.read(key, [(0, head)])
    if size is None:
        return ReadFault.ABSENT
    info = parse_head(head[:size], size)
    return info if isinstance(info, ReadFault) or info.key == key else ReadFault.OTHER_RECORD


def is_misnamed(shard: RecordInfo) -> bool:
    """Whether the key of a shard, or of a drafter's record, does not follow from the record that it
    says it is of. Never of a whole record."""
    keys = ShardKeys(shard.schema.shard, shard.schema.drafter)
    return shard.of != b"" and keys.of(ChunkKey(shard.of)) != shard.key


def _why_wrong(store: Store, entry: Entry, size: int, window: memoryview) -> ReadFault | None:
    """Check the key, the namespace, every checksum and all values of an untrusted record. Its first
    bytes are in `window`, which has room for the longest header, and for a leaf: the bytes that
    share one checksum."""
    key = entry.key
    info = parse_head(window[:size], size)
    if isinstance(info, ReadFault):
        return info
    schema = info.schema
    # An earlier release wrote some whose namespace the store does not know.
    if entry.namespace not in (b"", schema.namespace) or is_misnamed(info):
        return ReadFault.OTHER_RECORD
    if schema.head_bytes > _MAX_HEAD_BYTES:
        return ReadFault.BAD_HEADER
    trusted = memoryview(bytearray(schema.head_bytes))
    if store.read(key, [(0, trusted)]) != size:
        return ReadFault.WRONG_SIZE
    reason = check_head(schema, key, info.first_token, size, trusted, info.of)
    if reason is not None:
        return reason
    at = schema.header_bytes + CHECKSUM.num_bytes
    for component, offset in zip(schema.components, schema.component_offsets, strict=True):
        start_of_window = end_of_window = 0
        for start, stop in leaf_spans(component, component.num_rows):
            if stop > end_of_window:
                start_of_window = start
                end_of_window = min(start + window.nbytes, component.num_bytes)
                wanted = window[: end_of_window - start]
                if store.read(key, [(offset + start, wanted)]) != size:
                    return ReadFault.WRONG_SIZE
            leaf = window[start - start_of_window : stop - start_of_window]
            found = one_leaf(component, leaf)
            if found.digests != trusted[at : at + CHECKSUM.num_bytes]:
                return ReadFault.BAD_CHECKSUM
            if not found.are_finite:
                return ReadFault.NOT_FINITE
            at += CHECKSUM.num_bytes
    return None


def estimate(
    store: Store, found: Iterable[Entry], max_bytes: int | None, age: float | None
) -> GcReport:
    """Count what `Store.gc` would remove of the values `found`; remove nothing. Takes about
    100 bytes of memory for each value. Raises ConfigError as `shrink` does."""
    surplus, sizes = _surplus(store, found, max_bytes, age)
    removed_bytes = sum(sizes[index] for index in surplus)
    used_bytes = store.catalogue().facts().get("used_bytes") or sum(sizes)
    return GcReport(len(surplus), removed_bytes, used_bytes - removed_bytes)


def shrink(store: Store, max_bytes: int | None, age: float | None) -> GcReport:
    """Delete the values that `estimate` counts, the least recently used first.

    Raises:
        ConfigError: there is an `age`, and no value says when it was used.
        StoreError: the store refused to delete a value, or failed; what was deleted before stays
            deleted.
    """
    entries = list(store.catalogue().scan())
    surplus, sizes = _surplus(store, entries, max_bytes, age)
    used_bytes = sum(sizes)
    removed_records = removed_bytes = 0
    for entry in (entries[index] for index in reversed(surplus)):
        used_bytes -= entry.stored_bytes
        if delete_or_fail(store, entry, removed_records):
            removed_records += 1
            removed_bytes += entry.stored_bytes
    return GcReport(removed_records, removed_bytes, used_bytes)


def clear(store: Store, found: Iterable[Entry]) -> GcReport:
    """Delete the values `found`. The report's `used_bytes` is always 0. Raises StoreError if the
    store refused to delete a value, or failed; what was deleted before stays deleted."""
    removed_records = removed_bytes = 0
    for entry in found:
        if delete_or_fail(store, entry, removed_records):
            removed_records += 1
            removed_bytes += entry.stored_bytes
    return GcReport(removed_records, removed_bytes, used_bytes=0)


def delete_or_fail(store: Store, entry: Entry, num_before: int) -> bool:
    """Delete a value; False if it was already gone. Raises StoreError if the store did not delete
    it. `num_before`, the number deleted before it, is for the message."""
    values = store.in_namespace(entry.namespace)
    if values.delete(entry.key):
        return True
    if values.read(entry.key, ()) is not None:
        raise StoreError(
            FaultKind.RIGHTS,
            f"{store.url} did not delete {entry.key.hex()}; check your permission to "
            f"delete ({num_before} records were deleted before it)",
        )
    return False


def _surplus(
    store: Store, found: Iterable[Entry], max_bytes: int | None, age: float | None
) -> tuple[list[int], array[int]]:
    """Choose the values to delete: those not used for `age` seconds, and the least recently used of
    the others that do not fit into `max_bytes`. Pinned values stay, and take their room first. A
    value of unknown last use counts as the least recently used, but never as too old.

    Returns:
        Their places in `found`, the most recently used first, and the sizes of all values in bytes.

    Raises:
        ConfigError: there is an `age`, and no value says when it was used.
    """
    now = time.time()
    used, sizes, pinned = array("d"), array("q"), bytearray()
    for entry in found:  # kept as numbers, since there may be millions
        used.append(entry.last_used)
        sizes.append(entry.stored_bytes)
        pinned.append(entry.pinned_until > now)
    _check_uses(store, used.count(0.0), len(used), age)
    unused_since = 0.0 if age is None else now - age
    seen_bytes = sum(compress(sizes, pinned))
    surplus = []
    for index in sorted(range(len(used)), key=used.__getitem__, reverse=True):
        if pinned[index]:
            continue
        is_old = 0.0 < used[index] < unused_since
        seen_bytes += 0 if is_old else sizes[index]
        if is_old or (max_bytes is not None and seen_bytes > max_bytes):
            surplus.append(index)
    return surplus, sizes


def _check_uses(store: Store, num_unknown: int, num_values: int, age: float | None) -> None:
    """Warn if some uses are not known; raise ConfigError if none is and there is an `age`."""
    if age is not None and num_values and num_unknown == num_values:
        raise ConfigError(
            f"{store.url} does not say when its records were used, so --older-than cannot choose; "
            "give --max-bytes alone"
        )
    if num_unknown:
        logger.warning(
            "%s does not say when %d of its records were used: --max-bytes deletes these first, "
            "--older-than none",
            store.url,
            num_unknown,
        )

"""What an operator asks of a store: is it sound, put it right, make it smaller."""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass

from kvferry.errors import StoreError
from kvferry.record.check import MissReason, check_head, parse_head
from kvferry.record.schema import DIGEST_BYTES, RecordSchema, digest, leaf_spans
from kvferry.store.base import Entry, Source
from kvferry.store.file.eviction import list_files
from kvferry.store.file.layout import NUM_SHARDS, key_of_record_name
from kvferry.store.file.ledger import Net
from kvferry.store.file.membership import Member
from kvferry.store.file.reading import NotARecord, ReadAbilities, open_record
from kvferry.store.file.reconcile import reconcile
from kvferry.store.file.volume import Volume
from kvferry.types import ChunkKey

Progress = Callable[[int, int], None]
"""Called after each record with the number of records and of bytes checked so far."""

_WINDOW_BYTES = 4 << 20
_MAX_HEAD_BYTES = 64 << 20
"""A head beyond this is called bad: bounds what checking a hostile file can cost in memory."""
_BATCH = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyReport:
    """What `verify` found.

    Attributes:
        num_records: records looked at.
        num_bytes: their bytes.
        bad: key and reason of every record that is not what it should be.
        num_unreadable: records the medium would not give, not counted as bad.
    """

    num_records: int
    num_bytes: int
    bad: tuple[tuple[ChunkKey, MissReason], ...]
    num_unreadable: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RepairReport:
    """What `repair` did.

    Attributes:
        verified: records checked; the bad ones are in quarantine.
        num_recovered_writers: dead writers whose accounts were taken over.
        corrected_bytes: by how much the counts were wrong (positive: more on disk than counted);
            None if the store was in use, so that it could not be told.
    """

    verified: VerifyReport
    num_recovered_writers: int
    corrected_bytes: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class GcReport:
    """What `gc` removed, and what is stored now."""

    removed_records: int
    removed_bytes: int
    used_bytes: int


def scan(volume: Volume) -> Iterator[Entry]:
    """Every record at some moment during the iteration, shard by shard.

    Raises:
        StoreError: the medium failed.
    """
    for shard in range(NUM_SHARDS):
        try:
            files = list_files(volume.io, volume.layout.shard(shard))
        except OSError as error:
            raise StoreError(f"{volume.layout.root} cannot be listed: {error.strerror}") from error
        for file in files:
            key = key_of_record_name(file.path.rpartition("/")[2])
            if key is not None:
                yield Entry(key, file.num_bytes, file.used / 1e9)


def verify(volume: Volume, progress: Progress | None) -> VerifyReport:
    """Check every record completely; quarantine what is wrong, unless the store is read-only.

    Memory stays below 64 MiB and a few, whatever the files claim. Safe while the store is in use.

    Raises:
        StoreError: the store cannot be listed.
    """
    window = memoryview(mmap.mmap(-1, _WINDOW_BYTES))
    bad: list[tuple[ChunkKey, MissReason]] = []
    num_records = num_bytes = num_unreadable = 0
    for entry in scan(volume):
        try:
            reason = _check(volume, entry.key, window)
        except (OSError, StoreError):
            num_unreadable += 1
            continue
        if reason is MissReason.ABSENT:
            continue
        num_records += 1
        num_bytes += entry.num_bytes
        if reason is not None:
            bad.append((entry.key, reason))
            volume.set_aside(entry.key, reason)
        if progress is not None:
            progress(num_records, num_bytes)
    return VerifyReport(
        num_records=num_records,
        num_bytes=num_bytes,
        bad=tuple(bad),
        num_unreadable=num_unreadable,
    )


def repair(volume: Volume, progress: Progress | None) -> RepairReport:
    """Verify everything, take over what dead writers left, and correct the counts.

    Raises:
        StoreError: the store is read-only, or the medium failed.
    """
    member = _writable(volume)
    verified = verify(volume, progress)
    try:
        num_recovered = volume.upkeep.recover()
        volume.rest(always=True)
        correction = _run(reconcile(volume.io, volume.layout, member.writer))
    except OSError as error:
        raise _failure(volume, error) from error
    return RepairReport(
        verified=verified,
        num_recovered_writers=num_recovered,
        corrected_bytes=None if correction is None else correction.num_bytes,
    )


def gc(
    volume: Volume, max_bytes: int | None, older_than_seconds: float | None, now: float
) -> GcReport:
    """Remove what was not used for some time, then the least recently used until the rest fits.

    Args:
        volume: the store.
        max_bytes: keep at most so many bytes; None: the quota the store was opened with.
        older_than_seconds: remove records and quarantined files not used for so long.
        now: seconds since the epoch.

    Raises:
        StoreError: the store is read-only, or the medium failed.
    """
    member = _writable(volume)
    max_bytes = volume.quota.max_bytes if max_bytes is None else max_bytes
    try:
        volume.upkeep.recover()
        volume.upkeep.flush()
        volume.rest(always=True)
        before = volume.quota.refresh()
        if older_than_seconds is not None:
            for paths in _older_than(volume, now - older_than_seconds):
                volume.forget(member.remover.remove(paths))
        if max_bytes is not None:
            volume.quota.shrink_to(member, max_bytes)
        after = volume.quota.refresh()
    except OSError as error:
        raise _failure(volume, error) from error
    return GcReport(
        removed_records=before.num_records - after.num_records,
        removed_bytes=before.num_bytes - after.num_bytes,
        used_bytes=after.num_bytes,
    )


def _older_than(volume: Volume, oldest: float) -> Iterator[list[str]]:
    shards = [volume.layout.shard(shard) for shard in range(NUM_SHARDS)]
    for directory in [volume.layout.quarantine, *shards]:
        paths = [
            file.path
            for file in list_files(volume.io, directory)
            if file.used / 1e9 < oldest
            and (directory not in shards or key_of_record_name(os.path.basename(file.path)))
        ]
        for start in range(0, len(paths), _BATCH):
            yield paths[start : start + _BATCH]


def _check(volume: Volume, key: ChunkKey, window: memoryview) -> MissReason | None:
    # Abilities of its own: a check goes past the page cache only for what is not in it anyway.
    try:
        path = volume.layout.record(key)
        source = open_record(volume.io, path, ReadAbilities(), time.time())
    except NotARecord:
        return MissReason.BAD_HEADER
    if source is None:
        return MissReason.ABSENT
    with source:
        return check_source(source, key, window)


def check_source(source: Source, key: ChunkKey, window: memoryview) -> MissReason | None:
    """Every checksum of one record that nobody vouches for; None if it is right.

    Args:
        source: the record, opened.
        key: what it must be.
        window: scratch that holds at least one leaf and the longest header.
    """
    head = window[: source.read_into(window, 0)]
    info = parse_head(head, source.size)
    if isinstance(info, MissReason):
        return info
    schema = info.schema
    if schema.head_bytes > _MAX_HEAD_BYTES:
        return MissReason.BAD_HEADER
    trusted = memoryview(bytearray(schema.head_bytes))
    if source.read_into(trusted, 0) < schema.head_bytes:
        return MissReason.TRUNCATED
    reason = check_head(schema, key, info.first_token, source.size, trusted)
    if reason is not None:
        return reason
    return _check_payload(source, schema, trusted[schema.header_bytes + DIGEST_BYTES :], window)


def _check_payload(
    source: Source, schema: RecordSchema, table: memoryview, window: memoryview
) -> MissReason | None:
    """Every leaf against the table, reading through `window`."""
    at = 0
    for component, offset in zip(schema.components, schema.component_offsets, strict=True):
        start_of_window = end_of_window = 0
        for start, stop in leaf_spans(component, component.num_rows):
            if stop > end_of_window:
                start_of_window = start
                end_of_window = min(start + window.nbytes, component.num_bytes)
                length = end_of_window - start
                if source.read_into(window[:length], offset + start) < length:
                    return MissReason.TRUNCATED
            leaf = window[start - start_of_window : stop - start_of_window]
            if digest(leaf) != table[at : at + DIGEST_BYTES]:
                return MissReason.BAD_LEAF
            at += DIGEST_BYTES
    return None


def _run(scanning: Generator[None, None, Net | None]) -> Net | None:
    while True:
        try:
            next(scanning)
        except StopIteration as end:
            correction: Net | None = end.value
            return correction


def _writable(volume: Volume) -> Member:
    member = volume.membership.current
    if member is None:
        raise StoreError(
            f"the store {volume.layout.root} is open read-only or closed; open it writable to "
            "change it"
        )
    return member


def _failure(volume: Volume, error: OSError) -> StoreError:
    return StoreError(f"maintenance of {volume.layout.root} failed: {error.strerror}")

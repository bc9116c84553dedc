"""Reads and writes single records of a store, and verifies what it reads.

The cache, `RecordClient` and the commands call it. Functions that do I/O block, and run on I/O
threads. They raise nothing: a failed read answers with a `ReadFault`, a failed write with a
`PutResult`. A record with wrong bytes is taken out of the store.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from kvferry.errors import StoreError
from kvferry.observe import Observer
from kvferry.record.check import ReadFault, check_head, check_record, check_rows
from kvferry.record.checksum import CHECKSUM
from kvferry.record.schema import RecordSchema, RowRange, leaves_of
from kvferry.store.base import NO_DEADLINE, Put, PutResult, RecordBytes, Store, ValueCheck
from kvferry.types import ChunkKey

NOT_FINITE = (
    "what was computed has NaN or Inf: it is not stored, and nothing behind it is found. A step of "
    "the device went wrong, or numbers became too large for their dtype, as in float16; the host's "
    "own prefix cache may still hold them"
)
"""For logs; a position follows."""

WRITE_SECONDS = 30.0
"""Deadline of a write of one record while an engine goes on. It holds only the record's memory."""


def value_check(*schemas: RecordSchema) -> ValueCheck:
    """Return a check that accepts records of these schemas, of any namespace, and no other
    values."""

    def why_wrong(key: ChunkKey, value: memoryview, size: int) -> ReadFault | None:
        reason: ReadFault | None = None
        for schema in schemas:
            reason = check_record(schema, key, value, size)
            if reason is not ReadFault.OTHER_RECORD:
                break
        return reason

    sizes = frozenset(schema.record_bytes for schema in schemas)
    return ValueCheck(RecordBytes(max(sizes)), why_wrong, sizes=sizes)


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordRead:
    """What to read of one record, and where to: all of it, or the rows that one rank needs.

    Attributes:
        first_token: position of the chunk in its prompt.
        head: buffer of at least `schema.head_bytes` for the head.
        rows: the wanted rows, each with a buffer for their bytes, in which the runs lie one behind
            the other.
        image: `head` and `rows` as one buffer, if together they are a whole record as it is stored.
        looks_at_values: whether values that are not finite are wrong.
        of: of a shard, the key of the whole record.
    """

    key: ChunkKey
    first_token: int
    head: memoryview
    rows: Sequence[tuple[RowRange, memoryview]]
    image: memoryview | None = None
    looks_at_values: bool = False
    of: bytes = b""


def read_record(
    store: Store,
    schema: RecordSchema,
    read: RecordRead,
    observer: Observer,
    deadline: float = NO_DEADLINE,
    *,
    faults: list[StoreError] | None = None,
) -> ReadFault | None:
    """Read and verify parts of a record, in the namespace of its schema; None if all that was read
    is right. What the store raised is appended to `faults`. The caller counts the miss.

    A wrong record is read once more, since another process may have replaced it meanwhile. If it is
    wrong again, it is discarded from the store.
    """
    store = store.in_namespace(schema.namespace)
    try:
        reason = _read(store, schema, read, deadline)
        if reason is not None and reason.is_corruption:
            reason = _read(store, schema, read, deadline)
    except StoreError as error:
        reason = ReadFault.IO_ERROR
        if faults is not None:
            faults.append(error)
    if reason is not None and reason.is_corruption:
        observer.count("records_corrupt")
        store.discard(read.key, reason)
    return reason


def _read(
    store: Store, schema: RecordSchema, read: RecordRead, deadline: float
) -> ReadFault | None:
    head = read.head[: schema.head_bytes]
    all_rows = [(buffer, schema.runs_of(rows)) for rows, buffer in read.rows]
    ranges = [(0, head)] if read.image is None else [(0, read.image)]
    for buffer, runs in all_rows if read.image is None else ():
        ranges += [(schema.offset_of(run), buffer[start:stop]) for run, start, stop in runs]
    size = store.read(read.key, ranges, deadline)
    if size is None:
        return ReadFault.ABSENT
    reason = check_head(schema, read.key, read.first_token, size, head[:size], read.of)
    if reason is not None:
        return reason
    table = head[schema.header_bytes + CHECKSUM.num_bytes :]
    for buffer, runs in all_rows:
        # One call hashes all runs: a call for each costs more than the hash of a short row.
        leaves = b"".join([table[schema.leaf_slice(run)] for run, _, _ in runs])
        component = schema.components[runs[0][0].component]
        if not check_rows(component, buffer, leaves):
            return ReadFault.BAD_CHECKSUM
        if read.looks_at_values and not leaves_of(component, buffer).are_finite:
            return ReadFault.NOT_FINITE
    return None


def put_record(
    store: Store,
    schema: RecordSchema,
    key: ChunkKey,
    first_token: int,
    leaf_table: bytes,
    image: memoryview,
    deadline: float = NO_DEADLINE,
    mark: bytes = b"",
) -> Put:
    """Write the head into `image`, a record with its payload in place, and store it in one atomic
    step. Never raises."""
    seal_record(schema, key, first_token, leaf_table, image, mark)
    return store.in_namespace(schema.namespace).put(key, [image], deadline)


def seal_record(
    schema: RecordSchema,
    key: ChunkKey,
    first_token: int,
    leaf_table: bytes,
    image: memoryview,
    mark: bytes = b"",
) -> None:
    """Write the head of a record into `image`: the memory of the record, or any first part of it
    that has room for the head."""
    image[: schema.head_bytes] = schema.encode_head(key, first_token, leaf_table, mark)


def write_sealed(
    store: Store,
    namespace: bytes,
    key: ChunkKey,
    parts: Sequence[memoryview],
    observer: Observer,
) -> Put:
    """Store a sealed record, the bytes of `parts`, under the namespace that its head says, if the
    store takes values; count the result."""
    started = time.monotonic()
    why = store.accepts()
    if why is None:
        answer = store.in_namespace(namespace).put(key, parts, started + WRITE_SECONDS)
        observer.observe("save", time.monotonic() - started)
    else:
        answer = Put.failed(why)
    observer.count(f"put_{answer.result}")
    if answer.result is PutResult.STORED:
        observer.count("saved_bytes", sum(len(part) for part in parts))
    elif not answer.is_there:
        observer.count("save_failed")
    return answer

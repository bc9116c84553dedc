"""Records in and out of a store, verified on the way.

Functions that do I/O block, and run on I/O threads. They raise nothing: a failed read answers with
a `MissReason`, a failed write with a `PutResult`. A record with wrong bytes is taken out of the
store.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from kvferry.errors import StoreError
from kvferry.observe import Observer
from kvferry.record.check import MissReason, check_head, check_rows
from kvferry.record.schema import DIGEST_BYTES, RecordSchema, RowRange
from kvferry.store.base import PutResult, Source, Store
from kvferry.types import ChunkKey

PIECE_BYTES = 512 * 1024
"""How much of a record in the page cache is read and verified per call: small enough to stay in a
core's cache until it is hashed, and to hold the interpreter's lock briefly; large enough that a
call costs little beside its work."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordRead:
    """One record, or the rows of it that one rank needs.

    Attributes:
        first_token: position of the chunk in its prompt.
        head: scratch of at least `schema.head_bytes`.
        buffer_for: where the bytes of some rows shall land; called once per piece, in order.
        parts: `parts_of` the rows wanted; called once, with the open record.
    """

    key: ChunkKey
    first_token: int
    head: memoryview
    buffer_for: Callable[[RowRange], memoryview]
    parts: Callable[[Source], Sequence[RowRange]]


def pieces(
    schema: RecordSchema, ranges: Sequence[RowRange], piece_bytes: int = PIECE_BYTES
) -> Iterator[RowRange]:
    """Split row ranges into runs of whole layers, or of heads of one layer, of about
    `piece_bytes`; so that a piece is a box `[layers, heads]` whose rows are contiguous."""
    for component, first, stop in ranges:
        start = first
        heads = schema.components[component].shape[1]
        per_piece = max(1, piece_bytes // schema.components[component].row_bytes)
        while start < stop:
            if start % heads == 0 and per_piece >= heads and stop - start >= heads:
                count = min(per_piece, stop - start) // heads * heads
            else:
                count = min(per_piece, stop - start, heads - start % heads)
            yield RowRange(component, start, start + count)
            start += count


def parts_of(
    schema: RecordSchema, ranges: Sequence[RowRange]
) -> Callable[[Source], Sequence[RowRange]]:
    """For `RecordRead.parts`: small pieces of a record in memory, and all of each range at once of
    one that comes from a medium, which is fastest when asked for much. Computed once, here."""
    small = tuple(pieces(schema, ranges))
    large = tuple(pieces(schema, ranges, schema.record_bytes))
    return lambda source: small if source.is_cached() else large


def read_record(
    store: Store,
    schema: RecordSchema,
    read: RecordRead,
    observer: Observer,
    cancelled: Callable[[], bool] = lambda: False,
) -> MissReason | None:
    """Read and verify parts of a record; None if all of it was right.

    A record found wrong is discarded from the store. `cancelled` is asked between pieces.
    """
    try:
        reason = _read(store, schema, read, cancelled)
    except StoreError:
        reason = MissReason.IO_ERROR
    if reason is None:
        return None
    observer.count(f"miss_{reason}")
    if reason.is_corruption:
        observer.count("records_corrupt")
        store.discard(read.key, reason)
    return reason


def _read(
    store: Store, schema: RecordSchema, read: RecordRead, cancelled: Callable[[], bool]
) -> MissReason | None:
    if cancelled():
        return MissReason.CANCELLED
    source = store.open_read(read.key)
    if source is None:
        return MissReason.ABSENT
    with source:
        head = read.head[: schema.head_bytes]
        got = source.read_into(head, 0)
        reason = check_head(schema, read.key, read.first_token, source.size, head[:got])
        if reason is not None:
            return reason
        table = head[schema.header_bytes + DIGEST_BYTES :]
        for rows in read.parts(source):
            if cancelled():
                return MissReason.CANCELLED
            buffer = read.buffer_for(rows)
            if source.read_into(buffer, schema.offset_of(rows)) < len(buffer):
                return MissReason.TRUNCATED
            component = schema.components[rows.component]
            if not check_rows(component, buffer, table[schema.leaf_slice(rows)]):
                return MissReason.BAD_LEAF
    return None


def put_record(
    store: Store,
    schema: RecordSchema,
    key: ChunkKey,
    first_token: int,
    leaf_table: bytes,
    image: memoryview,
) -> PutResult:
    """Store a whole record in one atomic step. Never raises.

    Args:
        leaf_table: digests of the payload, in order.
        image: the record file with its payload in place; the head is written here.
    """
    image[: schema.head_bytes] = schema.encode_head(key, first_token, leaf_table)
    return store.put(key, [image])

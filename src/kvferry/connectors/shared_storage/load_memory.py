"""Memory that loads land in: a slot that outlives its asker, and what a direct load reads to."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from kvferry.connectors.shared_storage.rank_device import DEVICE_SECONDS, REACHED, RankDevice
from kvferry.errors import TransferError
from kvferry.layout.streams import Mark
from kvferry.record.check import MissReason
from kvferry.record.schema import RecordSchema, RowRange
from kvferry.store.recordio import RecordRead, read_record, try_record
from kvferry.store.staging import Content
from kvferry.types import ChunkKey

if TYPE_CHECKING:
    from kvferry.connectors.shared_storage.messages import ChunkRef
    from kvferry.connectors.shared_storage.rank_rows import RankRows
    from kvferry.observe import Observer
    from kvferry.store.base import Source, Stamp, Store
    from kvferry.store.staging import Staging


class LoadSlot:
    """A staging slot shared by an operation and whoever asked for it: free when both are through,
    so that a read that outlives its deadline writes to memory that nobody else has.

    Attributes:
        content: what it holds, if that is worth keeping; set by the operation before it drops it.
    """

    __slots__ = ("_after", "_holders", "_lock", "_staging", "content", "index")

    def __init__(self, staging: Staging, index: int) -> None:
        self._staging = staging
        self._lock = threading.Lock()
        self._holders = 2
        self._after = REACHED
        self.index = index
        self.content: Content | None = None

    def drop(self, after: Mark = REACHED) -> None:
        """One of the two holders is through, or will be after a mark."""
        with self._lock:
            self._holders -= 1
            if after is not REACHED:
                self._after = after
            last = self._holders == 0
        if last:
            self._staging.release(self.index, after=self._after, content=self.content)

    @property
    def view(self) -> memoryview:
        return self._staging.view(self.index)


def read_chunk(
    store: Store,
    rows: RankRows,
    schema: RecordSchema,
    chunk: ChunkRef,
    memory: memoryview,
    observer: Observer | None,
    *,
    cancelled: Callable[[], bool],
    wanted: Sequence[RowRange] | None = None,
    in_scratch: bool = False,
) -> Content | MissReason:
    """Read and verify a chunk, or what this rank needs of it. Blocks on the store; never raises.

    Args:
        store: where from.
        rows: what this rank needs.
        schema: what the record must look like.
        chunk: which.
        memory: a slot or, `in_scratch`, scratch of the calling thread.
        observer: counts a miss; None if nobody needs the chunk, so that one that is wrong is left
            for whoever does to find.
        cancelled: asked between pieces.
        wanted: the pieces to read, instead of all that this rank has rows of.
        in_scratch: each piece goes where the one before it was, so all are just looked at.

    Returns:
        What is in memory now, or why it is a miss.
    """
    place = rows.scratch_piece if in_scratch else rows.piece_of
    stamp: Stamp | None = None

    def parts(record: Source) -> Sequence[RowRange]:
        nonlocal stamp
        stamp = record.stamp
        return rows.pieces if wanted is None else wanted

    key = ChunkKey(chunk.key)
    read = RecordRead(
        key=key,
        first_token=chunk.first_token,
        head=rows.head_of(memory),
        buffer_for=lambda piece: place(memory, piece),
        parts=parts,
    )
    if observer is None:
        reason = try_record(store, schema, read, cancelled)
    else:
        reason = read_record(store, schema, read, observer, cancelled)
    return Content(key, chunk.first_token, schema, stamp) if reason is None else reason


class DirectMemory:
    """Where a direct load reads to: small scratch that stays in the cache for a record in memory, a
    staging slot for the whole of one on a medium or for a device, if there is one free.
    Runs in: I/O thread."""

    def __init__(self, rows: RankRows, device: RankDevice, staging: Staging) -> None:
        self._rows = rows
        self._device = device
        self._staging = staging
        self._scratch = rows.scratch()
        self._slot: int | None = None

    @property
    def head(self) -> memoryview:
        return self._rows.head_of(self._scratch)

    def parts(self, record: Source) -> Sequence[RowRange]:
        if self._device.overlaps or not record.is_cached():
            self._slot = self._staging.acquire()
        return self._rows.pieces if self._slot is None else self._rows.large_pieces

    def buffer_for(self, piece: RowRange) -> memoryview:
        if self._slot is None:
            return self._rows.scratch_piece(self._scratch, piece)
        return self._rows.piece_of(self._staging.view(self._slot), piece)

    def delivered(self, mark: Mark) -> None:
        """A piece is on its way to the blocks, its memory read until `mark`.

        Raises:
            TransferError: the device did not come to it.
        """
        # In a slot each piece has its own place; scratch is where the next one goes.
        if self._slot is None and not mark.wait(DEVICE_SECONDS):
            raise TransferError(f"a piece was not copied in {DEVICE_SECONDS} s")

    def close(self) -> None:
        """Give the slot back: the read has ended, so nothing of it can land there any more."""
        if self._slot is not None:
            self._staging.release(self._slot, after=self._device.done())
            self._slot = None

"""Memory that loads land in: a slot that outlives its asker, and what a direct load reads to."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvferry.connectors.shared_storage.rank_device import DEVICE_SECONDS, REACHED, RankDevice
from kvferry.errors import TransferError
from kvferry.layout.streams import Mark
from kvferry.record.schema import RowRange

if TYPE_CHECKING:
    from kvferry.connectors.shared_storage.rank_rows import RankRows
    from kvferry.store.base import Source
    from kvferry.store.staging import Staging


class LoadSlot:
    """A staging slot shared by an operation and whoever asked for it: free when both are through,
    so that a read that outlives its deadline writes to memory that nobody else has."""

    __slots__ = ("_after", "_holders", "_lock", "_staging", "index")

    def __init__(self, staging: Staging, index: int) -> None:
        self._staging = staging
        self._lock = threading.Lock()
        self._holders = 2
        self._after = REACHED
        self.index = index

    def drop(self, after: Mark = REACHED) -> None:
        """One of the two holders is through, or will be after a mark."""
        with self._lock:
            self._holders -= 1
            if after is not REACHED:
                self._after = after
            last = self._holders == 0
        if last:
            self._staging.release(self.index, after=self._after)

    @property
    def view(self) -> memoryview:
        return self._staging.view(self.index)


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

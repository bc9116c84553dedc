"""One rank's copies between blocks and staging, in order with what the engine submits.

    engine's stream   ─ forward ─●───────────(waits)─ next forward
                        produced ╎          ╎ gathered
    side stream                  └─ gather ─┴─ hash ─ copy to staging ─●
                                                                 taken ╎
    I/O thread                                                         └─ write

Loads go the other way: staging to the device, scatter, and the engine's stream waits. The engine's
thread only submits. Every token's place was checked before anything is. Without a device everything
has happened when a call returns, and nothing passes through memory of its own.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch

from kvferry.connectors.shared_storage.rank_rows import GroupDigests, RankRows
from kvferry.connectors.shared_storage.rank_tables import Runs
from kvferry.errors import TransferError
from kvferry.layout.ops import MakeCopies
from kvferry.layout.streams import Mark, SideStream, pinned

if TYPE_CHECKING:
    from kvferry.record.schema import RowRange
    from kvferry.store.staging import Staging

logger = logging.getLogger(__name__)

DEVICE_SECONDS = 60.0
"""How long a thread of ours waits for the device, which works on the engine's steps first."""

REACHED = Mark()


class CopyStream(Protocol):
    """What is needed of `SideStream`."""

    @property
    def overlaps(self) -> bool: ...
    def mark(self) -> Mark: ...
    def hold(self, mark: Mark) -> None: ...
    def end(self) -> Mark: ...
    def run(self, work: Callable[[], object], *, after: Mark) -> Mark: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceSetup:
    """How a device is used.

    Attributes:
        stream: makes the side stream.
        copies: runs the copies; None for the fastest.
        pin: locks the pages of staging.
        num_bytes: of device memory that one step's saves use without holding up the engine's
            stream until they are in staging.
    """

    stream: Callable[[torch.device], CopyStream] = SideStream
    copies: MakeCopies | None = None
    pin: Callable[[memoryview, torch.device], AbstractContextManager[None]] = pinned
    num_bytes: int = 256 << 20


class ChunkCopy(NamedTuple):
    """A chunk between its slot and its blocks."""

    slot: memoryview
    runs: Runs
    first_token: int


class TakenOut(NamedTuple):
    """A chunk that is on its way to its slot."""

    mark: Mark
    """Reached when it is there."""
    digests: GroupDigests
    """Complete then."""


class RankDevice:
    """Runs in: worker. Thread-safe after `register`.

    Args:
        rows: what this rank moves.
        staging: where to and from.
        setup: how.
    """

    def __init__(self, rows: RankRows, staging: Staging, setup: DeviceSetup) -> None:
        self._rows = rows
        self._staging = staging
        self._setup = setup
        self._stream: CopyStream = SideStream("cpu")
        self._pins = ExitStack()
        self._wave = max(1, setup.num_bytes // rows.slot_bytes)

    def register(self, kv_caches: Mapping[str, torch.Tensor]) -> None:
        """Bind the engine's tensors and pin staging.

        Raises:
            LayoutError: see `RankRows.register`.
        """
        self._rows.register(kv_caches, self._setup.copies)
        self._stream = self._setup.stream(self._rows.device)
        if not self._stream.overlaps:
            return
        try:
            self._pins.enter_context(self._setup.pin(self._staging.memory, self._rows.device))
        except TransferError as error:
            logger.warning("copies to and from the device will be slow: %s", error)

    @property
    def overlaps(self) -> bool:
        """Whether copies go on after the call that asks for them."""
        return self._stream.overlaps

    def mark(self) -> Mark:
        """All that the caller's current stream was given so far."""
        return self._stream.mark()

    def done(self) -> Mark:
        """All copies submitted so far, of every thread."""
        return self._stream.end()

    def hold(self) -> None:
        """Let the caller's current stream wait for all copies submitted so far."""
        self._stream.hold(self.done())

    def take_out(self, chunks: Iterator[ChunkCopy]) -> Iterator[TakenOut]:
        """Copy chunks out of the blocks, which the engine's stream may overwrite once all are
        yielded.

        Raises:
            TransferError: no device memory; what was not yielded was not taken out, and its slots
                may be written until `done`.
        """
        if not self._stream.overlaps:
            for chunk in chunks:
                self._rows.gather_chunk(*chunk)
                yield TakenOut(REACHED, {})
            return
        produced = self._stream.mark()
        while wave := list(islice(chunks, self._wave)):
            yield from self._take_wave(wave, produced)

    def _take_wave(self, wave: Sequence[ChunkCopy], produced: Mark) -> Iterator[TakenOut]:
        """All gathers first: the engine's stream waits for no more than these."""
        gathered: list[dict[int, torch.Tensor]] = []

        def gather() -> None:
            gathered.extend(
                self._rows.gather_on_device(chunk.runs, chunk.first_token) for chunk in wave
            )

        self._stream.hold(self._run(gather, produced))
        for index, chunk in enumerate(wave):
            digests: dict[int, Callable[[], bytes]] = {}
            copy = partial(self._to_slot, gathered, index, chunk.slot, digests)
            yield TakenOut(self._run(copy, REACHED), digests)

    def _to_slot(
        self,
        gathered: list[dict[int, torch.Tensor]],
        index: int,
        slot: memoryview,
        digests: dict[int, Callable[[], bytes]],
    ) -> None:
        # Dropped here: memory goes back to this stream, whose next work comes after the copy.
        rows, gathered[index] = gathered[index], {}
        digests.update(self._rows.hash_on_device(rows))
        self._rows.move_to_slot(rows, slot)

    def bring_in(self, chunk: ChunkCopy, *, after: Mark) -> None:
        """Copy tokens of a staged chunk into the blocks; the slot is read until `done`.

        Args:
            chunk: from where to where.
            after: the blocks are not written before this.

        Raises:
            TransferError: no device memory; part of the blocks may be written until `done`.
        """
        if self._stream.overlaps:
            self._run(partial(self._rows.scatter_chunk_on_device, *chunk), after)
        else:
            self._rows.scatter_chunk(*chunk)

    def bring_in_piece(self, piece: RowRange, chunk: ChunkCopy, *, after: Mark) -> Mark:
        """`bring_in` for one piece, which is all of `chunk.slot`.

        Returns:
            Reached when the piece's memory is no longer read.
        """
        part, runs, first_token = chunk
        if not self._stream.overlaps:
            self._rows.scatter_piece(part, piece, runs, first_token)
            return REACHED
        scatter = partial(self._rows.scatter_piece_on_device, part, piece, runs, first_token)
        return self._run(scatter, after)

    def _run(self, work: Callable[[], object], after: Mark) -> Mark:
        try:
            return self._stream.run(work, after=after)
        except torch.cuda.OutOfMemoryError as error:
            raise TransferError("the device has no memory left for a chunk on its way") from error

    def close(self, timeout: float) -> bool:
        """Let copies under way end, then unpin staging. False if they did not in time; staging then
        stays pinned. Idempotent."""
        if self._stream.overlaps and not self.done().wait(timeout):
            return False
        self._pins.close()
        return True

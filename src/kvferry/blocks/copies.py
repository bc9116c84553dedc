"""One rank's copies between blocks and slots, ordered with what the engine submits.

    engine's stream   ─ forward ─●───────────(waits)─ next forward
                        produced ╎          ╎ gathered
    side stream                  └─ gather ─┴─ hash ─ copy to slot ─●
                                                            copied ╎
    I/O thread                                                     └─ write

This is a save. A load goes the other way: slot to the device, scatter, and the engine's stream
waits. The worker role calls this on the engine's thread, which only submits. Every token's place is
checked before anything is submitted. On a CPU every call copies at once, straight between slot and
block, and the worker role spreads the chunks of loads over I/O threads.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import NamedTuple

import torch

from kvferry.blocks.paged import PagedTables, Runs
from kvferry.blocks.rows import GroupDigests, RankRows
from kvferry.contract.spec import EngineSpec
from kvferry.errors import TransferError
from kvferry.layout.ops import MakeCopies
from kvferry.layout.streams import Mark, SideStream, pinned
from kvferry.record.schema import LEAF_BYTES

logger = logging.getLogger(__name__)

REACHED = Mark()
"""For work that need not wait."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceSetup:
    """How a device is used; tests replace parts of it.

    Attributes:
        stream: makes the side stream.
        copies: makes the copy kernels; None for the fastest that are installed.
        pin: locks the pages of slots.
        num_bytes: device memory for one step's saves. If a step saves more, the engine's stream
            waits for copies to slots.
    """

    stream: Callable[[torch.device], SideStream] = SideStream
    copies: MakeCopies | None = None
    pin: Callable[[memoryview, torch.device], AbstractContextManager[None]] = pinned
    num_bytes: int = 256 << 20


class ChunkCopy(NamedTuple):
    """One chunk to copy, from its slot into blocks or back."""

    slot: memoryview
    runs: Runs
    first_token: int


class Gathered(NamedTuple):
    """A chunk on its way from its blocks to its slot."""

    mark: Mark
    """Reached when the slot holds the chunk."""
    digests: GroupDigests
    """Leaf digests of the groups that the device hashes; valid once `mark` is reached."""


class BlockCopies:
    """Copies between one rank's slots and blocks. Runs in: worker. Thread-safe after `register`.

    Args:
        spec: the engine, and what this rank holds of it.
        rows: where a chunk's rows lie in a slot.
        setup: how the device is used.

    Attributes:
        paged: the engine's tables and tensors.
        stream: stream of the copies; without a device until `register`.
    """

    def __init__(self, spec: EngineSpec, rows: RankRows, setup: DeviceSetup) -> None:
        self.paged = PagedTables(spec, rows)
        self.stream = SideStream("cpu")
        self._rows = rows
        self._setup = setup
        self._pins = ExitStack()

    def register(self, kv_caches: Mapping[str, torch.Tensor], slots: memoryview) -> None:
        """Bind the engine's tensors. The first time, pin the memory of all slots for their device.

        Raises:
            LayoutError: see `PagedTables.register`.
        """
        self.paged.register(kv_caches, self._setup.copies)
        if self.stream.overlaps:
            return
        self.stream = self._setup.stream(self.paged.device)
        if not self.stream.overlaps:
            return
        try:
            self._pins.enter_context(self._setup.pin(slots, self.paged.device))
        except TransferError as error:
            logger.warning("copies to and from the device will be slow: %s", error)

    def unregister(self, timeout: float) -> None:
        """Let copies under way end, and drop the engine's tensors until the next `register`.
        Idempotent.

        Raises:
            TransferError: the copies did not end within `timeout` seconds; nothing was dropped.
        """
        if not self.stream.end().wait(timeout):
            raise TransferError(
                f"copies out of the KV memory did not end in {timeout:.0f} s: keep it"
            )
        self.paged.unregister()

    def scatter(self, chunk: ChunkCopy, *, after: Mark) -> None:
        """Copy tokens of a chunk from its slot into the blocks. No block is written before `after`
        is reached. The slot is read until `stream.end()` is reached.

        Raises:
            TransferError: no device memory; some blocks may be written until `stream.end()` is
                reached.
        """
        if self.stream.overlaps:
            self._run(partial(self._scatter_on_device, chunk), after)
            return
        for group in self.paged.groups_in(chunk.runs):
            rows = self._rows.group_rows(chunk.slot, group)
            self.paged.scatter(group, rows, chunk.runs, chunk.first_token)

    def gather(self, chunks: Iterator[ChunkCopy]) -> Iterator[Gathered]:
        """Copy whole chunks out of the blocks into their slots. Once all are yielded, the engine's
        stream may overwrite the blocks.

        Raises:
            TransferError: no device memory; the slots of chunks that were not yielded may be
                written until `stream.end()` is reached.
        """
        if not self.stream.overlaps:
            for chunk in chunks:
                for group in self.paged.groups_in(chunk.runs):
                    rows = self._rows.group_rows(chunk.slot, group)
                    self.paged.gather(group, rows, chunk.runs, chunk.first_token)
                yield Gathered(REACHED, {})
            return
        produced = self.stream.mark()
        per_wave = max(1, self._setup.num_bytes // self._rows.slot_bytes)
        while wave := list(islice(chunks, per_wave)):
            yield from self._gather_wave(wave, produced)

    def _gather_wave(self, wave: Sequence[ChunkCopy], produced: Mark) -> Iterator[Gathered]:
        """Gather all chunks of a wave first: the engine's stream waits for these gathers alone."""
        gathered: list[dict[int, torch.Tensor]] = []

        def gather() -> None:
            gathered.extend(self._gather_on_device(chunk) for chunk in wave)

        self.stream.hold(self._run(gather, produced))
        for index, chunk in enumerate(wave):
            digests: dict[int, Callable[[], bytes]] = {}
            copy = partial(self._to_slot, gathered, index, chunk.slot, digests)
            yield Gathered(self._run(copy, REACHED), digests)

    # The following methods only submit work to the current stream.

    def _scatter_on_device(self, chunk: ChunkCopy) -> None:
        for group in self.paged.groups_in(chunk.runs):
            rows = self.paged.new_rows(group)
            memory = _bytes_in(self._rows.group_rows(chunk.slot, group))
            rows.view(-1).view(torch.uint8).copy_(memory, non_blocking=True)
            self.paged.scatter(group, rows, chunk.runs, chunk.first_token)

    def _gather_on_device(self, chunk: ChunkCopy) -> dict[int, torch.Tensor]:
        """Gather the rows of a chunk into new device memory. Return them by group."""
        gathered = {}
        for group in self.paged.groups_in(chunk.runs):
            rows = gathered[group] = self.paged.new_rows(group)
            self.paged.gather(group, rows, chunk.runs, chunk.first_token)
        return gathered

    def _to_slot(
        self,
        gathered: list[dict[int, torch.Tensor]],
        index: int,
        slot: memoryview,
        digests: dict[int, Callable[[], bytes]],
    ) -> None:
        # Dropped here: this stream may reuse the memory, but only for work after the copy.
        by_group, gathered[index] = gathered[index], {}
        for group, rows in by_group.items():
            later = self.paged.digests_later(group, rows, LEAF_BYTES)
            if later is not None and self._rows.writes_group(group):
                digests[group] = later
            target = _bytes_in(self._rows.group_rows(slot, group))
            target.copy_(rows.view(-1).view(torch.uint8), non_blocking=True)

    def _run(self, work: Callable[[], object], after: Mark) -> Mark:
        try:
            return self.stream.run(work, after=after)
        except torch.cuda.OutOfMemoryError as error:
            raise TransferError("the device has no memory left to copy a chunk") from error

    def close(self, timeout: float) -> bool:
        """Let copies under way end, then unpin the slots. Return False if the copies did not end in
        time; the slots then stay pinned. Idempotent."""
        if not self.stream.end().wait(timeout):
            return False
        self._pins.close()
        return True


def _bytes_in(memory: memoryview) -> torch.Tensor:
    return torch.frombuffer(memory, dtype=torch.uint8)

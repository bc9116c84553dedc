"""One rank's copies between blocks and slots, ordered with what the engine submits.

    save  engine's stream  ─ forward ─ gather ●─ next forward
          outward                    gathered └─ copy to slot ●
          hashing                                      copied └─ hash ●
          I/O thread                                                  └─ write

    load  inward           ─ copy from slot ●
          engine's stream  ─ forward ───────┴─ scatter ─ next forward

Between the blocks and the slots, chunks lie in pieces of device memory, which are taken when the
engine starts: no copy fails later for lack of memory. A save that finds no free piece is put off,
so that the engine's stream never waits for the copy of another. Loads take pieces by turns.

The worker role calls this on the engine's thread, which only submits. Every token's place is
checked before anything is submitted. On a CPU every call copies at once, straight between slot and
block, and the worker role spreads the chunks of loads over I/O threads.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext, suppress
from dataclasses import dataclass, replace
from itertools import islice
from typing import NamedTuple

import torch

from kvferry.blocks.paged import PagedTables, Runs
from kvferry.blocks.rows import GroupLeaves, RankRows
from kvferry.blocks.states import PagedStates, StateBlocks
from kvferry.contract.spec import EngineSpec
from kvferry.errors import LayoutError, TransferError
from kvferry.layout.ops import MakeCopies
from kvferry.layout.streams import REACHED, DeviceStream, Mark, Streams, pinned
from kvferry.record.leaves import Leaves
from kvferry.record.schema import LEAF_BYTES

logger = logging.getLogger(__name__)

_PROOF_SECONDS = 60.0
"""For the first copy of one chunk, beside whatever else the device does."""


def staging_bytes(device: torch.device, step_bytes: int) -> int:
    """Return how much device memory chunks on their way take: as much as a step saves, and a
    quarter of the whole for loads, within small shares of the device and of what the engine has
    left."""
    free, total = torch.cuda.mem_get_info(device)
    return min(step_bytes * 4 // 3, free // 8, total // 64)


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceSetup:
    """How a device is used; tests replace parts of it.

    Attributes:
        streams: makes the streams; None from it for a CPU.
        copies: makes the copy kernels; None for the fastest that are installed.
        pin: locks the pages of slots.
        num_bytes: returns how much device memory chunks on their way may take, from the device and
            the KV of one step. They take a quarter of it in, the rest out.
    """

    streams: Callable[[torch.device], Streams | None] = Streams.of
    copies: MakeCopies | None = None
    pin: Callable[[memoryview, torch.device], AbstractContextManager[None]] = pinned
    num_bytes: Callable[[torch.device, int], int] = staging_bytes


class ChunkCopy(NamedTuple):
    """One chunk to copy, from its slot into blocks or back."""

    slot: memoryview
    runs: Runs
    first_token: int


class StateCopy(NamedTuple):
    """One part of a state to copy, from its slot into the engine's pages or back."""

    slot: memoryview
    part: int
    blocks: StateBlocks


class Gathered(NamedTuple):
    """A chunk on its way from its blocks to its slot."""

    mark: Mark
    """Reached when the slot holds the chunk."""
    leaves: GroupLeaves
    """Leaves of the groups that the device hashes; valid once `mark` is reached."""


@dataclass(slots=True)
class _Piece:
    """Device memory for one chunk: the rows of each group."""

    rows: Mapping[int, torch.Tensor]
    free: Mark = REACHED
    """Reached when the device has done with the last chunk in it."""


class BlockCopies:
    """Copies between one rank's slots and blocks. Runs in: worker, with a device on the engine's
    thread alone; without one, `scatter` is thread-safe.

    Args:
        spec: the engine, and what this rank holds of it.
        rows: where a chunk's rows lie in a slot.
        setup: how the device is used.
        states: the engine's pages of recurrent states, if it has any.

    Attributes:
        paged: the engine's tables and tensors.
        states: as given.
    """

    def __init__(
        self,
        spec: EngineSpec,
        rows: RankRows,
        setup: DeviceSetup,
        states: PagedStates | None = None,
    ) -> None:
        self.paged = PagedTables(spec, rows)
        self.states = states
        self._rows = rows
        self._setup = setup
        # A host that does not say how much a step computes: as much as vLLM's steps.
        tokens = spec.step_tokens or 8192
        self._step_bytes = tokens * rows.slot_bytes // rows.schema.chunk_tokens
        self._pins = ExitStack()
        self._streams: Streams | None = None
        self._incoming: deque[_Piece] = deque()
        self._outgoing: list[_Piece] = []
        self._blocks_used = REACHED

    @property
    def overlaps(self) -> bool:
        """Whether copies go on after a call has returned: True on a device."""
        return self._streams is not None

    def setup_beside(self) -> DeviceSetup:
        """Return how other layers of the engine use the device: in the same streams, from the same
        slots, which are pinned. For what is registered later."""
        return replace(self._setup, streams=lambda _: self._streams, pin=lambda *_: nullcontext())

    @torch.inference_mode(mode=False)
    def register(
        self, kv_caches: Mapping[str, torch.Tensor], slots: memoryview, slot: memoryview
    ) -> None:
        """Bind the engine's tensors. The first time, pin the memory of all slots for their device,
        take the memory for copies, and try these with one slot.

        Raises:
            LayoutError: see `PagedTables.register`.
            TransferError: the device cannot be used: it is of another kind, has too little memory
                left, or does not copy or hash rightly.
        """
        self.paged.register(kv_caches, self._setup.copies)
        if self.states is not None:
            self.states.register(kv_caches, self._setup.copies)
        if self._streams is not None:
            return
        try:
            self._streams = self._setup.streams(self.paged.device)
            if self._streams is not None:
                self._begin(slots, slot[: self._rows.slot_bytes])
        except TransferError:
            raise
        except Exception as error:  # of a compiler or a driver: the engine can do without kvferry
            raise TransferError(f"the device's copies do not work: {error!r}") from error

    def _begin(self, slots: memoryview, slot: memoryview) -> None:
        try:
            self._pins.enter_context(self._setup.pin(slots, self.paged.device))
        except TransferError as error:
            logger.warning("copies to and from the device will be slow: %s", error)
        self._take_memory()
        self._prove(slot)

    def _take_memory(self) -> None:
        wanted = self._setup.num_bytes(self.paged.device, self._step_bytes)
        pieces: list[_Piece] = []
        with suppress(torch.cuda.OutOfMemoryError):  # it may be in parts too small
            while (len(pieces) + 1) * self._rows.slot_bytes <= wanted:
                pieces.append(_Piece(self.paged.new_rows()))
        if len(pieces) < 2:
            raise TransferError(
                f"the device has no memory left for two chunks of {self._rows.slot_bytes} bytes "
                "on their way; leave it more (in vLLM, by a smaller gpu_memory_utilization)"
            )
        num_incoming = max(1, len(pieces) // 4)
        self._incoming = deque(pieces[:num_incoming])
        self._outgoing = pieces[num_incoming:]

    def _prove(self, slot: memoryview) -> None:
        """Copy the null block of each table out, its inverse in and out, and itself back in. This
        compiles the kernels before the first request, and tries all that copies go through."""
        image = _bytes_in(slot)
        for runs, num_bytes in self.paged.null_blocks():
            chunk = ChunkCopy(slot, runs, 0)
            self._out(chunk)
            before = image.clone()
            image.copy_(~before)
            self._in(chunk)
            image.copy_(before)
            self._out(chunk)
            changed = image ^ before
            image.copy_(before)
            self._in(chunk)
            if not int((changed != 0).sum()) == int((changed == 255).sum()) == num_bytes:
                raise TransferError("the device copies blocks wrongly")

    def _in(self, chunk: ChunkCopy) -> None:
        self.scatter(chunk)
        _await(self.slots_read())
        _await(self._blocks_used)

    def _out(self, chunk: ChunkCopy) -> None:
        (gathered,) = self.gather(iter((chunk,)))
        _await(gathered.mark)
        leaves = (self._rows.leaves(chunk.slot, known) for known in (gathered.leaves, {}))
        if len(set(leaves)) > 1:
            raise TransferError("the device hashes rows wrongly")

    def unregister(self, timeout: float) -> None:
        """Let copies under way end, and drop the engine's tensors until the next `register`. The
        host may then take the device memory away, and bring it back for that. Idempotent.

        Raises:
            TransferError: the copies did not end within `timeout` seconds; nothing was dropped.
        """
        if not self._have_ended(timeout):
            raise TransferError(
                f"copies out of the KV memory did not end in {timeout:.0f} s: keep it"
            )
        self.paged.unregister()
        if self.states is not None:
            self.states.unregister()

    def scatter_state(self, copy: StateCopy) -> None:
        """As `scatter`, of a part of a state. On a device the engine's thread waits for the slot's
        bytes: states are few.

        Raises:
            LayoutError: there are no such pages; nothing was written.
            TransferError: no device memory; some pages may be written.
        """
        states = self._pages()
        if self._streams is None:
            states.scatter(copy.part, copy.slot, copy.blocks)
        else:
            self._blocks_used = _submit(
                self._streams.engine, lambda: states.scatter(copy.part, copy.slot, copy.blocks)
            )

    def gather_state(self, copy: StateCopy) -> Gathered:
        """As `gather`, of a part of a state; when it returns, the slot has it.

        Raises:
            LayoutError: there are no such pages; nothing was written.
            TransferError: no device memory.
        """
        states = self._pages()
        if self._streams is None:
            states.gather(copy.part, copy.slot, copy.blocks)
            return Gathered(REACHED, {})
        self._blocks_used = _submit(
            self._streams.engine, lambda: states.gather(copy.part, copy.slot, copy.blocks)
        )
        return Gathered(self._blocks_used, {})

    def _pages(self) -> PagedStates:
        if self.states is None:
            raise LayoutError("this engine has no recurrent states")
        return self.states

    def scatter(self, chunk: ChunkCopy) -> None:
        """Copy tokens of a chunk from its slot into the blocks, between what the engine has
        submitted and what it submits next. The slot is read until `slots_read` is reached.

        Raises:
            TransferError: no device memory; some blocks may be written.
        """
        groups = self.paged.groups_in(chunk.runs)
        memory = {group: self._rows.group_rows(chunk.slot, group) for group in groups}
        if self._streams is None:
            for group in groups:
                self.paged.scatter(group, memory[group], chunk.runs, chunk.first_token)
            return
        piece = self._incoming[0]
        self._incoming.rotate(-1)

        def to_device() -> None:
            for group in groups:
                _bytes_of(piece.rows[group]).copy_(_bytes_in(memory[group]), non_blocking=True)

        def to_blocks() -> None:
            for group in groups:
                self.paged.scatter(group, piece.rows[group], chunk.runs, chunk.first_token)

        copied = _submit(self._streams.inward, to_device, piece.free)
        piece.free = self._blocks_used = _submit(self._streams.engine, to_blocks, copied)

    def gather(self, chunks: Iterator[ChunkCopy]) -> Iterator[Gathered]:
        """Copy whole chunks out of the blocks into their slots. On a device, only the first ones
        are taken, as many as there is memory for now. Once they are yielded, the engine's stream
        may overwrite the blocks.

        Raises:
            TransferError: no device memory; the slots of chunks that were taken and not yielded may
                be written until `slots_written` is reached.
        """
        streams = self._streams
        if streams is None:
            for chunk in chunks:
                for group in self.paged.groups_in(chunk.runs):
                    rows = self._rows.group_rows(chunk.slot, group)
                    self.paged.gather(group, rows, chunk.runs, chunk.first_token)
                yield Gathered(REACHED, {})
            return
        free = [piece for piece in self._outgoing if piece.free.poll()]
        wave = list(zip(islice(chunks, len(free)), free, strict=False))
        if not wave:
            return

        def gather() -> None:
            for chunk, piece in wave:
                for group in self.paged.groups_in(chunk.runs):
                    self.paged.gather(group, piece.rows[group], chunk.runs, chunk.first_token)

        self._blocks_used = gathered = _submit(streams.engine, gather)
        for chunk, piece in wave:
            yield self._to_slot(streams, chunk, piece, gathered)

    def _to_slot(
        self, streams: Streams, chunk: ChunkCopy, piece: _Piece, gathered: Mark
    ) -> Gathered:
        groups = self.paged.groups_in(chunk.runs)
        leaves: dict[int, Callable[[], Leaves]] = {}

        def copy() -> None:
            for group in groups:
                target = _bytes_in(self._rows.group_rows(chunk.slot, group))
                target.copy_(_bytes_of(piece.rows[group]), non_blocking=True)

        def digest() -> None:
            for group in groups:
                later = self.paged.leaves_later(group, piece.rows[group], LEAF_BYTES)
                if later is not None and self._rows.writes_group(group):
                    leaves[group] = later

        # Loads from the same slot have read it: their scatter came before this gather.
        piece.free = _submit(streams.outward, copy, gathered)
        piece.free = _submit(streams.hashing, digest, piece.free)
        return Gathered(piece.free, leaves)

    def slots_read(self) -> Mark:
        """Return a mark behind the device's reads of slots so far."""
        return REACHED if self._streams is None else self._streams.inward.run()

    def slots_written(self) -> Mark:
        """Return a mark behind the device's writes to slots so far."""
        return REACHED if self._streams is None else self._streams.outward.run()

    def close(self, timeout: float) -> bool:
        """Let copies under way end, then unpin the slots. Return False if the copies did not end in
        time; the slots then stay pinned. Idempotent."""
        has_ended = self._have_ended(timeout)
        if has_ended:
            self._pins.close()
        return has_ended

    def _have_ended(self, timeout: float) -> bool:
        beside = () if self._streams is None else self._streams[1:]
        marks = [self._blocks_used, *(stream.run() for stream in beside)]
        deadline = time.monotonic() + timeout
        return all(mark.wait(deadline - time.monotonic()) for mark in marks)


def _await(mark: Mark) -> None:
    if not mark.wait(_PROOF_SECONDS):
        raise TransferError(f"the device did not copy a chunk in {_PROOF_SECONDS:.0f} s")


def _submit(stream: DeviceStream, work: Callable[[], None], *after: Mark) -> Mark:
    try:
        return stream.run(work, *after)
    except torch.cuda.OutOfMemoryError as error:
        raise TransferError("the device has no memory left to copy a chunk") from error


def _bytes_of(rows: torch.Tensor) -> torch.Tensor:
    return rows.view(-1).view(torch.uint8)


def _bytes_in(memory: memoryview) -> torch.Tensor:
    return torch.frombuffer(memory, dtype=torch.uint8)

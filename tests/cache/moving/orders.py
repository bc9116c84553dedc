"""An engine that computes, saves, loads, fetches and sleeps in any order, over a device that runs
its streams in any order; it counts the chunks that are wrong. `test_orders` searches with it on a
simulated device, `soak` runs it on a real one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from kvferry.blocks.tables import BlockSlice
from kvferry.cache.messages import Fetch, Load, Save, SlotChunk
from kvferry.layout.streams import REACHED
from kvferry.record.check import ReadFault
from kvferry.store.memory import MemoryStore
from kvferry.testing.stores.hooks import wait_until
from tests.cache.moving.device_host import BLOCK, CHUNK, DeviceHost
from tests.cache.moving.simulated_device import STREAMS

PLACES = ((1, 2), (7, 3), (5, 8))
"""Blocks of one chunk each."""
NUM_SLOTS = 3

Action = tuple[Any, ...]
"""The name of a method of `Engine`, and its arguments."""


class Engine:
    """Computes chunks that differ in every byte of a token, and moves them about. What it knows is
    what a scheduler role knows: which slot holds what, as reported."""

    def __init__(self, device: Any) -> None:
        self.device = device
        setup = device.setup(num_pieces=4)
        self.host = DeviceHost("HND", MemoryStore("orders"), device=device.kind, setup=setup)
        self.num_chunks = 0
        self.in_place: dict[tuple[int, ...], int] = {}
        self.in_slot: dict[int, int] = {}
        self.stored: list[int] = []
        self._num_wrong = torch.zeros((), dtype=torch.int64, device=device.kind)
        self._num_lost = 0

    # -- the actions ----------------------------------------------------------------------------

    def compute(self, place: int) -> None:
        """Compute another chunk in some blocks."""
        self.num_chunks += 1
        blocks, number = PLACES[place], self.num_chunks
        self.in_place[blocks] = number
        self._step(lambda: self._write(blocks, number))

    def save(self, place: int, slot: int) -> None:
        """Save what some blocks hold into a slot, whatever that held: it was evicted."""
        unsaved = [b for b, number in self.in_place.items() if number not in self.in_slot.values()]
        if not unsaved:
            return
        blocks = unsaved[place % len(unsaved)]
        number = self.in_place[blocks]
        self.in_slot.pop(slot, None)
        num_missed, num_saved = len(self.host.missed), len(self.host.saved)
        num_sealed = len(self.host.sealed)
        self._step(saves=(Save(chunk(slot, number), slices(blocks)),))
        if self.host.missed[num_missed:]:
            assert self.host.missed[num_missed].missed == ReadFault.CANCELLED
            return
        self.device.run_until(lambda: self.device.is_idle("hashing"))

        def is_refused() -> bool:
            return any(not each.is_finite for each in self.host.sealed[num_sealed:])

        self._await(lambda: len(self.host.saved) > num_saved or is_refused())
        if is_refused():  # it has bytes that nobody computed
            self._num_lost += 1
            return
        self.in_slot[slot] = number
        if number not in self.stored:
            self.stored.append(number)

    def load(self, slot: int, place: int) -> None:
        """Load what a slot holds into some blocks."""
        if not self.in_slot:
            return
        slot = sorted(self.in_slot)[slot % len(self.in_slot)]
        number, blocks = self.in_slot[slot], PLACES[place]
        self.in_place[blocks] = number
        load = Load("r", (chunk(slot, number),), 0, CHUNK, slices(blocks))
        self._step(lambda: self._check(blocks, number), loads=(load,))

    def fetch(self, which: int, slot: int) -> None:
        """Read a stored chunk into a slot, whatever that held."""
        evicted = [number for number in self.stored if number not in self.in_slot.values()]
        if not evicted:
            return
        number = evicted[which % len(evicted)]
        self.in_slot.pop(slot, None)
        num_held, num_missed = len(self.host.held), len(self.host.missed)
        self._step(fetches=(Fetch(chunk(slot, number), (0, 1)),))
        busy = self.host.worker.io._used_by_device.get(slot, REACHED)
        self.device.run_until(busy.poll)
        self._await(lambda: len(self.host.held) + len(self.host.missed) > num_held + num_missed)
        if len(self.host.missed) > num_missed:  # it has other bytes than its checksums say
            self._num_lost += 1
            return
        self.in_slot[slot] = number

    def sleep(self) -> None:
        """Sleep and wake up."""
        self.device.run_until(lambda: all(map(self.device.is_idle, STREAMS)))
        self.host.worker.unregister_kv_caches()
        self.host.worker.register_kv_caches(self.host.tensors)

    def advance(self, stream: str, count: int) -> None:
        self.device.advance(stream, count)

    # -- its parts ------------------------------------------------------------------------------

    def _step(self, forward: Callable[[], None] = lambda: None, **plan: object) -> None:
        self.host.begin(**plan)
        self.device.compute(forward)
        self.host.end()

    def _await(self, is_reported: Callable[[], bool]) -> None:
        def has_come() -> bool:
            self.host.step()
            return is_reported()

        wait_until(has_come, "a report")

    def _blocks(
        self, blocks: tuple[int, ...], number: int
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        for at, cache in enumerate(self.host.caches):
            for layer, tensor in enumerate(cache.tensors):
                for index, block in enumerate(blocks):
                    numbers = torch.arange(tensor[block].numel(), device=tensor.device) * 7
                    numbers += number * 131 + at * 17 + layer * 29 + index * 43
                    yield tensor[block], (numbers % 251).to(tensor.dtype).view(tensor[block].shape)

    def _write(self, blocks: tuple[int, ...], number: int) -> None:
        for block, values in self._blocks(blocks, number):
            block.copy_(values)

    def _check(self, blocks: tuple[int, ...], number: int) -> None:
        """Count what differs, without waiting for the device."""
        for block, values in self._blocks(blocks, number):
            self._num_wrong += (block != values).any()

    def close(self) -> int:
        """Let everything end. Return how much was wrong."""
        for blocks, number in self.in_place.items():
            self.device.compute(lambda blocks=blocks, number=number: self._check(blocks, number))
        self.device.drain(STREAMS[self.num_chunks % len(STREAMS)])
        self.host.close()
        return int(self._num_wrong) + self._num_lost


def chunk(slot: int, number: int) -> SlotChunk:
    return SlotChunk(slot, bytes([number]) * 32, 0)


def slices(blocks: tuple[int, ...]) -> tuple[BlockSlice, ...]:
    assert len(blocks) * BLOCK == CHUNK
    return (BlockSlice(0, blocks), BlockSlice(0, blocks))


def num_wrong_after(actions: Sequence[Action], device: Any) -> int:
    """Run a new engine on a device."""
    engine = Engine(device)
    for name, *arguments in actions:
        getattr(engine, name)(*arguments)
    return engine.close()


class Deaf:
    """Mixed into a class of streams: waits for no mark of another stream."""

    is_deaf = True

    def run(self, work: Callable[[], object] | None = None, *after: object) -> Any:
        return super().run(work, *(() if self.is_deaf else after))

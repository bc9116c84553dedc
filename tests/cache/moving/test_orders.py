"""Saves, loads, evictions and sleep on a device that runs its streams in any order: no chunk is
ever wrong. Without one of the waits between the streams, the same search finds a wrong one."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, Phase, find, given, settings
from hypothesis import strategies as st

from kvferry.blocks.tables import BlockSlice
from kvferry.cache.messages import PUT_OFF, Fetch, Load, Save, SlotChunk
from kvferry.cache.moving.slot_io import SlotIO
from kvferry.layout.streams import REACHED, Streams
from kvferry.store.memory import MemoryStore
from kvferry.testing.stores.hooks import wait_until
from tests.cache.moving.device_host import BLOCK, CHUNK, DeviceHost
from tests.cache.moving.simulated_device import STREAMS, SimulatedDevice, SimulatedStream

PLACES = ((1, 2), (7, 3), (5, 8))
"""Blocks of one chunk each."""
NUM_SLOTS = 3


class Engine:
    """Computes chunks that differ in every byte of a token, and moves them about. What it knows is
    what a scheduler role knows: which slot holds what, as reported."""

    def __init__(self, device: SimulatedDevice) -> None:
        self.device = device
        self.host = DeviceHost("HND", MemoryStore("orders"), setup=device.setup(num_pieces=4))
        self.num_chunks = 0
        self.in_place: dict[tuple[int, ...], int] = {}
        self.in_slot: dict[int, int] = {}
        self.stored: list[int] = []
        self.wrong: list[str] = []

    # -- what hypothesis chooses ----------------------------------------------------------------

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
        self._step(saves=(Save(chunk(slot, number), slices(blocks)),))
        if self.host.missed[num_missed:]:
            assert self.host.missed[num_missed].missed == PUT_OFF
            return
        self._run_until(lambda: not self.device.queues["hashing"])
        self._await(lambda: len(self.host.saved) > num_saved)
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
        num_held = len(self.host.held)
        self._step(fetches=(Fetch(chunk(slot, number), (0, 1)),))
        busy = self.host.worker.io._used_by_device.get(slot, REACHED)
        self._run_until(busy.poll)
        self._await(lambda: len(self.host.held) > num_held)
        self.in_slot[slot] = number

    def sleep(self) -> None:
        """Sleep and wake up."""
        self._run_until(lambda: not any(self.device.queues.values()))
        self.host.worker.unregister_kv_caches()
        self.host.worker.register_kv_caches(self.host.tensors)

    def advance(self, stream: str, count: int) -> None:
        for _ in range(count):
            self.device.advance(stream)

    # -- its parts ------------------------------------------------------------------------------

    def _step(self, forward=lambda: None, **plan: object) -> None:
        self.host.begin(**plan)
        self.device.compute(forward)
        self.host.end()

    def _await(self, is_reported) -> None:
        def has_come() -> bool:
            self.host.begin()
            self.host.end()
            return is_reported()

        wait_until(has_come, "a report")

    def _run_until(self, is_reached) -> None:
        """Run the other streams as late as possible."""
        while not is_reached():
            assert any(self.device.advance(name) for name in reversed(STREAMS))

    def _blocks(self, blocks: tuple[int, ...], number: int):
        for at, cache in enumerate(self.host.caches):
            for layer, tensor in enumerate(cache.tensors):
                for index, block in enumerate(blocks):
                    numbers = torch.arange(tensor[block].numel()) * 7
                    numbers += number * 131 + at * 17 + layer * 29 + index * 43
                    yield tensor[block], (numbers % 251).to(tensor.dtype).view(tensor[block].shape)

    def _write(self, blocks: tuple[int, ...], number: int) -> None:
        for block, values in self._blocks(blocks, number):
            block.copy_(values)

    def _check(self, blocks: tuple[int, ...], number: int) -> None:
        if not all(torch.equal(block, values) for block, values in self._blocks(blocks, number)):
            self.wrong.append(f"blocks {blocks} do not hold chunk {number}")

    def close(self) -> None:
        for blocks, number in self.in_place.items():
            self.device.compute(lambda blocks=blocks, number=number: self._check(blocks, number))
        self.device.drain(STREAMS[self.num_chunks % len(STREAMS)])
        self.host.close()


def chunk(slot: int, number: int) -> SlotChunk:
    return SlotChunk(slot, bytes([number]) * 32, 0)


def slices(blocks: tuple[int, ...]) -> tuple[BlockSlice, ...]:
    assert len(blocks) * BLOCK == CHUNK
    return (BlockSlice(0, blocks), BlockSlice(0, blocks))


places, slots = st.integers(0, len(PLACES) - 1), st.integers(0, NUM_SLOTS - 1)
ACTIONS = st.lists(
    st.one_of(
        st.tuples(st.just("compute"), places),
        st.tuples(st.just("save"), places, slots),
        st.tuples(st.just("load"), slots, places),
        st.tuples(st.just("fetch"), st.integers(0, 9), slots),
        st.tuples(st.just("sleep")),
        st.tuples(st.just("advance"), st.sampled_from(STREAMS), st.integers(1, 6)),
    ),
    min_size=15,
    max_size=40,
)


def wrong_after(actions, device: SimulatedDevice) -> list[str]:
    engine = Engine(device)
    for name, *arguments in actions:
        getattr(engine, name)(*arguments)
    engine.close()
    return engine.wrong


@settings(max_examples=40, suppress_health_check=[HealthCheck.too_slow])
@given(ACTIONS)
def test_no_order_of_streams_makes_a_chunk_wrong(actions):
    assert wrong_after(actions, SimulatedDevice()) == []


class Deaf(SimulatedStream):
    """Waits for no mark of another stream."""

    def run(self, work=None, *_after):
        return super().run(work)


def device_without(what: str, monkeypatch) -> SimulatedDevice:
    device = SimulatedDevice()
    if what == "busy_until":
        monkeypatch.setattr(SlotIO, "busy_until", lambda _io, _slot, _mark: None)
    else:
        streams = [(Deaf if name == what else SimulatedStream)(device, name) for name in STREAMS]
        device.streams = Streams(*streams)
    return device


@pytest.mark.parametrize("what", ["engine", "inward", "outward", "hashing", "busy_until"])
def test_without_a_wait_some_order_makes_a_chunk_wrong(what, monkeypatch):
    def is_wrong(actions) -> bool:
        return bool(wrong_after(actions, device_without(what, patch)))

    quick = settings(max_examples=2000, phases=[Phase.generate], deadline=None, database=None)
    with monkeypatch.context() as patch:
        found = find(ACTIONS, is_wrong, settings=quick)  # raises if there is none
    assert wrong_after(found, SimulatedDevice()) == []

"""Runs random saves, loads, evictions and sleeps on a real device, with delays in all its streams,
and counts what is wrong. As a control it leaves out one wait at a time, which must be found.

`python -m benchmarks device --part soak` runs this. Without a GPU, the device is a simulated one.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from unittest import mock

import torch

from kvferry.blocks.copies import DeviceSetup
from kvferry.cache.moving.slot_io import SlotIO
from kvferry.layout.streams import DeviceStream, Streams
from kvferry.testing.stores.hooks import wait_until
from tests.cache.moving.orders import NUM_SLOTS, PLACES, Action, Deaf, num_wrong_after
from tests.cache.moving.simulated_device import STREAMS, SimulatedDevice, SimulatedStream

NUM_ACTIONS = 120
"""Of one engine, which numbers its chunks with a byte."""

DELAY_CYCLES = 300_000
"""Some 0.2 ms of a GPU: longer than any copy of these small chunks."""

CONTROLS = (*STREAMS, "busy_until")
"""What a control leaves out: all waits of one stream, or that of a slot for the device."""


class DeafDeviceStream(Deaf, DeviceStream):
    is_deaf = False  # while the engine starts, and the copies are tried


class DeafSimulatedStream(Deaf, SimulatedStream):
    pass


class CudaDevice:
    """A real device, as `Engine` drives it.

    Args:
        deaf: the stream that waits for no other.
    """

    kind = "cuda"

    def __init__(self, deaf: str = "") -> None:
        self._device = torch.device("cuda", torch.cuda.current_device())
        streams = {
            name: (DeafDeviceStream if name == deaf else DeviceStream)(
                self._device, is_engines=name == "engine"
            )
            for name in STREAMS
        }
        self._streams = Streams(**streams)

    def setup(self, num_pieces: int) -> DeviceSetup:
        def num_bytes(_device: torch.device, step_bytes: int) -> int:
            return num_pieces * step_bytes * 32 // 8192

        return DeviceSetup(streams=lambda _device: self._streams, num_bytes=num_bytes)

    def compute(self, work: Callable[[], object]) -> None:
        for stream in self._streams:
            if isinstance(stream, DeafDeviceStream):
                stream.is_deaf = True
        work()

    def advance(self, stream: str, count: int) -> None:
        """Delay what follows in a stream."""
        getattr(self._streams, stream).run(lambda: torch.cuda._sleep(count * DELAY_CYCLES))

    def is_idle(self, stream: str) -> bool:
        found: list[bool] = []
        getattr(self._streams, stream).run(
            lambda: found.append(torch.cuda.current_stream().query())
        )
        return found[0]

    def run_until(self, is_reached: Callable[[], bool]) -> None:
        wait_until(is_reached, "the device is there", 60.0)

    def drain(self, _first: str) -> None:
        torch.cuda.synchronize()


def simulated(deaf: str = "") -> SimulatedDevice:
    device = SimulatedDevice()
    kinds = {name: DeafSimulatedStream if name == deaf else SimulatedStream for name in STREAMS}
    device.streams = Streams(*(kind(device, name) for name, kind in kinds.items()))
    return device


def random_actions(source: random.Random) -> Iterator[Action]:
    for _ in range(NUM_ACTIONS):
        place, slot = source.randrange(len(PLACES)), source.randrange(NUM_SLOTS)
        yield source.choice(
            [
                *[("compute", place), ("save", place, slot), ("load", slot, place)] * 4,
                *[("fetch", source.randrange(10), slot)] * 2,
                *[("advance", source.choice(STREAMS), source.randint(1, 6))] * 4,
                ("sleep",),
            ]
        )


@contextmanager
def without(what: str, make: Callable[..., object]) -> Iterator[Callable[[], object]]:
    """Yield a maker of devices that lack one wait."""
    if what in STREAMS:
        yield partial(make, what)
        return
    with mock.patch.object(SlotIO, "busy_until"):
        yield make


def soak(seconds: float, seed: int) -> list[dict[str, str | int]]:
    """Run engines one after the other for so long, and each control until it is found, or for half
    as long. Return a row for each."""
    make = CudaDevice if torch.cuda.is_available() else simulated
    rows = [_row("as it is", make, seconds, seed, is_control=False)]
    for what in CONTROLS:
        with without(what, make) as lacking:
            rows.append(_row(f"without waits: {what}", lacking, seconds / 2, seed, is_control=True))
    return rows


def _row(
    case: str, make: Callable[[], object], seconds: float, seed: int, *, is_control: bool
) -> dict[str, str | int]:
    source, began, count, wrong = random.Random(seed), time.monotonic(), 0, 0
    while not count or (time.monotonic() - began < seconds and not (wrong and is_control)):
        wrong += num_wrong_after(list(random_actions(source)), make())
        count += NUM_ACTIONS
    return {
        "case": case,
        "actions": count,
        "wrong": wrong,
        "failed": int((wrong > 0) != is_control),
    }

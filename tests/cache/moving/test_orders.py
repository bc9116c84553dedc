"""Saves, loads, evictions and sleep on a device that runs its streams in any order: no chunk is
ever wrong. Without one of the waits between the streams, the same search finds a wrong one."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, Phase, find, given, settings
from hypothesis import strategies as st

from kvferry.cache.moving.slot_io import SlotIO
from kvferry.layout.streams import Streams
from tests.cache.moving.orders import NUM_SLOTS, PLACES, Deaf, num_wrong_after
from tests.cache.moving.simulated_device import STREAMS, SimulatedDevice, SimulatedStream

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


@settings(max_examples=40, suppress_health_check=[HealthCheck.too_slow])
@given(ACTIONS)
def test_no_order_of_streams_makes_a_chunk_wrong(actions):
    assert num_wrong_after(actions, SimulatedDevice()) == 0


class DeafStream(Deaf, SimulatedStream):
    pass


def device_without(what: str, monkeypatch) -> SimulatedDevice:
    device = SimulatedDevice()
    if what == "busy_until":
        monkeypatch.setattr(SlotIO, "busy_until", lambda _io, _slot, _mark: None)
    else:
        streams = [
            (DeafStream if name == what else SimulatedStream)(device, name) for name in STREAMS
        ]
        device.streams = Streams(*streams)
    return device


@pytest.mark.parametrize("what", ["engine", "inward", "outward", "hashing", "busy_until"])
def test_without_a_wait_some_order_makes_a_chunk_wrong(what, monkeypatch):
    def is_wrong(actions) -> bool:
        return num_wrong_after(actions, device_without(what, patch)) > 0

    quick = settings(max_examples=2000, phases=[Phase.generate], deadline=None, database=None)
    with monkeypatch.context() as patch:
        found = find(ACTIONS, is_wrong, settings=quick)  # raises if there is none
    assert num_wrong_after(found, SimulatedDevice()) == 0

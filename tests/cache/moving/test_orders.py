"""Saves, loads, evictions and sleep on a device that runs its streams in any order: no chunk is
ever wrong. Without one of the waits between the streams, the same search finds a wrong one."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, Phase, find, given, settings
from hypothesis import strategies as st

from tests.cache.moving.orders import NUM_SLOTS, PLACES, num_wrong_after
from tests.cache.moving.simulated_device import STREAMS, SimulatedDevice
from tests.cache.moving.soak import CONTROLS, simulated, without

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
    device = SimulatedDevice()
    assert num_wrong_after(actions, device) == 0
    assert device.pinned == 0


@pytest.mark.parametrize("what", CONTROLS)
def test_without_a_wait_some_order_makes_a_chunk_wrong(what):
    quick = settings(max_examples=2000, phases=[Phase.generate], deadline=None, database=None)
    found = []
    with without(what, simulated) as make:

        def is_wrong(actions) -> bool:
            if num_wrong_after(actions, make()) > 0:
                found.append(actions)
            # A second run may be right: bytes that are read too early are what the memory held.
            return bool(found)

        find(ACTIONS, is_wrong, settings=quick)  # raises if there is none
    assert num_wrong_after(found[0], SimulatedDevice()) == 0

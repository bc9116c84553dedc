"""Checks the slots of a host pool (each is memory for one chunk), for tests of the cache."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any


def check_pool(pool: Any, holds: Iterable[Iterable[Any]] | None = None) -> None:  # noqa: ANN401
    """Check that no slot of a `HostPool` is lost, in two places, or in a wrong state; and, given
    all holds, that each pin has an owner. Raises AssertionError."""
    if holds is not None:
        owned = Counter(id(slot) for hold in holds for slot in hold)
        pins = {id(slot): slot.pins for slot in pool.pinned()}
        assert dict(owned) == pins, "pins without an owner, or of a slot that was assigned again"
    assigned: dict[int, Any] = pool._slots
    idle = pool._idle
    by_key = {key: pool.find(key) for key in pool._by_key}
    named = {id(slot) for slot in by_key.values()}
    slots = list(assigned.values())
    places = [*pool._free, *assigned]
    assert sorted(places) == list(range(len(places))), "slots in two places"
    assert len(places) <= pool.num_slots
    known = pool.loans._slots
    offered = {key: place for key, place in known.items() if place is not None}
    assert offered == {key: by_key[key].index for key in offered}
    pending = [by_key[key] for key in known.keys() - offered.keys()]
    assert all(slot.is_writing or slot.filling for slot in pending)
    for index, slot in assigned.items():
        assert slot.pins >= 0
        assert slot.index == index
        assert bool(slot.filling) == (slot.num_filling > 0), slot
        is_idle = slot.is_idle and not slot.pins
        found = slot.key in idle and by_key.get(slot.key) is slot
        assert found == is_idle, f"{slot} should be idle: {is_idle}"
        if id(slot) in named:
            assert slot.held or slot.filling, index
    strays = [slot for slot in by_key.values() if assigned.get(slot.index) is not slot]
    assert not strays, "keys of slots that have another chunk"
    assert pool.is_filling == any(slot.num_filling > 0 for slot in slots)
    assert pool.is_writing == any(slot.is_writing for slot in slots)

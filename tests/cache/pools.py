"""The slots of a host pool, and a check of all of them."""

from __future__ import annotations

from kvferry.cache.deciding.host_pool import HostPool, Slot
from kvferry.types import ChunkKey


def slot_at(pool: HostPool, index: int) -> Slot | None:
    """The slot at a place, also one that was given up."""
    return pool._slots.get(index)


def held_keys(pool: HostPool) -> set[ChunkKey]:
    """The chunks that have a slot."""
    return set(pool._by_key)


def check_pool(pool: HostPool) -> None:
    """Check that no slot is lost, in two places, or in a wrong state."""
    assigned, by_key, idle = pool._slots, pool._by_key, pool._idle
    slots = list(assigned.values())
    places = [*pool._free, *assigned]
    assert sorted(places) == list(range(len(places))), "slots in two places"
    assert len(places) <= pool.num_slots
    offered = {key: place for key, place in pool.loans._slots.items() if place is not None}
    assert offered == {key: by_key[key].index for key in offered}
    pending = [by_key[key] for key in pool.loans._slots.keys() - offered.keys()]
    assert all(slot.is_writing or slot.filling == pool._all_groups for slot in pending)
    for index, slot in assigned.items():
        assert slot.pins >= 0
        assert slot.index == index
        assert bool(slot.filling) == (slot.num_filling > 0), slot
        is_idle = not (slot.pins or slot.is_busy)
        found = slot.key in idle and by_key.get(slot.key) is slot
        assert found == is_idle, f"{slot} should be idle: {is_idle}"
        if by_key.get(slot.key) is slot:
            assert slot.held or slot.filling, slot
    found = [slot for slot in by_key.values() if assigned.get(slot.index) is not slot]
    assert not found, "keys of slots that have another chunk"
    assert pool.is_filling == any(slot.num_filling > 0 for slot in slots)
    assert pool.is_writing == any(slot.is_writing for slot in slots)

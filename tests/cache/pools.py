"""Looks into the slots of a host pool (each is memory for one chunk), and checks them all."""

from __future__ import annotations

from collections.abc import Iterable

from kvferry.cache.deciding.host_pool import Hold, HostPool, Slot
from kvferry.cache.deciding.scheduler import SharedStorageScheduler
from kvferry.types import ChunkKey


def slots_of(pool: HostPool) -> dict[int, Slot]:
    """Return the assigned slots by place, those that were given up included."""
    return pool._slots


def slot_at(pool: HostPool, index: int) -> Slot | None:
    """Return the slot at a place, even if it was given up."""
    return slots_of(pool).get(index)


def held_keys(pool: HostPool) -> set[ChunkKey]:
    """Return the keys of the chunks that have a slot."""
    return set(pool._by_key)


def holds_of(role: SharedStorageScheduler) -> list[Hold]:
    """Return all that owns pins: of each search, its hit and its audit; loads; and audits."""
    searches = [state.search for state in role.requests.by_id.values() if state.search]
    hits = [search.hit for search in searches if search.hit is not None]
    expected, running = role.audits._expected.values(), role.audits._running.values()
    audits = [*(hit.audit for hit in hits if hit.audit is not None), *expected, *running]
    return [
        *(search.pinned for search in searches),
        *(audit.hold for audit in audits),
        *(hold for _load, hold in role._loads.values()),
    ]


def check_pool(pool: HostPool, holds: Iterable[Hold] | None = None) -> None:
    """Check that no slot is lost, in two places, or in a wrong state; and, given all holds, that
    each pin has an owner."""
    if holds is not None:
        assert sum(map(len, holds)) == pool.num_pins, "pins without an owner"
    assigned, idle = slots_of(pool), pool._idle
    by_key = {key: pool.find(key) for key in held_keys(pool)}
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
        is_idle = not (slot.pins or slot.is_busy)
        found = slot.key in idle and by_key.get(slot.key) is slot
        assert found == is_idle, f"{slot} should be idle: {is_idle}"
        if by_key.get(slot.key) is slot:
            assert slot.held or slot.filling, slot
    found = [slot for slot in by_key.values() if assigned.get(slot.index) is not slot]
    assert not found, "keys of slots that have another chunk"
    assert pool.is_filling == any(slot.num_filling > 0 for slot in slots)
    assert pool.is_writing == any(slot.is_writing for slot in slots)

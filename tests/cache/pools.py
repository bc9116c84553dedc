"""Looks into the slots of a host pool (each is memory for one chunk), and checks them all."""

from __future__ import annotations

from kvferry.cache.deciding.host_pool import HostPool, Slot
from kvferry.testing.pools import check_pool
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


__all__ = ["check_pool", "held_keys", "slot_at", "slots_of"]

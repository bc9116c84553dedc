"""Looks into the slots of a host pool (each is memory for one chunk), and checks them all."""

from __future__ import annotations

from kvferry.cache.deciding.hold import Hold
from kvferry.cache.deciding.host_pool import HostPool, Slot
from kvferry.cache.deciding.scheduler import CacheScheduler
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


def holds_of(role: CacheScheduler) -> list[Hold]:
    """Return all that owns pins: of each search, its hit and its audit; loads; and audits."""
    requests = role.requests.by_id.values()
    searches = [request.search for request in requests if request.search is not None]
    hits = [search.hit for search in searches if search.hit is not None]
    of_requests = (request.audit for request in requests)
    audits = [
        *(hit.audit for hit in hits if hit.audit is not None),
        *(audit for audit in of_requests if audit is not None and audit.is_expected),
        *role.audits._running.values(),
    ]
    return [
        *(search.pinned for search in searches),
        *(audit.hold for audit in audits),
        *(request.load[1] for request in requests if request.load is not None),
    ]


__all__ = ["check_pool", "held_keys", "holds_of", "slot_at", "slots_of"]

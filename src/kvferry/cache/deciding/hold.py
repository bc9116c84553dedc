"""The pins of one owner."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from kvferry.cache.deciding.host_pool import HostPool, Slot


class Hold:
    """The pins of one owner: a search, a load or an audit. They move to another owner as a whole
    and are never copied, so each ends once. Runs in: scheduler thread.

    Invariant: each slot in it has one pin of it.
    """

    __slots__ = ("_pool", "_slots")

    def __init__(self, pool: HostPool) -> None:
        self._pool = pool
        self._slots: list[Slot] = []

    def __len__(self) -> int:
        return len(self._slots)

    def __iter__(self) -> Iterator[Slot]:
        return iter(self._slots)

    def __reversed__(self) -> Iterator[Slot]:
        return reversed(self._slots)

    def add(self, slot: Slot) -> None:
        """Pin a slot."""
        self._pool.pin(slot)
        self._slots.append(slot)

    def add_spare(self, first_token: int) -> Slot | None:
        """Pin a slot for the copy of an audit, if one can be had (`HostPool.spare`)."""
        slot = self._pool.spare(first_token)
        if slot is not None:
            self._slots.append(slot)
        return slot

    def keep_only(self, slots: Iterable[Slot]) -> None:
        """Pin these slots and end the earlier pins, in this order: none of them is let go."""
        before, self._slots = self._slots, list(slots)
        for slot in self._slots:
            self._pool.pin(slot)
        self._pool.unpin_all(before)

    def move(self) -> Hold:
        """Hand all pins over to a new owner; this one has none any more."""
        moved = Hold(self._pool)
        moved._slots, self._slots = self._slots, moved._slots
        return moved

    def release(self) -> None:
        """End all pins. Idempotent."""
        if self._slots:
            before, self._slots = self._slots, []
            self._pool.unpin_all(before)

"""What there is of the chunks of a prompt: one pass, which changes nothing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from kvferry.blocks.tables import Tables
from kvferry.cache.config import StatePlaces
from kvferry.cache.deciding.failed_keys import FailedKeys
from kvferry.cache.deciding.host_pool import NO_GROUPS, HostPool
from kvferry.cache.deciding.miss import ABSENT, Miss
from kvferry.contract.messages import LookupMiss
from kvferry.errors import FaultKind
from kvferry.keys import state_key
from kvferry.store.base import ASK_SECONDS, HERE, Store, Where
from kvferry.types import ChunkKey

# Strings and no enum: a look-up goes through thousands of chunks.
HELD = "held"
"""Every rank holds all of it."""
COMING = "coming"
"""It has a slot, and a part of it is still to be brought into that."""
STORED = "stored"
"""The store has it, and it has no slot."""
ASKED = "asked"
"""The store has not answered yet whether it has it."""
EXPECTED = "expected"
"""The store does not have it, and may soon have it."""
LACKING = "lacking"
"""The store does not have it."""
FAILED = "failed"
"""It could not be read a short time ago, so it is not waited for."""


class ChunkView(NamedTuple):
    """What there is of one chunk."""

    what: str
    held: frozenset[int] = NO_GROUPS
    """The groups that every rank holds."""
    is_own: bool = False
    """Whether it was computed here, and not read from the store."""
    tier: str = ""
    """Where the store has it, if it is `STORED` or `COMING` and that was to be looked at."""
    state: str = ""
    """What there is of the recurrent state behind it, which a hit that ends there needs, too:
    `HELD`, `COMING`, `STORED` or `ASKED`. Empty: nothing, or the model has none."""
    miss: Miss | None = None
    """If it is none of the first three: why."""


_STORED = ChunkView(STORED)
_LATE = Miss(LookupMiss.AWAY, f"asked, and no answer within {ASK_SECONDS:g} s", FaultKind.LATE)
_NOT_HERE = {
    Where.ASKED: ChunkView(ASKED, miss=_LATE),
    Where.COMING: ChunkView(EXPECTED, miss=ABSENT),
    Where.ABSENT: ChunkView(LACKING, miss=ABSENT),
}


class Survey(NamedTuple):
    """What there is of a prompt's chunks, from one of them on."""

    first: int
    """Index of that chunk."""
    chunks: Sequence[ChunkView]
    """The chunks up to the first one that is neither `HELD`, `COMING` nor `STORED`."""
    end: ChunkView | None
    """That one; None: there is none."""
    num_slots: int
    num_taken: int
    """Slots that cannot be had now (`HostPool.num_taken`)."""

    @property
    def num_known(self) -> int:
        """Number of leading chunks of the prompt that are here, those before `first` included."""
        return self.first + len(self.chunks)

    def what(self, number: int) -> str:
        """What there is of a known chunk from `first` on, by its index in the prompt."""
        return self.chunks[number - self.first].what

    def state(self, number: int) -> str:
        """What there is of the state behind a chunk from `first` on; nothing, if that is not
        known."""
        number -= self.first
        return self.chunks[number].state if number < len(self.chunks) else ""

    @property
    def is_state_asked(self) -> bool:
        """Whether the store has not answered yet whether it has a state."""
        return any(chunk.state is ASKED for chunk in self.chunks)

    def is_own(self, number: int) -> bool:
        """Whether a chunk from `first` on is known to be computed here."""
        number -= self.first
        return number < len(self.chunks) and self.chunks[number].is_own


class Surveyor:
    """Looks at memory, the store and what failed. Changes nothing. Runs in: scheduler thread; no
    I/O. `states`: where there are states; None: nowhere."""

    def __init__(
        self,
        tables: Tables,
        pool: HostPool,
        store: Store,
        unreadable: FailedKeys,
        states: StatePlaces | None = None,
    ) -> None:
        self._states = states
        self._pool = pool
        self._store = store
        self._unreadable = unreadable
        self._all_groups = tables.all_groups
        self._held = ChunkView(HELD, tables.all_groups)
        self._own = ChunkView(HELD, tables.all_groups, is_own=True)

    def survey(
        self,
        keys: Sequence[ChunkKey],
        first: int,
        *,
        with_tiers: bool = False,
        with_faults: bool = True,
    ) -> Survey:
        """Look at the chunks with these keys from `first` on.

        Args:
            with_tiers: say also where the store has a chunk that is not held.
            with_faults: say also which faults of the store may be why it lacks a chunk.
        """
        find, where, unreadable = self._pool.find, self._store.where, self._unreadable
        everything, whole, own = self._all_groups, self._held, self._own
        chunks: list[ChunkView] = []
        end = None
        for index in range(first, len(keys)):
            key = keys[index]
            slot = find(key)
            if slot is None:
                if key in unreadable:
                    end = ChunkView(FAILED, miss=unreadable.why(key))
                    break
                if (found := where(key)) is not HERE:
                    end = _NOT_HERE[found]
                    if with_faults:
                        end = self._with_faults(end)
                    break
                chunks.append(_STORED)
            elif slot.held >= everything:
                chunks.append(own if slot.is_save else whole)
            elif not slot.is_save and key in unreadable:
                end = ChunkView(FAILED, miss=unreadable.why(key))
                break
            else:
                chunks.append(ChunkView(COMING, slot.held, slot.is_save))
        if self._states is not None:
            self._add_states(chunks, keys, first, self._states)
        if with_tiers:
            tier_of = self._store.tier_of
            for number, chunk in enumerate(chunks):
                if chunk.what is not HELD:
                    chunks[number] = chunk._replace(tier=tier_of(keys[first + number]))
        return Survey(first, chunks, end, self._pool.num_slots, self._pool.num_taken)

    def _add_states(
        self,
        chunks: list[ChunkView],
        keys: Sequence[ChunkKey],
        first: int,
        states: StatePlaces,
    ) -> None:
        for number, chunk in enumerate(chunks):
            if states.is_behind(first + number):
                state = self._state(keys[first + number], states.num_parts)
                chunks[number] = chunk._replace(state=state)

    def _state(self, chunk: ChunkKey, num_parts: int) -> str:
        """What there is of all parts of the state behind a chunk."""
        found = HELD
        for part in range(num_parts):
            key = state_key(chunk, part)
            slot = self._pool.find(key)
            if slot is not None and slot.held >= self._all_groups:
                continue
            if key in self._unreadable and (slot is None or not slot.is_save):
                return ""
            if slot is not None:
                found = COMING if found is HELD else found
                continue
            where = self._store.where(key)
            if where is not HERE:  # of most states the first part is not
                return ASKED if where is Where.ASKED else ""
            found = STORED
        return found

    def _with_faults(self, end: ChunkView) -> ChunkView:
        faults = [(each.name, each.fault) for each in self._store.tiers() if each.fault]
        if not faults:
            return end
        why = "; ".join(f"{name} {fault}" for name, fault in faults)
        return end._replace(miss=Miss(LookupMiss.AWAY, why, faults[0][1].kind))

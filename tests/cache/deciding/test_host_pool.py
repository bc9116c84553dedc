"""The table of slots: which chunk each holds, which may be taken, which goes first."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from kvferry.cache.deciding.hold import Hold
from kvferry.cache.deciding.host_pool import HostPool, Slot
from kvferry.testing.stores import make_key
from kvferry.types import ChunkKey
from tests.cache.pools import check_pool, slot_at

GROUPS = frozenset([0, 1])
A, B, C, D = (make_key(number) for number in range(4))


def make_pool(num_slots: int = 3, num_ranks: int = 1) -> HostPool:
    return HostPool(num_slots, num_ranks, GROUPS)


def hold(pool: HostPool, key: ChunkKey, groups: frozenset[int] = GROUPS) -> Slot:
    """Fetch a chunk on all ranks; it is idle afterwards."""
    slot = pool.fetch(key, 0, groups)
    assert slot is not None
    pool.pin(slot)
    pool.pop_orders()
    while slot.num_filling:
        pool.report_filled(slot.index)
    pool.unpin(slot)
    check_pool(pool)
    return slot


def test_reports_of_places_that_are_none_or_of_nothing_under_way_are_ignored():
    pool = make_pool()
    slot = hold(pool, A)
    for index in (-1, pool.num_slots, 10**9, pool.num_slots - 1, slot.index):
        assert pool.report_filled(index) is None
        assert pool.report_filled(index, missed=True) is None
        assert pool.report_written(index) is None
    assert pool.holds(A, GROUPS)
    check_pool(pool)


def test_integrity_is_checked():
    pool = make_pool()
    slot = hold(pool, A)
    slot.pins = 1
    with pytest.raises(AssertionError, match="should be idle"):
        check_pool(pool)


@pytest.mark.parametrize("moves", [False, True])
def test_the_pins_of_a_hold_end_once_however_often_it_is_released_or_moved(moves):
    pool = make_pool()
    owner = Hold(pool)
    for key in (A, B):
        owner.add(hold(pool, key))
    assert owner.add_spare(0) is not None
    before = owner
    if moves:
        owner = before.move()
        assert (len(before), len(owner)) == (0, 3)
    check_pool(pool, [before, owner][not moves :])
    before.release()
    assert pool.num_pins == 3 * moves
    for _ in range(2):
        owner.release()
        assert (len(owner), pool.num_pins, pool.num_taken) == (0, 0, 0)
    check_pool(pool, [before, owner])


def test_a_hold_that_keeps_others_lets_none_of_them_go_between():
    """A fetch that nobody pins is cancelled."""
    pool = make_pool()
    owner = Hold(pool)
    slots = [pool.fetch(key, 0, GROUPS) for key in (A, B)]
    owner.keep_only(slots)
    owner.keep_only(slots[1:])
    assert [slot.key for slot in owner] == [B]
    assert (pool.find(A), pool.find(B)) == (None, slots[1])


def test_a_pin_without_an_owner_is_found():
    pool = make_pool()
    owner = Hold(pool)
    owner.add(hold(pool, A))
    check_pool(pool, [owner])
    with pytest.raises(AssertionError, match="without an owner"):
        check_pool(pool, [])


BEGUN = {
    "a fetch of the other groups": lambda pool: (
        hold(pool, A, frozenset([0])),
        pool.fetch(A, 0, GROUPS),
    ),
    "a fetch for peers": lambda pool: pool.fetch_whole(A, 0),
    "a save": lambda pool: pool.save(A, 0),
}


@pytest.mark.parametrize("is_carried", [False, True], ids=["to be ordered", "under way"])
@pytest.mark.parametrize("begun", BEGUN)
def test_a_reset_takes_back_an_order_and_lets_what_is_under_way_end_for_nobody(begun, is_carried):
    """The read or copy under way keeps its slot: it is not cancelled, and nothing finds or lends
    what it brings."""
    pool = make_pool(num_slots=1)
    BEGUN[begun](pool)
    slot = pool.find(A)
    if is_carried:
        pool.pop_orders()
    pool.clear()
    assert pool.pop_orders() == ((), ())
    if is_carried or slot.is_save:
        assert pool.fetch(B, 0, GROUPS) is None
        pool.report_filled(slot.index)
        pool.report_sealed(slot.index)
        pool.report_written(slot.index)
    assert pool.find(A) is None
    assert not pool.loans.knows(A)
    assert pool.fetch(B, 0, GROUPS) is not None
    check_pool(pool)


# -- random use, beside a simple model ----------------------------------------------------------


@dataclass
class Chunk:
    """What the model knows of one assigned slot: ranks still to report, pins, and its chunk."""

    key: ChunkKey
    is_save: bool
    pins: int = 0
    held: frozenset[int] = frozenset()
    filling: frozenset[int] = frozenset()
    ordered: bool = False
    filling_ranks: set[int] = field(default_factory=set)
    sealing_ranks: set[int] = field(default_factory=set)
    is_writing: bool = False
    failed: bool = False
    is_known: bool = True
    seconds: float = 0.0

    @property
    def is_busy(self) -> bool:
        return bool(self.filling_ranks or self.sealing_ranks or self.is_writing)


class PoolMachine(RuleBasedStateMachine):
    """Few slots, few chunks; each slot compared with the model after every rule."""

    def __init__(self) -> None:
        super().__init__()
        self.chunks: dict[int, Chunk] = {}  # by slot
        self.idle: OrderedDict[int, None] = OrderedDict()  # slots, longest idle first
        self.num_cancels = 0
        self.num_reports = 0

    @initialize(num_slots=st.integers(1, 4), num_ranks=st.integers(1, 2))
    def open(self, num_slots: int, num_ranks: int) -> None:
        self.num_slots, self.num_ranks = num_slots, num_ranks
        self.pool = HostPool(num_slots, num_ranks, GROUPS)

    # -- the model ------------------------------------------------------------------------------

    def known(self, key: ChunkKey) -> int | None:
        return next((i for i, c in self.chunks.items() if c.key == key and c.is_known), None)

    def settle(self, index: int) -> None:
        """After a change: a slot that nobody uses is idle if it is known, else free."""
        chunk = self.chunks[index]
        if chunk.pins or chunk.is_busy:
            self.idle.pop(index, None)
        elif chunk.is_known:
            self.idle[index] = None
            self.idle.move_to_end(index)
        else:
            self.idle.pop(index, None)
            del self.chunks[index]

    def assign(self, slot: Slot | None, key: ChunkKey, *, is_save: bool) -> Chunk | None:
        """The pool may have taken a free slot, else the one that was idle longest, else none."""
        has_free = len(self.chunks) < self.num_slots
        if not has_free and not self.idle:
            assert slot is None
            return None
        assert slot is not None
        if has_free:
            assert slot.index not in self.chunks, "a slot that is in use was assigned again"
        else:
            longest, _ = self.idle.popitem(last=False)
            assert slot.index == longest, "not the one that was idle longest"
            del self.chunks[longest]
        chunk = self.chunks[slot.index] = Chunk(key, is_save)
        return chunk

    # -- rules ----------------------------------------------------------------------------------

    @rule(key=st.sampled_from([A, B, C, D]), groups=st.sampled_from([{0}, {1}, {0, 1}]))
    def fetch(self, key: ChunkKey, groups: set[int]) -> None:
        wanted = frozenset(groups)
        index = self.known(key)
        slot = self.pool.fetch(key, 0, wanted)
        if index is None:
            chunk = self.assign(slot, key, is_save=False)
            if chunk is None:
                return
        else:
            assert slot is not None
            assert slot.index == index
            chunk = self.chunks[index]
        assert slot is not None
        if not chunk.filling and not wanted <= chunk.held:
            chunk.filling = wanted - chunk.held
            chunk.filling_ranks = set(range(self.num_ranks))
            chunk.ordered, chunk.failed = True, False
        # A fetch is pinned by who asked for it.
        self.pool.pin(slot)
        chunk.pins += 1
        self.settle(slot.index)

    @rule(key=st.sampled_from([A, B, C, D]))
    def save(self, key: ChunkKey) -> None:
        index = self.known(key)
        if index is not None and self.chunks[index].held >= GROUPS:
            return  # nobody saves what is held
        slot = self.pool.save(key, 0)
        num_writing = sum(chunk.is_writing for chunk in self.chunks.values())
        if num_writing >= max(1, self.num_slots // 2):
            assert slot is None
            return
        if index is not None:
            if self.chunks[index].pins or self.chunks[index].is_busy:
                assert slot is None
                return
            self.chunks[index].is_known = False
            self.settle(index)
        chunk = self.assign(slot, key, is_save=True)
        if chunk is not None:
            chunk.filling = GROUPS
            chunk.filling_ranks = set(range(self.num_ranks))
            chunk.sealing_ranks = set(range(self.num_ranks))
            chunk.is_writing = True

    @precondition(lambda self: any(chunk.held for chunk in self.chunks.values()))
    @rule(data=st.data())
    def pin(self, data: st.DataObject) -> None:
        held = sorted(i for i, c in self.chunks.items() if c.is_known and c.held)
        if held:
            index = data.draw(st.sampled_from(held))
            self.pool.pin(slot_at(self.pool, index))
            self.chunks[index].pins += 1
            self.settle(index)

    @precondition(lambda self: any(chunk.pins for chunk in self.chunks.values()))
    @rule(data=st.data(), all_of_them=st.booleans())
    def unpin(self, data: st.DataObject, all_of_them: bool) -> None:
        pinned = sorted(i for i, c in self.chunks.items() for _ in range(c.pins))
        for index in pinned if all_of_them else [data.draw(st.sampled_from(pinned))]:
            self.end_pin(index)

    def end_pin(self, index: int) -> None:
        chunk = self.chunks[index]
        self.pool.unpin(slot_at(self.pool, index))
        chunk.pins -= 1
        if not chunk.pins and chunk.filling and not chunk.held and not chunk.is_save:
            chunk.is_known = False
            if chunk.ordered:
                chunk.filling, chunk.filling_ranks = frozenset(), set()
            else:
                self.num_cancels += 1
        self.settle(index)

    @rule()
    def plan(self) -> None:
        fetches, cancels = self.pool.pop_orders()
        ordered = {i: c for i, c in self.chunks.items() if c.ordered}
        assert {fetch.chunk.slot: fetch.groups for fetch in fetches} == {
            index: tuple(sorted(chunk.filling)) for index, chunk in ordered.items()
        }
        assert all(ordered[fetch.chunk.slot].key == fetch.chunk.key for fetch in fetches)
        assert len(cancels) == self.num_cancels
        self.num_cancels = 0
        for chunk in ordered.values():
            chunk.ordered = False

    def reporting(self) -> list[tuple[int, int]]:
        """Slots and ranks with a fetch or copy that a plan has carried."""
        return sorted(
            (index, rank)
            for index, chunk in self.chunks.items()
            if not chunk.ordered
            for rank in chunk.filling_ranks
        )

    @precondition(lambda self: self.reporting())
    @rule(data=st.data(), missed=st.booleans())
    def report_filled(self, data: st.DataObject, missed: bool) -> None:
        self.end_filling(*data.draw(st.sampled_from(self.reporting())), missed=missed)

    @precondition(lambda self: any(chunk.filling_ranks for chunk in self.chunks.values()))
    @rule(missed=st.sampled_from([False, False, False, True]))
    def report_all_filled(self, missed: bool) -> None:
        self.plan()
        for index, rank in self.reporting():
            self.end_filling(index, rank, missed=missed)

    def end_filling(self, index: int, rank: int, *, missed: bool) -> None:
        chunk = self.chunks[index]
        self.num_reports += 1
        seconds = self.num_reports * 7 % 5 / 4
        slot = self.pool.report_filled(index, seconds, missed=missed)
        chunk.seconds = max(chunk.seconds, seconds)
        chunk.filling_ranks.discard(rank)
        chunk.failed |= missed
        if missed:
            chunk.sealing_ranks.discard(rank)
        assert bool(slot.filling) == bool(chunk.filling_ranks)
        if chunk.filling_ranks:
            return
        if not chunk.failed:
            chunk.held |= chunk.filling
        elif not chunk.held:
            chunk.is_known = False
        chunk.filling = frozenset()
        if chunk.failed:
            chunk.is_writing = False
        self.settle(index)

    def sealing(self) -> list[tuple[int, int]]:
        """Slots and ranks that have copied and not hashed."""
        return sorted(
            (index, rank)
            for index, chunk in self.chunks.items()
            for rank in chunk.sealing_ranks - chunk.filling_ranks
        )

    @precondition(lambda self: self.sealing())
    @rule(data=st.data())
    def report_sealed(self, data: st.DataObject) -> None:
        index, rank = data.draw(st.sampled_from(self.sealing()))
        slot, chunk = self.pool.report_sealed(index), self.chunks[index]
        chunk.sealing_ranks.discard(rank)
        if not chunk.sealing_ranks and chunk.is_writing:
            self.pool.seal(slot)
        self.settle(index)

    def writing(self) -> list[int]:
        return sorted(i for i, c in self.chunks.items() if c.is_writing and not c.sealing_ranks)

    @precondition(lambda self: self.writing())
    @rule(data=st.data())
    def report_written(self, data: st.DataObject) -> None:
        index = data.draw(st.sampled_from(self.writing()))
        assert self.pool.report_written(index) is not None
        self.chunks[index].is_writing = False
        self.settle(index)

    @precondition(lambda self: any(chunk.is_writing for chunk in self.chunks.values()))
    @rule(data=st.data())
    def give_up_writing(self, data: st.DataObject) -> None:
        """Also before it is hashed."""
        copied = sorted(i for i, c in self.chunks.items() if c.is_writing and not c.filling)
        if copied:
            index = data.draw(st.sampled_from(copied))
            self.pool.end_write(slot_at(self.pool, index))
            self.chunks[index].is_writing = False
            self.settle(index)

    @rule(key=st.sampled_from([A, B, C, D]))
    def drop(self, key: ChunkKey) -> None:
        index = self.known(key)
        self.pool.drop(key)
        if index is not None and not (self.chunks[index].pins or self.chunks[index].is_busy):
            self.chunks[index].is_known = False
            self.settle(index)

    @precondition(lambda self: self.num_reports > 5)  # else little else would happen
    @rule()
    def clear(self) -> None:
        self.num_reports = 0
        for index, chunk in list(self.chunks.items()):
            while chunk.pins:  # as a reset does first
                self.pool.unpin(slot_at(self.pool, index))
                chunk.pins -= 1
            if chunk.filling and not chunk.held and not chunk.is_save and chunk.is_known:
                chunk.is_known = False
                if not chunk.ordered:
                    self.num_cancels += 1
        self.pool.clear()
        for index, chunk in list(self.chunks.items()):
            chunk.is_known = False
            if chunk.ordered:
                chunk.filling, chunk.filling_ranks, chunk.ordered = frozenset(), set(), False
            self.settle(index)

    # -- what holds at all times ----------------------------------------------------------------

    @invariant()
    def equals_the_model(self) -> None:
        if not hasattr(self, "pool"):
            return
        check_pool(self.pool)
        for index in range(self.num_slots):
            slot, chunk = slot_at(self.pool, index), self.chunks.get(index)
            assert (slot is None) == (chunk is None), index
            if slot is None or chunk is None:
                continue
            assert (slot.key, slot.pins, slot.held) == (chunk.key, chunk.pins, chunk.held)
            assert (slot.filling, slot.seconds) == (chunk.filling, chunk.seconds)
            assert slot.num_filling == len(chunk.filling_ranks)
            assert slot.num_sealing == len(chunk.sealing_ranks)
            assert slot.is_writing == chunk.is_writing
            assert (self.pool.find(slot.key) is slot) == chunk.is_known
        taken = sum(bool(c.pins or c.is_busy) for c in self.chunks.values())
        assert self.pool.num_taken == taken
        assert self.pool.is_filling == any(c.filling_ranks for c in self.chunks.values())
        assert self.pool.is_writing == any(c.is_writing for c in self.chunks.values())


PoolMachine.TestCase.settings = settings(
    max_examples=200, stateful_step_count=50, deadline=None, derandomize=True
)
TestPoolMachine = PoolMachine.TestCase

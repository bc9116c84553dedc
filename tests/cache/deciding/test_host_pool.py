"""The table of slots: which chunk each holds, which may be taken, which goes first."""

from __future__ import annotations

import pytest

from kvferry.cache.deciding.hold import Hold
from kvferry.cache.deciding.host_pool import HostPool, Slot
from kvferry.testing.stores import make_key
from kvferry.types import ChunkKey
from tests.cache.pools import check_pool

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


def test_the_chunk_that_was_used_longest_ago_goes_first_and_none_that_is_in_use():
    pool = make_pool(num_slots=2)
    first, second = hold(pool, A), hold(pool, B)
    pool.pin(first)
    pool.unpin(first)
    assert pool.fetch(C, 0, GROUPS).index == second.index
    assert pool.find(B) is None
    pool.pin(first)
    assert pool.fetch(D, 0, GROUPS) is None
    assert pool.find(A) is first
    check_pool(pool)


def test_a_fetch_brings_what_is_lacking_of_a_chunk_beside_what_is_held():
    """Also after one that failed."""
    pool = make_pool()
    slot = hold(pool, A, frozenset([0]))
    for is_missed in (True, False):
        assert slot.held == {0}
        assert pool.fetch(A, 0, GROUPS) is slot
        ((fetch,), _) = pool.pop_orders()
        assert fetch.groups == (1,)
        pool.report_filled(slot.index, missed=is_missed)
        assert pool.find(A) is slot
    assert slot.held == GROUPS
    check_pool(pool)


UNPINNED = {
    "a fetch": (lambda pool: pool.fetch(A, 0, GROUPS), True),
    "a save": (lambda pool: pool.save(A, 0), False),
    "a fetch of the other groups": (BEGUN["a fetch of the other groups"], False),
}


@pytest.mark.parametrize("begun", UNPINNED)
def test_the_last_pin_cancels_a_fetch_into_a_slot_that_holds_nothing(begun):
    pool = make_pool()
    begin, is_cancelled = UNPINNED[begun]
    begin(pool)
    slot = pool.find(A)
    pool.pop_orders()
    for _ in range(2):
        pool.pin(slot)
    pool.unpin(slot)
    assert not pool.has_work
    pool.unpin(slot)
    assert pool.pop_orders() == ((), (slot.index,) * is_cancelled)
    assert (pool.find(A) is None) == is_cancelled
    pool.report_filled(slot.index)
    check_pool(pool)


def test_of_several_ranks_the_slowest_counts_and_one_that_fails_is_enough():
    pool = make_pool(num_ranks=2)
    slot = pool.fetch(A, 0, GROUPS)
    pool.pop_orders()
    for seconds in (2.0, 1.0):
        assert pool.find(A) is slot
        pool.report_filled(slot.index, seconds, missed=seconds > 1)
    assert (slot.seconds, pool.find(A), pool.num_taken) == (2.0, None, 0)
    check_pool(pool)


def test_half_of_the_slots_are_written_at_once():
    pool = make_pool(num_slots=4)
    slot = pool.save(A, 0)
    assert pool.save(B, 0) is not None
    assert pool.save(C, 0) is None
    pool.report_filled(slot.index, missed=True)
    assert pool.save(C, 0) is not None
    check_pool(pool)


@pytest.mark.parametrize("use", ["pinned", "being read"])
def test_a_chunk_whose_slot_is_in_use_is_neither_dropped_nor_saved_anew(use):
    pool = make_pool()
    slot = hold(pool, A, frozenset([0]))
    if use == "pinned":
        pool.pin(slot)
    else:
        pool.fetch(A, 0, GROUPS)
    pool.drop(A)
    assert pool.save(A, 0) is None
    assert pool.find(A) is slot
    check_pool(pool)


def test_a_slot_whose_write_was_given_up_is_in_use_until_it_is_hashed():
    pool = make_pool()
    slot = pool.save(A, 0)
    pool.report_filled(slot.index)
    pool.end_write(slot)
    assert pool.num_taken == 1
    pool.report_sealed(slot.index)
    assert pool.num_taken == 0
    check_pool(pool)

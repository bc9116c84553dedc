"""Broken chunks, little memory, late stores and hosts that break their word, with windows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from torch.testing import assert_close

from benchmarks.host import HostStep
from kvferry.cache.deciding.search import Hit, Settled
from kvferry.errors import ContractError
from kvferry.record.schema import RowRange
from kvferry.store.memory import MemoryStore
from kvferry.testing.clock import FakeClock
from kvferry.testing.faults import CorruptingStore, Gate, flip_bit
from kvferry.types import KVGroup
from tests.cache.conftest import record_bytes
from tests.cache.hosts import make_groups
from tests.cache.keeping import StallsFor, wait_for
from tests.cache.windowed import LIMIT, MIXED, Vanishing, group, opened, stored
from tests.host_tables import HostTable
from tests.simulated_host import SimulatedHost

# -- what is broken -------------------------------------------------------------------------------


def damaged_rows(groups: Sequence[KVGroup], component: int):
    """Flips a bit in the first row of a component."""
    with opened(groups, MemoryStore("schema")) as host:
        return flip_bit(8 * host.parts[0].schema.offset_of(RowRange(component, 0, 1)) + 3)


@pytest.mark.parametrize("chunk", range(10))
def test_damage_matters_where_it_is_read(chunk: int):
    prompt = list(range(81))
    for component, expected in ((0, 8 * chunk), (1, 80 if chunk < 8 else 8 * chunk)):
        store, keys = stored(MIXED, prompt)
        damage = damaged_rows(MIXED, component)
        broken = CorruptingStore(store, damage=damage, keys={keys[chunk]})
        with opened(MIXED, broken) as host:
            # A hit that is cut needs other windows: they are fetched before it is promised.
            assert host.run("reader", prompt).num_external_tokens == expected
            assert host.observer["records_corrupt"] == (expected < 80)
            assert host.observer["load_failed_chunks"] == 0


@pytest.mark.parametrize("chunk", range(10))
def test_a_chunk_that_vanished_cuts_the_hit_before_it(chunk: int):
    prompt = list(range(81))
    store, keys = stored(MIXED, prompt)
    with opened(MIXED, Vanishing(store, keys[chunk])) as host:
        assert host.run("reader", prompt).num_external_tokens == 8 * chunk
    all_window = [group(2, 12)]
    store, keys = stored(all_window, prompt)
    with opened(all_window, Vanishing(store, keys[chunk])) as host:
        expected = 80 if chunk < 8 else 8 * chunk
        assert host.run("reader", prompt).num_external_tokens == expected


@pytest.mark.parametrize("slots", range(1, 13))
def test_little_memory_makes_a_shorter_hit_never_a_wrong_one(slots: int):
    prompt = list(range(81))
    store, _keys = stored(MIXED, prompt)
    with opened(MIXED, store, memory_bytes=slots * record_bytes(MIXED, 8)) as host:
        assert host.pool.num_slots == slots
        assert host.run("reader", prompt).num_external_tokens == min(80, 8 * slots)
        assert host.observer["miss_tokens/no_memory"] == max(0, 80 - 8 * slots)


def test_a_deadline_within_windows_is_a_miss():
    """What came in time is not what a shorter hit needs, and there is no time to ask again."""
    prompt = list(range(81))
    store, keys = stored(MIXED, prompt)
    gate, clock = Gate(), FakeClock()
    with opened(MIXED, StallsFor(store, gate, {keys[9]}), clock=clock, io_threads=2) as host:
        request = host.add("reader", prompt)

        def has_rest() -> bool:
            assert host.scheduler.lookup(request, 0).num_tokens is None
            host.step([])
            return host.observer.snapshot().get("fetch_count", 0) == 9

        wait_for(has_rest)
        clock.advance(LIMIT)
        assert host.admit(request) == 0
        host.complete(request)
        assert host.observer["miss_tokens/deadline"] == 80
        gate.release()


# -- what a host could not recover from -----------------------------------------------------------


def test_one_table_of_several_groups_is_cut_before_a_chunk_that_vanished():
    groups = (*make_groups(num_layers=2), group(2, None))
    shared = (HostTable(block_size=4, layers=((0, (0, 1)), (1, (0, 1)))),)
    prompt = list(range(81))
    store, keys = stored(groups, prompt)
    with opened(groups, Vanishing(store, keys[4]), tables=shared) as host:
        assert host.run("reader", prompt).num_external_tokens == 32
        assert host.observer["load_failed_chunks"] == 0


# -- hosts that do not keep their word -------------------------------------------------------------


def load(host: SimulatedHost, request: Any, block_ids: Any, num_external: int) -> frozenset[int]:
    """Allocate again, run the step; what failed, if the blocks still hold what they did."""
    state = host.scheduler.requests.track(request)
    search = state.search
    search.state = Settled(Hit(0, 80, range(10), range(10)), search.state)
    host.scheduler.update_after_alloc(request, block_ids, num_external)
    plan = host.scheduler.build_plan(HostStep([], set(), set()))
    (rank,) = host.ranks
    before = {name: cache.clone() for name, cache in rank.caches.items()}
    with rank.driver.step(plan, set()) as step:
        pass
    failed = step.output.invalid_block_ids
    for name, cache in rank.caches.items():
        for block in {0, *failed}:
            assert_close(cache[block], before[name][block], equal_nan=True)
    return failed


@pytest.fixture
def waiting() -> Iterator[tuple[SimulatedHost, Any]]:
    """A host of one full and one windowed table, and a request that was promised a hit."""
    prompt = list(range(81))
    store, _keys = stored(MIXED, prompt)
    with opened(MIXED, store) as host:
        request = host.add("reader", prompt)
        while host.scheduler.lookup(request, 0).num_tokens is None:
            host.step([])
        host.grow(request, 0)
        request.num_computed_tokens = 80
        host.grow(request, 81)
        yield host, request


def test_a_null_block_within_the_window_is_a_failed_load(waiting):
    host, request = waiting
    full, windowed = (list(table) for table in request.block_ids)
    assert windowed[17:20] == [b for b in windowed[17:20] if b]
    windowed[18] = 0
    failed = load(host, request, (full, windowed), 80)
    assert failed
    assert 0 not in failed
    assert {*full[18:20], windowed[19]} <= failed


def test_a_hit_of_which_the_host_takes_less_fails_where_its_windows_were_not_fetched(waiting):
    host, request = waiting
    full, windowed = (list(table) for table in request.block_ids)
    # As if the table had been made for a hit of 40 tokens: its window is from block 7 on.
    windowed[7:10] = windowed[17:20]
    failed = load(host, request, (full, windowed), 40)
    assert set(windowed[8:10]) <= failed


def test_a_host_without_all_tables_is_warned(waiting):
    host, request = waiting
    with pytest.raises(ContractError, match="1 block tables"):
        load(host, request, request.block_ids[:1], 80)


def test_the_same_load_succeeds_if_the_host_keeps_its_word(waiting):
    host, request = waiting
    assert not load(host, request, request.block_ids, 80)
    host.check(request)

"""Hits of LRU and the optimum, beside caches that are tried one request at a time."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.cache.deciding.host_pool import HostPool
from kvferry.simulate.reuse import NEVER, optimum, previous_references, reuse_distances
from kvferry.testing.stores import make_key
from tests.cache.pools import check_pool
from tests.simulate.reference import Prompts, conversations, lru_hits, make_trace, most_hits

GROUPS = frozenset([0])


def previous(references: list[int]):
    return previous_references(np.asarray(references, np.int64))


def distances(prompts: Prompts):
    trace = make_trace(prompts, 16)
    return reuse_distances(trace.blocks, trace.starts)


@pytest.mark.parametrize("seed", range(5))
def test_lru_of_every_size_follows_from_the_distances(seed: int):
    prompts = conversations(seed=seed, num_requests=120)
    for capacity in (1, 2, 7, 13, 30, 50, 500):
        assert (distances(prompts) < capacity).tolist() == lru_hits(prompts, capacity)


@given(st.lists(st.lists(st.integers(0, 2), max_size=4), max_size=12), st.integers(1, 9))
def test_lru_of_any_prompts_follows_from_the_distances(branches, capacity):
    # A block stands for all tokens up to its end, as in the traces.
    names: dict[tuple[int, ...], int] = {}
    prompts = [
        [names.setdefault(tuple(branch[: at + 1]), len(names)) for at in range(len(branch))]
        for branch in branches
    ]
    assert (distances(prompts) < capacity).tolist() == lru_hits(prompts, capacity)


@pytest.mark.parametrize("capacity", [2, 7, 30])
def test_the_host_pool_hits_what_the_distances_say(capacity: int):
    prompts = conversations(seed=11, num_requests=150)
    pool = HostPool(capacity, 1, GROUPS)
    hits: list[bool] = []
    for prompt in prompts:
        keys = [make_key(block) for block in prompt]
        used, is_leading = [], True
        for key in keys:
            is_leading = is_leading and pool.holds(key, GROUPS)
            hits.append(is_leading)
            if is_leading:
                used.append(pool.find(key))
                pool.pin(used[-1])
        for key in keys[len(used) :]:
            slot = pool.find(key) or pool.save(key, 0)
            if slot is not None:
                pool.pin(slot)
                used.append(slot)
                if slot.filling:
                    pool.report_filled(slot.index)
                    pool.report_sealed(slot.index)
                    pool.report_written(slot.index)
        pool.unpin_all(used)
        pool.touch(keys)
        check_pool(pool)
    assert (distances(prompts) < capacity).tolist() == hits


@given(st.lists(st.integers(0, 4), max_size=11), st.integers(1, 3))
def test_the_optimum_is_the_most_that_any_decisions_give(references, capacity):
    assert optimum(previous(references), capacity).sum() == most_hits(tuple(references), capacity)


def test_a_block_that_is_needed_too_late_is_not_taken_in():
    # With one place: keeping 1 brings a hit, keeping 2 in its stead none.
    assert optimum(previous([1, 2, 1, 2]), 1).tolist() == [False, False, True, False]


def test_without_reuse_there_are_no_hits():
    assert distances([[3, 1, 2]]).tolist() == [NEVER] * 3
    assert not optimum(previous([3, 1, 2]), 5).any()


def test_a_block_that_a_request_names_twice_is_a_hit():
    assert distances([[3, 3]]).tolist() in ([0, NEVER], [NEVER, 0])

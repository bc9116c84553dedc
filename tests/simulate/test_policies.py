"""Replays of the classes that run, beside a list that is searched."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.cache.config import CacheBounds
from kvferry.cache.deciding.host_pool import HostPool
from kvferry.config import DEFAULT_CHUNK_TOKENS
from kvferry.errors import ConfigError
from kvferry.simulate.policies import MAX_CHANCES, Chances, Lru, check_policy, replay
from kvferry.testing.stores import make_key
from tests.cache.pools import check_pool
from tests.simulate.reference import conversations, lru_hits, make_trace, pool_hits

GROUPS = frozenset([0])


@pytest.mark.parametrize("capacity", [1, 2, 7, 30, 500])
@pytest.mark.parametrize("seed", range(4))
def test_the_orders_do_what_the_reference_does(seed: int, capacity: int):
    prompts = conversations(seed=seed, num_requests=120)
    trace = make_trace(prompts, 16)
    assert replay(trace, capacity, Lru()).hits.tolist() == pool_hits(prompts, capacity, 0)
    replayed = replay(trace, capacity, Chances(capacity)).hits.tolist()
    assert replayed == pool_hits(prompts, capacity, MAX_CHANCES)


@pytest.mark.parametrize("capacity", [2, 7, 30])
def test_the_replay_is_what_the_host_pool_does(capacity: int):
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
    replayed = replay(make_trace(prompts, 16), capacity, Lru())
    assert replayed.hits.tolist() == hits


@given(st.lists(st.lists(st.integers(0, 6), max_size=5), max_size=20), st.booleans())
def test_prompts_with_gaps_and_repetitions_keep_within_the_capacity(prompts, has_chances):
    order = Chances(3) if has_chances else Lru()
    replay(make_trace(prompts, 16), 3, order)
    assert len(order) == min(3, len({block for prompt in prompts for block in prompt}))


def test_what_one_request_uses_is_not_taken_if_only_repeated_blocks_are():
    trace = make_trace([[1, 2], [1, 3], [1, 2], [1, 2]], 16)
    outcome = replay(trace, 3, Lru(), repeated=True)
    assert outcome.hits.tolist() == [False] * 4 + [True, False] + [True] * 2
    assert outcome.num_written == 2


@pytest.mark.parametrize(("num_remembered", "num_written"), [(2, 2), (1, 0)])
def test_blocks_that_one_request_used_are_forgotten_after_others(num_remembered, num_written):
    # Blocks so large that as many tokens as the connector remembers are one or two of them.
    num_tokens = CacheBounds().max_used_once * DEFAULT_CHUNK_TOKENS
    trace = make_trace([[1], [2], [1], [2]], num_tokens // num_remembered)
    assert replay(trace, 3, Lru(), repeated=True).num_written == num_written


def test_a_prompt_that_fits_half_keeps_its_beginning():
    trace = make_trace([[1, 2], [1, 3], [4], [1, 2]], 16)
    hits = replay(trace, 3, Lru()).hits.tolist()
    assert hits[-2:] == [True, False], "2 was evicted before its parent"
    assert lru_hits(trace.blocks.tolist(), 3)[-2:] == [True, False]
    trace = make_trace([[1, 2, 3], [4], [1, 2, 3]], 16)
    assert replay(trace, 3, Lru()).hits.tolist()[-3:] == [True, True, False]
    assert lru_hits(trace.blocks.tolist(), 3)[-3:] == [False] * 3


def test_what_was_used_again_outlives_what_was_not():
    trace = make_trace([[1], [1], [2], [3], [1]], 16)
    assert replay(trace, 2, Lru()).hits.tolist() == [False, True, False, False, False]
    assert replay(trace, 2, Chances(2)).hits.tolist() == [False, True, False, False, True]


def test_an_unknown_policy_is_refused_with_the_nearest_name():
    with pytest.raises(ConfigError, match=r"unknown policy 'chance'; did you mean 'chances'\?"):
        check_policy("chance")

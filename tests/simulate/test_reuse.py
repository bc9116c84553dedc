"""Reuse distances and the optimum, beside caches that are tried one reference at a time."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.simulate.reuse import (
    NEVER,
    lru_outcome,
    optimum,
    previous_references,
    reuse_distances,
)
from tests.simulate.reference import conversations, lru_hits, most_hits

REFERENCES = st.lists(st.integers(0, 7), max_size=60)


def previous(references: list[int]):
    return previous_references(np.asarray(references, np.int64))


@given(REFERENCES)
def test_distances_count_the_other_blocks_in_between(references):
    distances = reuse_distances(previous(references)).tolist()
    for at, block in enumerate(references):
        earlier = [place for place in range(at) if references[place] == block]
        between = set(references[earlier[-1] + 1 : at]) if earlier else None
        assert distances[at] == (NEVER if between is None else len(between))


@given(REFERENCES, st.integers(1, 9))
def test_lru_of_every_size_follows_from_the_distances(references, capacity):
    hits, num_written = lru_outcome(reuse_distances(previous(references)), capacity)
    assert hits.tolist() == lru_hits(references, capacity)
    assert num_written == len(references) - hits.sum()


@pytest.mark.parametrize("seed", range(5))
def test_runs_of_a_prefix_are_counted_as_their_blocks(seed: int):
    references = [block for prompt in conversations(seed=seed, num_requests=60) for block in prompt]
    distances = reuse_distances(previous(references))
    for capacity in (1, 2, 13, 50):
        assert lru_outcome(distances, capacity).hits.tolist() == lru_hits(references, capacity)


@given(st.lists(st.integers(0, 4), max_size=11), st.integers(1, 3))
def test_the_optimum_is_the_most_that_any_decisions_give(references, capacity):
    hits, num_written = optimum(previous(references), capacity)
    assert hits.sum() == most_hits(tuple(references), capacity)
    assert num_written <= len(references) - hits.sum()


def test_a_block_that_is_needed_too_late_is_not_taken_in():
    # With one place: keeping 1 brings a hit, keeping 2 in its stead none.
    hits, num_written = optimum(previous([1, 2, 1, 2]), 1)
    assert hits.tolist() == [False, False, True, False]
    assert num_written == 1


def test_without_reuse_there_are_no_hits():
    assert reuse_distances(previous([3, 1, 2])).tolist() == [NEVER] * 3
    assert not optimum(previous([3, 1, 2]), 5).hits.any()

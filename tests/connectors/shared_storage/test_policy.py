"""Loading or computing: what measured rates decide, and what they must not."""

from __future__ import annotations

from kvferry.connectors.shared_storage.policy import (
    MIN_LOST,
    MIN_WAIT_SECONDS,
    PROBE_EVERY,
    LoadPolicy,
)


def make_policy(*, tokens_per_second: float = 1000.0) -> LoadPolicy:
    policy = LoadPolicy(load_timeout_seconds=5.0)
    policy.saw_compute(1000, 1000 / tokens_per_second)
    return policy


def test_a_small_hit_that_met_a_busy_moment_does_not_speak_against_large_ones():
    policy = make_policy()
    policy.saw_load(8, 0.1)  # 80 tokens a second
    assert policy.worth_loading(4000)


def test_one_load_that_lost_is_an_outlier_and_two_are_not():
    policy = make_policy()
    policy.saw_load(128, 3.0)
    assert policy.worth_loading(1000)
    policy.saw_load(128, 3.0)
    assert not policy.worth_loading(1000)


def test_a_load_that_was_given_up_counts_at_once():
    policy = make_policy()
    policy.saw_slow_load(400, 5.0)
    assert not policy.worth_loading(400)


def test_a_store_that_recovered_is_found_by_a_probe_and_then_used():
    policy = make_policy()
    for _ in range(MIN_LOST):
        policy.saw_load(128, 3.0)
    answers = [policy.worth_loading(1000) for _ in range(PROBE_EVERY)]
    assert answers == [False] * (PROBE_EVERY - 1) + [True]
    policy.saw_load(1000, 0.01)
    assert policy.worth_loading(1000)


def test_a_wait_lasts_as_long_as_computing_within_bounds():
    policy = make_policy()
    assert policy.wait_seconds(10) == MIN_WAIT_SECONDS
    assert policy.wait_seconds(2000) == 2.0
    assert policy.wait_seconds(1_000_000) == 5.0
    assert LoadPolicy(5.0).wait_seconds(10) == 5.0

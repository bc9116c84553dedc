"""Loading or computing: what measured rates decide, and what they must not."""

from __future__ import annotations

from collections import deque
from types import SimpleNamespace
from typing import Any

import pytest

from kvferry.cache.deciding.policy import (
    LONGEST_LOOKS_SECONDS,
    MIN_WAIT_SECONDS,
    RETRY_SLOW_SECONDS,
    LoadPolicy,
    ProducerWaits,
)
from kvferry.store.base import ASK_SECONDS
from kvferry.testing.clock import FakeClock


def step_of(*items: tuple[int, int, int]) -> list[Any]:
    """Requests of a step: tokens of the prompt, those computed before, and those of the step."""
    return [
        SimpleNamespace(
            request=SimpleNamespace(num_prompt_tokens=prompt),
            num_computed_tokens=computed,
            num_scheduled_tokens=scheduled,
        )
        for prompt, computed, scheduled in items
    ]


PREFILL = step_of((5000, 2000, 1000))


def make_policy(*, tokens_per_second: float = 1000.0, **options: Any) -> LoadPolicy:
    policy = LoadPolicy(load_timeout_seconds=5.0, **options)
    policy.saw_compute(1000, 1000 / tokens_per_second)
    return policy


def part_worth(policy: LoadPolicy, *parts: tuple[str | None, int], chunk: int = 100) -> int:
    """Tokens worth loading of a hit whose parts lie in these tiers."""
    tiers = [tier for tier, tokens in parts for _ in range(tokens // chunk)]
    worth = policy.worth_loading(tiers, chunk)
    if worth.is_trial:
        policy.tries_slow()
    return worth.num_chunks * chunk


def test_a_small_hit_that_met_a_busy_moment_does_not_speak_against_large_ones():
    policy = make_policy()
    policy.saw_load("file", 8, 0.1)  # 80 tokens a second
    assert not policy.is_any_slow
    assert part_worth(policy, ("file", 4000)) == 4000


def test_one_load_that_lost_is_an_outlier_and_two_are_not():
    policy = make_policy()
    policy.saw_load("file", 128, 3.0)
    assert part_worth(policy, ("file", 1000)) == 1000
    policy.saw_load("file", 128, 3.0)
    assert policy.is_any_slow
    assert part_worth(policy, ("file", 1000)) == 0


def test_a_tier_that_loses_every_second_time_is_slow():
    clock = FakeClock()
    policy = make_policy(clock=clock)
    num_loaded = 0
    for number in range(100):
        clock.advance(0.25)
        if part_worth(policy, ("s3", 1000)):
            num_loaded += 1
            policy.saw_load("s3", 1000, (3.0, 0.9)[number % 2])
    assert num_loaded < 20


def test_a_load_that_was_given_up_counts_at_once():
    policy = make_policy()
    policy.saw_slow_load("file", 400, 5.0)
    assert part_worth(policy, ("file", 400)) == 0


def test_a_store_that_recovered_is_found_by_a_probe_and_then_used():
    clock = FakeClock()
    policy = make_policy(clock=clock)
    policy.saw_slow_load("file", 128, 3.0)
    answers = []
    for _ in range(8):
        clock.advance(RETRY_SLOW_SECONDS / 4)
        answers.append(part_worth(policy, ("file", 1000)))
        assert part_worth(policy) == 0  # a prompt of which nothing is stored puts nothing off
    assert answers == [0, 0, 0, 1000] * 2
    policy.saw_load("file", 1000, 0.01)
    assert part_worth(policy, ("file", 1000)) == 1000


def test_a_hit_is_loaded_as_far_as_it_gains():
    policy = make_policy()
    policy.saw_load("file", 1000, 0.01)
    policy.saw_slow_load("s3", 1000, 5.0)
    assert part_worth(policy, ("file", 500), ("s3", 1000)) == 500
    assert part_worth(policy, (None, 300), ("s3", 1000)) == 300
    assert part_worth(policy, ("s3", 1000), ("file", 500)) == 0
    # A little of the slow tier costs less than what lies behind it gains.
    assert part_worth(policy, ("s3", 100), ("file", 5000)) == 5100
    assert part_worth(policy, ("file", 500), (None, 100)) == 600


def test_a_tier_that_is_slow_does_not_speak_against_another():
    policy = make_policy()
    policy.saw_slow_load("s3", 1000, 5.0)
    assert part_worth(policy, ("valkey", 1000)) == 1000
    policy.saw_load("valkey", 1000, 0.1)
    assert part_worth(policy, ("valkey", 1000)) == 1000


def test_the_numbers_of_a_decision_are_given():
    policy = make_policy()
    policy.saw_slow_load("s3", 1000, 5.0)  # at most 100 tokens a second
    worth = policy.worth_loading(["s3"] * 10, 100)
    assert worth.num_chunks == 0
    assert worth.load_seconds == pytest.approx(10.0)
    assert worth.compute_seconds == pytest.approx(1.0)


def test_a_wait_lasts_as_long_as_computing_within_bounds():
    policy = make_policy()
    assert policy.wait_seconds(10) == MIN_WAIT_SECONDS
    assert policy.wait_seconds(2000) == 2.0
    assert policy.wait_seconds(1_000_000) == 5.0
    assert LoadPolicy(5.0).wait_seconds(10) == 5.0


@pytest.mark.parametrize("num_ahead", [0, 1, 3])
def test_a_step_is_timed_from_the_end_of_the_one_before(num_ahead):
    """However many steps the host plans ahead, and whatever the others do."""
    clock = FakeClock()
    policy = LoadPolicy(100.0, clock)
    ahead: deque[int] = deque()
    for number in range(20):
        ahead.append(policy.begin_step(PREFILL, loads=number % 3 == 1))
        if len(ahead) > num_ahead:
            clock.advance(2.0)  # of the engine: 500 tokens a second
            step = ahead.popleft()
            policy.end_step(step)
            policy.end_step(step)  # by another rank
            clock.advance(0.001)
    assert policy.wait_seconds(10_000) == pytest.approx(20.0, rel=0.01)


def test_a_step_without_an_output_is_not_timed_with_the_next():
    clock = FakeClock()
    policy = LoadPolicy(100.0, clock)
    policy.begin_step(PREFILL, loads=False)
    clock.advance(1000.0)
    last = policy.begin_step(PREFILL, loads=False)
    clock.advance(2.0)
    policy.end_step(last)
    assert policy.wait_seconds(10_000) == pytest.approx(20.0)


def test_outputs_that_come_at_once_do_not_look_fast():
    clock = FakeClock()
    policy = make_policy(tokens_per_second=500.0, clock=clock)
    for _ in range(10):
        steps = [policy.begin_step(PREFILL, loads=False) for _ in range(2)]
        clock.advance(4.0)
        for step in steps:
            clock.advance(1e-6)
            policy.end_step(step)
    assert policy.wait_seconds(1000) > 1.0


DECODE = [(500, 500 + number, 1) for number in range(96)]
STEPS = {
    "decode": DECODE,
    "decode with drafts": [(500, 500 + number, 5) for number in range(96)],
    "recomputed answers": [(500, 500, 100), (500, 500, 100)],
    "few tokens of a prompt": [*DECODE, (90, 0, 90)],
    "the end of a prompt": [*DECODE, (1090, 1000, 90)],
}


@pytest.mark.parametrize("items", STEPS.values(), ids=STEPS)
def test_decoding_is_not_taken_for_prefill(items):
    clock = FakeClock()
    policy = LoadPolicy(100.0, clock)
    for _ in range(10):
        step = policy.begin_step(step_of((81920, 0, 8192)), loads=False)
        clock.advance(8192 / 30_000)
        policy.end_step(step)
    for _ in range(30):
        step = policy.begin_step(step_of(*items), loads=False)
        clock.advance(0.018)
        policy.end_step(step)
    assert policy.compute_rate == pytest.approx(30_000, rel=0.1)
    assert policy.wait_seconds(81920) == pytest.approx(81920 / 30_000, rel=0.1)


def test_a_step_of_prompts_beside_which_others_decode_shows_the_speed_of_prefill():
    clock = FakeClock()
    policy = LoadPolicy(100.0, clock)
    for _ in range(10):
        step = policy.begin_step(step_of(*DECODE, (4000, 1000, 960), (32, 0, 32)), loads=False)
        clock.advance(1.0)
        policy.end_step(step)
    assert policy.compute_rate == pytest.approx(992)


# -- waits for other engines ----------------------------------------------------------------------


def test_after_a_wait_in_vain_requests_only_look_and_now_and_then_one_waits_again(caplog):
    waits, now = ProducerWaits(5.0, "memory://server"), 0.0
    assert [waits.seconds(now) for _ in range(2)] == [5.0, 5.0]
    for number, looks in enumerate((10, 20, 40, 80, 160, 300, LONGEST_LOOKS_SECONDS)):
        now += 5.0
        for _ in range(5):  # of those that end together, one counts
            waits.in_vain(now)
        assert caplog.text.count("nothing came of 3 handovers") == (number > 1)
        assert waits.seconds(now + looks - 0.01) == ASK_SECONDS
        now += looks
        assert [waits.seconds(now) for _ in range(2)] == [5.0, ASK_SECONDS]
    assert "memory://server" in caplog.text
    waits.came()
    assert [waits.seconds(now) for _ in range(2)] == [5.0, 5.0]

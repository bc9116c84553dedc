"""What a report adds up: the prefix tree of a journal, steps of time, causes, and their bounds."""

from __future__ import annotations

import math
import random
import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.errors import ConfigError
from kvferry.journal import KEY_BYTES, JournalLine
from kvferry.report.gather import (
    AGE_UNKNOWN,
    MAX_BRANCHES,
    MAX_CHUNKS,
    MAX_STEPS,
    Branch,
    RecordedRequests,
    Survey,
    TimeSteps,
    causes,
)
from kvferry.store.base import Entry, Removal
from kvferry.types import ChunkKey

NOW = 1e9
SPACE = b"s" * 32


def key_of(number: int) -> ChunkKey:
    return ChunkKey(number.to_bytes(KEY_BYTES, "big") + bytes(32 - KEY_BYTES))


def recorded(*prompts: list[int], chunk_tokens: int = 7) -> RecordedRequests:
    requests = RecordedRequests()
    for numbers in prompts:
        keys = [key_of(number)[:KEY_BYTES].hex() for number in numbers]
        requests.add(JournalLine(NOW, chunk_tokens, 100, keys))
    return requests


def surveyed(requests: RecordedRequests, *numbers: int, num_bytes: int = 10) -> Survey:
    survey = Survey(requests.chunks(), NOW)
    for number in numbers:
        survey.add(Entry(key_of(number), num_bytes, NOW - number, SPACE))
    return survey


def test_prompts_with_a_common_start_become_a_tree_of_what_is_stored():
    requests = recorded([1, 2, 3, 4], [1, 2, 5, 6], [1, 2, 5, 6])
    survey = surveyed(requests, 1, 2, 3, 5, 9)
    assert survey.branches() == [
        Branch(SPACE, None, 0, 14, 40, 3, NOW - 1),
        Branch(SPACE, 0, 14, 21, 10, 1, NOW - 3),
        Branch(SPACE, 0, 14, 21, 10, 2, NOW - 5),
    ]
    assert survey.branches() == survey.branches()
    assert survey.spaces[SPACE].num_records == 5
    assert dict(survey.spaces[SPACE].ages) == {"used in the last hour": 10}  # the ninth


def test_a_run_goes_on_over_a_chunk_that_was_evicted_and_knows_its_namespace():
    survey = surveyed(recorded([1, 2, 3]), 3)
    assert survey.branches() == [Branch(SPACE, None, 0, 21, 10, 1, NOW - 3)]


@given(st.lists(st.lists(st.integers(0, 12), max_size=8), max_size=8), st.sets(st.integers(0, 12)))
def test_no_part_is_larger_than_the_whole_whatever_a_journal_says(prompts, stored):
    requests = recorded(*prompts)
    branches = surveyed(requests, *stored).branches()
    below = [0] * len(branches)
    for number, run in enumerate(branches):
        assert run.parent is None or run.parent < number
        if run.parent is not None:
            below[run.parent] += run.num_bytes
    assert all(size <= run.num_bytes for size, run in zip(below, branches, strict=True))
    told = {number for numbers in prompts for number in numbers}
    roots = sum(run.num_bytes for run in branches if run.parent is None)
    assert roots == 10 * len(told & stored)


def test_the_largest_branches_are_kept_with_what_they_follow():
    prompts = [
        [0, 10_000 + n, *range(20_000 + 50 * n, 20_001 + 50 * n + n % 40)] for n in range(600)
    ]
    requests = recorded(*prompts)
    stored = {number for numbers in prompts for number in numbers}
    branches = surveyed(requests, *stored).branches()
    assert len(branches) == MAX_BRANCHES
    assert branches[0].parent is None
    assert {run.parent for run in branches[1:]} == {0}
    smallest = sorted((2 + n % 40) * 10 for n in range(600))[600 - MAX_BRANCHES + 1]
    assert min(run.num_bytes for run in branches) >= smallest


def test_memory_is_bounded_whatever_is_in_the_journal_and_the_store():
    rng = random.Random(3)
    requests = RecordedRequests()
    tracemalloc.start()
    try:
        for _ in range(300):
            keys = [rng.randbytes(KEY_BYTES).hex() for _ in range(MAX_CHUNKS // 100)]
            requests.add(JournalLine(rng.random() * 2e9, 7, 100, keys, hits={"file": 1}))
        chunks = requests.chunks()
        survey = Survey(chunks, NOW)
        for _ in range(10_000):
            survey.add(Entry(ChunkKey(rng.randbytes(32)), 10, NOW, SPACE))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert MAX_CHUNKS * 0.9 < len(chunks) <= MAX_CHUNKS
    assert peak < 70e6  # all of the journal would take three times as much
    assert survey.spaces[SPACE].num_records == 10_000


@given(
    st.lists(st.tuples(st.floats(0, 1e300), st.sampled_from("abc"), st.integers(0, 9)), min_size=1)
)
def test_steps_of_time_lose_nothing_and_are_few(amounts):
    steps = TimeSteps()
    for at, name, amount in amounts:
        steps.add(at, name, amount)
    found = list(steps.steps())
    assert sum(sums.total() for _, sums in found) == sum(amount for *_, amount in amounts)
    starts = [at for at, _ in found]
    assert starts == sorted(starts)
    assert starts[-1] - starts[0] < MAX_STEPS * steps.seconds
    assert all(math.isfinite(at) for at in starts)


def test_keys_that_are_none_are_an_error():
    with pytest.raises(ConfigError, match="hexadecimal"):
        RecordedRequests().add(JournalLine(1.0, 7, 100, ["xyz"]))


def test_a_record_whose_last_use_is_not_known_is_not_old():
    survey = Survey({}, NOW)
    for last_used in (0.0, NOW - 10, NOW - 1e6, math.nan):
        survey.add(Entry(key_of(1), 1, last_used, SPACE))
    assert dict(survey.spaces[SPACE].ages) == {
        AGE_UNKNOWN: 2, "used in the last hour": 1, "not used for a week": 1,
    }  # fmt: skip


def test_removals_are_counted_by_reason_and_detail():
    removals = [
        Removal(key_of(n), 10, NOW - n, reason, detail, "1@host")
        for n, (reason, detail) in enumerate(
            [("evicted", "quota"), ("quarantined", "bad_leaf"), ("evicted", "quota")]
        )
    ]
    assert causes(removals) == [
        ("evicted", "quota", 2, 20, NOW),
        ("quarantined", "bad_leaf", 1, 10, NOW - 1),
    ]

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
    MAX_CHUNKS,
    MAX_RUNS,
    MAX_STEPS,
    RecordedRequests,
    Survey,
    TimeSteps,
    causes,
)
from kvferry.store.catalogue import Entry, Removal
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


def runs_of(survey: Survey) -> list[tuple]:
    """Of each run: namespace, place of the run before it, its tokens, bytes, uses and last use."""
    runs = survey.runs()
    return [
        (run.namespace, runs.index(run.parent.run) if run.parent else None,
         run.parent.end if run.parent else 0, run.run_end, run.all_bytes, run.uses, run.last_used)
        for run in runs
    ]  # fmt: skip


def test_prompts_with_a_common_start_become_a_tree_of_what_is_stored():
    requests = recorded([1, 2, 3, 4], [1, 2, 5, 6], [1, 2, 5, 6])
    survey = surveyed(requests, 1, 2, 3, 5, 9)
    assert runs_of(survey) == [
        (SPACE, None, 0, 14, 40, 3, NOW - 1),
        (SPACE, 0, 14, 21, 10, 1, NOW - 3),
        (SPACE, 0, 14, 21, 10, 2, NOW - 5),
    ]
    assert runs_of(survey) == runs_of(survey)
    assert survey.spaces[SPACE].num_records == 5
    assert dict(survey.spaces[SPACE].ages) == {"used in the last hour": 10}  # the ninth


def test_a_run_goes_on_over_a_chunk_that_was_evicted_and_knows_its_namespace():
    survey = surveyed(recorded([1, 2, 3]), 3)
    assert runs_of(survey) == [(SPACE, None, 0, 21, 10, 1, NOW - 3)]


def test_a_run_ends_where_a_shorter_prompt_ends():
    survey = surveyed(recorded([1, 2], [1, 2, 3]), 1, 2, 3)
    assert runs_of(survey) == [
        (SPACE, None, 0, 14, 30, 2, NOW - 1),
        (SPACE, 0, 14, 21, 10, 1, NOW - 3),
    ]


def test_a_run_is_in_the_namespace_of_the_one_that_it_follows_whatever_a_store_says():
    survey = surveyed(recorded([1], [1, 2]), 1)
    survey.add(Entry(key_of(2), 10, NOW - 2, b"t" * 32))
    assert [namespace for namespace, *_ in runs_of(survey)] == [SPACE, SPACE]


@given(st.lists(st.lists(st.integers(0, 12), max_size=8), max_size=8), st.sets(st.integers(0, 12)))
def test_no_part_is_larger_than_the_whole_whatever_a_journal_says(prompts, stored):
    runs = runs_of(surveyed(recorded(*prompts), *stored))
    below = [0] * len(runs)
    for number, (_, parent, _, _, num_bytes, *_) in enumerate(runs):
        if parent is not None:
            assert parent < number
            below[parent] += num_bytes
    sizes = [num_bytes for _, _, _, _, num_bytes, *_ in runs]
    assert all(size <= whole for size, whole in zip(below, sizes, strict=True))
    told = {number for numbers in prompts for number in numbers}
    roots = sum(size for (_, parent, *_), size in zip(runs, sizes, strict=True) if parent is None)
    assert roots == 10 * len(told & stored)


def test_the_largest_runs_are_kept_with_what_they_follow():
    prompts = [
        [0, 10_000 + n, *range(20_000 + 50 * n, 20_001 + 50 * n + n % 40)] for n in range(600)
    ]
    stored = {number for numbers in prompts for number in numbers}
    runs = runs_of(surveyed(recorded(*prompts), *stored))
    assert len(runs) == MAX_RUNS
    assert [parent for _, parent, *_ in runs] == [None] + [0] * (MAX_RUNS - 1)
    smallest = sorted((2 + n % 40) * 10 for n in range(600))[600 - MAX_RUNS + 1]
    assert min(num_bytes for _, _, _, _, num_bytes, *_ in runs) >= smallest


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
            [("evicted", "quota"), ("damaged", "bad_checksum"), ("evicted", "quota")]
        )
    ]
    assert causes(removals) == [
        ("evicted", "quota", 2, 20, NOW),
        ("damaged", "bad_checksum", 1, 10, NOW - 1),
    ]

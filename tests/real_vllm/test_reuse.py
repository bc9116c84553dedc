"""One engine stores, another reads: lengths, block sizes, preemption, aborts."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.real_vllm.conftest import MakePrompt
from tests.real_vllm.harness import (
    Oracle,
    Process,
    assert_reused,
    assert_same,
    expected_hit,
    kvferry,
    records,
    wait_for_records,
)

Models = dict[str, Path]


def num_chunks(prompts: list[list[int]], chunk: int = 128) -> int:
    return sum(len(prompt) // chunk for prompt in prompts)


def test_a_new_process_reads_what_another_stored_and_what_it_lacks_and_then_has_it_in_memory(
    tmp_path: Path, models: Models, make_prompt: MakePrompt, oracle: Oracle,
    first: Process, second: Process,
) -> None:  # fmt: skip
    prompts = [make_prompt(n) for n in (300, 385, 777, 1000)]
    start = make_prompt(300)
    longer = make_prompt(900, start=start)
    own, [own_longer] = oracle(prompts), oracle([longer])
    with first.engine(models["plain"], kvferry(tmp_path)) as engine:
        cold = engine.generate(prompts)
        engine.generate([longer])
    wait_for_records(tmp_path, num_chunks([*prompts, longer]))
    with second.engine(models["plain"], kvferry(tmp_path)) as engine:
        warm = engine.generate(prompts)
        beginning = engine.generate([start])
        rest = engine.generate([longer])
        second.call("reset", 30, connector=False)
        again = engine.generate(prompts)
    hits = [expected_hit(len(prompt)) for prompt in prompts]
    assert_reused(own, cold, warm, hits)
    # Each record is read once; some before they are asked for, as the engine starts.
    fetched = sum(each.counted("fetch_seconds_count") for each in (warm, beginning, rest))
    assert fetched == num_chunks([*prompts, longer])
    assert_same([own_longer], rest)
    assert (beginning.external, rest.local, rest.external) == (256, 256, 640)
    assert_same(own, again)
    assert [answer.cached for answer in again] == hits
    assert again.counted("fetch_seconds_count") == 0
    assert again.counted('hit_tokens_total{"tier": "memory"}') == sum(hits)


# A hit that comes late is cut short, as on a busy machine.
NUM_TRIES = 4

EDGES = [1, 2, 31, 32, 33, 127, 128, 129, 130, 191, 192, 193, 255, 256, 257, 383, 384, 385]


@pytest.mark.parametrize(
    ("chunk", "block", "lengths"),
    [(32, 32, list(range(1, 98))), (128, 128, EDGES), (128, 32, EDGES), (96, 64, EDGES)],
)
def test_prompts_of_one_token_to_three_blocks_and_one_hit_whole_blocks_but_never_the_last_token(
    chunk: int, block: int, lengths: list[int], tmp_path: Path, models: Models,
    make_prompt: MakePrompt, oracle: Oracle, first: Process, second: Process,
) -> None:  # fmt: skip
    prompts = [make_prompt(n) for n in lengths]
    own = oracle(prompts, max_tokens=2)
    connector = kvferry(tmp_path, chunk_tokens=chunk)
    with first.engine(models["plain"], connector, block_size=block) as engine:
        cold = engine.generate(prompts, max_tokens=2)
    wait_for_records(tmp_path, num_chunks(prompts, chunk))
    assert_same(own, cold)
    hits = [expected_hit(n, chunk=chunk, block=block) for n in lengths]
    with second.engine(models["plain"], connector, block_size=block) as engine:
        for _ in range(NUM_TRIES):
            warm = engine.generate(prompts, max_tokens=2)
            assert_same(own, warm)
            if [answer.cached for answer in warm] == hits:
                break
            second.call("reset", 30, connector=False)
    assert [answer.cached for answer in warm] == hits


def test_requests_that_are_preempted_and_resumed_say_the_same(
    tmp_path: Path, models: Models, make_prompt: MakePrompt, oracle: Oracle,
    first: Process, second: Process,
) -> None:  # fmt: skip
    prompts = [make_prompt(n) for n in (250, 251, 253, 254)]
    own = oracle(prompts, max_tokens=40)
    small = {"num_gpu_blocks_override": 10, "max_model_len": 512}  # 8 of 2 blocks, then of 3
    connector = kvferry(tmp_path, save_generated=True)
    with first.engine(models["plain"], connector, **small) as engine:
        cold = engine.generate(prompts, max_tokens=40, together=True)
    wait_for_records(tmp_path, 4)
    with second.engine(models["plain"], connector, **small) as engine:
        warm = engine.generate(prompts, max_tokens=40, together=True)
    assert_same(own, cold)
    assert_same(own, warm)
    for run in (cold, warm):
        assert run.metrics["vllm:num_preemptions_total"] > 0
    assert warm.external >= 4 * 128


def test_aborts_while_loading_or_saving_leave_an_engine_that_serves_and_leaks_no_block(
    tmp_path: Path, models: Models, make_prompt: MakePrompt, oracle: Oracle,
    first: Process, second: Process,
) -> None:  # fmt: skip
    prompts = [make_prompt(900) for _ in range(8)]
    own = oracle(prompts)
    small = {"num_gpu_blocks_override": 20}
    aborted = [{"token_ids": prompt, "abort_after": index} for index, prompt in enumerate(prompts)]
    for process in (first, second):  # the second finds what the first could store
        with process.engine(models["plain"], kvferry(tmp_path), **small) as engine:
            engine.generate(aborted, max_tokens=6, together=True)
            answers = engine.generate(prompts, together=True)
            assert engine.metrics()["vllm:kv_cache_usage_perc"] == 0
        assert_same(own, answers)
    assert len(records(tmp_path)) == num_chunks(prompts)

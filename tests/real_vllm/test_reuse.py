"""One engine stores, another reads: lengths and block sizes."""

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
    [(32, 32, list(range(1, 98))), (96, 64, EDGES)],
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

"""Hybrids while blocks are short: hits take blocks, requests lose theirs, come at any time and are
aborted. The engine lives, all blocks come back, and the answers are right."""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.real_vllm.conftest import Pool
from tests.real_vllm.harness import (
    Answers,
    Engine,
    Process,
    assert_same,
    kvferry,
    wait_for_records,
)
from tests.real_vllm.host import RELEASE
from tests.real_vllm.hybrids import options_of, write_hybrid

pytestmark = pytest.mark.skipif(RELEASE < (0, 32), reason="its host hands off no states")

ARCH = "granitemoehybrid"
LONG = (300, 300, 400, 400)
NEAR_THE_END_OF_A_BLOCK = (120, 250, 260, 370, 380, 380, 500, 505)
LONG_ANSWERS, ANSWERS = 400, 20


@dataclass(frozen=True)
class Stored:
    """Prompts that a process stored, and the answers of an engine without a connector."""

    model: Path
    store: Path
    prompts: list[list[int]]
    long: Answers
    short: Answers


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory, pool: Pool) -> Stored:
    root = tmp_path_factory.mktemp("schedules")
    model, options, source = write_hybrid(root, ARCH), options_of(ARCH), random.Random(60)
    shared = [source.randrange(3, 320) for _ in range(256)]
    prompts = [
        [*shared[: length // 2], *(source.randrange(3, 320) for _ in range(length - length // 2))]
        for length in (*LONG, *NEAR_THE_END_OF_A_BLOCK)
    ]
    with pool.get("second").engine(model, **options) as engine:
        long = engine.generate(prompts[: len(LONG)], max_tokens=LONG_ANSWERS)
        short = engine.generate(prompts, max_tokens=ANSWERS)
    store = root / "store"
    with pool.get("first").engine(model, kvferry(store, chunk_tokens=128), **options) as engine:
        engine.generate(prompts, max_tokens=1)
        whole = {
            tuple(prompt[:stop]) for prompt in prompts for stop in range(128, len(prompt) + 1, 128)
        }
        wait_for_records(store, 2 * len(whole))  # KV and the state behind it
    return Stored(model, store, prompts, long, short)


def few_blocks(number: int) -> dict[str, Any]:
    return {**options_of(ARCH), "num_gpu_blocks_override": number, "max_model_len": 1024}


def free_blocks(process: Process) -> int:
    count: int = process.call("blocks", 30)["free"]
    return count


def assert_nothing_failed(answers: Iterable[Answers]) -> None:
    for each in answers:
        assert each.counted("hook_failed", "load_failed", "contract", "mismatch", "corrupt") == 0


@pytest.mark.parametrize("num_blocks", [26, 21])
def test_hits_while_blocks_are_short_are_right_and_the_engine_lives(
    num_blocks: int, stored: Stored, second: Process
) -> None:
    connector = kvferry(stored.store, chunk_tokens=128, save_generated=True)
    prompts = stored.prompts[: len(LONG)]
    with second.engine(stored.model, connector, **few_blocks(num_blocks)) as engine:
        free = free_blocks(second)
        runs = [engine.generate(prompts, max_tokens=LONG_ANSWERS, together=True) for _ in range(2)]
        for answers in runs:
            assert_same(stored.long, answers)
            assert answers.metrics["vllm:num_preemptions_total"] > 0
        assert runs[0].external >= 256 + 256 + 384 + 384
        assert_nothing_failed(runs)
        assert free_blocks(second) == free


def schedule(source: random.Random, stored: Stored) -> tuple[list[dict[str, Any]], list[int]]:
    """Return requests that come in some steps, maybe to be aborted or to have all lose their
    blocks; and the index of the prompt of each."""
    chosen = [source.randrange(len(stored.prompts)) for _ in range(source.randrange(2, 7))]
    requests = []
    for number in chosen:
        request: dict[str, Any] = {
            "token_ids": stored.prompts[number],
            "max_tokens": source.randrange(1, ANSWERS + 1),
            "after": source.randrange(12),
        }
        if source.random() < 0.2:
            request["abort_after"] = request["after"] + source.randrange(1, 12)
        if source.random() < 0.1:
            request["preempts_after"] = source.randrange(2, 20)
        requests.append(request)
    return requests, chosen


def run_schedules(engine: Engine, stored: Stored, seeds: Iterable[int]) -> list[Answers]:
    free, runs = free_blocks(engine.process), []
    for seed in seeds:
        source = random.Random(seed)
        requests, chosen = schedule(source, stored)
        answers = engine.generate(requests, together=True)
        for answer, request, number in zip(answers, requests, chosen, strict=True):
            expected = stored.short[number]
            if "abort_after" not in request:
                assert len(answer.tokens) == request["max_tokens"], seed
            assert answer.tokens == expected.tokens[: len(answer.tokens)], seed
        if source.random() < 0.5:
            engine.process.call("reset", 30, connector=source.random() < 0.2)
        assert free_blocks(engine.process) == free, seed
        runs.append(answers)
    assert_nothing_failed(runs)
    return runs


@pytest.mark.parametrize("seeds", [range(12), pytest.param(range(12, 212), marks=pytest.mark.slow)])
def test_requests_of_any_schedule_are_right_while_blocks_are_short(
    seeds: range, stored: Stored, second: Process
) -> None:
    connector = kvferry(stored.store, chunk_tokens=128, save_generated=True, audit=0.3)
    with second.engine(stored.model, connector, **few_blocks(13)) as engine:
        runs = run_schedules(engine, stored, seeds)
    preempted = sum(run.metrics.get("vllm:num_preemptions_total", 0) > 0 for run in runs)
    assert preempted > len(seeds) // 4
    assert sum(run.external > 0 for run in runs) > len(seeds) // 4
    assert sum(run.counted("audits") for run in runs) > 0

"""Several sequences of a prompt, logprobs of prompts, many requests at once.

One engine stores; others, most of them with memory for a single hit at a time, read.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from tests.real_vllm.conftest import Pool
from tests.real_vllm.harness import Answers, assert_same, kvferry, wait_for_records

Models = dict[str, Path]

SMALL = {"memory_bytes": 5 << 20, "io_threads": 2}  # nine slots
SAMPLING = {
    "sequences": {"n": 3, "temperature": 1.0, "seed": 7},
    "prompt_logprobs": {"prompt_logprobs": 1},
}


@dataclass(frozen=True)
class Runs:
    """The same prompts, by what is asked about them: to an engine without a connector (`own`), to
    one that stores (`cold`), to one in another process (`warm`), and to one there in which every
    request needs a hit of ours (`uncached`: vLLM's own prefix cache is off)."""

    store: Path
    prompts: dict[str, list[list[int]]]
    own: dict[str, Answers]
    cold: dict[str, Answers]
    warm: dict[str, Answers]
    uncached: dict[str, Answers]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, models: Models, pool: Pool) -> Runs:
    source = random.Random(40)

    def prompt(num_tokens: int, start: list[int] | None = None) -> list[int]:
        return [*(start or []), *(source.randrange(3, 320) for _ in range(num_tokens))]

    shared = prompt(768)
    prompts = {
        "sequences": [prompt(n) for n in (700, 257, 100)],
        "prompt_logprobs": [prompt(n) for n in (700, 257, 100)],
        "many": [prompt(n, shared) for n in range(1, 250, 8)],
    }

    def run(name: str, connector: dict[str, Any] | None, **options: Any) -> dict[str, Answers]:
        answers = {}
        process = pool.get(name)
        with process.engine(models["plain"], connector, max_num_seqs=32, **options) as engine:
            for what, some in prompts.items():
                asked = [{"token_ids": p, "sampling": SAMPLING.get(what, {})} for p in some]
                answers[what] = engine.generate(asked, together=what == "many")
        return answers

    store = tmp_path_factory.mktemp("many") / "store"
    own, cold = run("first", None), run("first", kvferry(store))
    wait_for_records(store, 7 + 7 + 6 + 16)
    small = kvferry(store, **SMALL)
    warm, uncached = run("second", small), run("second", small, enable_prefix_caching=False)
    return Runs(store, prompts, own, cold, warm, uncached)


def test_three_sequences_of_a_prompt_are_the_same_from_the_store(runs: Runs) -> None:
    own, warm = runs.own["sequences"], runs.warm["sequences"]
    assert len({tuple(answer.tokens) for answer in own}) == 9
    for run in (runs.cold, runs.warm, runs.uncached):
        assert_same(own, run["sequences"])
    assert [answer.cached for answer in warm] == [640] * 3 + [256] * 3 + [0] * 3
    assert warm.external == 640 + 256  # the other sequences had it of the first one
    assert runs.uncached["sequences"].metrics["vllm:kvferry_hits_total"] == 6


def test_logprobs_of_a_prompt_are_whole_and_right_though_its_kv_is_stored(runs: Runs) -> None:
    own = runs.own["prompt_logprobs"]
    for run in (runs.cold, runs.warm, runs.uncached):
        answers = run["prompt_logprobs"]
        assert_same(own, answers)
        lengths = [len(answer.prompt_logprobs) for answer in answers]
        assert lengths == [len(prompt) for prompt in runs.prompts["prompt_logprobs"]]
        ours, theirs = (
            [replace(answer, logprobs=answer.prompt_logprobs[1:]) for answer in some]
            for some in (answers, own)
        )
        assert_same(theirs, ours)
        assert [answer.cached for answer in answers] == [0, 0, 0]
        assert not answers.counted("hits", "failed")


def test_many_requests_at_once_with_room_for_one_hit_are_right(runs: Runs) -> None:
    for run in (runs.cold, runs.warm, runs.uncached):
        assert_same(runs.own["many"], run["many"])
        assert not run["many"].counted("failed", "corrupt")
    assert all((answer.cached or 0) >= 768 for answer in runs.warm["many"])
    assert runs.warm["many"].external >= 768
    assert runs.uncached["many"].metrics["vllm:kvferry_hits_total"] > 1

"""What vLLM stored, the embedded engine reads, and the other way round."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvferry.engine import LLM, Completion, SamplingParams
from tests.real_vllm.conftest import MakePrompt
from tests.real_vllm.harness import (
    Answer,
    Oracle,
    Process,
    assert_same,
    kvferry,
    wait_for_records,
)

Models = dict[str, Path]

LENGTHS = (300, 385, 777)
INDEX_SECONDS = 30.0


def embedded(
    model: Path,
    store: Path,
    prompts: list[list[int]],
    connector_options: dict[str, Any] | None = None,
    **config: Any,
) -> list[Completion]:
    options = {"audit": "off", **(connector_options or {})}
    config |= {"dtype": "float32", "num_threads": 2, "connector_options": options}
    with pytest.MonkeyPatch.context() as patch:
        # By itself it waits for its store's index so long only that it still starts quickly.
        patch.setattr("kvferry.engine.llm.READY_SECONDS", INDEX_SECONDS)
        llm = LLM(model, store=f"file://{store}", **config)
    with llm:
        params = SamplingParams(max_tokens=4, logprobs=20, ignore_eos=True)
        return llm.generate(prompts, params)


def as_answer(completion: Completion) -> Answer:
    return Answer(
        tokens=list(completion.token_ids),
        logprobs=[
            {str(token): value for token, value in position.top.items()}
            for position in completion.logprobs or ()
        ],
        cached=completion.num_cached_tokens + completion.num_external_tokens,
        reason=str(completion.finish_reason),
        seconds=completion.ttft_seconds,
    )


def test_vllm_and_the_embedded_engine_read_each_other(
    tmp_path: Path, models: Models, make_prompt: MakePrompt, oracle: Oracle,
    first: Process, second: Process,
) -> None:  # fmt: skip
    of_vllm, of_embedded = ([make_prompt(n) for n in LENGTHS] for _ in range(2))
    own, own_of_embedded = oracle(of_vllm), oracle(of_embedded)
    with first.engine(models["plain"], kvferry(tmp_path)) as engine:
        engine.generate(of_vllm)
    wait_for_records(tmp_path, 2 + 3 + 6)
    prompts = [*of_vllm, *of_embedded]
    completions = embedded(models["plain"], tmp_path, prompts, prefix_caching=False)
    assert [c.num_external_tokens for c in completions] == [256, 384, 768, 0, 0, 0]
    assert_same([*own, *own_of_embedded], [as_answer(completion) for completion in completions])
    wait_for_records(tmp_path, 2 * (2 + 3 + 6))
    with second.engine(models["plain"], kvferry(tmp_path)) as engine:
        warm = engine.generate(of_embedded)
    assert warm.external == 256 + 384 + 768
    assert_same(own_of_embedded, warm)

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


def test_the_embedded_engine_reads_what_vllm_stored(
    tmp_path: Path, models: Models, make_prompt: MakePrompt, oracle: Oracle, first: Process
) -> None:
    prompts = [make_prompt(n) for n in LENGTHS]
    own = oracle(prompts)
    with first.engine(models["plain"], kvferry(tmp_path)) as engine:
        engine.generate(prompts)
    wait_for_records(tmp_path, 2 + 3 + 6)
    completions = embedded(models["plain"], tmp_path, prompts, prefix_caching=False)
    assert [c.num_external_tokens for c in completions] == [256, 384, 768]
    assert_same(own, [as_answer(completion) for completion in completions])


def test_vllm_reads_what_the_embedded_engine_stored(
    tmp_path: Path, models: Models, make_prompt: MakePrompt, oracle: Oracle, second: Process
) -> None:
    prompts = [make_prompt(n) for n in LENGTHS]
    own = oracle(prompts)
    cold = embedded(models["plain"], tmp_path, prompts)
    assert_same(own, [as_answer(completion) for completion in cold])
    wait_for_records(tmp_path, 2 + 3 + 6)
    with second.engine(models["plain"], kvferry(tmp_path)) as engine:
        warm = engine.generate(prompts)
    assert warm.external == 256 + 384 + 768
    assert_same(own, warm)

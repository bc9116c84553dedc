"""Speculative decoding, generated tokens, and KV of other types."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.real_vllm.conftest import MakePrompt, Pool
from tests.real_vllm.harness import Process, assert_same, kvferry, records, wait_for_records
from tests.real_vllm.host import does

Models = dict[str, Path]

NGRAM = {
    "method": "ngram",
    "num_speculative_tokens": 3,
    "prompt_lookup_max": 3,
    "prompt_lookup_min": 1,
}


@pytest.mark.parametrize(
    "speculative",
    [
        pytest.param(None, id="plain"),
        pytest.param(NGRAM, id="ngram", marks=does("speculates", since=(0, 28))),
    ],
)
def test_a_second_turn_finds_what_the_first_generated_and_no_drafts(
    speculative: dict[str, object] | None, tmp_path: Path, models: Models,
    make_prompt: MakePrompt, pool: Pool,
) -> None:  # fmt: skip
    # vLLM cannot start another engine in a process where one has speculated.
    names = ("writer", "reader") if speculative else ("first", "second")
    first, second = (pool.get(name) for name in names)
    # Drafts come from repeated tokens: the n-gram drafter proposes many, and most are wrong.
    prompts = [make_prompt(50) * 4 for _ in range(3)]
    engine_options = {"speculative_config": speculative} if speculative else {}
    connector = kvferry(tmp_path, chunk_tokens=32, save_generated=True)
    with first.engine(models["plain"], connector, block_size=32, **engine_options) as engine:
        answers = engine.generate(prompts, max_tokens=100, together=True)
        drafted = engine.metrics().get("vllm:spec_decode_num_draft_tokens_total", 0)
    assert (drafted > 0) is (speculative is not None)
    turns = [p + answer.tokens for p, answer in zip(prompts, answers, strict=True)]
    # The last token's KV was never computed.
    wait_for_records(tmp_path, 3 * (299 // 32))
    assert len(records(tmp_path)) == 3 * (299 // 32)
    asked = [make_prompt(320, start=turn) for turn in turns]
    with second.engine(models["plain"], block_size=32) as engine:
        engine.generate(asked, max_tokens=1)
        own = engine.generate(asked)
    with second.engine(models["plain"], connector, block_size=32, **engine_options) as engine:
        warm = engine.generate(asked)
    assert_same(own, warm)
    assert [answer.cached for answer in warm] == [299 // 32 * 32] * 3
    for name in ("writer", "reader"):
        pool.discard(name)


@does("keeps a prefix cache of FP8 KV", since=(0, 28))
@pytest.mark.parametrize("dtype", ["fp8_e4m3", "fp8_e5m2"])
def test_kv_of_another_type_is_right_and_shares_nothing_with_the_models_own(
    dtype: str, tmp_path: Path, models: Models, make_prompt: MakePrompt, first: Process
) -> None:
    prompts = [make_prompt(n) for n in (300, 777)]
    connector = kvferry(tmp_path)
    with first.engine(models["plain"], connector) as engine:
        engine.generate(prompts)
    of_the_model = wait_for_records(tmp_path, 8)
    with first.engine(models["plain"], connector, kv_cache_dtype=dtype) as engine:
        cold = engine.generate(prompts)
        own = engine.generate(prompts)
    assert cold.external == 0
    assert own.local == 256 + 768
    assert len(wait_for_records(tmp_path, 16) - of_the_model) == 8
    with first.engine(models["plain"], connector, kv_cache_dtype=dtype) as engine:
        warm = engine.generate(prompts)
    assert_same(own, warm)
    assert warm.external == 256 + 768

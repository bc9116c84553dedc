"""SmolLM2-135M on real text: bfloat16 like the engine's own prefix hit, float32 like a cold run."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvferry.demo.model import prepare_model
from kvferry.demo.run import default_document, load_tokenizer
from tests.real_vllm.harness import Process, assert_same, expected_hit, kvferry, wait_for_records

CACHE = Path(".demo")
"""Where `make demo` keeps the model too."""

LENGTHS = (300, 641, 897)


@pytest.fixture(scope="module")
def smollm() -> Path:
    return prepare_model(CACHE, report=print).absolute()


@pytest.fixture(scope="module")
def prompts(smollm: Path) -> list[list[int]]:
    tokens = load_tokenizer(smollm)(default_document()[:40_000])["input_ids"]
    return [tokens[start : start + n] for start, n in zip((0, 2000, 5000), LENGTHS, strict=True)]


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_new_process_says_what_the_engine_says_by_its_own_prefix_hit(
    dtype: str, smollm: Path, prompts: list[list[int]], tmp_path: Path,
    first: Process, second: Process,
) -> None:  # fmt: skip
    options = {"dtype": dtype, "max_model_len": 2048, "kv_cache_memory_bytes": 256 << 20}
    with first.engine(smollm, **options) as engine:
        cold = engine.generate(prompts, max_tokens=8)
        own = engine.generate(prompts, max_tokens=8)
    with first.engine(smollm, kvferry(tmp_path), **options) as engine:
        stored = engine.generate(prompts, max_tokens=8)
    wait_for_records(tmp_path, 2 + 5 + 7)
    with second.engine(smollm, kvferry(tmp_path), **options) as engine:
        warm = engine.generate(prompts, max_tokens=8)
    hits = [expected_hit(n) for n in LENGTHS]
    assert [answer.cached for answer in own] == [answer.cached for answer in warm] == hits
    assert warm.external == sum(hits)
    assert_same(cold, stored)
    assert_same(own, warm)
    if dtype == "float32":
        assert_same(cold, warm)

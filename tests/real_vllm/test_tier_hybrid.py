"""Models with recurrent states, with kvferry as a tier of vLLM's own offloading."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.real_vllm.conftest import MakePrompt
from tests.real_vllm.harness import Process, assert_same
from tests.real_vllm.host import serves_tiers
from tests.real_vllm.hybrids import options_of, write_hybrid
from tests.real_vllm.test_tier_engine import (
    CHUNKS,
    HITS,
    LENGTHS,
    assert_counters_agree,
    offloading,
    store_all,
)

pytestmark = serves_tiers()

ARCHS = ("granitemoehybrid", "lfm2")
ROWS = CHUNKS + len(LENGTHS)
"""The KV of every chunk, and the states after the last one of each prompt."""


@pytest.fixture(scope="session")
def hybrids(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("hybrids")
    return {arch: write_hybrid(root, arch) for arch in ARCHS}


@pytest.mark.parametrize("arch", ARCHS)
def test_a_hybrid_model_says_the_same_with_rows_of_another_process(
    arch: str, tmp_path: Path, hybrids: dict[str, Path], make_prompt: MakePrompt,
    first: Process, second: Process,
) -> None:  # fmt: skip
    model, connector, options = hybrids[arch], offloading(tmp_path), options_of(arch)
    prompts = [make_prompt(length) for length in LENGTHS]
    with second.engine(model, **options) as engine:
        engine.generate(prompts, max_tokens=1)
        own = engine.generate(prompts)
    assert own.local == HITS
    with first.engine(model, connector, **options) as engine:
        cold = store_all(engine, tmp_path, prompts, make_prompt, ROWS)
    with second.engine(model, connector, **options) as engine:
        warm = engine.generate(prompts)
    assert_same(own, cold)
    assert_same(own, warm)
    assert warm.external == HITS
    assert_counters_agree(warm, ROWS)

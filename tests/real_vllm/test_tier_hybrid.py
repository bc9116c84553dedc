"""Models with recurrent states, with kvferry as a tier of vLLM's own offloading."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.real_vllm.conftest import MakePrompt, Pool
from tests.real_vllm.harness import Process, assert_same
from tests.real_vllm.host import serves_tiers
from tests.real_vllm.hybrids import (
    BLOCKS,
    NEED_TORCHVISION,
    options_of,
    with_torchvision,
    write_hybrid,
)
from tests.real_vllm.test_tier_engine import (
    LENGTHS,
    assert_counters_agree,
    offloading,
    store_all,
)

pytestmark = serves_tiers()

ARCHS = ("granitemoehybrid", "lfm2", "qwen3_next", "qwen3_5_text")
OF_A_SWEEP = {"lfm2", "qwen3_5_text"}


@pytest.fixture(scope="session")
def hybrids(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("hybrids")
    return {arch: write_hybrid(root, arch) for arch in ARCHS}


@pytest.mark.parametrize(
    "arch",
    [pytest.param(each, marks=pytest.mark.sweep) if each in OF_A_SWEEP else each for each in ARCHS],
)
def test_a_hybrid_model_says_the_same_with_rows_of_another_process(
    arch: str, tmp_path: Path, hybrids: dict[str, Path], make_prompt: MakePrompt,
    first: Process, second: Process, pool: Pool,
) -> None:  # fmt: skip
    if arch in NEED_TORCHVISION:
        first, second = with_torchvision(pool, tmp_path / "names")
    model, connector, options = hybrids[arch], offloading(tmp_path / "store"), options_of(arch)
    block = BLOCKS.get(arch, 128)
    connector["kv_connector_extra_config"]["block_size"] = block
    prompts = [make_prompt(length) for length in LENGTHS]
    chunks = [length // block for length in LENGTHS]
    # The KV of every chunk, and the states after the last one of each prompt.
    rows, hits = sum(chunks) + sum(map(bool, chunks)), sum(chunks) * block
    with second.engine(model, **options) as engine:
        engine.generate(prompts, max_tokens=1)
        own = engine.generate(prompts)
    assert own.local == hits
    with first.engine(model, connector, **options) as engine:
        cold = store_all(engine, tmp_path / "store", prompts, make_prompt, rows)
    with second.engine(model, connector, **options) as engine:
        warm = engine.generate(prompts)
    assert_same(own, cold)
    assert_same(own, warm)
    assert warm.external == hits
    assert_counters_agree(warm, rows)

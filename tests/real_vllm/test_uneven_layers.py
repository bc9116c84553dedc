"""Layers of two forms in one group, of which vLLM's scheduler sees the first alone."""

from __future__ import annotations

from pathlib import Path

from kvferry.testing.models import make_tiny_model
from tests.real_vllm.conftest import MakePrompt, Pool
from tests.real_vllm.harness import assert_same, kvferry, wait_for_records
from tests.real_vllm.host import does

FP8_BUT_FOR_ONE = {"kv_cache_dtype": "fp8", "kv_cache_dtype_skip_layers": ["0"]}


@does("keeps some layers in another dtype", since=(0, 32))
def test_layers_of_two_forms_hit_in_another_process(
    tmp_path: Path, make_prompt: MakePrompt, pool: Pool
) -> None:
    # vLLM's kernels for fp8 take heads of 32 elements.
    shape = {"hidden_size": 256, "num_attention_heads": 8, "head_dim": 32}
    model = make_tiny_model(tmp_path / "model", seed=3, **shape)
    store, prompts = tmp_path / "store", [make_prompt(n) for n in (300, 386)]
    with pool.get("first").engine(model, kvferry(store), **FP8_BUT_FOR_ONE) as engine:
        cold = engine.generate(prompts)
        wait_for_records(store, 2 + 3)
    process = pool.get("second")
    with process.engine(model, kvferry(store), **FP8_BUT_FOR_ONE) as engine:
        warm = engine.generate(prompts)
    assert_same(cold, warm)
    assert (cold.external, warm.external) == (0, 256 + 384)
    assert "sees less of this model" in process.log.read_text(errors="replace")

"""Latent attention (MLA) on a CPU, where vLLM's own prefix cache is off because hits go wrong."""

from __future__ import annotations

from pathlib import Path

from kvferry.testing.models import make_tiny_model
from tests.real_vllm.conftest import MakePrompt
from tests.real_vllm.harness import Process, assert_same, kvferry, records
from tests.real_vllm.host import does

# The smallest that vLLM's kernels for latent attention take.
SHAPE = {
    "hidden_size": 256,
    "intermediate_size": 384,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 32,
    "v_head_dim": 32,
}


@does("runs latent attention", since=(0, 32))
def test_latent_attention_on_a_cpu_is_served_without_the_cache_and_with_one_warning(
    tmp_path: Path, make_prompt: MakePrompt, first: Process
) -> None:
    model = make_tiny_model(tmp_path / "model", "deepseek_v2", seed=3, **SHAPE)
    prompts = [make_prompt(n) for n in (300, 386)]
    # Where it can, vLLM takes kernels for AMX instead, which compute in bfloat16 only.
    backend = {"attention_backend": "CPU_MLA"}
    with first.engine(model, **backend) as engine:
        own = engine.generate(prompts)
    before = len(first.log.read_text(errors="replace"))
    with first.engine(model, kvferry(tmp_path / "store"), **backend) as engine:
        cold = engine.generate(prompts)
        again = engine.generate(prompts)
    assert_same(own, cold)
    assert_same(own, again)
    assert again.external == 0
    assert not records(tmp_path / "store")
    log = first.log.read_text(errors="replace")[before:]
    assert log.count("kvferry is off for this model") == 1

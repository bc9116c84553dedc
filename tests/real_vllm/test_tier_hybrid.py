"""Hybrid models, which the connector refuses, with kvferry as a tier of vLLM's own offloading."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig, AutoModelForCausalLM

from kvferry.testing.models import write_random_model
from tests.real_vllm.conftest import MakePrompt
from tests.real_vllm.harness import EngineError, Process, assert_same, kvferry
from tests.real_vllm.host import serves_tiers
from tests.real_vllm.test_tier_engine import (
    CHUNKS,
    HITS,
    LENGTHS,
    assert_counters_agree,
    offloading,
    store_all,
)

pytestmark = serves_tiers()

SHAPE = {
    "vocab_size": 320,
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
MODELS: dict[str, dict[str, Any]] = {
    # Mamba-2: a recurrent state.
    "granitemoehybrid": {
        "layer_types": ["mamba", "attention"] * 2,
        "mamba_n_heads": 8,
        "mamba_d_head": 32,
        "mamba_n_groups": 1,
        "mamba_d_state": 16,
        "mamba_chunk_size": 64,
        "num_local_experts": 0,
        "num_experts_per_tok": 0,
        "shared_intermediate_size": 192,
    },
    # Short convolutions: the last few tokens.
    "lfm2": {
        "layer_types": ["conv", "full_attention"] * 2,
        "block_auto_adjust_ff_dim": False,
        # Of checkpoints; vLLM reads them, and Transformers writes none.
        "conv_dim": 128,
        "block_dim": 128,
        "block_multiple_of": 32,
        "block_ffn_dim_multiplier": 1.0,
    },
}

# States and attention in each layer. vLLM numbers the states behind the attention of all layers.
FALCON: dict[str, Any] = {
    "head_dim": 32,
    "mamba_d_ssm": 256,
    "mamba_n_heads": 8,
    "mamba_d_head": 32,
    "mamba_n_groups": 1,
    "mamba_d_state": 16,
    "mamba_chunk_size": 64,
}

# Steps of a block: on a CPU, Mamba-2 keeps no state of a token within a step.
OPTIONS: dict[str, Any] = {
    "enable_prefix_caching": True,
    "mamba_cache_mode": "align",
    "max_num_batched_tokens": 128,
}
ROWS = CHUNKS + len(LENGTHS)
"""The KV of every chunk, and the states after the last one of each prompt."""


@pytest.fixture(scope="session")
def hybrids(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("hybrids")

    def write(arch: str) -> Path:
        config = AutoConfig.for_model(arch, **SHAPE, **MODELS[arch])
        build = partial(AutoModelForCausalLM.from_config, config)
        return write_random_model(root / arch, build, seed=5)

    return {arch: write(arch) for arch in MODELS}


def write_falcon(root: Path) -> Path:
    config = AutoConfig.for_model("falcon_h1", **SHAPE, **FALCON)
    return write_random_model(root, partial(AutoModelForCausalLM.from_config, config), seed=5)


def test_the_connector_refuses_states_whatever_number_their_layers_have(
    tmp_path: Path, hybrids: dict[str, Path], second: Process
) -> None:
    models = {**hybrids, "falcon_h1": write_falcon(tmp_path / "falcon_h1")}
    for speculative in (
        None,
        {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 2},
    ):
        more = {} if speculative is None else {"speculative_config": speculative}
        for arch, model in models.items():
            with pytest.raises(EngineError, match="MambaSpec") as refusal:
                second.start(model, kvferry(tmp_path / "store"), **OPTIONS, **more)
            assert len(str(refusal.value).splitlines()) == 1, arch
            second.call("stop", 30)


@pytest.mark.parametrize("arch", MODELS)
def test_a_hybrid_model_says_the_same_with_rows_of_another_process(
    arch: str, tmp_path: Path, hybrids: dict[str, Path], make_prompt: MakePrompt,
    first: Process, second: Process,
) -> None:  # fmt: skip
    model, connector = hybrids[arch], offloading(tmp_path)
    prompts = [make_prompt(length) for length in LENGTHS]
    with second.engine(model, **OPTIONS) as engine:
        engine.generate(prompts, max_tokens=1)
        own = engine.generate(prompts)
    assert own.local == HITS
    with first.engine(model, connector, **OPTIONS) as engine:
        cold = store_all(engine, tmp_path, prompts, make_prompt, ROWS)
    with second.engine(model, connector, **OPTIONS) as engine:
        warm = engine.generate(prompts)
    assert_same(own, cold)
    assert_same(own, warm)
    assert warm.external == HITS
    assert_counters_agree(warm, ROWS)

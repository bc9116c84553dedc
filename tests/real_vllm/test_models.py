"""Models other than plain Llamas: windows, latent attention, layers of two forms."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from kvferry.testing.models import make_tiny_model
from tests.real_vllm.conftest import MakePrompt
from tests.real_vllm.harness import (
    Answer,
    Engine,
    Process,
    assert_same,
    expected_hit,
    kvferry,
    records,
    wait_for_records,
)
from tests.real_vllm.host import RELEASE, does
from tests.real_vllm.test_cross_engine import as_answer, embedded
from tests.tokenizers import save_tiny_tokenizer

WINDOW = 150
SHAPE = {"hidden_size": 256, "intermediate_size": 384, "max_position_embeddings": 4096}
WINDOWED: dict[str, dict[str, Any]] = {
    "gemma3_text": {"head_dim": 32},  # layers with a window and without
    "mistral": {},  # all layers have one
    # Scores are capped. Real checkpoints name the activation twice, and vLLM 0.14 reads both.
    "gemma2": {"head_dim": 32, "hidden_act": "gelu_pytorch_tanh"},
    "gpt_oss": {"head_dim": 32, "num_experts_per_tok": 2},  # attention sinks, experts
}

APART: dict[str, Any] = {"disable_hybrid_kv_cache_manager": False}
"""Each kind of layer has a block table, and blocks that left a window are given back."""

MERGED: dict[str, Any] = {"disable_hybrid_kv_cache_manager": True}
"""All layers share one block table and keep all tokens."""

CHUNKS = {"chunk_tokens": 64}
SMALL_STEPS: dict[str, Any] = {"block_size": 64, "max_num_batched_tokens": 192}


@pytest.fixture(scope="session")
def windowed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("windowed")
    return {
        arch: make_tiny_model(
            root / arch, arch, seed=3, **{**SHAPE, "sliding_window": WINDOW, **config}
        )
        for arch, config in WINDOWED.items()
    }


def own_answers(engine: Engine, prompts: list[list[int]], block: int = 64) -> list[Answer]:
    """What an engine says by its own prefix hit, whole blocks of each prompt."""
    engine.generate(prompts, max_tokens=1)
    answers = engine.generate(prompts)
    assert answers.local == sum((len(prompt) - 1) // block * block for prompt in prompts)
    return list(answers)


@pytest.mark.skipif(RELEASE < (0, 28), reason="its own engine does not start with a tiny Llama 4")
def test_attention_in_chunks_is_read_by_another_process_and_equals_the_engines_own_hit(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, make_prompt: MakePrompt,
    first: Process, second: Process,
) -> None:  # fmt: skip
    model = make_tiny_model(tmp_path_factory.mktemp("chunked") / "m", "llama4_text", seed=3)
    lengths = (100, 193, 384, 385, 700)  # shorter than an attention chunk, about it, longer
    prompts = [make_prompt(n) for n in lengths]
    connector = kvferry(tmp_path, **CHUNKS)
    with second.engine(model, block_size=64) as engine:
        own = own_answers(engine, prompts)
    with first.engine(model, connector, **SMALL_STEPS) as engine:
        cold = engine.generate(prompts)
    assert_same(own, cold)
    wait_for_records(tmp_path, sum(n // 64 for n in lengths))
    with second.engine(model, connector, **SMALL_STEPS) as engine:
        warm = engine.generate(prompts)
    assert_same(own, warm)
    assert [answer.cached for answer in warm] == [
        expected_hit(n, chunk=64, block=64) for n in lengths
    ]


@pytest.mark.parametrize(
    "arch", ["gemma3_text", "mistral", pytest.param("gemma2", marks=pytest.mark.sweep)]
)
def test_engines_that_keep_a_window_or_all_tokens_share_records(
    arch: str, tmp_path: Path, windowed: dict[str, Path], make_prompt: MakePrompt,
    first: Process, second: Process,
) -> None:  # fmt: skip
    model = windowed[arch]
    lengths = (100, 149, 151, 300, 777)  # shorter than the window, about it, longer
    sets = [[make_prompt(n) for n in lengths] for _ in range(3)]
    chunks = sum(n // 64 for n in lengths)
    hits = [expected_hit(n, chunk=64, block=64) for n in lengths]
    # Where every layer has a window, the blocks of 0.28 are of 16 tokens, whatever one asks for.
    block = 16 if arch == "mistral" and RELEASE == (0, 28) else 64
    with second.engine(model, **APART, block_size=64) as engine:
        own = [own_answers(engine, prompts, block) for prompts in sets]
    connector = kvferry(tmp_path, **CHUNKS)

    by_embedded = embedded(model, tmp_path, sets[0], connector_options=CHUNKS)
    assert_same(own[0], [as_answer(completion) for completion in by_embedded])
    wait_for_records(tmp_path, chunks)
    with first.engine(model, connector, **APART, **SMALL_STEPS) as engine:
        warm = engine.generate(sets[0], together=True)
        cold = engine.generate(sets[1], together=True)
    assert_same(own[0], warm)
    assert_same(own[1], cold)
    assert [answer.cached for answer in warm] == hits
    wait_for_records(tmp_path, 2 * chunks)
    with second.engine(model, connector, **MERGED, **SMALL_STEPS) as engine:
        warm = engine.generate([*sets[0], *sets[1]])
        cold = engine.generate(sets[2])
    assert_same([*own[0], *own[1]], warm)
    assert_same(own[2], cold)
    assert [answer.cached for answer in warm] == hits * 2
    wait_for_records(tmp_path, 3 * chunks)
    with first.engine(model, connector, **APART, **SMALL_STEPS) as engine:
        warm = engine.generate([*sets[2], *sets[1]])
    assert_same([*own[2], *own[1]], warm)
    assert [answer.cached for answer in warm] == hits * 2
    assert warm.external == 2 * sum(hits)
    of_vllm = embedded(model, tmp_path, [*sets[1], *sets[2]], connector_options=CHUNKS)
    assert_same([*own[1], *own[2]], [as_answer(completion) for completion in of_vllm])
    # The embedded engine's own blocks are of 16 tokens.
    assert [c.num_external_tokens for c in of_vllm] == [n // 64 * 64 for n in lengths] * 2
    assert len(records(tmp_path)) == 3 * chunks


def test_attention_sinks_and_experts_with_a_window_read_what_was_stored(
    tmp_path: Path, windowed: dict[str, Path], make_prompt: MakePrompt,
    first: Process, second: Process,
) -> None:  # fmt: skip
    # Without any connector, answers of this random model differ by more than the tolerance between
    # engines of the other allocator and budget (which of the two it is was not looked into): so
    # both engines here have the same.
    model = windowed["gpt_oss"]
    lengths = (100, 149, 151, 300, 777)
    prompts = [make_prompt(n) for n in lengths]
    connector = kvferry(tmp_path, **CHUNKS)
    options = {**APART, "block_size": 64}
    if RELEASE < (0, 32):
        options["dtype"] = "bfloat16"  # the kernel took sinks of no other type
    with first.engine(model, connector, **options) as engine:
        own = own_answers(engine, prompts)
    wait_for_records(tmp_path, sum(n // 64 for n in lengths))
    with second.engine(model, connector, **options) as engine:
        warm = engine.generate(prompts)
    assert_same(own, warm)
    assert warm.external == sum(expected_hit(n, chunk=64, block=64) for n in lengths)


# The smallest that vLLM's kernels for latent attention take.
LATENT = {
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
    model = make_tiny_model(tmp_path / "model", "deepseek_v2", seed=3, **LATENT)
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


def test_a_model_that_keeps_no_kv_is_served_and_one_line_says_so(
    tmp_path: Path, models: dict[str, Path], second: Process
) -> None:
    model = shutil.copytree(models["plain"], tmp_path / "model")
    save_tiny_tokenizer(model)
    embeds: dict[str, Any] = {"runner": "pooling", "hf_overrides": {"is_causal": False}}
    embeds["skip_tokenizer_init"] = False  # which vLLM has no embedders without
    before = len(second.log.read_text(errors="replace"))
    second.start(model, kvferry(tmp_path / "store"), **embeds)
    second.call("stop", 30)
    log = second.log.read_text(errors="replace")[before:]
    assert log.count("kvferry is off for this model: it keeps no KV") == 1


FP8_BUT_FOR_ONE = {"kv_cache_dtype": "fp8", "kv_cache_dtype_skip_layers": ["0"]}


@does("keeps some layers in another dtype", since=(0, 32))
def test_layers_of_two_forms_hit_in_another_process(
    tmp_path: Path, make_prompt: MakePrompt, first: Process, second: Process
) -> None:
    """In one group, of which vLLM's scheduler sees the first alone."""
    # vLLM's kernels for fp8 take heads of 32 elements.
    shape = {"hidden_size": 256, "num_attention_heads": 8, "head_dim": 32}
    model = make_tiny_model(tmp_path / "model", seed=3, **shape)
    store, prompts = tmp_path / "store", [make_prompt(n) for n in (300, 386)]
    with first.engine(model, kvferry(store), **FP8_BUT_FOR_ONE) as engine:
        cold = engine.generate(prompts)
        wait_for_records(store, 2 + 3)
    with second.engine(model, kvferry(store), **FP8_BUT_FOR_ONE) as engine:
        warm = engine.generate(prompts)
    assert_same(cold, warm)
    assert (cold.external, warm.external) == (0, 256 + 384)
    assert "sees less of this model" in second.log.read_text(errors="replace")

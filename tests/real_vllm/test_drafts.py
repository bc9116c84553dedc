"""Drafts after a hit of another process are accepted as after vLLM's own hit."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from kvferry.testing.models import make_tiny_model
from tests.real_vllm.conftest import MakePrompt, Pool
from tests.real_vllm.harness import Answers, assert_same, kvferry, records, wait_for_records
from tests.real_vllm.host import does

CHUNKS = 4


def write_models(directory: Path, method: str) -> tuple[Path, Path]:
    """A target of two layers, of which the second adds nothing, and a drafter that is the first, so
    that with the right KV it proposes what the target says. As an EAGLE head it gets each token
    with the hidden state of the one before it, and does without that. Such a head has no norm
    before its layer, and none behind: so embeddings are normalised, and the order of tokens by
    their logits is the same. It does not see the first token, and so is wrong now and then."""
    from safetensors.torch import load_file, save_file

    sizes = {"head_dim": 32, "num_key_value_heads": 2}
    target = make_tiny_model(directory / "target", num_hidden_layers=2, **sizes)
    drafter = make_tiny_model(directory / "drafter", num_hidden_layers=1, **sizes)
    weights = load_file(target / "model.safetensors")
    for name in ("self_attn.o_proj", "mlp.down_proj"):
        weights[f"model.layers.1.{name}.weight"].zero_()
    embedded = weights["model.embed_tokens.weight"]
    embedded /= embedded.pow(2).mean(-1, keepdim=True).sqrt().clamp_min(1e-6)  # padding has none
    save_file(weights, target / "model.safetensors", {"format": "pt"})
    first = {name: each for name, each in weights.items() if ".layers.1." not in name}
    if method == "eagle":
        config = json.loads((drafter / "config.json").read_text())
        config["architectures"] = ["EagleLlamaForCausalLM"]
        (drafter / "config.json").write_text(json.dumps(config))
        size = embedded.shape[1]
        first = {
            name.removeprefix("model."): each
            for name, each in first.items()
            if ".layers.0." in name and "input_layernorm" not in name
        }
        first["fc.weight"] = torch.cat([torch.eye(size), torch.zeros(size, size)], dim=1)
    save_file(first, drafter / "model.safetensors", {"format": "pt"})
    return target, drafter


def rate(answers: Answers) -> float:
    """The share of drafts that were accepted."""
    found = [
        answers.metrics.get(f"vllm:spec_decode_num_{what}_tokens_total", 0)
        for what in ("accepted", "draft")
    ]
    assert found[1] > 20
    return found[0] / found[1]


def drafts_of(directory: Path) -> set[Path]:
    return {path for path in directory.rglob("*.safetensors") if b'"draft.' in head_of(path)}


def head_of(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.read(4096)


@does("speculates with a model", since=(0, 32))
@pytest.mark.parametrize("method", ["eagle", pytest.param("draft_model", marks=pytest.mark.sweep)])
def test_drafts_are_accepted_after_a_hit_of_another_process_as_after_an_own_one(
    method: str, tmp_path: Path, make_prompt: MakePrompt, pool: Pool
) -> None:
    target, drafter = write_models(tmp_path / "models", method)
    store, connector = tmp_path / "store", kvferry(tmp_path / "store")
    speculative = {"method": method, "model": str(drafter), "num_speculative_tokens": 3}
    prompts = [make_prompt(CHUNKS * 128 + 20) for _ in range(2)]
    with pool.get("writer").engine(target, connector, speculative_config=speculative) as engine:
        cold = engine.generate(prompts, max_tokens=60)
        own = engine.generate(prompts[:1], max_tokens=60)
        wait_for_records(store, 2 * 2 * CHUNKS)
    pool.discard("writer")
    assert own.local > 0
    lost = drafts_of(store)
    assert len(lost) == 2 * CHUNKS
    with pool.get("reader").engine(target, connector, speculative_config=speculative) as engine:
        [warm] = (first := engine.generate(prompts[:1], max_tokens=60))
        for path in lost:
            path.unlink()
        [without] = (second := engine.generate(prompts[1:], max_tokens=60))
    pool.discard("reader")
    assert_same(cold, [warm, without])
    assert [warm.cached, without.cached] == [CHUNKS * 128] * 2
    rates = {"own": rate(own), "warm": rate(first), "without": rate(second)}
    print(rates)
    assert rates["warm"] >= rates["own"] - 0.05
    assert rates["own"] > 0.85
    assert rates["without"] < rates["own"] - 0.2
    assert len(records(store)) == 2 * CHUNKS
    assert first.counted("loaded_drafts") == second.counted("lacking_drafts") == CHUNKS

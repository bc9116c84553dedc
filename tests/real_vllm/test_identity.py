"""LoRA adapters keep requests apart by their content. Salts: test_erase.py; tenants:
test_request_options.py."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from tests.real_vllm.conftest import MakePrompt
from tests.real_vllm.harness import (
    Process,
    assert_same,
    kvferry,
    records,
    wait_for_records,
)

Models = dict[str, Path]
Request = dict[str, Any]

# The cache is not used until an adapter is hashed, beside its first requests.
NUM_TRIES = 20


@pytest.fixture
def adapters(tmp_path: Path) -> dict[str, Path]:
    """Two LoRA adapters for the tiny model."""
    return {name: make_adapter(tmp_path / name, seed) for seed, name in enumerate(("a", "b"))}


def make_adapter(path: Path, seed: int) -> Path:
    path.mkdir()
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for layer in range(4):
        prefix = f"base_model.model.model.layers.{layer}.self_attn"
        for module, size in (("q_proj", 256), ("v_proj", 128)):
            weights = (
                torch.randn(8, 256, generator=generator),
                torch.randn(size, 8, generator=generator),
            )
            tensors[f"{prefix}.{module}.lora_A.weight"] = weights[0] * 0.1
            tensors[f"{prefix}.{module}.lora_B.weight"] = weights[1] * 0.1
    save_file(tensors, path / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA",
        "r": 8,
        "lora_alpha": 16,
        "target_modules": ["q_proj", "v_proj"],
        "bias": "none",
        "task_type": "CAUSAL_LM",
    }
    (path / "adapter_config.json").write_text(json.dumps(config))
    return path


def test_lora_adapters_share_by_content(
    tmp_path: Path, models: Models, adapters: dict[str, Path], make_prompt: MakePrompt,
    first: Process, second: Process,
) -> None:  # fmt: skip
    prompts = [make_prompt(400) for _ in range(2)]

    def under(name: str | None, number: int = 1) -> list[Request]:
        lora = None
        if name is not None:
            lora = {"name": "tuned", "id": number, "path": str(adapters[name])}
        return [{"token_ids": prompt, "lora": lora} for prompt in prompts]

    lora = {"enable_lora": True, "max_lora_rank": 8, "max_loras": 2}
    store = tmp_path / "store"
    # Without vLLM's own prefix cache: that of 0.14 knows adapters by name alone.
    with second.engine(models["plain"], enable_prefix_caching=False, **lora) as engine:
        own = {
            name: engine.generate(under(name, number))
            for number, name in enumerate(("a", "b", None), start=1)
        }
    with pytest.raises(AssertionError):
        assert_same(own["a"], own[None])
    with first.engine(models["plain"], kvferry(store), **lora) as engine:
        for _ in range(NUM_TRIES):
            assert_same(own["a"], engine.generate(under("a")))
            first.call("reset", 30, connector=False)
            if len(records(store)) >= 6:
                break
        wait_for_records(store, 6)
        base = engine.generate(under(None))
        assert_same(own[None], base)
        assert base.external == 0
    wait_for_records(store, 12)
    with second.engine(models["plain"], kvferry(store), **lora) as engine:
        for _ in range(NUM_TRIES):
            warm = engine.generate(under("a", 7))
            assert_same(own["a"], warm)
            if warm.external == 2 * 384:
                break
            second.call("reset", 30, connector=False)
        assert warm.external == 2 * 384
    with second.engine(models["plain"], kvferry(store), **lora) as engine:
        other = engine.generate(under("b", 7))
        assert_same(own["b"], other)
        assert other.external == 0
        second.call("reset", 30, connector=False)
        assert_same(own["b"], engine.generate(under("b", 7)))


def test_an_adapter_rewritten_between_its_loading_and_its_first_request_is_a_miss(
    tmp_path: Path, models: Models, adapters: dict[str, Path], make_prompt: MakePrompt,
    first: Process, second: Process,
) -> None:  # fmt: skip
    prompt, store = make_prompt(400), tmp_path / "store"
    named = {"name": "tuned", "id": 1, "path": str(adapters["a"])}
    explain = {"extra_args": {"kvferry": {"explain": True}}}
    request = {"token_ids": prompt, "lora": named, "sampling": explain}
    lora = {"enable_lora": True, "max_lora_rank": 8, "max_loras": 2}
    with first.engine(models["plain"], kvferry(store), **lora) as engine:
        assert first.call("add_lora", 60, lora=named)["done"]
        shutil.copytree(adapters["b"], adapters["a"], dirs_exist_ok=True)
        old = engine.generate([request])
        why = [old[0].params["kvferry"]["why"]]
        while "changed on disk" not in why[-1]:
            assert len(why) < NUM_TRIES, why
            why.append(engine.generate([request])[0].params["kvferry"]["why"])
        again = engine.generate([request])
        assert again[0].params["kvferry"]["miss_reason"] == "adapter"
        assert_same(old, again)
    assert not records(store)
    with second.engine(models["plain"], kvferry(store), **lora) as engine:
        for _ in range(3):
            new = engine.generate([request])
            second.call("reset", 30, connector=False)
            with pytest.raises(AssertionError):
                assert_same(old, new)

"""Paged attention against the model's own forward, chunk by chunk, from scattered blocks."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM

from kvferry.engine.config import EngineConfig
from kvferry.engine.model import PagedModel
from kvferry.engine.model_config import ModelConfig
from kvferry.engine.paged_attention import PagedAttention
from kvferry.engine.request import BatchEntry
from kvferry.errors import ConfigError

# Batches of whole engines have more architectures (`test_llm`).
ARCHITECTURES = ["llama", "gpt_neox", "gemma3_text", "deepseek_v3"]
BLOCK_SIZE = 7


def own_logits(path, token_ids: torch.Tensor) -> torch.Tensor:
    model = AutoModelForCausalLM.from_pretrained(
        path, local_files_only=True, attn_implementation="eager"
    )
    with torch.inference_mode():
        return model(input_ids=token_ids[None]).logits[0]


def random_tokens(count: int, seed: int = 1) -> torch.Tensor:
    return torch.randint(3, 320, (count,), generator=torch.Generator().manual_seed(seed))


def paged_logits(model, token_ids: torch.Tensor, chunks: list[int]) -> torch.Tensor:
    """All logits, computed in chunks over randomly scattered blocks full of NaN."""
    geometry = model.geometry
    num_blocks = -(-len(token_ids) // BLOCK_SIZE)
    pool = torch.full(
        (
            geometry.num_layers,
            num_blocks + 5,
            model.num_kv_heads,
            BLOCK_SIZE,
            geometry.content_size,
        ),
        float("nan"),
    )
    layers = list(zip(geometry.layer_names, pool, strict=True))
    table = torch.randperm(num_blocks + 4, generator=torch.Generator().manual_seed(2))
    table = (table[:num_blocks] + 1).tolist()
    attention = PagedAttention(layers, model.codec)
    parts, start = [], 0
    for size in chunks:
        new = token_ids[start : start + size]
        positions = attention.begin_step([BatchEntry(new.tolist(), start, table, True)])
        parts.append(model.forward(new, positions, attention, list(range(size))))
        start += size
    assert start == len(token_ids)
    return torch.cat(parts)


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_chunks_over_scattered_blocks_agree_with_the_model(model_dir, arch):
    path = model_dir(arch)
    model = PagedModel(ModelConfig(path, EngineConfig()), "cpu")
    token_ids = random_tokens(101)
    expected = own_logits(path, token_ids)
    assert expected.std() > 0.05, "a flat model would agree with anything"
    for chunks in ([101], [11, 1, 40, 3, 23, 1, 1, 21], [100, 1]):
        difference = (paged_logits(model, token_ids, chunks) - expected).abs().max()
        assert difference <= 1e-4


def test_tiles_agree_with_one_piece(model_dir, monkeypatch):
    path = model_dir("mistral")
    model = PagedModel(ModelConfig(path, EngineConfig()), "cpu")
    token_ids = random_tokens(101)
    whole = paged_logits(model, token_ids, [30, 71])
    monkeypatch.setattr("kvferry.engine.paged_attention.MAX_MASK_ELEMENTS", 1000)
    tiled = paged_logits(model, token_ids, [30, 71])
    assert (tiled - whole).abs().max() <= 1e-5


def test_attention_outside_the_engine_says_so(model_dir):
    model = PagedModel(ModelConfig(model_dir(), EngineConfig()), "cpu")
    with pytest.raises(ConfigError, match="without its context"):
        model.model(input_ids=torch.tensor([[3, 4]]), use_cache=False)

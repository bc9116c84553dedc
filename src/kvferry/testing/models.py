"""Tiny random models in the shape of real ones, for tests that need a model directory."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from kvferry.engine.model import quiet_transformers
from kvferry.errors import ConfigError

_SMALL = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "max_position_embeddings": 1024,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}

_LATENT = {
    "num_key_value_heads": 8,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 12,
    "v_head_dim": 10,
    "topk_group": 1,
    "num_experts_per_tok": 1,
    "moe_intermediate_size": 32,
}

_EXPERTS = {"n_routed_experts": 2, "n_group": 1, "first_k_dense_replace": 1}

_WINDOWED = {
    **_SMALL,
    "num_hidden_layers": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "sliding_window": 29,
}

_ARCHITECTURES: dict[str, dict[str, Any]] = {
    "llama": {**_SMALL, "num_key_value_heads": 4},
    # Norms on q and k, and a head_dim that is not hidden_size / num_attention_heads.
    "qwen3": {**_SMALL, "num_key_value_heads": 2, "head_dim": 12},
    # Every layer sees only the last `sliding_window` tokens.
    "mistral": {**_SMALL, "num_key_value_heads": 2, "sliding_window": 37},
    # Parallel residual, partial rotary embedding, no grouped heads.
    "gpt_neox": {**_SMALL},
    # Full and sliding layers in turn; the config scales the scores.
    "gemma3_text": {**_WINDOWED, "layer_types": ["sliding_attention", "full_attention"] * 2},
    # Two that run on one rank only: norms over all query heads; one projection for q, k and v.
    "olmo2": {**_SMALL, "num_key_value_heads": 4},
    "phi3": {**_SMALL, "num_key_value_heads": 4},
    # Two that run llama's class, with defaults of their own for what a config omits.
    "internlm3": {**_SMALL, "num_key_value_heads": 4, "head_dim": 8},
    "iquestcoder": {**_SMALL, "num_key_value_heads": 4, "head_dim": 8},
    # Latent attention, with and without a low-rank query.
    "deepseek_v3": {**_SMALL, **_LATENT, **_EXPERTS, "q_lora_rank": 16},
    "deepseek_v2": {**_SMALL, **_LATENT, **_EXPERTS, "q_lora_rank": None},
    # Capped scores; full and sliding layers in turn.
    "gemma2": {**_WINDOWED, "attn_logit_softcapping": 3.0},
    # A sink (key without a value) for every head; experts; full and sliding layers in turn.
    "gpt_oss": {
        **_WINDOWED,
        "num_hidden_layers": 2,
        "num_local_experts": 2,
        "num_experts_per_tok": 1,
    },
    # Three that the engine refuses: no causal mask; attention in chunks, with layers of all tokens;
    # latent attention that it does not know.
    "bert": {**_SMALL},
    "llama4_text": {
        **_SMALL,
        "num_hidden_layers": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "intermediate_size_mlp": 96,
        "num_local_experts": 2,
        "interleave_moe_layer_step": 2,
        "no_rope_layers": [1, 1, 1, 0],
        "attention_chunk_size": 192,
    },
    "youtu": {**_SMALL, **_LATENT, "q_lora_rank": 16},
}


def make_tiny_model(
    path: str | Path, arch: str = "llama", seed: int = 0, **overrides: object
) -> Path:
    """Write a tiny random model to the directory `path` (config and safetensors, no tokenizer).

    Weights depend on the arguments alone. Different seeds give files of equal size and headers.

    Args:
        path: directory; made if absent.
        arch: a key of `_ARCHITECTURES`; the error for another one lists them.
        overrides: config values, for example `num_hidden_layers=2`.

    Raises:
        ConfigError: an unknown architecture.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    if arch not in _ARCHITECTURES:
        raise ConfigError(f"arch is {arch!r}; use one of {', '.join(_ARCHITECTURES)}")
    config = AutoConfig.for_model(arch, **{**_ARCHITECTURES[arch], **overrides})
    return write_random_model(path, partial(AutoModelForCausalLM.from_config, config), seed)


def write_random_model(path: str | Path, build: Callable[[], Any], seed: int = 0) -> Path:
    """Write a model with random weights to the directory `path` (config and safetensors).

    Args:
        path: directory; made if absent.
        build: makes the model. Weights depend on this and the seed alone.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = build()
        with torch.no_grad():
            for name, parameter in sorted(model.named_parameters()):
                # Larger than usual, since nearly uniform attention would hide a wrong key.
                if parameter.ndim > 1 and "embed" not in name:
                    parameter.normal_(std=1.5 * parameter.shape[-1] ** -0.5)
    directory = Path(path)
    directory.mkdir(parents=True, exist_ok=True)
    with quiet_transformers():
        model.save_pretrained(directory)
    return directory

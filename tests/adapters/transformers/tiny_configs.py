"""Tiny configs of all architectures for which Transformers has a causal LM, for `sweep`.

`SIZES` has one value for each field that many configs share. `CHANGES` has what single
architectures need: to be built at all, to have all their kinds of layers among four, or to have
sparse attention that takes fewer than a hundred tokens.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from transformers import (
    CONFIG_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

MODEL_TYPES = sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)

NOT_BUILT = {
    "gemma3n": "its vision part needs the library timm",
    "gemma4_assistant": "it drafts from the KV of another model and has none of its own",
    "gemma4_unified_assistant": "it drafts from the KV of another model and has none of its own",
    "musicgen": "Transformers' AutoModelForCausalLM cannot load it",
    "musicgen_melody": "Transformers' AutoModelForCausalLM cannot load it",
}
"""Architectures without a tiny model, and the reasons."""

SIZES: dict[str, Any] = {
    "vocab_size": 256,
    "vocab_size_per_layer_input": 256,
    "unpadded_vocab_size": 256,
    "audio_vocab_size": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "is_decoder": True,
    "is_encoder_decoder": False,
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len"), 512),
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "emb_dim", "embedding_size"), 64),
    "hidden_size_per_layer_input": 16,
    # Four layers, so that two kinds can alternate.
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers"), 4),
    **dict.fromkeys(("decoder_layers", "num_decoder_layers"), 4),
    **dict.fromkeys(("encoder_layers", "num_encoder_layers"), 4),
    # Heads.
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads"), 4),
    **dict.fromkeys(("attention_heads", "decoder_attention_heads", "encoder_attention_heads"), 4),
    **dict.fromkeys(("num_decoder_attention_heads", "num_encoder_attention_heads"), 4),
    **dict.fromkeys(("num_key_value_heads", "swa_num_key_value_heads"), 2),
    **dict.fromkeys(("head_dim", "swa_head_dim"), 16),
    "swa_num_attention_heads": 4,
    "dim_head": 16,
    "rotary_dim": 8,
    # Windows and sparse attention.
    **dict.fromkeys(("sliding_window", "sliding_window_size", "window_size"), 32),
    "index_head_dim": 16,
    "index_n_heads": 32,  # with few, their choices tie
    "index_topk": 16,
    "index_block_size": 16,
    "index_topk_blocks": 2,
    "keep_window_size": 32,
    # Latent attention.
    "kv_lora_rank": 16,
    "q_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 12,
    "v_head_dim": 10,
    # MLPs and experts.
    **dict.fromkeys(("intermediate_size", "n_inner", "ffn_dim", "dff", "dim_ff", "d_inner"), 96),
    **dict.fromkeys(("decoder_ffn_dim", "encoder_ffn_dim", "dense_intermediate_size"), 96),
    **dict.fromkeys(("moe_intermediate_size", "shared_intermediate_size"), 32),
    "shared_expert_intermediate_size": 32,
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 4),
    "moe_num_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    # Recurrent layers.
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim"), 16),
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    **dict.fromkeys(("mamba_d_state", "state_size", "chunk_size"), 16),
}

_SLIDING = {"layer_types": ["sliding_attention", "full_attention"] * 2}
_LINEAR = {"layer_types": ["linear_attention", "full_attention"] * 2}
_CONV = {"layer_types": ["conv", "full_attention"] * 2}
_LATENT = {"num_key_value_heads": 4}
_WINDOWED = {"use_sliding_window": True, "max_window_layers": 2, "sliding_window": 32}
_QWEN4 = {
    "layer_types": ["linear_attention", "indexed_attention"] * 2,
    "indexer_n_heads": 2,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 16,
    "indexer_budget": 16,
    "indexer_compress_ratio": 4,
    "hc_lowrank": 16,
}
_DOTS3 = {"num_key_value_heads": 4, "layer_types": ["indexed_attention"] * 4}

CHANGES: dict[str, dict[str, Any]] = {
    "axk1": _LATENT,
    "axk2": _LATENT,
    "bailing_hybrid": {**_LATENT, "layer_group_size": 2, "first_k_dense_replace": 1},
    "big_bird": {"attention_type": "original_full"},  # the other is no decoder's
    "bamba": {"attn_layer_indices": [1, 3], "mamba_n_heads": 8},
    "cohere_compass_text": {
        **_SLIDING,
        "rope_parameters": {
            kind: {"rope_type": "default", "rope_theta": 10000.0}
            for kind in _SLIDING["layer_types"]
        },
    },
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8.0},
        "ffn_config": {"hidden_size": 64, "ffn_hidden_size": 96},
    },
    "deepseek_v2": _LATENT,
    "deepseek_v3": _LATENT,
    "deepseek_v32": _LATENT,
    "dory": {"n_input_layers": 1, "n_recurrent_layers": 2, "n_output_layers": 1},
    "dots1": {**_SLIDING, "n_shared_experts": 1},
    "dots3_note": {
        "text_config": _DOTS3,
        "vision_config": {"adapter_in_dim": 64, "adapter_out_dim": 64, "num_hidden_layers": 42},
        "audio_config": {"adapter_input_size": 64, "adapter_out_dim": 64},
    },
    "dots3_note_text": _DOTS3,
    "emu3": {"vocabulary_map": {"<image>": 255}},
    "ernie4_5_moe": {"moe_k": 2},
    "gemma3": {"vision_config": {"model_type": "siglip_vision_model", "image_size": 56}},
    "gemma3_text": _SLIDING,
    "gemma3n_text": {**_SLIDING, "num_kv_shared_layers": 2},
    "glm4_moe_lite": _LATENT,
    "glm_moe_dsa": _LATENT,
    "gpt_neo": {"attention_types": [[["global", "local"], 2]]},
    "granitemoehybrid": {**_LINEAR, "mamba_n_heads": 8, "mamba_d_head": 16},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "kimi_linear": {**_LATENT, **_LINEAR, "linear_head_dim": 16, "linear_num_heads": 4},
    "kolibri1": _SLIDING,
    "laguna": _SLIDING,
    "lfm2": _CONV,
    "lfm2_moe": _CONV,
    "longcat_flash": {
        **_LATENT,
        "num_layers": 2,
        "head_dim": 8,
        "ffn_hidden_size": 96,
        "expert_ffn_hidden_size": 32,
        "moe_topk": 2,
        "zero_expert_num": 2,
    },
    "marian": {"scale_embedding": True},  # else all prompts have nearly the same answer
    "mamba2": {"num_heads": 8, "head_dim": 16},
    "mellum": _SLIDING,
    "minicpm3": _LATENT,
    "minimax_m3_vl_text": {
        "layer_types": ["minimax_m3_sparse", "full_attention"] * 2,
        "index_n_heads": 2,
    },
    "ministral": _SLIDING,
    "mpt": {"use_cache": True},  # else `generate` runs without the store, unless it is asked to
    "qwen2": _WINDOWED,
    "qwen2_moe": _WINDOWED,
    "qwen3": _WINDOWED,
    "qwen3_moe": _WINDOWED,
    "qwen4_exp": {"text_config": _QWEN4},
    "qwen4_exp_text": _QWEN4,
    "reformer": {
        "axial_pos_shape": (16, 32),
        "axial_pos_embds_dim": (16, 48),
        "attention_head_size": 16,
        "local_attn_chunk_length": 16,
        "feed_forward_size": 96,
        "attn_layers": ["local", "local"],
    },
    "sarvam_mla": _LATENT,
    "smollm3": {**_SLIDING, "use_sliding_window": True},
    "xlstm": {"qk_dim_factor": 1.0},
    "xmod": {"default_language": "en_XX"},
    "youtu": _LATENT,
    "zamba": {"num_hidden_layers": 5, "attn_layer_period": 2, "attn_layer_offset": 1},
    "zamba2": {"layers_block_type": ["linear_attention", "hybrid"] * 2, "num_key_value_heads": 4},
    "zaya": {"num_experts_per_tok": 1, "layer_types": ["hybrid", "hybrid_sliding"] * 2},
}


VISION = {
    **dict.fromkeys(("out_hidden_size", "projection_dim"), 64),
    **dict.fromkeys(("image_size", "window_size"), 32),
    "depth": 2,
    "num_position_embeddings": 16,
    "deepstack_visual_indexes": [0],
    "fullatt_block_indexes": [0],
    "patch_size": 16,
    "temporal_patch_size": 2,
    "spatial_merge_size": 2,
    "in_channels": 3,
}

WITH_IMAGES: dict[str, dict[str, Any]] = {
    "gemma3": {
        "text_config": {**_SLIDING, "model_type": "gemma3_text"},
        "vision_config": {"model_type": "siglip_vision_model", "image_size": 56},
    },
    "qwen2_5_vl": {
        "text_config": {
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 10000.0,
                "mrope_section": [2, 3, 3],
            }
        },
        "vision_config": VISION,
    },
    "qwen3_vl": {"vision_config": VISION},
    "qwen3_5": {"text_config": _LINEAR, "vision_config": VISION},
}
"""What classes that take images and text need, in place of `CHANGES`."""


def build_with_images(model_type: str) -> Any:
    """Build a tiny model that takes images and text."""
    config = CONFIG_MAPPING[model_type](
        **values_of(CONFIG_MAPPING[model_type], WITH_IMAGES[model_type])
    )
    return MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING[type(config)]._from_config(config)


def tiny_config(model_type: str) -> Any:
    """Return a tiny config of the class of `model_type`, with tiny configs of its parts."""
    changes = CHANGES.get(model_type, {})
    return CONFIG_MAPPING[model_type](**values_of(CONFIG_MAPPING[model_type], changes))


def build_model(config: Any) -> Any:
    """Build the causal LM of a config; if the LM's class wants a part of the config, pass that."""
    wanted = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    parts = [getattr(config, name) for name in config.sub_configs]
    return wanted._from_config(
        next((part for part in parts if type(part) is wanted.config_class), config)
    )


def values_of(cls: Any, changes: dict[str, Any]) -> dict[str, Any]:
    names = {field.name for field in dataclasses.fields(cls)}
    values = {**{name: size for name, size in SIZES.items() if name in names}, **changes}
    for name, part in cls.sub_configs.items():
        inner = changes.get(name, {})
        if dataclasses.is_dataclass(part):
            values[name] = values_of(part, inner)
        elif inner or name == "text_config":  # of any architecture
            usual = getattr(getattr(cls(), name, None), "model_type", None) or "llama"
            inner = {"model_type": usual, **inner}
            values[name] = values_of(CONFIG_MAPPING[inner["model_type"]], inner)
    return values

"""Tiny configs of all classes of Transformers that take images and text, for `sweep_image_text`.

As tiny_configs.py: the sizes are those of `SIZES`, and of `_VISION` in the vision part; `CHANGES`
has what single classes need beside them.
"""

from __future__ import annotations

from typing import Any

from transformers import CONFIG_MAPPING, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES

from tests.adapters.transformers.tiny_configs import CHANGES as CAUSAL_CHANGES
from tests.adapters.transformers.tiny_configs import VISION, WITH_IMAGES, values_of

IMAGE_TEXT_TYPES = sorted(MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES)

NO_IMAGE_MODEL = {
    "apertus1p5": "its parts for images and sound are large whatever the config says",
    "evolla": "Transformers' AutoModelForImageTextToText cannot load it",
    "gemma3n": "its vision part needs the library timm",
    "inkling_mm_model": "its vision part needs the library scipy",
    "janus": "its parts for images are large whatever the config says",
    "muse_spark": "its parts for images and sound are large whatever the config says",
    "perception_lm": "its vision part needs the library timm",
    "pi0": "it moves a robot",
    "pp_formulanet": "Transformers cannot save it",
    "t5gemma2": "it is an encoder-decoder, whose encoder is large whatever the config says",
}
"""Classes without a tiny model, and the reasons."""


def _rope(*sections: int) -> dict[str, Any]:
    """Rotary embeddings of positions in time, height and width: pairs of numbers for each."""
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": list(sections)}
    return {"text_config": {"rope_parameters": rope}}


_LATENT = {"num_key_value_heads": 4}
_MAP = {"vocabulary_map": {"<image>": 255}}
_CODEBOOK = {"base_channels": 32, "channel_multiplier": [1, 1], "num_res_blocks": 1}

CHANGES: dict[str, dict[str, Any]] = {
    **WITH_IMAGES,
    "chameleon": _MAP,
    "cohere_compass": {"text_config": CAUSAL_CHANGES["cohere_compass_text"]},
    "cosmos3_edge": _rope(2, 3, 3),
    "deepseek_vl_hybrid": {
        "high_res_vision_config": {"model_type": "sam_vision_model", "mlp_dim": 96}
    },
    "deepseek_ocr2": {"text_config": {"mlp_layer_types": ["dense", *["sparse"] * 3]}},
    "emu3": {**_MAP, "vq_config": _CODEBOOK},
    "ernie4_5_vl_moe": {
        "text_config": {
            **_rope(3, 3, 2)["text_config"],
            "moe_intermediate_size": [32, 32],
            "moe_k": 2,
        }
    },
    "fast_vlm": {"vision_config": {"model_type": "siglip_vision_model"}},  # not timm's
    "florence2": {
        "vision_config": {
            "patch_size": [7, 3, 3, 3],
            "num_heads": [2, 2, 2, 2],
            "embed_dim": [16, 16, 16, 16],
            "num_groups": [2, 2, 2, 2],
            "depths": [1, 1, 1, 1],
        }
    },
    "glm4v": _rope(2, 3, 3),
    "glm4v_moe": _rope(1, 1, 2),
    "glm5_next": {
        "text_config": {
            **_LATENT,
            "layer_types": None,
            "qk_rope_head_dim": 0,
            "linear_head_dim": 16,
            "linear_num_heads": 4,
        }
    },
    "granite4_vision": {"deepstack_layer_map": [[0, 0]], "downsample_rate": "1/2"},
    "hunyuan_vl": _rope(2, 3, 3),
    "glm_ocr": _rope(2, 3, 3),
    "glm46v": _rope(2, 3, 3),
    "glmga": _rope(2, 3, 3),
    "inkling2": {"vision_config": {"text_hidden_size": 64}},
    "inkling2_loop": {"vision_config": {"text_hidden_size": 64}},
    "kimi_k25": {"text_config": _LATENT},
    "kosmos-2": {"text_config": {"embed_dim": 64, "layers": 4}},
    "kosmos-2.5": {"text_config": {"embed_dim": 64, "layers": 4}},
    "vision-encoder-decoder": {
        "encoder": {"model_type": "vit", "image_size": 32},
        "decoder": {"model_type": "bert"},
    },
    "mistral4": _LATENT,
    "mistral_large4": {"text_config": _LATENT},
    "molmo2": {
        "vision_config": {"image_size": [32, 32]},
        "adapter_config": {"vision_feature_layer": [3, 2]},
    },
    "nemotron_h_omni": {"vision_config": {"video_temporal_patch_size": 2}},
    "paddleocr_vl": _rope(2, 3, 3),
    "qwen2_5_omni_thinker": {**_rope(2, 3, 3), "vision_start_token_id": 251},
    "qwen3_omni_moe_thinker": _rope(2, 3, 3),
    "qwen2_vl": {**_rope(2, 3, 3), "vision_config": {"embed_dim": 64, "hidden_size": 64}},
    "hy_v4_vl": _rope(2, 1, 1),
}
"""What classes need beside the sizes, in place of the changes of tiny_configs.py."""


def image_text_config(model_type: str) -> Any:
    """Return a tiny config of the class of `model_type`."""
    cls = CONFIG_MAPPING[model_type]
    changes = dict(CHANGES.get(model_type, CAUSAL_CHANGES.get(model_type, {})))
    if "vision_config" in cls.sub_configs:
        changes["vision_config"] = {**VISION, **changes.get("vision_config", {})}
    return cls(**values_of(cls, changes))


def build_image_text(config: Any) -> Any:
    """Build the model of a config."""
    return MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING[type(config)]._from_config(config)

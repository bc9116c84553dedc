"""Tiny models that take images, and prompts with pictures as their processors make them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from transformers import CONFIG_MAPPING, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
from transformers.modeling_outputs import MoeCausalLMOutputWithPast

from tests.adapters.transformers.image_configs import build_image_text, image_text_config
from tests.adapters.transformers.tiny_configs import CHANGES, VISION, WITH_IMAGES, values_of

IMAGE, VIDEO, START, END, BREAK = 250, 251, 252, 253, 254
"""Token ids: of a picture's tokens, of a video's, around them, and between rows of some."""

_IDS = {
    **dict.fromkeys(("image_token_id", "image_token_index"), IMAGE),
    **dict.fromkeys(("video_token_id", "video_token_index"), VIDEO),
    **dict.fromkeys(("vision_start_token_id", "image_start_token_id", "boi_token_index"), START),
    **dict.fromkeys(("vision_end_token_id", "image_end_token_id", "eoi_token_index"), END),
    **dict.fromkeys(("boi_token_id", "video_start_token_id"), START),
    **dict.fromkeys(("eoi_token_id", "video_end_token_id"), END),
}


class Picture(NamedTuple):
    """A picture of `height * width` tokens, where a model has pictures of several sizes."""

    seed: int
    height: int = 2
    width: int = 3

    def pixels(self, *shape: int) -> torch.Tensor:
        """Return its pixels in a shape."""
        return torch.randn(shape, generator=torch.Generator().manual_seed(self.seed))


class Processed(NamedTuple):
    """What a processor makes of pictures."""

    tokens: list[list[int]]
    """Of each picture, between `START` and `END`."""
    tensors: dict[str, torch.Tensor]


def _grid(pictures: Sequence[Picture], frames: int = 2) -> Processed:
    """Patches of all pictures, and their grids (Qwen's kind)."""
    grids = torch.tensor([[1, 2 * each.height, 2 * each.width] for each in pictures])
    size = 3 * frames * 16**2
    pixels = [each.pixels(4 * each.height * each.width, size) for each in pictures]
    tokens = [[IMAGE] * (each.height * each.width) for each in pictures]
    return Processed(tokens, {"pixel_values": torch.cat(pixels), "image_grid_thw": grids})


def _tiles(size: int, num_tokens: int) -> Callable[[Sequence[Picture]], Processed]:
    """Pictures of one size, one tile each."""

    def process(pictures: Sequence[Picture]) -> Processed:
        pixels = torch.stack([each.pixels(3, size, size) for each in pictures])
        return Processed([[IMAGE] * num_tokens for _ in pictures], {"pixel_values": pixels})

    return process


def _several_tiles(size: int, num_tokens: int) -> Callable[[Sequence[Picture]], Processed]:
    """Pictures of `height` tiles, whose tokens follow each other."""

    def process(pictures: Sequence[Picture]) -> Processed:
        pixels = torch.cat([each.pixels(each.height, 3, size, size) for each in pictures])
        tokens = [[IMAGE] * num_tokens * each.height for each in pictures]
        return Processed(tokens, {"pixel_values": pixels})

    return process


def _tiles_apart(size: int, num_tokens: int) -> Callable[[Sequence[Picture]], Processed]:
    """Pictures of `height` tiles, with a token between two."""

    def process(pictures: Sequence[Picture]) -> Processed:
        pixels = torch.cat([each.pixels(each.height, 3, size, size) for each in pictures])
        tokens = [([IMAGE] * num_tokens + [BREAK]) * each.height for each in pictures]
        return Processed(tokens, {"pixel_values": pixels})

    return process


def _sizes(pictures: Sequence[Picture], unit: int = 32) -> Processed:
    """Pictures padded to the largest, and their sizes; a token ends each row (Pixtral's kind)."""
    height = unit * max(each.height for each in pictures)
    width = unit * max(each.width for each in pictures)
    pixels = torch.zeros(len(pictures), 3, height, width)
    sizes = [(unit * each.height, unit * each.width) for each in pictures]
    for into, each, (rows, columns) in zip(pixels, pictures, sizes, strict=True):
        into[:, :rows, :columns] = each.pixels(3, rows, columns)
    tokens = [(([IMAGE] * each.width + [BREAK]) * each.height)[:-1] for each in pictures]
    return Processed(tokens, {"pixel_values": pixels, "image_sizes": torch.tensor(sizes)})


def _places(pictures: Sequence[Picture]) -> Processed:
    """Patches padded to one number, and the place of each (Gemma 4)."""
    most = 9 * 12
    pixels = torch.zeros(len(pictures), most, 3 * 16 * 16)
    places = torch.full((len(pictures), most, 2), -1)
    for number, each in enumerate(pictures):
        rows, columns = 3 * each.height, 3 * each.width
        pixels[number, : rows * columns] = each.pixels(rows * columns, 768).sigmoid()
        grid = torch.cartesian_prod(torch.arange(rows), torch.arange(columns)).flip(1)
        places[number, : rows * columns] = grid
    tokens = [[IMAGE] * (each.height * each.width) for each in pictures]
    return Processed(tokens, {"pixel_values": pixels, "image_position_ids": places})


def _shapes(pictures: Sequence[Picture]) -> Processed:
    """Patches padded to the most, their mask, and their shapes (LFM2-VL)."""
    most = max(4 * each.height * each.width for each in pictures)
    pixels = torch.zeros(len(pictures), most, 3 * 16 * 16)
    mask = torch.zeros(len(pictures), most, dtype=torch.int32)
    for number, each in enumerate(pictures):
        size = 4 * each.height * each.width
        pixels[number, :size] = each.pixels(size, 768)
        mask[number, :size] = 1
    shapes = torch.tensor([[2 * each.height, 2 * each.width] for each in pictures])
    tokens = [[IMAGE] * (each.height * each.width) for each in pictures]
    tensors = {"pixel_values": pixels, "spatial_shapes": shapes, "pixel_attention_mask": mask}
    return Processed(tokens, tensors)


class ImageModel(NamedTuple):
    """How a tiny model is made, and what its processor makes of pictures."""

    changes: dict[str, Any] | None
    """Of its config; None: those of image_configs.py."""
    process: Callable[[Sequence[Picture]], Processed]
    types: str | None = None
    """Name of the argument with the types of tokens."""


_MROPE = {
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}
}
_SIGLIP = {"model_type": "siglip_vision_model", "image_size": 56, "patch_size": 14}

MODELS: dict[str, ImageModel] = {
    "qwen2_5_vl": ImageModel(WITH_IMAGES["qwen2_5_vl"], _grid, "mm_token_type_ids"),
    "qwen3_vl": ImageModel(WITH_IMAGES["qwen3_vl"], _grid, "mm_token_type_ids"),
    "qwen3_5": ImageModel(WITH_IMAGES["qwen3_5"], _grid, "mm_token_type_ids"),
    "glm4v": ImageModel(
        {"vision_config": VISION, "text_config": {"model_type": "glm4v_text", **_MROPE}},
        _grid,
        "mm_token_type_ids",
    ),
    "minimax_m3_vl": ImageModel(
        {
            "vision_config": VISION,
            "text_config": {"model_type": "minimax_m3_vl_text", **CHANGES["minimax_m3_vl_text"]},
        },
        _grid,
    ),
    "gemma3": ImageModel(
        {**WITH_IMAGES["gemma3"], "vision_config": _SIGLIP, "mm_tokens_per_image": 4},
        _tiles(56, 4),
        "token_type_ids",
    ),
    "gemma4": ImageModel(
        {
            "text_config": {
                "model_type": "gemma4_text",
                "layer_types": ["sliding_attention", "full_attention"] * 2,
                "use_bidirectional_attention": "vision",
            }
        },
        _places,
        "mm_token_type_ids",
    ),
    "llama4": ImageModel(
        {
            "text_config": {"model_type": "llama4_text"},
            "vision_config": {
                "image_size": 56,
                "patch_size": 14,
                "intermediate_size": 256,
                "vision_output_dim": 64,
                "projector_input_dim": 64,
                "projector_output_dim": 64,
            },
        },
        _tiles_apart(56, 4),
    ),
    "internvl": ImageModel(
        {"vision_config": {"image_size": [56, 56], "patch_size": [14, 14]}, "image_seq_length": 4},
        _several_tiles(56, 4),
    ),
    "mistral3": ImageModel(
        {
            "vision_config": {"model_type": "pixtral", "image_size": 128, "patch_size": 16},
            "spatial_merge_size": 2,
        },
        _sizes,
    ),
    "lfm2_vl": ImageModel(
        {
            "text_config": {"model_type": "lfm2", "layer_types": ["conv", "full_attention"] * 2},
            "vision_config": {
                "model_type": "siglip2_vision_model",
                "patch_size": 16,
                "num_patches": 64,
            },
            "downsample_factor": 2,
        },
        _shapes,
    ),
    "llava": ImageModel(
        {"vision_config": {"model_type": "clip_vision_model", "image_size": 56, "patch_size": 14}},
        _tiles(56, 16),
    ),
}


_TYPES = "mm_token_type_ids"

MORE: dict[str, ImageModel] = {
    **dict.fromkeys(
        ("cohere_compass", "cosmos3_omni", "glm46v", "glm4v_moe", "glm_ocr", "glmga", "qwen2_vl"),
        ImageModel(None, _grid, _TYPES),
    ),
    **dict.fromkeys(("qwen3_5_moe", "qwen3_vl_moe"), ImageModel(None, _grid, _TYPES)),
    "exaone4_5": ImageModel(None, _grid),
    **dict.fromkeys(
        ("cosmos3_edge", "ernie4_5_vl_moe"), ImageModel(None, partial(_grid, frames=1), _TYPES)
    ),
    **dict.fromkeys(("aya_vision", "cohere2_vision", "got_ocr2"), ImageModel(None, _tiles(32, 1))),
}
"""Classes of which a prompt with images is tried in one process."""


def image_model(model_type: str) -> ImageModel:
    """Return how a model is made."""
    return MODELS[model_type] if model_type in MODELS else MORE[model_type]


def build(model_type: str) -> Any:
    """Build a tiny model."""
    mend_llama4()
    changes = image_model(model_type).changes
    if changes is None:
        config = image_text_config(model_type)
        for name, value in _IDS.items():
            if hasattr(config, name):
                setattr(config, name, value)
        return build_image_text(config)
    config_class = CONFIG_MAPPING[model_type]
    values = values_of(config_class, changes)
    fields = config_class.__dataclass_fields__
    values.update({name: value for name, value in _IDS.items() if name in fields})
    config = config_class(**values)
    return MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING[type(config)]._from_config(config)


def mend_llama4() -> None:
    """Let the class of Llama 4 run, which cannot in Transformers 5.24: it returns a field that the
    output of its text model does not have."""
    if not hasattr(MoeCausalLMOutputWithPast, "image_outputs"):
        MoeCausalLMOutputWithPast.image_outputs = None


class ImagePrompt(NamedTuple):
    """A prompt as arguments of `generate`."""

    input_ids: torch.Tensor
    inputs: dict[str, torch.Tensor]


def image_prompt(model_type: str, *parts: int | Picture, seed: int = 0) -> ImagePrompt:
    """Make a prompt of text of so many tokens, and pictures."""
    model = image_model(model_type)
    pictures = [each for each in parts if isinstance(each, Picture)]
    processed = model.process(pictures) if pictures else Processed([], {})
    tokens = iter(processed.tokens)
    generator = torch.Generator().manual_seed(seed)
    row: list[int] = []
    for part in parts:
        if isinstance(part, Picture):
            row += [START, *next(tokens), END]
        else:
            row += torch.randint(3, 200, (part,), generator=generator).tolist()
    ids = torch.tensor([row])
    inputs = dict(processed.tensors)
    if model.types is not None:
        inputs[model.types] = (ids == IMAGE).int()
    return ImagePrompt(ids, inputs)

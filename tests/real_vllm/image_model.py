"""A tiny random model that reads images, for tests of vLLM's multimodal requests."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from tests.tokenizers import save_tiny_tokenizer

IMAGE_PIXELS = 56
PATCH_PIXELS = 14


def make_image_model(path: Path) -> tuple[Path, int]:
    """Write a Llava of random weights to `path`. Return the path and the id of the token that
    stands for an image."""
    import transformers

    path.mkdir(parents=True)
    save_tiny_tokenizer(path)
    tokenizer = transformers.AutoTokenizer.from_pretrained(path)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<image>"]})
    image = tokenizer.convert_tokens_to_ids("<image>")
    text = transformers.LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        initializer_range=0.12,  # answers depend on every token, so that wrong KV shows
    )
    vision = transformers.CLIPVisionConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        image_size=IMAGE_PIXELS,
        patch_size=PATCH_PIXELS,
    )
    config = transformers.LlavaConfig(
        vision_config=vision,
        text_config=text,
        image_token_index=image,
        vision_feature_layer=-1,
        tie_word_embeddings=False,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = transformers.LlavaForConditionalGeneration(config)
        for name, weights in model.named_parameters():
            if ("vision" in name or "projector" in name) and weights.dim() > 1:
                torch.nn.init.normal_(weights, std=0.15)
    model.save_pretrained(path)
    # vLLM 0.32 reads the names of earlier Transformers.
    file = path / "model.safetensors"
    older = {
        name
        if "vision_model" in name
        else name.replace("vision_tower.", "vision_tower.vision_model."): weights
        for name, weights in load_file(file).items()
    }
    save_file(older, file, metadata={"format": "pt"})
    processor = transformers.CLIPImageProcessor(
        size={"shortest_edge": IMAGE_PIXELS},
        crop_size={"height": IMAGE_PIXELS, "width": IMAGE_PIXELS},
    )
    transformers.LlavaProcessor(
        image_processor=processor,
        tokenizer=tokenizer,
        patch_size=PATCH_PIXELS,
        vision_feature_select_strategy="default",
        image_token="<image>",
        num_additional_image_tokens=1,
    ).save_pretrained(path)
    return path, image

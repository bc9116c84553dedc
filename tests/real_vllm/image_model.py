"""A tiny random model that reads images, for tests of vLLM's multimodal requests.

It is a BLIP-2, because vLLM 0.32 reads images for that without torchvision.
"""

from __future__ import annotations

from pathlib import Path

import torch

from tests.tokenizers import save_tiny_tokenizer

IMAGE_PIXELS = 56
PATCH_PIXELS = 14
NUM_QUERIES = 16
"""Tokens that stand for an image. vLLM puts them before the other tokens of a prompt."""


def make_image_model(path: Path) -> Path:
    """Write a BLIP-2 of random weights to `path`, which is returned."""
    import transformers

    path.mkdir(parents=True)
    save_tiny_tokenizer(path)
    tokenizer = transformers.AutoTokenizer.from_pretrained(path)
    images = transformers.BlipImageProcessor(size={"height": IMAGE_PIXELS, "width": IMAGE_PIXELS})
    processor = transformers.Blip2Processor(images, tokenizer, num_query_tokens=NUM_QUERIES)
    processor.save_pretrained(path)
    text = transformers.LlamaConfig(
        architectures=["LlamaForCausalLM"],
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        initializer_range=0.12,  # answers depend on every token, so that wrong KV shows
    )
    vision = transformers.Blip2VisionConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        image_size=IMAGE_PIXELS,
        patch_size=PATCH_PIXELS,
    )
    queries = transformers.Blip2QFormerConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2
    )
    config = transformers.Blip2Config(
        vision_config=vision,
        qformer_config=queries,
        text_config=text,
        num_query_tokens=NUM_QUERIES,
        image_token_index=tokenizer.convert_tokens_to_ids("<image>"),
        tie_word_embeddings=False,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = transformers.Blip2ForConditionalGeneration(config)
        for name, weights in model.named_parameters():
            if not name.startswith("language_model") and weights.dim() > 1:
                torch.nn.init.normal_(weights, std=0.15)
    model.save_pretrained(path)
    return path

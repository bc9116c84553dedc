"""Prompts and comparisons for the tests of caches that are trees."""

from __future__ import annotations

from functools import partial

import torch

from tests.adapters.transformers import generating
from tests.adapters.transformers.generating import Batch, generate, prompt

WITHIN = 1e-5
"""Of the largest logit."""

CHUNK = 64
"""Recurrent layers compute in blocks of so many tokens; pieces of other sizes round otherwise."""

LENGTH = 141
HIT = 128

reuse = partial(generating.reuse, chunk_tokens=CHUNK)


def ids_of(length: int = LENGTH, seed: int = 0) -> torch.Tensor:
    return prompt(length, seed).clamp(max=250)


def rows_of(*prompts: torch.Tensor) -> Batch:
    """Make a batch of prompts, padded on the left."""
    most = max(each.shape[1] for each in prompts)
    paddings = [most - each.shape[1] for each in prompts]
    input_ids = [
        torch.nn.functional.pad(each, (padding, 0), value=7)
        for each, padding in zip(prompts, paddings, strict=True)
    ]
    masks = [(torch.arange(most) >= padding)[None] for padding in paddings]
    return Batch(torch.cat(input_ids), torch.cat(masks).long())


def assert_right(model, input_ids, found) -> None:
    """Tokens and logits are those of the model without a store."""
    sequences, logits = generate(model, input_ids)
    assert (found.logits - logits).abs().max() <= WITHIN * logits.abs().max()
    assert found.token_ids == sequences[0].tolist()

"""What one process stores of caches that are trees, another reads: the logits are the model's."""

from __future__ import annotations

import json

import pytest
import torch

from tests.adapters.transformers.generating import run_elsewhere
from tests.adapters.transformers.trees import HIT, WITHIN, ids_of, reuse

# Recurrent states of several kinds, convolutions, windows, latents, indexers.
FAMILIES = [
    *("qwen3_next", "granitemoehybrid", "kimi_linear", "lfm2", "bamba", "gemma4_text"),
    *("glm4_moe_lite", "deepseek_v32", "zaya"),
]
HALF = ["qwen3_next", "lfm2", "granitemoehybrid", "glm4_moe_lite"]

STEP = 2**-7
"""A step of bfloat16 at the largest logit."""

READER = """
import json
import sys
import torch
from transformers import AutoModelForCausalLM
from tests.adapters.transformers.generating import generate
from tests.adapters.transformers.trees import ids_of, reuse

store_url, dtype, *paths = sys.argv[1:]
for path in paths:
    model = AutoModelForCausalLM.from_pretrained(path, dtype=getattr(torch, dtype))
    found = reuse(model, store_url, ids_of())
    sequences, cold = generate(model, ids_of())
    line = {
        "num_loaded": found.num_loaded,
        "tokens": [found.token_ids, sequences[0].tolist()],
        "logits": found.logits.tolist(),
        "cold": cold.tolist(),
    }
    print(json.dumps(line))
"""


def read_elsewhere(store_url, dtype, paths) -> list[dict]:
    return [json.loads(line) for line in run_elsewhere(READER, store_url, dtype, *paths)]


def difference(found, expected) -> float:
    """Return the largest difference of logits, as part of the largest."""
    one, other = torch.as_tensor(found), torch.as_tensor(expected)
    return float((one - other).abs().max() / other.abs().max())


@pytest.mark.slow
def test_another_process_answers_as_the_model(tree_dir, load_model, store_url):
    paths = [tree_dir(each) for each in FAMILIES]
    for path in paths:
        assert reuse(load_model(path), store_url, ids_of()).num_saved >= HIT  # with states
    lines = read_elsewhere(store_url, "float32", paths)
    found = {}
    for name, line in zip(FAMILIES, lines, strict=True):
        assert line["num_loaded"] == HIT, name
        assert line["tokens"][0] == line["tokens"][1], name
        found[name] = difference(line["logits"], line["cold"])
    assert max(found.values()) <= WITHIN, found


@pytest.mark.slow
def test_half_precision_in_another_process(tree_dir, load_model, store_url):
    """Compared with the process that stored, which computed the prompt in the same pieces: another
    order of sums moves logits of bfloat16 by several of its steps, with or without a store."""
    written = [
        reuse(load_model(tree_dir(each), dtype=torch.bfloat16), store_url, ids_of())
        for each in HALF
    ]
    lines = read_elsewhere(store_url, "bfloat16", [tree_dir(each) for each in HALF])
    for name, first, line in zip(HALF, written, lines, strict=True):
        assert line["num_loaded"] == HIT, name
        assert difference(line["logits"], first.logits.tolist()) <= STEP, name


def test_the_comparison_can_fail(tree_dir, load_model, store_url):
    model = load_model(tree_dir("lfm2"))
    one, other = (reuse(model, store_url, ids_of(seed=seed)).logits for seed in (0, 1))
    assert difference(one, other) > 1000 * WITHIN
    assert difference(one, other) > STEP

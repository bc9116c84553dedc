"""Types that say that all tokens are text: no argument for some models, an embedding for others."""

from __future__ import annotations

import pytest
import torch

from kvferry.adapters.transformers import StoredKV
from kvferry.observe import Counters
from tests.adapters.transformers.generating import CHUNK, generate
from tests.adapters.transformers.trees import ids_of

WITHIN = 1e-5
"""Of the largest logit."""

NUM_TOKENS = 60

MODELS = {
    # Whether the model computes the same with types of text as without types.
    "gpt2": False,
    "gptj": False,
    "codegen": False,
    "gpt_neo": False,
    "ctrl": True,
}


@pytest.mark.parametrize("model_type", MODELS)
def test_types_of_text_are_served_where_they_say_nothing(
    load_model, tree_dir, store_url, model_type, caplog
):
    model, counts = load_model(tree_dir(model_type)), Counters()
    ids = ids_of(NUM_TOKENS)
    types = {"token_type_ids": torch.zeros_like(ids)}
    calls = [{}, types, types, {}]
    expected = [generate(model, ids, **each)[1] for each in calls]
    is_same = torch.allclose(*expected[:2], atol=1e-4)
    assert is_same == MODELS[model_type]
    with (
        caplog.at_level("INFO"),
        StoredKV(model, store_url, chunk_tokens=CHUNK, observer=counts) as kv,
    ):
        for number, (given, logits) in enumerate(zip(calls, expected, strict=True)):
            _, found = generate(kv, ids, **given)
            assert (found - logits).abs().max() <= WITHIN * logits.abs().max()
            assert bool(kv.num_loaded) == (number > 0 and (is_same or not given))
    assert counts["generated_without_store"] == (0 if is_same else 2)
    assert ("it uses token_type_ids" in caplog.text) == (not is_same)


def test_a_prefill_heeds_types_of_text(load_model, tree_dir, store_url):
    model, ids = load_model(tree_dir("gpt2")), ids_of(NUM_TOKENS)
    types = torch.zeros_like(ids)
    with torch.no_grad():
        expected = model(ids, token_type_ids=types).logits[:, -1]
    with StoredKV(model, store_url, chunk_tokens=CHUNK) as kv:
        for _ in range(2):
            cache = kv.prefill(ids, token_type_ids=types)
            with torch.no_grad():
                given = {"cache": cache, "token_type_ids": types[:, -1:]}
                logits = model(ids[:, -1:], **given).logits[:, -1]
            assert (logits - expected).abs().max() <= WITHIN * expected.abs().max()

"""Token ids that a model takes and its first vocabulary does not have."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForImageTextToText

from kvferry.adapters.transformers import StoredKV
from kvferry.engine.model import quiet_transformers
from kvferry.errors import ConfigError
from kvferry.observe import Counters
from kvferry.testing.models import write_random_model
from tests.adapters.transformers.generating import CHUNK, generate
from tests.adapters.transformers.image_models import IMAGE, Picture, build, image_prompt
from tests.adapters.transformers.trees import ids_of

OUTSIDE = 300
"""An id behind the 256 of the tiny vocabularies."""


def _outside(model_type: str):
    model = build(model_type)
    model.config.image_token_id = OUTSIDE
    return model


def test_an_image_token_may_be_outside_the_vocabulary(tmp_path, store_url):
    place = write_random_model(tmp_path / "model", lambda: _outside("gemma3"))

    def load():
        with quiet_transformers():
            return AutoModelForImageTextToText.from_pretrained(place, dtype=torch.float32)

    ids, inputs = image_prompt("gemma3", 40, Picture(1), 50)
    ids = torch.where(ids == IMAGE, OUTSIDE, ids)
    _, logits = generate(load(), ids, **inputs)
    counts = Counters()
    with StoredKV(load(), store_url, chunk_tokens=CHUNK, observer=counts) as kv:
        for num_loaded in (0, (ids.shape[1] - 2) // CHUNK * CHUNK):
            _, found = generate(kv, ids, **inputs)
            assert (found - logits).abs().max() <= 1e-5 * logits.abs().max()
            assert kv.num_loaded == num_loaded
        with pytest.raises(ConfigError, match=r"token id 301 is given; the vocabulary has 256"):
            kv.generate(ids.clamp(max=255).index_fill(1, torch.tensor([5]), 301))
    assert counts["generated_without_store"] == 0


@pytest.mark.parametrize("model_type", ["llama", "gpt_neo"])
def test_tokens_that_were_added_later_run_without_the_store(
    load_model, tree_dir, store_url, model_type
):
    model, counts, ids = load_model(tree_dir(model_type)), Counters(), ids_of(60)
    with StoredKV(model, store_url, chunk_tokens=CHUNK, observer=counts) as kv:
        generate(kv, ids)
        model.resize_token_embeddings(OUTSIDE + 1)
        ids[0, 5] = OUTSIDE
        expected, logits = generate(model, ids)
        sequences, found = generate(kv, ids)
        assert torch.equal(sequences, expected)
        assert torch.equal(found, logits)
        cache = kv.prefill(ids)
        assert cache.get_seq_length() == 59
        assert kv.num_loaded == 0
    assert counts["model_changed"] == 2

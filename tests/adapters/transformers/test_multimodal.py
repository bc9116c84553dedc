"""Models that also take images: their prompts of text. test_images.py has those with images."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from transformers import AutoModelForImageTextToText

from kvferry.adapters.transformers import StoredKV
from kvferry.adapters.transformers.host_model import HostModel
from kvferry.engine.model import quiet_transformers
from kvferry.observe import Counters
from tests.adapters.transformers import generating
from tests.adapters.transformers.generating import generate, prompt
from tests.adapters.transformers.tiny_configs import WITH_IMAGES

CHUNK = 64
LENGTH, HIT = 141, 128
WITHIN = 1e-5
"""Of the largest logit."""

reuse = partial(generating.reuse, chunk_tokens=CHUNK)


@pytest.fixture
def load(image_dir):
    def factory(model_type: str):
        with quiet_transformers():
            return AutoModelForImageTextToText.from_pretrained(
                image_dir(model_type), dtype=torch.float32
            )

    return factory


def text(seed: int = 0) -> torch.Tensor:
    return prompt(LENGTH, seed).clamp(max=200)


@pytest.mark.parametrize("model_type", WITH_IMAGES)
def test_a_prompt_of_text_is_served(load, store_url, model_type):
    expected, logits = generate(load(model_type), text())
    _, others = generate(load(model_type), text().flip(1))
    largest = logits.abs().max()
    assert (logits - others).abs().max() > 1000 * WITHIN * largest
    for num_loaded in (0, HIT):
        found = reuse(load(model_type), store_url, text())
        assert found.num_loaded == num_loaded
        assert found.token_ids == expected[0].tolist()
        assert (found.logits - logits).abs().max() <= WITHIN * largest


@pytest.mark.parametrize("is_reset", [True, False])
@pytest.mark.parametrize("model_type", ["qwen3_5", "qwen3_vl"])
def test_state_that_an_image_left_in_the_model_is_put_back(
    load, store_url, monkeypatch, model_type, is_reset
):
    model, counts = load(model_type), Counters()
    expected = model(text()).logits[:, -1]
    with StoredKV(model, store_url, chunk_tokens=CHUNK, observer=counts) as kv:
        if not is_reset:  # then the answer is wrong
            monkeypatch.setattr(HostModel, "reset", lambda _: None)
        for num_loaded in (0, HIT):
            model.model.rope_deltas = torch.tensor([[-30]])  # as a prompt with an image does
            cache = kv.prefill(text())
            assert kv.num_loaded == num_loaded
            with torch.no_grad():
                logits = model(text()[:, -1:], cache=cache).logits[:, -1]
            difference = (logits - expected).abs().max() / expected.abs().max()
            assert (difference <= WITHIN) == is_reset
            assert is_reset or difference > 100 * WITHIN
    assert counts["model_changed"] == 0


@pytest.mark.parametrize("model_type", ["qwen3_5", "qwen3_vl", "qwen2_5_vl"])
def test_state_that_an_image_left_before_is_no_part_of_the_model(load, store_url, model_type):
    model = load(model_type)
    expected, logits = generate(model, text())
    for num_loaded in (0, HIT):
        model.model.rope_deltas = torch.tensor([[-30]])
        found = reuse(model, store_url, text())
        assert found.num_loaded == num_loaded
        assert found.token_ids == expected[0].tolist()
        assert (found.logits - logits).abs().max() <= WITHIN * logits.abs().max()


@pytest.mark.parametrize(
    ("arguments", "is_served"),
    [
        ({"mm_token_type_ids": torch.zeros((1, LENGTH), dtype=torch.int)}, True),
        ({"mm_token_type_ids": torch.ones((1, LENGTH), dtype=torch.int)}, False),
        ({"pixel_values": torch.zeros((4, 1536))}, False),
        ({"image_grid_thw": torch.tensor([[1, 2, 2]])}, False),
    ],
    ids=["types of text", "types of images", "pixels", "a grid"],
)
def test_what_says_that_there_is_an_image_runs_without_the_store(
    load, store_url, arguments, is_served, caplog
):
    model, counts = load("qwen3_5"), Counters()
    calls = []
    model.generate = lambda *_, **given: calls.append(given)
    with caplog.at_level("INFO"), StoredKV(model, store_url, observer=counts) as kv:
        kv._model.generate = lambda *_, **given: calls.append(given)
        kv.generate(text(), **arguments)
    assert counts["generated_without_store"] == (not is_served)
    assert [next(iter(arguments)) in given for given in calls] == [True]
    assert (f"it uses {next(iter(arguments))}" in caplog.text) == (not is_served)

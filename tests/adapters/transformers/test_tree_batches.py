"""Batches of prompts, where a cache is a tree: right, or named and run without the store."""

from __future__ import annotations

import pytest
import torch
from transformers.models.lfm2 import modeling_lfm2

from kvferry.adapters.transformers import StoredKV, proof
from kvferry.observe import Counters
from tests.adapters.transformers.generating import generate
from tests.adapters.transformers.trees import (
    CHUNK,
    HIT,
    assert_right,
    ids_of,
    reuse,
    rows_of,
)

WITH_STATES = ["qwen3_next", "granitemoehybrid", "kimi_linear", "lfm2"]
WITHOUT = ["deepseek_v32", "gemma4_text", "bloom"]

WITHIN = 3e-5
"""Of the largest logit. By as much a padded row of qwen3_next differs from the row alone, since its
blocks of tokens begin elsewhere."""


def difference(model, kv, rows, **options) -> float:
    """Generate with and without the store; tokens must agree. Return the largest difference of
    logits, as part of the largest."""
    options["attention_mask"] = rows.attention_mask
    found, logits = generate(kv, rows.input_ids, **options)
    expected, cold = generate(model, rows.input_ids, **options)
    assert torch.equal(found, expected)
    return float((logits - cold).abs().max() / cold.abs().max())


@pytest.mark.parametrize("model_type", [*WITH_STATES, *WITHOUT])
def test_each_row_is_read_up_to_where_it_can_go_on(tree_dir, load_model, store_url, model_type):
    model = load_model(tree_dir(model_type))
    # The first two are stored, the third has no whole chunk, and the last is as long as the first.
    prompts = [ids_of(200), ids_of(100, seed=2), ids_of(10, seed=3), ids_of(200, seed=1)]
    paddings = [200 - each.shape[1] for each in prompts]
    reuse(model, store_url, prompts[0])
    reuse(model, store_url, prompts[1])
    for ends in ([192, 64, 0, 0], [192, 64, 0, 192]):
        counts = Counters()
        with StoredKV(model, store_url, chunk_tokens=CHUNK, observer=counts) as kv:
            assert difference(model, kv, rows_of(*prompts)) <= WITHIN
            assert kv.num_loaded == min(map(sum, zip(paddings, ends, strict=True)))
        assert counts["generated_without_store"] == 0
        if model_type in WITH_STATES:
            assert counts["hit_tokens"] == sum(ends)
            assert counts["hits"] == sum(end > 0 for end in ends)
    for each in prompts:  # alone, each reads what the batch stored
        again = reuse(load_model(tree_dir(model_type)), store_url, each)
        assert again.num_loaded == each.shape[1] // CHUNK * CHUNK
        assert_right(model, each, again)


@pytest.mark.parametrize("model_type", ["qwen3_next", "lfm2"])
def test_beams_and_answers_of_several_prompts(tree_dir, load_model, store_url, model_type):
    model = load_model(tree_dir(model_type))
    rows = rows_of(ids_of(150), ids_of(141, seed=1))
    for options in ({"num_beams": 3}, {"num_beams": 2, "num_return_sequences": 2}):
        with StoredKV(model, store_url, chunk_tokens=CHUNK) as kv:
            assert difference(model, kv, rows, **options) <= WITHIN


def test_rows_that_are_alike_are_computed_and_read_together(tree_dir, load_model, store_url):
    model, counts = load_model(tree_dir("lfm2")), Counters()
    rows = rows_of(ids_of(150), ids_of(150), ids_of(150, seed=1), ids_of(150, seed=2))
    ran, read = [], []
    with StoredKV(model, store_url, chunk_tokens=CHUNK, observer=counts) as kv:
        _noted(kv._model, "run", ran)
        assert difference(model, kv, rows) <= WITHIN
        assert {len(input_ids) for input_ids, *_ in ran} == {4}
        _noted(kv._states, "read", read)
        assert difference(model, kv, rows) <= WITHIN
        assert kv.num_loaded == HIT
        assert len(read) == 3


def _noted(parent, name, calls) -> None:
    """Note the arguments of each call of a method."""
    method = getattr(parent, name)
    setattr(parent, name, lambda *each, **named: (calls.append(each), method(*each, **named))[1])


@pytest.mark.parametrize("model_type", ["qwen3_next", "granitemoehybrid", "lfm2"])
def test_a_token_that_is_hidden_further_on(tree_dir, load_model, store_url, model_type):
    model = load_model(tree_dir(model_type))
    rows = rows_of(ids_of(200), ids_of(180, seed=1))
    rows.attention_mask[0, 90:95] = 0
    rows.attention_mask[1, 170] = 0
    for num_loaded in (0, 64):
        with StoredKV(model, store_url, chunk_tokens=CHUNK) as kv:
            assert difference(model, kv, rows) <= WITHIN
            assert kv.num_loaded == num_loaded
    assert reuse(model, store_url, ids_of(200)).num_loaded == 64


@pytest.mark.parametrize(
    "lengths", [(140, 1), (140, 2), (140, 3), (140, 65), (70, 66), (5, 4), (2, 1)]
)
def test_rows_of_awkward_lengths(tree_dir, load_model, store_url, lengths):
    model, counts = load_model(tree_dir("lfm2")), Counters()
    rows = rows_of(*(ids_of(length, seed) for seed, length in enumerate(lengths)))
    for _ in range(2):
        with StoredKV(model, store_url, chunk_tokens=CHUNK, observer=counts) as kv:
            assert difference(model, kv, rows) <= WITHIN
            cache = kv.prefill(*rows)
            expected = model(rows.input_ids[:, :-1], attention_mask=rows.attention_mask[:, :-1])
            for law in kv._form.tree.states:
                ours, theirs = (
                    kv._form.tree.leaves(each)[law.path] for each in (cache, expected.cache)
                )
                assert (ours - theirs).abs().max() <= WITHIN * theirs.abs().max()
        assert counts["miss_no_state"] == 0


def test_a_row_without_a_visible_token_runs_without_the_store(
    tree_dir, load_model, store_url, caplog
):
    model, counts = load_model(tree_dir("lfm2")), Counters()
    rows = rows_of(ids_of(70), ids_of(50))
    rows.attention_mask[1] = 0
    with (
        caplog.at_level("INFO"),
        StoredKV(model, store_url, chunk_tokens=CHUNK, observer=counts) as kv,
    ):
        kv.generate(rows.input_ids, attention_mask=rows.attention_mask, max_new_tokens=2)
    assert counts["generated_without_store"] == 1
    assert "runs without the store: a prompt of the batch has hardly a token" in caplog.text


# ---- what is not served


def _leak(monkeypatch) -> None:
    """Let padding into the states of convolutions, as models do that know no mask there."""
    monkeypatch.setattr(modeling_lfm2, "apply_mask_to_padding_states", lambda hidden, _: hidden)


def _told(model, store_url, rows, caplog, **options):
    """Generate, and return by how much logits differ, the counts, and why it was not served."""
    counts = Counters()
    caplog.clear()
    with (
        caplog.at_level("INFO"),
        StoredKV(model, store_url, chunk_tokens=CHUNK, observer=counts, **options) as kv,
    ):
        largest = difference(model, kv, rows, new_tokens=1)
    lines = [each.message for each in caplog.records if "without the store" in each.message]
    return largest, counts, "".join(lines)


NAMED = {"weights_version": "leaks"}


def test_a_model_whose_padding_leaks_is_refused_for_padding_alone(
    tree_dir, load_model, store_url, monkeypatch, caplog
):
    _leak(monkeypatch)
    model = load_model(tree_dir("lfm2"))
    padded, whole = rows_of(ids_of(150), ids_of(140)), rows_of(ids_of(150), ids_of(150, seed=1))
    for _ in range(2):  # as proven now, and as the store says
        largest, counts, why = _told(model, store_url, padded, caplog, **NAMED)
        assert largest == 0
        assert counts["generated_without_store"] == 1
        assert "with hidden tokens, leaf layers.1.keys of a restored batch" in why
    assert _told(model, store_url, whole, caplog, **NAMED)[0] <= WITHIN
    largest, counts, why = _told(model, store_url, whole, caplog, **NAMED)
    assert (largest <= WITHIN, counts["hit_tokens"], why) == (True, 2 * HIT, "")


def test_without_the_proof_padding_would_be_served_wrongly(
    tree_dir, load_model, store_url, monkeypatch, caplog
):
    _leak(monkeypatch)
    monkeypatch.setattr(proof, "_not_served", lambda *_, **__: "")
    model = load_model(tree_dir("lfm2"))
    rows = rows_of(ids_of(150), ids_of(140))
    with StoredKV(model, store_url, chunk_tokens=CHUNK, **NAMED) as kv:
        _, logits = generate(kv, rows.input_ids, attention_mask=rows.attention_mask)
    _, cold = generate(model, rows.input_ids, attention_mask=rows.attention_mask)
    assert (logits[:2] - cold[:2]).abs().max() > 100 * WITHIN * cold.abs().max()


@pytest.mark.parametrize("model_type", ["blenderbot", "minimax_m3_vl_text"])
def test_padded_rows_that_differ_from_the_rows_alone_are_not_stored(
    tree_dir, load_model, store_url, caplog, model_type
):
    """Positions that count padding, and blocks of keys that begin with it."""
    model, ids = load_model(tree_dir(model_type)), ids_of(100, seed=1)
    largest, counts, why = _told(model, store_url, rows_of(ids_of(120), ids), caplog)
    assert largest == 0
    assert (counts["generated_without_store"], counts["put_stored"]) == (1, 0)
    assert "with hidden tokens, leaf layers." in why
    found = reuse(model, store_url, ids)
    assert found.num_loaded == 0
    assert_right(model, ids, found)
    assert _told(model, store_url, rows_of(ids_of(100), ids), caplog)[0] <= WITHIN


def test_a_state_whose_size_depends_on_tokens_is_refused_for_padding_alone(
    tree_dir, load_model, store_url, caplog
):
    """Windows beside states, of which a short row has less."""
    model = load_model(tree_dir("zaya"))
    largest, _, why = _told(model, store_url, rows_of(ids_of(150), ids_of(140)), caplog)
    assert largest == 0
    assert "with hidden tokens, leaf layers.1.keys has other sizes in other rows" in why
    for hit_tokens in (0, 2 * HIT):
        rows = rows_of(ids_of(150), ids_of(150, seed=1))
        largest, counts, why = _told(model, store_url, rows, caplog)
        assert (largest <= WITHIN, counts["hit_tokens"], why) == (True, hit_tokens, "")

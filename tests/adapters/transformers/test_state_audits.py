"""The audit of states: a state that is not this model's is found before it is used."""

from __future__ import annotations

import pytest
import torch

from kvferry.adapters.transformers import StoredKV
from kvferry.adapters.transformers.cache_tree import CacheTree
from kvferry.observe import Counters
from tests.adapters.transformers.generating import generate, loaded
from tests.adapters.transformers.trees import CHUNK, HIT, WITHIN, assert_right, ids_of, reuse

KINDS = ["qwen3_next", "granitemoehybrid", "kimi_linear", "lfm2"]


def stored_wrongly(model, store_url, monkeypatch, change, ids) -> None:
    """Store a prompt whose states are changed before they are stored."""
    state = CacheTree.state

    def changed(tree, cache, row=0):
        kept = {law.path: tree.leaves(cache)[law.path].clone() for law in tree.states}
        for law in tree.states[-1:]:  # one is enough
            change(tree.leaves(cache)[law.path])
        found = state(tree, cache, row)
        for path, value in kept.items():
            tree.leaves(cache)[path].copy_(value)
        return found

    with StoredKV(model, store_url, chunk_tokens=CHUNK) as kv, monkeypatch.context() as patch:
        patch.setattr(CacheTree, "state", changed)
        kv.prefill(ids)


CHANGES = {
    "of another prompt": lambda state: state.copy_(state.roll(1, -1)),
    "of a model that computes more": lambda state: state.mul_(1.02),
    "empty": lambda state: state.zero_(),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
@pytest.mark.parametrize("model_type", KINDS)
def test_a_state_that_differs_is_found_at_the_first_hit(
    tree_dir, load_model, store_url, monkeypatch, change, caplog, model_type
):
    model = load_model(tree_dir(model_type))
    stored_wrongly(model, store_url, monkeypatch, change, ids_of())
    found = reuse(model, store_url, ids_of())
    assert (found.num_loaded, found.counts["audit_mismatch"]) == (0, 1)
    assert_right(model, ids_of(), found)
    assert "state layers." in caplog.text
    assert "KV differs from that in record" in caplog.text
    assert found.num_saved == 0
    assert reuse(model, store_url, ids_of()).num_loaded == 0  # its records were taken out


def test_without_the_audit_it_would_be_served(tree_dir, load_model, store_url, monkeypatch):
    model, ids = load_model(tree_dir("lfm2")), ids_of(HIT + 2)
    stored_wrongly(model, store_url, monkeypatch, CHANGES["empty"], ids)
    found = reuse(model, store_url, ids, audit="off")
    _, logits = generate(model, ids)
    assert found.num_loaded == HIT
    assert (found.logits - logits).abs().max() > 100 * WITHIN * logits.abs().max()


@pytest.mark.parametrize("change", [torch.nan, torch.inf])
def test_a_state_that_is_not_finite_is_taken_out(
    tree_dir, load_model, store_url, monkeypatch, change
):
    model = load_model(tree_dir("lfm2"))
    stored_wrongly(model, store_url, monkeypatch, lambda state: state.fill_(change), ids_of())
    found = reuse(model, store_url, ids_of())
    assert (found.num_loaded, found.counts["records_corrupt"]) == (0, 1)
    assert found.counts["audit_mismatch"] == 0
    assert_right(model, ids_of(), found)
    assert reuse(model, store_url, ids_of()).num_loaded == HIT


def test_an_audit_computes_from_the_state_before_the_end(tree_dir, load_model, store_url):
    """Prompts of a conversation leave one behind each turn, and every 256 tokens."""
    model = load_model(tree_dir("lfm2"))
    reuse(model, store_url, ids_of(390))
    ran, counts = [], Counters()
    with StoredKV(model, store_url, chunk_tokens=CHUNK, observer=counts) as kv:
        assert kv._form.tree.snapshot_tokens == 256
        run = kv._model.run
        kv._model.run = lambda ids, *each, **named: (
            ran.append(ids.shape[1]),
            run(ids, *each, **named),
        )[1]
        assert loaded(kv, ids_of(390)) == 384
        assert ran == [CHUNK, 128, 5]  # the first chunk, what is behind 256 tokens, and the rest
        ran.clear()
        assert loaded(kv, ids_of(390)) == 384
        assert ran == [5]
    assert (counts["audits"], counts["audit_mismatch"]) == (1, 0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("model_type", KINDS)
def test_honest_states_are_never_suspected(tree_dir, load_model, store_url, model_type, dtype):
    model, counts = load_model(tree_dir(model_type), dtype=dtype), Counters()
    with StoredKV(model, store_url, chunk_tokens=CHUNK, observer=counts, audit=1.0) as kv:
        for length in (70, 200, 330, 390, 330, 200):
            kv.prefill(ids_of(length))
        assert kv.num_loaded == 192
    assert counts["audits"] == counts["hits"] == 5
    assert (counts["audit_mismatch"], counts["audit_doubtful"]) == (0, 0)

"""Caches that are trees of leaves: what is served of them is right, and all else is refused."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForImageTextToText, cache_utils

from kvferry.adapters.transformers import StoredKV, prefill, proof
from kvferry.adapters.transformers.cache_leaves import slots
from kvferry.adapters.transformers.cache_tree import CacheTree
from kvferry.errors import ConfigError
from kvferry.keys import ChunkKeys, Namespace, state_keys
from kvferry.observe import Counters
from kvferry.store.base import Where
from kvferry.store.url import open_store
from kvferry.testing.faults import flip_bit
from kvferry.testing.models import write_random_model
from tests.adapters.transformers.generating import chat_elsewhere, generate, loaded
from tests.adapters.transformers.image_configs import build_image_text, image_text_config
from tests.adapters.transformers.trees import CHUNK, HIT, WITHIN, assert_right, ids_of, reuse

# Recurrent states (three kinds), convolutions, indexers, latents of another form, layers of several
# shapes, windows and states in one layer, attention outside the interface, own positions.
SERVED = [
    *("qwen3_next", "granitemoehybrid", "kimi_linear", "lfm2", "deepseek_v32", "glm4_moe_lite"),
    *("gemma4_text", "zaya", "bloom", "roberta"),
]


@pytest.mark.parametrize("model_type", SERVED)
def test_a_restored_cache_answers_like_the_model(tree_dir, load_model, store_url, model_type):
    model = load_model(tree_dir(model_type))
    first = reuse(model, store_url, ids_of())
    assert first.num_loaded == 0
    assert_right(model, ids_of(), first)
    again = reuse(load_model(tree_dir(model_type)), store_url, ids_of())
    assert again.num_loaded == HIT
    assert again.num_saved == 0
    assert_right(model, ids_of(), again)


@pytest.mark.parametrize("model_type", ["qwen3_next", "gemma4_text"])
def test_a_prefill_returns_a_cache_of_all_tokens_but_the_last(
    tree_dir, load_model, store_url, model_type
):
    model = load_model(tree_dir(model_type))
    expected = model(ids_of()).logits[:, -1]
    for num_loaded in (0, HIT):
        with StoredKV(model, store_url, chunk_tokens=CHUNK) as kv:
            cache = kv.prefill(ids_of())
            assert kv.num_loaded == num_loaded
            logits = model(ids_of()[:, -1:], cache=cache).logits[:, -1]
        assert (logits - expected).abs().max() <= WITHIN * expected.abs().max()


def test_a_model_that_keeps_no_cache_unless_asked_is_served_when_asked(
    tree_dir, load_model, store_url
):
    model, counts = load_model(tree_dir("mpt")), Counters()
    model.generation_config.use_cache = False
    with StoredKV(model, store_url, chunk_tokens=CHUNK, observer=counts) as kv:
        kv.generate(ids_of(), max_new_tokens=2)
        assert counts["generated_without_store"] == 1
        for num_loaded in (0, HIT):
            found = generate(kv, ids_of(), use_cache=True)
            assert kv.num_loaded == num_loaded
            expected = generate(model, ids_of(), use_cache=True)
            assert torch.equal(found[0], expected[0])


def test_rows_without_elements_are_restored(tmp_path, store_url):
    """Latent attention whose keys have no rotated part."""
    build = partial(build_image_text, image_text_config("mistral_large4"))
    directory = write_random_model(tmp_path / "model", build)
    load = partial(AutoModelForImageTextToText.from_pretrained, directory, dtype=torch.float32)
    with StoredKV(load(), store_url, chunk_tokens=CHUNK) as kv:
        leaves = {name: slot.value for name, slot in slots(kv.prefill(ids_of())).items()}
    assert 0 in {each.numel() for each in leaves.values() if isinstance(each, torch.Tensor)}
    assert_right(load(), ids_of(), found := reuse(load(), store_url, ids_of()))
    assert found.num_loaded == HIT


REFUSED = {
    "jamba": r"computes leaf layers\.1\.\w+ of its cache otherwise in pieces",
    "mamba": "Mamba",
    "falcon_mamba": "FalconMamba",
}


@pytest.mark.parametrize(("model_type", "message"), REFUSED.items())
def test_what_transformers_computes_wrongly_in_pieces_is_refused(
    tree_dir, load_model, store_url, model_type, message
):
    model = load_model(tree_dir(model_type))
    with pytest.raises(ConfigError, match=message) as refusal:
        StoredKV(model, store_url, chunk_tokens=CHUNK)
    assert "\n" not in str(refusal.value)


def test_without_the_proof_it_would_be_served_wrongly(tree_dir, load_model, store_url, monkeypatch):
    monkeypatch.setattr(proof, "prove", lambda *_: ("", ""))
    model = load_model(tree_dir("jamba"))
    reuse(model, store_url, ids_of(), audit="off")
    found = reuse(model, store_url, ids_of(), audit="off")
    _, logits = generate(model, ids_of())
    assert found.num_loaded == HIT
    assert (found.logits - logits).abs().max() > 100 * WITHIN * logits.abs().max()


class _Counting(torch.nn.Module):
    """A norm that adds what follows from the tokens that it saw, as own positions would."""

    def __init__(self, norm):
        super().__init__()
        self.norm = norm
        self.num_seen = 0

    def forward(self, hidden):
        self.num_seen += hidden.shape[1]
        return self.norm(hidden) * (1 + 0.01 * self.num_seen)


def test_a_position_that_a_module_keeps_is_refused_by_name(tree_dir, load_model, store_url):
    model = load_model(tree_dir("qwen3_next"))
    layer = model.model.layers[1]
    layer.input_layernorm = _Counting(layer.input_layernorm)
    with pytest.raises(ConfigError, match=r"layers\.1\.input_layernorm\.num_seen outside its"):
        StoredKV(model, store_url, chunk_tokens=CHUNK, weights_version="counts")


def _scale_when_long(monkeypatch, more_than: int) -> None:
    """Make layers of attention that scale all keys, once there are more than so many."""
    update = cache_utils.DynamicLayer.update

    def scaling(self, *args, **kwargs):
        update(self, *args, **kwargs)
        if self.keys.shape[-2] > more_than:
            self.keys = self.keys * 1.05
        return self.keys, self.values

    monkeypatch.setattr(cache_utils.DynamicLayer, "update", scaling)


@pytest.mark.parametrize("model_type", ["qwen3_next", "glm4_moe_lite"])
def test_a_leaf_that_depends_on_length_after_the_proof_is_never_stored(
    tree_dir, load_model, store_url, monkeypatch, caplog, model_type
):
    model, counts = load_model(tree_dir(model_type)), Counters()
    _scale_when_long(monkeypatch, 4 * CHUNK)
    options = {"chunk_tokens": CHUNK, "weights_version": "scales", "observer": counts}
    with StoredKV(model, store_url, **options) as kv:
        for length in (300, 330):
            kv.generate(ids_of(length), max_new_tokens=2)
        assert counts["put_stored"] == 0
        assert counts["cache_law_broken"] == 2
        kv.generate(ids_of(2 * CHUNK + 2), max_new_tokens=2)
        assert counts["put_stored"] > 0
    assert caplog.text.count("a prompt is not stored: of the model's cache, leaf rows in") == 1


def test_without_the_witness_it_would_be_stored(tree_dir, load_model, store_url, monkeypatch):
    monkeypatch.setattr(prefill.TreePrefill, "_witness", lambda *_: None)
    model, counts = load_model(tree_dir("qwen3_next")), Counters()
    _scale_when_long(monkeypatch, 4 * CHUNK)
    options = {"chunk_tokens": CHUNK, "weights_version": "scales", "observer": counts}
    with StoredKV(model, store_url, **options) as kv:
        kv.generate(ids_of(330), max_new_tokens=2)
    assert counts["put_stored"] > 0


@pytest.mark.parametrize("model_type", ["qwen3_next", "gemma4_text"])
def test_a_leaf_that_does_not_obey_its_law_is_named(tree_dir, load_model, store_url, model_type):
    """As a window does that is longer than all that the probes saw."""
    with StoredKV(load_model(tree_dir(model_type)), store_url, chunk_tokens=CHUNK) as kv:
        tree: CacheTree = kv._form.tree
        cache = kv.prefill(ids_of(2 * CHUNK + 1))
    assert tree.broken(cache, 2 * CHUNK) is None
    assert tree.broken(cache, 3 * CHUNK) is not None
    for law in (*tree.rows, *tree.states, *tree.counts):
        slot = slots(cache)[law.path]
        cut = slot.value[..., 1:, :] if law in tree.rows else None
        for other in (cut, "text", torch.zeros(3, dtype=torch.float16)):
            slot.put(other)
            assert ".".join(law.path) in tree.broken(cache, 2 * CHUNK)
        slot.put(slot.value)
        assert tree.broken(cache, 2 * CHUNK) is None
    for state in tree.states:
        slots(cache)[state.path].value.view(-1)[-1] = torch.inf
        assert tree.broken(cache, 2 * CHUNK) == f"{'.'.join(state.path)} has NaN or Inf"
        break


def test_a_cache_class_of_foreign_code_needs_a_name(tree_dir, load_model, store_url, monkeypatch):
    _scale_when_long(monkeypatch, 10_000)
    with pytest.raises(ConfigError, match=r"DynamicLayer keeps the cache of .*weights_version"):
        StoredKV(load_model(tree_dir("qwen3_next")), store_url, chunk_tokens=CHUNK)


# ---- the proof


def test_a_proof_is_kept_for_the_same_code(tree_dir, load_model, store_url, monkeypatch):
    model, calls = load_model(tree_dir("qwen3_next")), []
    prove = proof.prove
    monkeypatch.setattr(proof, "prove", lambda *each: (calls.append(1), prove(*each)))

    def opened():
        with StoredKV(model, store_url, chunk_tokens=CHUNK) as kv:
            return bytes.fromhex(kv.namespace)

    namespace = opened()
    assert opened() == namespace
    assert len(calls) == 1
    with open_store(store_url) as store:
        text = store.catalogue().description(namespace)
        assert Namespace.from_text(namespace, text).state_parts > 0
        for other in (json.dumps({**json.loads(text), "proof": "0" * 64}), "[", "{}"):
            store.describe(namespace, other)
            opened()
            assert (
                Namespace.from_text(namespace, store.catalogue().description(namespace)) is not None
            )
    assert len(calls) == 4
    monkeypatch.setattr(proof, "_version", lambda _: "another")
    assert opened() == namespace
    assert len(calls) == 5


def test_other_code_of_the_cache_has_another_namespace(
    tree_dir, load_model, store_url, monkeypatch
):
    model = load_model(tree_dir("lfm2"))
    reuse(model, store_url, ids_of())
    _scale_when_long(monkeypatch, 10_000)
    monkeypatch.setattr(
        "kvferry.adapters.transformers.cache_copies.code_of", lambda *_: "transformers 6.0.0, 0"
    )
    options = {"weights_version": None}
    monkeypatch.setattr("kvferry.adapters.transformers.host_model.is_library_cache", lambda _: True)
    assert reuse(model, store_url, ids_of(), **options).num_loaded == 0


# ---- states


def _files(store_url):
    return sorted(Path(store_url.removeprefix("file://")).glob("records/*/*.safetensors"))


def _state_files(store_url):
    return [each for each in _files(store_url) if b'"state":{' in each.read_bytes()[:4096]]


@pytest.mark.parametrize(
    ("damage", "counter"),
    [
        (lambda path: path.write_bytes(path.read_bytes()[:-1]), "miss_wrong_size"),
        (lambda path: path.write_bytes(flip_bit(-8)(path.read_bytes())), "miss_bad_checksum"),
        (lambda path: path.unlink(), "miss_absent"),
        (
            lambda path: path.write_bytes(_files(path.parents[2].as_uri())[0].read_bytes()),
            "miss_other_record",
        ),
    ],
    ids=["truncated", "flipped", "missing", "another record"],
)
def test_a_state_that_is_not_right_is_a_miss(tree_dir, load_model, store_url, damage, counter):
    model = load_model(tree_dir("qwen3_next"))
    reuse(model, store_url, ids_of())
    damage(_state_files(store_url)[-1])
    broken = reuse(model, store_url, ids_of())
    assert broken.num_loaded < HIT
    assert broken.counts[counter] >= 1
    assert broken.counts["miss_no_state"] == 1
    assert_right(model, ids_of(), broken)
    assert reuse(model, store_url, ids_of()).num_loaded == HIT  # it was stored again


def test_a_state_without_its_chunks_is_a_miss(tree_dir, load_model, store_url):
    model = load_model(tree_dir("qwen3_next"))
    reuse(model, store_url, ids_of())
    states = set(_state_files(store_url))
    for path in _files(store_url):
        if path not in states:
            path.unlink()
    found = reuse(model, store_url, ids_of())
    assert found.num_loaded == 0
    assert_right(model, ids_of(), found)


def test_bytes_that_are_no_state_of_the_tree_are_a_miss(tree_dir, load_model, store_url):
    model, sound = load_model(tree_dir("lfm2")), []
    with StoredKV(model, store_url, chunk_tokens=CHUNK) as kv:
        tree: CacheTree = kv._form.tree
        sound.append(tree.state(kv.prefill(ids_of())))
    (state,) = sound
    assert tree.accepts(state)
    assert tree.accepts(state + bytes(99))
    head = int.from_bytes(state[:4], "little")
    shapes = json.loads(state[4 : 4 + head])
    bad = [[*shapes[:-1], shapes[-1][:-1]], shapes[:-1], [[-1] * 3] * len(shapes), {}, [[1e99]]]
    bad += [[[1 << 40] * len(shapes[0])] * len(shapes), [None] * len(shapes)]
    bad += [[[each[0], *reversed(each[1:])] for each in shapes]]
    texts = [json.dumps(each).encode() for each in bad]
    wrong = [len(each).to_bytes(4, "little") + each + state[4 + head :] for each in texts]
    for each in (*wrong, b"", state[:3], state[:-1], bytes(100), b"\xff" * 100):
        assert not tree.accepts(each)


def test_a_state_is_stored_at_the_end_and_where_every_prompt_has_one(
    tree_dir, load_model, store_url, monkeypatch
):
    model, counts = load_model(tree_dir("lfm2")), Counters()
    with StoredKV(model, store_url, chunk_tokens=CHUNK, observer=counts) as kv:
        assert kv._form.tree.snapshot_tokens == 256
        loaded(kv, ids_of(390))
        namespace = bytes.fromhex(kv.namespace)
        # A prompt that begins like it and parts from it behind 270 tokens.
        other = torch.cat((ids_of(330), ids_of(40, seed=7)), dim=1)
        assert loaded(kv, other) == 256
        assert loaded(kv, ids_of(390)) == 384
    keys = ChunkKeys(namespace, CHUNK)
    keys.extend(ids_of(390)[0].tolist())
    with open_store(store_url) as store:
        assert store.wait_indexed(60.0)
        parts = Namespace.from_text(namespace, store.catalogue().description(namespace)).state_parts
        known = [
            all(store.where(each) is Where.HERE for each in state_keys(key, parts))
            for key in keys.keys
        ]
    assert [CHUNK * (n + 1) for n, each in enumerate(known) if each] == [256, 320, 384]


# ---- beams


@pytest.mark.parametrize("model_type", ["qwen3_next", "lfm2", "deepseek_v32", "zaya"])
@pytest.mark.parametrize(
    "options", [{"num_beams": 3}, {"num_return_sequences": 2, "do_sample": True}], ids=str
)
def test_leaves_of_all_kinds_are_repeated(tree_dir, load_model, store_url, model_type, options):
    model = load_model(tree_dir(model_type))
    options = {"max_new_tokens": 5, "pad_token_id": 0, **options}

    def answer(by):
        torch.manual_seed(1)
        return by.generate(ids_of(), attention_mask=torch.ones_like(ids_of()), **options)

    expected = answer(model)
    for num_loaded in (0, HIT):
        with StoredKV(model, store_url, chunk_tokens=CHUNK) as kv:
            assert torch.equal(answer(kv), expected)
            assert kv.num_loaded == num_loaded


# ---- conversations


@pytest.mark.slow
@pytest.mark.parametrize("model_type", ["qwen3_next", "lfm2"])
def test_a_conversation_goes_on_in_another_process(tree_dir, store_url, model_type):
    # Of prompts of 40, 75, 110, ... tokens, all but the last two may be read.
    ends = [(40 + 35 * turn - 2) // CHUNK * CHUNK for turn in range(8)]
    for expected in ([0, *ends[:-1]], ends):
        assert chat_elsewhere(store_url, CHUNK, 8, tree_dir(model_type)) == expected

"""What single loads and saves of `StoredKV` ask for."""

from __future__ import annotations

import pytest

from kvferry.adapters.transformers import StoredKV
from kvferry.errors import ConfigError
from kvferry.store.url import open_one
from tests.adapters.transformers.generating import CHUNK, batch, generate, prompt, reuse

OPTIONS = {"chunk_tokens": CHUNK, "audit": "off"}


@pytest.mark.parametrize(("most", "loaded"), [(0, 0), (5, 5), (16, 16), (40, 40), (1000, 96)])
def test_no_more_is_read_than_was_asked_for(load_model, store_url, most, loaded):
    model, input_ids = load_model(), prompt(101)
    reuse(model, store_url, input_ids)
    with StoredKV(model, store_url, **OPTIONS) as kv:
        cache = kv.load(input_ids, max_load_tokens=most, explain=True)
    assert cache.num_loaded == loaded
    [said] = cache.explanation
    assert (said["prompt_tokens"], said["hit_tokens"]) == (101, loaded)
    assert said["by_tier"] == ({"file": loaded} if loaded else {})
    assert said["miss_reason"] == ("not_loading" if loaded < 96 else "partial")


def test_why_nothing_was_read(load_model, store_url):
    model, input_ids = load_model(), prompt(101)
    with StoredKV(model, store_url, **OPTIONS) as kv:
        assert kv.load(input_ids).explanation is None
        [said] = kv.load(input_ids, explain=True).explanation
    assert said["miss_tokens"] == {"absent": 96, "partial": 5}
    reuse(model, store_url, input_ids)
    with open_one(store_url) as store:
        for entry in list(store.scan()):
            store.delete(entry.key)
            store.put(entry.key, [b"x" * entry.num_bytes])
    with StoredKV(model, store_url, **OPTIONS) as kv:
        assert kv.load(input_ids).num_loaded == 0
        model.train()
        [said] = kv.load(input_ids, explain=True).explanation
    assert said["miss_reason"] == "not_loading"


def test_each_row_of_a_batch_is_explained(load_model, store_url):
    model, rows = load_model(), batch(60, 40)
    reuse(model, store_url, prompt(40))
    with StoredKV(model, store_url, **OPTIONS) as kv:
        cache = kv.load(rows.input_ids, attention_mask=rows.attention_mask, explain=True)
    first, second = cache.explanation
    assert (first["prompt_tokens"], first["hit_tokens"]) == (60, 32)
    assert (first["miss_reason"], first["miss_tokens"]["absent"]) == ("absent", 16)
    # A row of 20 hidden tokens is read as far as the other one is.
    assert (second["prompt_tokens"], second["hit_tokens"]) == (40, 12)
    assert second["miss_tokens"] == {"not_loading": 20, "partial": 8}
    assert second["why"] == "another row of the batch ends here"


def test_what_is_saved_is_kept_as_long_as_was_asked(load_model, store_url):
    model, input_ids = load_model(), prompt(50)
    with StoredKV(model, f"{store_url}?max_bytes=1GiB", **OPTIONS) as kv:
        cache = kv.load(input_ids)
        sequences, _ = generate(model, input_ids, cache, new_tokens=1)
        assert kv.save(sequences, cache, pin=3600) == 48
    with open_one(store_url) as store:
        assert store.wait_indexed(60.0)
        assert [entry.pinned_until > 0 for entry in store.scan()] == [True] * 3


def test_wrong_values_are_refused_by_name(load_model, store_url):
    with StoredKV(load_model(), store_url, **OPTIONS) as kv:
        cache = kv.load(prompt(20))
        for call, name in (
            (lambda: kv.load(prompt(20), max_load_tokens=-1), "max_load_tokens"),
            (lambda: kv.load(prompt(20), explain="yes"), "explain"),
            (lambda: kv.save(prompt(20), cache, pin=1e6), "pin"),
        ):
            with pytest.raises(ConfigError, match=name):
                call()

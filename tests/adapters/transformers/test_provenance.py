"""What `save` stores is what the model computes for the tokens that are given, or it refuses.

Provenance: what the hooks of `StoredKV` know about a cache. What is known is not computed again.
"""

from __future__ import annotations

import copy
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from transformers import DynamicCache
from transformers.cache_utils import QuantizedLayer

from kvferry.adapters.transformers import StoredKV
from kvferry.adapters.transformers.arguments import Prompt
from kvferry.adapters.transformers.recompute import CachedChunk, Recomputer
from kvferry.errors import ConfigError
from kvferry.observe import Counters
from kvferry.testing.stores.hooks import wait_until
from tests.adapters.transformers.generating import (
    CHUNK,
    RecordWriter,
    assert_same_as_cold,
    batch,
    generate,
    prompt,
    reuse,
)
from tests.transformers_cache import cache_of, with_cache

LENGTH = 61
A, B = prompt(LENGTH, 1), prompt(LENGTH, 2)
WHOLE = LENGTH // CHUNK * CHUNK


class World:
    """A model, another of the same shape, and a `StoredKV` of the first with its counts."""

    def __init__(self, model, other, kv: StoredKV, counts: Counters) -> None:
        self.model, self.other, self.kv, self.counts = model, other, kv, counts


@pytest.fixture
def world(model_dir, load_model, store_url):
    model, counts = load_model(), Counters()
    with StoredKV(model, store_url, chunk_tokens=CHUNK, observer=counts) as kv:
        yield World(model, load_model(model_dir(seed=1)), kv, counts)


def bare(model, ids=B, cache=None, **options):
    """A cache that a forward filled."""
    cache = DynamicCache() if cache is None else cache
    with torch.no_grad():
        model(input_ids=ids, **with_cache(cache), **options)
    return cache


def loaded(world, ids=B, **options):
    """One of `load`, filled by a forward."""
    cache = world.kv.load(ids)
    return bare(world.model, ids[:, cache.get_seq_length() :], cache, **options)


def edited(cache, edit):
    for layer in cache.layers:
        layer.keys, layer.values = edit(layer.keys), edit(layer.values)
    return cache


def edited_in_place(cache):
    for layer in cache.layers:
        layer.values.mul_(1.05)
    return cache


def of_another_prompt_by_generate(world):
    """As users do by mistake: one cache for two prompts."""
    cache = DynamicCache()
    generate(world.model, A, cache)
    cache.crop(-4)
    return cache


def refilled(world):
    cache = loaded(world)
    cache.crop(-21)
    return bare(world.model, A[:, 40:], cache)


def merged(world):
    first, second = bare(world.model), bare(world.model, A)
    for one, other in zip(first.layers, second.layers, strict=True):
        one.keys = torch.cat((one.keys[:, :, :32], other.keys[:, :, 32:]), -2)
        one.values = torch.cat((one.values[:, :, :32], other.values[:, :, 32:]), -2)
    return first


def one_layer_of_another(world):
    first, second = bare(world.model), bare(world.model, A)
    first.layers[1] = second.layers[1]
    return first


def partly_of_another_model(world):
    return bare(world.model, B[:, 30:], bare(world.other, B[:, :30]))


def steered(world):
    """A hook changed what a layer computes, and is gone again."""
    layer = world.model.model.layers[1]
    hook = layer.register_forward_pre_hook(lambda _, args: (args[0] + 0.5, *args[1:]))
    cache = bare(world.model)
    hook.remove()
    return cache


def under_autocast(world):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        cache = bare(world.model)
    return edited(cache, lambda tensor: tensor.float())


def in_training(world):
    world.model.train()
    for layer in world.model.model.layers:
        layer.self_attn.attention_dropout = 0.5
    cache = bare(world.model)
    for layer in world.model.model.layers:
        layer.self_attn.attention_dropout = 0.0
    world.model.eval()
    return cache


def embeddings(world, ids=A):
    cache, embeds = world.kv.load(B), world.model.get_input_embeddings()(ids)
    with torch.no_grad():
        world.model(inputs_embeds=embeds, **with_cache(cache))
    return cache


def with_a_hole(world):
    mask = torch.ones_like(B)
    mask[:, 10:30] = 0
    return loaded(world, attention_mask=mask)


def with_a_late_hole(world):
    """Hidden from the last forward only."""
    cache = bare(world.model, B[:, :20], world.kv.load(B))
    mask = torch.ones_like(B)
    mask[:, 3] = 0
    return bare(world.model, B[:, 20:], cache, attention_mask=mask)


def by_a_mask_of_another_shape(world):
    mask = torch.full((1, 1, LENGTH, LENGTH), -1e9).triu(1)
    mask[:, :, 20:, :20] = -1e9
    return loaded(world, attention_mask=mask)


WRONG = {
    "generate, another prompt": of_another_prompt_by_generate,
    "bare, another prompt": lambda world: bare(world.model, A),
    "loaded empty, another prompt": lambda world: bare(world.model, A, world.kv.load(B)),
    "scaled": lambda world: edited(loaded(world), lambda tensor: tensor * 1.05),
    "scaled in place": lambda world: edited_in_place(loaded(world)),
    "rounded": lambda world: edited(loaded(world), lambda tensor: (tensor * 8).round() / 8),
    "another model": lambda world: bare(world.other, B, world.kv.load(B)),
    "partly of another model": partly_of_another_model,
    "cropped and refilled": refilled,
    "merged": merged,
    "one layer of another": one_layer_of_another,
    "steered": steered,
    "in training": in_training,
    "embeddings": embeddings,
    "doubled positions": lambda world: loaded(world, position_ids=torch.arange(LENGTH)[None] * 2),
    "shifted positions": lambda world: loaded(world, position_ids=torch.arange(LENGTH)[None] + 1),
    "a hole in the mask": with_a_hole,
    "a late hole in the mask": with_a_late_hole,
    "a mask of four dimensions": by_a_mask_of_another_shape,
    "autocast": under_autocast,
}


@pytest.mark.parametrize("make", WRONG.values(), ids=WRONG)
def test_what_the_model_does_not_compute_for_the_tokens_is_refused(world, make):
    cache = make(world)
    assert cache.get_seq_length() == LENGTH
    with pytest.raises(
        ConfigError, match="not what the model computes for these tokens"
    ) as refused:
        world.kv.save(B, cache)
    assert "\n" not in str(refused.value)
    assert "pass a new cache of kv.load" in str(refused.value)
    # Nothing was stored, and the right cache still is.
    assert world.kv.load(B).get_seq_length() == 0
    assert world.kv.save(B, loaded(world)) == WHOLE


def test_another_continuation_than_was_computed_is_refused(world, load_model, store_url):
    """The loaded tokens are those that are given; what follows them is not."""
    world.kv.save(B[:, :32], bare(world.model, B[:, :32]))
    other = torch.cat((B[:, :32], A[:, 32:]), dim=1)
    cache = world.kv.load(B)
    assert cache.get_seq_length() == 32
    sequences, _ = generate(world.model, other, cache)
    wrong = sequences.clone()
    wrong[:, :LENGTH] = B
    with pytest.raises(ConfigError, match="not what the model computes"):
        world.kv.save(wrong, cache)
    assert world.kv.load(wrong).get_seq_length() == 32
    assert world.kv.save(sequences, cache) == 32
    assert_same_as_cold(world.model, other, reuse(world.model, store_url, other))


def test_rows_that_changed_places_are_refused(world):
    ids = torch.cat((A, B))
    cache = bare(world.model, ids)
    cache.reorder_cache(torch.tensor([1, 0]))
    with pytest.raises(ConfigError, match="row 0 of the cache is not what the model computes"):
        world.kv.save(ids, cache, num_tokens=LENGTH)
    assert world.kv.save(ids.flip(0), cache, num_tokens=LENGTH) == 2 * WHOLE


class Quantised(QuantizedLayer):
    """Without one of the libraries that quantise."""

    _quantize = _dequantize = None


def test_quantised_and_offloaded_caches_are_refused_by_name(world):
    offloaded, quantised = DynamicCache(offloading=True), bare(world.model)
    offloaded.layers = bare(world.model).layers
    quantised.layers[1] = Quantised()
    for cache, message in ((offloaded, "is offloaded"), (quantised, "Quantised; only a")):
        with pytest.raises(ConfigError, match=message) as refused:
            world.kv.save(B, cache)
        assert "\n" not in str(refused.value)


# ---- what is not known, and right


def selected(world):
    cache = bare(world.model, torch.cat((A, B)))
    cache.batch_select_indices(torch.tensor([1]))
    return cache


def cropped(world):
    cache = DynamicCache()
    bare(world.model, torch.cat((B, A), dim=1), cache)
    cache.crop(-LENGTH)
    return cache


def in_inference_mode(world):
    with torch.inference_mode():
        return loaded(world)


def slightly_edited(world):
    """Less than rounding may differ by: what is stored is computed again."""
    return edited(loaded(world), lambda tensor: tensor * (1 + 1e-6))


UNKNOWN = {
    "of nobody": lambda world: edited(bare(world.model), torch.clone),
    "a row of two": selected,
    "cropped": cropped,
    "inference mode": in_inference_mode,
    "embeddings of the same tokens": lambda world: embeddings(world, B),
    "slightly edited": slightly_edited,
}


@pytest.mark.parametrize("make", UNKNOWN.values(), ids=UNKNOWN)
def test_what_is_not_known_is_computed_again_and_stored(world, store_url, caplog, make):
    cache = make(world)
    with caplog.at_level("INFO"):
        assert world.kv.save(B, cache) == WHOLE
        assert world.kv.save(B, cache) == 0
    assert world.counts["save_recomputed_tokens"] == WHOLE
    assert caplog.text.count("is computed again before it is stored") == 1
    again = reuse(world.model, store_url, B)
    assert again.num_loaded == WHOLE
    assert_same_as_cold(world.model, B, again)


def test_what_is_stored_already_is_not_computed_again(load_model, store_url):
    model, counts = load_model(), Counters()
    with StoredKV(model, store_url, chunk_tokens=CHUNK, observer=counts) as kv:
        kv.save(B[:, :32], bare(model, B[:, :32]))
        assert counts["save_recomputed_tokens"] == 0
        assert kv.save(B, edited(bare(model), torch.clone)) == WHOLE - 32
        assert counts["save_recomputed_tokens"] == WHOLE - 32
    assert_same_as_cold(model, B, reuse(model, store_url, B))


def test_a_save_that_computes_again_ends_in_time(load_model, store_url):
    model, counts = load_model(), Counters()
    options = {"chunk_tokens": CHUNK, "observer": counts, "save_timeout_seconds": 1e-9}
    with StoredKV(model, store_url, **options) as kv:
        assert kv.save(B, edited(bare(model), torch.clone)) == 0
    assert counts["save_deadline"] == 1
    assert counts["save_recomputed_tokens"] == 0


def test_what_was_computed_again_in_time_is_stored(load_model, store_url):
    model, long = load_model(), prompt(600, 3)
    cache = edited(bare(model, long), torch.clone)
    with RecordWriter(model, store_url) as writer:
        one = Prompt(0, long[0].tolist())
        keys = writer.keys(long)
        chunks = {key: CachedChunk(0, one, n * CHUNK) for n, key in enumerate(keys)}
        deadline = time.monotonic() + 0.5

        class LateHost:
            def __getattr__(self, name):
                return getattr(writer.host, name)

            def compute(self, token_ids, into, observer):
                assert writer.host.compute(token_ids, into, observer)
                wait_until(lambda: time.monotonic() >= deadline, "the deadline")
                return True

        late = Recomputer(LateHost(), writer.rows, Counters())
        images = late.images(cache, chunks, (), deadline)
        assert writer.write(images) in (0, 512 // CHUNK)  # 0 if this machine stalled
    with StoredKV(model, store_url, chunk_tokens=CHUNK) as kv:
        kv.save(long, cache)
    again = reuse(model, store_url, long)
    assert again.num_loaded == 592
    assert_same_as_cold(model, long, again)


READER = """
import sys
import torch
from transformers import AutoModelForCausalLM
from tests.adapters.transformers.generating import assert_same_as_cold, reuse
from tests.adapters.transformers.test_provenance import B

model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32)
again = reuse(model, sys.argv[2], B, audit="off")
assert_same_as_cold(model, B, again)
print(again.num_loaded)
"""


@pytest.mark.slow
def test_another_process_reads_what_was_computed_again(model_dir, world, store_url):
    with pytest.raises(ConfigError, match="not what the model computes"):
        world.kv.save(B, bare(world.model, A))
    assert world.kv.save(B, slightly_edited(world)) == WHOLE
    done = subprocess.run(
        [sys.executable, "-c", READER, str(model_dir()), store_url],
        cwd=Path(__file__).parents[3],
        capture_output=True,
        text=True,
        check=True,
        timeout=240,
    )
    assert done.stdout == f"{WHOLE}\n"


# ---- what is known


def by_greedy(model, kv, **options):
    cache = kv.load(B)
    return kv.save(generate(model, B, cache, new_tokens=20, **options)[0], cache)


def by_sampling(model, kv, **options):
    cache, ids = kv.load(B), torch.ones_like(B)
    options = {"do_sample": True, "max_new_tokens": 20, "attention_mask": ids, **options}
    return kv.save(model.generate(B, **with_cache(cache), **options), cache)


def by_batch(model, kv):
    rows = batch(90, 53, 37)
    cache = kv.load(rows.input_ids, attention_mask=rows.attention_mask)
    sequences, _ = generate(model, rows.input_ids, cache, attention_mask=rows.attention_mask)
    return kv.save(sequences, cache)


def by_chat(model, kv):
    num_saved, ids, cache = 0, B[:, :20], kv.load(B)
    for turn in range(3):
        cache = kv.load(ids) if turn == 2 else cache
        ids, _ = generate(model, torch.cat((ids, prompt(30, turn)), dim=1), cache)
        num_saved += kv.save(ids, cache)
    return num_saved


def by_chat_that_loads_every_turn(model, kv):
    num_saved, ids = 0, B[:, :20]
    for turn in range(3):
        ids = torch.cat((ids, prompt(30, turn)), dim=1)
        cache = kv.load(ids)
        ids, _ = generate(model, ids, cache)
        num_saved += kv.save(ids, cache)
    return num_saved


def by_num_tokens(model, kv):
    cache = kv.load(B)
    return kv.save(generate(model, B, cache)[0], cache, num_tokens=LENGTH)


def by_own_cache_of_generate(model, kv):
    output = model.generate(B, max_new_tokens=3, return_dict_in_generate=True)
    return kv.save(output.sequences, cache_of(output))


def by_forward(model, kv, **options):
    cache = kv.load(B)
    bare(model, B[:, cache.get_seq_length() :], cache, **options)
    return kv.save(B, cache)


def by_forward_with_positions(model, kv):
    cache = kv.load(B)
    first = cache.get_seq_length()
    mask, positions = torch.ones_like(B), torch.arange(first, LENGTH)[None]
    bare(model, B[:, first:], cache, attention_mask=mask, position_ids=positions)
    return kv.save(B, cache)


def by_the_cache_of_a_forward(model, kv):
    return kv.save(B, cache_of(model(B, use_cache=True)))


def by_the_old_name(model, kv):
    cache = kv.load(B)
    with pytest.warns(FutureWarning) if "cache" in with_cache(None) else torch.no_grad():
        model(B[:, cache.get_seq_length() :], past_key_values=cache)
    return kv.save(B, cache)


HONEST = {
    "greedy": by_greedy,
    "sampling": by_sampling,
    "several answers": lambda model, kv: by_sampling(model, kv, num_return_sequences=3),
    "prefill in pieces": lambda model, kv: by_greedy(model, kv, prefill_chunk_size=7),
    "batch": by_batch,
    "chat": by_chat,
    "chat that loads every turn": by_chat_that_loads_every_turn,
    "num_tokens": by_num_tokens,
    "the cache of generate": by_own_cache_of_generate,
    "forward": by_forward,
    "forward with positions": by_forward_with_positions,
    "the cache of a forward": by_the_cache_of_a_forward,
    "the old name": by_the_old_name,
}


WINDOWED = [name for name in HONEST if not name.startswith("the ")]
"""Caches of `load` keep what has left the windows of a model."""


@pytest.mark.parametrize(
    ("arch", "name"),
    [*(("llama", name) for name in HONEST), *(("gemma3_text", name) for name in WINDOWED)],
)
def test_honest_use_is_never_computed_again(model_dir, load_model, store_url, arch, name):
    model, counts, use = load_model(model_dir(arch)), Counters(), HONEST[name]
    with StoredKV(model, store_url, chunk_tokens=CHUNK, observer=counts) as kv:
        assert use(model, kv) > 0
        use(model, kv)
        assert counts["save_recomputed_tokens"] == 0


@pytest.mark.parametrize("is_known", [True, False])
def test_what_a_window_left_of_padded_rows_is_stored(model_dir, load_model, store_url, is_known):
    model, counts = load_model(model_dir("mistral", sliding_window=37)), Counters()
    rows = batch(90, 70)
    with StoredKV(model, store_url, chunk_tokens=CHUNK, observer=counts) as kv:
        cache = DynamicCache(config=model.config)
        generate(model, rows.input_ids, cache, attention_mask=rows.attention_mask, new_tokens=1)
        cache = cache if is_known else edited(cache, torch.clone)
        mask = rows.attention_mask
        # Of 90 tokens the last 36 are left: 64 to 80 of the one row, 34 to 70 of the other.
        assert kv.save(rows.input_ids, cache, attention_mask=mask, num_tokens=90) == 2 * CHUNK
        assert (counts["save_recomputed_tokens"] == 0) == is_known
    for length in (90, 70):
        reuse(model, store_url, prompt(length))
        again = reuse(model, store_url, prompt(length))
        assert again.num_loaded == length // CHUNK * CHUNK
        assert_same_as_cold(model, prompt(length), again)


def test_two_on_one_model_know_the_same_and_see_no_change(load_model, store_url, tmp_path):
    model, counts = load_model(), Counters()
    options = {"chunk_tokens": CHUNK, "observer": counts}
    other_url = (tmp_path / "other").as_uri()
    with StoredKV(model, store_url, **options) as one:
        with StoredKV(model, other_url, **options) as two:
            cache = one.load(B)
            sequences, _ = generate(model, B, cache)
            assert one.save(sequences, cache) == two.save(sequences, cache) == WHOLE + CHUNK
        assert by_greedy(model, one) > 0
        assert counts["model_changed"] == counts["save_recomputed_tokens"] == 0
    assert not model._forward_hooks
    assert not model._forward_pre_hooks


def test_a_copy_of_a_watched_model_works_alone(load_model, store_url):
    model = load_model()
    with StoredKV(model, store_url, chunk_tokens=CHUNK):
        other = copy.deepcopy(model)
    bare(other)
    assert reuse(other, store_url, B).num_saved == WHOLE + CHUNK


def test_beams_are_computed_again(load_model, store_url):
    model, counts = load_model(), Counters()
    with StoredKV(model, store_url, chunk_tokens=CHUNK, observer=counts) as kv:
        assert by_greedy(model, kv, num_beams=3) == WHOLE
        assert counts["save_recomputed_tokens"] == WHOLE
        assert by_greedy(model, kv, num_beams=3) == 0
        assert counts["save_recomputed_tokens"] == WHOLE
    assert_same_as_cold(model, B, reuse(model, store_url, B))

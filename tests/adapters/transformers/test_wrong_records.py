"""A wrong record is told from another model: it is taken out, and the others are used on."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kvferry.adapters.transformers import StoredKV
from kvferry.adapters.transformers.cache_copies import gather
from kvferry.adapters.transformers.host_model import HostModel
from kvferry.engine import LLM, SamplingParams
from kvferry.observe import Counters
from kvferry.store.url import open_store
from tests.adapters.transformers.generating import CHUNK, RecordWriter, generate, prompt

NAMED = {"weights_version": "one"}
FIRST_TOKEN = SamplingParams(max_tokens=1, ignore_eos=True, return_logits=True)
LENGTH = 4 * CHUNK + 5
NUM_CHUNKS = LENGTH // CHUNK


@pytest.fixture
def model(load_model):
    return load_model()


def write(
    model,
    url,
    seed,
    kv_of=None,
    *,
    numbers=range(NUM_CHUNKS),
    change=lambda payload: None,
    named=NAMED,
):
    """Store chunks of a prompt, with the KV of another cache in them if one is given."""
    from transformers import DynamicCache

    ids = seed if isinstance(seed, torch.Tensor) else prompt(LENGTH, seed)
    with RecordWriter(model, url, **named) as writer:
        cache = kv_of
        if cache is None:
            cache = DynamicCache()
            assert writer.host.compute(ids[0].tolist(), cache, Counters())
        chain, images = writer.keys(ids), []
        for number in numbers:
            image = gather(writer.rows, cache, writer.host, 0, number * CHUNK)
            change(torch.frombuffer(writer.rows.image_of(image), dtype=torch.float32))
            images.append((chain[number], number * CHUNK, image))
        for key, _, _ in images:
            writer.store.delete(key)
        assert writer.write(images) == len(images)
        return chain


def scale(payload):
    payload.mul_(1.2)


def write_on_another(model, url, seed, named=NAMED):
    """As where one cache was used for two prompts: the end is computed on the KV of the other."""
    from transformers import DynamicCache

    cache, ids = DynamicCache(), prompt(LENGTH, seed)
    host = HostModel(model, None, None)
    for part in (prompt(LENGTH, seed + 100)[0, : 2 * CHUNK], ids[0, 2 * CHUNK :]):
        assert host.compute(part.tolist(), cache, Counters())
    return write(model, url, seed, cache, named=named)


def read(model, url, seeds, **options):
    """How many tokens of each prompt a process loads, and its counts. The logits are right."""
    counts, found = Counters(), []
    with StoredKV(model, url, observer=counts, chunk_tokens=CHUNK, **NAMED, **options) as kv:
        for seed in seeds:
            cache = kv.load(prompt(LENGTH, seed))
            found.append(cache.get_seq_length())
            _, logits = generate(model, prompt(LENGTH, seed), cache)
            _, cold = generate(model, prompt(LENGTH, seed))
            assert (logits - cold).abs().max() < 1e-3
    return found, counts


def loaded_when_audited(kv, counts):
    """Tokens of the first prompt that are loaded when the wrong one of its chunks is compared."""
    for _ in range(40):  # the chunk that is compared is drawn
        loaded = kv.load(prompt(LENGTH, 1)).get_seq_length()
        if counts["audit_mismatch"]:
            break
    return loaded


WHOLE = NUM_CHUNKS * CHUNK


def test_kv_that_is_wrong_from_the_start_and_fits_together_is_found(model, store_url, caplog):
    chain = write_on_another(model, store_url, 1)
    write(model, store_url, 2)
    found, counts = read(model, store_url, [1, 1, 2, 1])
    assert found == [0, 0, WHOLE, 0]
    assert counts["audit_mismatch"] == 1
    assert chain[0].hex() in caplog.text
    assert store_url in caplog.text
    assert "another model" not in caplog.text


def test_a_changed_record_ends_neither_loading_nor_saving(model, store_url, caplog):
    write(model, store_url, 1, change=scale)
    write(model, store_url, 2)
    counts = Counters()
    with StoredKV(model, store_url, observer=counts, chunk_tokens=CHUNK, **NAMED) as kv:
        assert kv.load(prompt(LENGTH, 1)).get_seq_length() == 0
        sequences, _ = generate(model, prompt(LENGTH, 3), cache := kv.load(prompt(LENGTH, 3)))
        assert kv.save(sequences, cache) == 0  # not known yet
        assert kv.load(prompt(LENGTH, 2)).get_seq_length() == WHOLE
        assert kv.save(sequences, cache) == WHOLE
        sequences, _ = generate(model, prompt(LENGTH, 1), cache := kv.load(prompt(LENGTH, 1)))
        assert kv.save(sequences, cache) == WHOLE  # in the place of the wrong ones
        assert kv.load(prompt(LENGTH, 1)).get_seq_length() == WHOLE
    assert "another model" not in caplog.text
    assert counts["audit_bad_records"] == NUM_CHUNKS
    assert read(model, store_url, [1, 2, 3])[0] == [WHOLE] * 3


def test_one_record_among_right_ones_is_known_at_once(model, store_url):
    chain = write(model, store_url, 1, numbers=[0, 2, 3])
    write(model, store_url, 1, numbers=[1], change=scale)
    counts = Counters()
    store = open_store(store_url)
    with StoredKV(model, store, observer=counts, chunk_tokens=CHUNK, audit=1.0, **NAMED) as kv:
        assert loaded_when_audited(kv, counts) == CHUNK
        assert not store.contains(chain[1])
        assert store.contains(chain[2])
        sequences, _ = generate(model, prompt(LENGTH, 3), cache := kv.load(prompt(LENGTH, 3)))
        assert kv.save(sequences, cache) == WHOLE
    assert counts["audit_bad_records"] == 1


def test_a_record_that_is_hit_after_a_right_one_is_found_by_a_rate(model, store_url):
    write(model, store_url, 1)
    write(model, store_url, 2, change=scale)
    found, counts = read(model, store_url, [1, 2, 1], audit=1.0)
    assert found == [WHOLE, 0, WHOLE]
    assert counts["audit_mismatch"] == 1


def test_two_prompts_that_differ_are_another_model(model, store_url, caplog):
    for seed in (1, 2, 3):
        write(model, store_url, seed, change=scale)
    found, counts = read(model, store_url, [1, 2, 3, 3])
    assert found == [0, 0, 0, 0]
    assert counts["audit_mismatch"] == 2
    assert caplog.text.count("another model stored them") == 1
    assert "weights_version" in caplog.text


def test_what_agreed_before_the_suspects_decides_nothing(model, store_url):
    """Another model, whose KV differs from the third chunk on: another prompt with the same first
    chunks, which agreed already, does not show that the records of the first were wrong."""
    one = prompt(LENGTH, 1)
    other = torch.cat([one[:, : 2 * CHUNK], prompt(LENGTH, 2)[:, 2 * CHUNK :]], dim=1)
    for ids in (one, other):
        write(model, store_url, ids, numbers=[0, 1])
        write(model, store_url, ids, numbers=[2, 3], change=scale)
    counts = Counters()
    with StoredKV(model, store_url, observer=counts, chunk_tokens=CHUNK, **NAMED) as kv:
        kv._auditor.draw = lambda: 0.99  # the last chunk
        assert kv.load(one).get_seq_length() == 2 * CHUNK
        kv._auditor.draw = lambda: 0.0  # the first that may be chosen
        assert kv.load(other).get_seq_length() <= 2 * CHUNK
    assert counts["audit_mismatch"] == 2
    assert not counts["audit_bad_records"]


def test_what_was_computed_on_a_wrong_record_is_not_saved(model, store_url):
    write(model, store_url, 1)
    counts = Counters()
    with StoredKV(model, store_url, observer=counts, chunk_tokens=CHUNK, audit=1.0, **NAMED) as kv:
        old = kv.load(prompt(LENGTH, 1))
        sequences, _ = generate(model, prompt(LENGTH, 1), old, new_tokens=2 * CHUNK)
        write(model, store_url, 1, numbers=[1], change=scale)
        assert loaded_when_audited(kv, counts) == CHUNK
        assert kv.save(sequences, old) == 0


def test_an_engine_finds_a_wrong_beginning_and_a_wrong_record(model, model_dir, store_url):
    """Records of `StoredKV` and the engine are the same."""
    write_on_another(model, store_url, 1, {})
    for seed in (2, 3):
        write(model, store_url, seed, named={})
    write(model, store_url, 4, named={}, change=scale)
    counts = Counters()
    options = {"chunk_tokens": CHUNK, "audit": 1.0}
    config = {"dtype": "float32", "prefix_caching": False, "block_size": CHUNK}
    with LLM(
        model_dir(), store=store_url, connector_options=options, observer=counts, **config
    ) as llm:

        def loaded(seed):
            ids = prompt(LENGTH, seed)
            (completion,) = llm.generate([ids[0].tolist()], FIRST_TOKEN)
            assert llm.drain(10.0)  # the comparison of a hit that loads nothing ends behind it
            _, cold = generate(model, ids, new_tokens=1)
            is_right = np.abs(completion.first_logits - cold[0].numpy()).max() < 1e-3
            return completion.num_external_tokens, is_right

        for _ in range(60):  # whether the first chunk is compared is drawn
            _, is_right = loaded(1)
            assert is_right or not counts["audit_mismatch"]
            if counts["audit_mismatch"]:
                break
        assert counts["audit_mismatch"] == 1
        assert loaded(2) == (0, True)
        assert loaded(3)[1]
        before = counts["audit_mismatch"]
        assert loaded(4)[1]
        assert counts["audit_mismatch"] == before + 1
        for seed in (1, 2, 3, 4):
            assert loaded(seed)[1]
    # Which hits are audited as a cold prefill is drawn, too.
    assert counts["audits"] >= counts["audit_mismatch"] >= 2

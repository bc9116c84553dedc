"""A wrong record is found, taken out of the store and never used."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kvferry.adapters.transformers import StoredKV
from kvferry.adapters.transformers.host_model import HostModel
from kvferry.engine import LLM, SamplingParams
from kvferry.observe import Counters
from kvferry.store.base import Where
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
            writer.host.compute(ids, cache)
        chain, images = writer.keys(ids), []
        for number in numbers:
            image = writer.form.gather(cache, 0, number * CHUNK)
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
    for part in (prompt(LENGTH, seed + 100)[:, : 2 * CHUNK], ids[:, 2 * CHUNK :]):
        host.compute(part, cache)
    return write(model, url, seed, cache, named=named)


WHOLE = NUM_CHUNKS * CHUNK


def read(model, url, seeds, *, draw=0.0, **options):
    """How many tokens of each prompt a process loads, and its counts. The logits are right."""
    counts, found = Counters(), []
    with StoredKV(model, url, observer=counts, chunk_tokens=CHUNK, **NAMED, **options) as kv:
        kv._auditor.draw = lambda: draw
        for seed in seeds:
            _, logits = generate(kv, prompt(LENGTH, seed))
            _, cold = generate(model, prompt(LENGTH, seed))
            assert (logits - cold).abs().max() < 1e-3
            found.append(kv.num_loaded)
    return found, counts


def test_kv_that_is_wrong_from_the_start_and_fits_together_is_found(model, store_url, caplog):
    chain = write_on_another(model, store_url, 1)
    write(model, store_url, 2)
    found, counts = read(model, store_url, [1, 1, 2], draw=0.99)
    assert found == [0, 0, 0]
    assert (counts["audits"], counts["audit_mismatch"], counts["put_stored"]) == (1, 1, 0)
    [said] = [each for each in caplog.messages if "KV differs" in each]
    assert "\n" not in said
    for part in (chain[0].hex(), store_url, "weights_version", "reads and writes nothing more"):
        assert part in said
    # The next process no longer reads it.
    assert read(model, store_url, [1, 2])[0] == [0, WHOLE]


@pytest.mark.parametrize(("wrong", "draw"), [(0, 0.5), (1, 0.0), (3, 0.99)])
def test_the_record_that_differs_is_taken_out(model, store_url, wrong, draw):
    chain = write(model, store_url, 1)
    write(model, store_url, 1, numbers=[wrong], change=scale)
    assert read(model, store_url, [1, 1], draw=draw)[0] == [0, 0]
    with open_store(store_url) as store:
        assert store.wait_indexed(60.0)
        assert [store.where(key) is Where.HERE for key in chain] == [
            n != wrong for n in range(NUM_CHUNKS)
        ]
    assert read(model, store_url, [1])[0] == [wrong * CHUNK]


def test_a_record_that_is_hit_after_a_right_one_is_found_by_a_rate(model, store_url):
    write(model, store_url, 1)
    write(model, store_url, 2, change=scale)
    found, counts = read(model, store_url, [1, 2, 1], audit=1.0)
    assert found == [WHOLE, 0, 0]
    assert counts["audit_mismatch"] == 1


def test_an_engine_finds_a_wrong_beginning(model, model_dir, store_url):
    """Records of `StoredKV` and the engine are the same."""
    write_on_another(model, store_url, 1, {})
    write(model, store_url, 2, named={})
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
        for seed in (1, 2, 1):
            assert loaded(seed) == (0, True)
        assert counts["audit_mismatch"] == 1

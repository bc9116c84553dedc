"""A device that goes wrong in one call, in `StoredKV`: what it computed is not stored, and what an
older release stored of it goes at the first audit. No other prompt loses its cache."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

import pytest
import torch

from kvferry.adapters.transformers import StoredKV
from kvferry.observe import Counters
from kvferry.record.leaves import Leaves
from kvferry.record.schema import leaf_digests
from kvferry.store.url import open_store
from tests.adapters.transformers.generating import CHUNK, generate, prompt

LENGTH = 3 * CHUNK + 5
PROMPTS = [prompt(LENGTH, seed=seed) for seed in range(4)]
BAD = 2


@contextmanager
def going_wrong(value: float) -> Iterator[None]:
    """No hook, so that the model is as it was made: what all models call goes wrong."""
    silu = torch.nn.functional.silu
    with patch.object(torch.nn.functional, "silu", lambda *args, **kw: silu(*args, **kw) * value):
        yield


def as_older_releases():
    return patch(
        "kvferry.store.record_client.leaves_of",
        lambda *rows: Leaves(leaf_digests(*rows), are_finite=True),
    )


def fill(model, url: str, value: float) -> Counters:
    """Store all prompts; the device goes wrong at one of them."""
    counts = Counters()
    with StoredKV(model, url, chunk_tokens=CHUNK, observer=counts, audit="off") as kv:
        for number, each in enumerate(PROMPTS):
            if number == BAD:
                with going_wrong(value):
                    kv.prefill(each)
            else:
                kv.prefill(each)
    return counts


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_later_process_reads_all_prompts_but_that_one(load_model, store_url, dtype, value):
    counts = fill(load_model(dtype=dtype), store_url, value)
    assert counts["save_not_finite"] == 3
    assert counts["put_stored"] == 9
    model = load_model(dtype=dtype)
    right = [model.generate(each, max_new_tokens=4, do_sample=False) for each in PROMPTS]
    with StoredKV(load_model(dtype=dtype), store_url, chunk_tokens=CHUNK) as kv:
        for number in (BAD, 0, 1, 2, 3):
            answer = kv.generate(PROMPTS[number], max_new_tokens=4, do_sample=False)
            assert torch.equal(answer, right[number])
        assert kv.num_loaded == 3 * CHUNK


def test_an_overflow_of_float16_is_not_stored(load_model, store_url):
    """Finite in float32, and in bfloat16, whose exponents are as long."""
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        model = load_model(dtype=dtype)
        with torch.no_grad():
            model.model.layers[-1].self_attn.v_proj.weight.mul_(1e6)
        counts = Counters()
        options = {"chunk_tokens": CHUNK, "observer": counts, "weights_version": f"{dtype}"}
        with StoredKV(model, store_url, **options) as kv:
            generate(kv, PROMPTS[0])
        overflows = dtype is torch.float16
        assert counts["save_not_finite"] == 3 * overflows
        assert counts["put_stored"] == 3 * (not overflows)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_what_older_releases_stored_of_it_goes_at_the_first_audit(load_model, store_url, value):
    with as_older_releases():
        counts = fill(load_model(), store_url, value)
    assert counts["put_stored"] == 12
    model, counts = load_model(), Counters()
    right = [model.generate(each, max_new_tokens=4, do_sample=False) for each in PROMPTS]
    with StoredKV(load_model(), store_url, chunk_tokens=CHUNK, observer=counts) as kv:
        for number, loaded in ((BAD, 0), (BAD, 3 * CHUNK), (0, 3 * CHUNK), (3, 3 * CHUNK)):
            answer = kv.generate(PROMPTS[number], max_new_tokens=4, do_sample=False)
            assert torch.equal(answer, right[number])
            assert kv.num_loaded == loaded
    assert counts["records_corrupt"] == 1
    assert counts["audit_mismatch"] == 0
    assert counts["put_stored"] == 3  # those that went, computed anew
    with open_store(store_url) as store:
        removed = store.catalogue().removals(100) or []
    assert [each.detail for each in removed] == ["not_finite"] * 3


def test_an_audit_on_a_device_that_goes_wrong_is_no_verdict(load_model, store_url):
    fill(load_model(), store_url, 1.0)
    counts = Counters()
    with StoredKV(load_model(), store_url, chunk_tokens=CHUNK, observer=counts) as kv:
        with going_wrong(math.nan):
            kv.prefill(PROMPTS[0])
        assert kv.num_loaded == 0
        assert counts["save_not_finite"] == counts["put_stored"] == 0  # all is there
        kv.prefill(PROMPTS[0])
        assert kv.num_loaded == 3 * CHUNK
    assert counts["audit_mismatch"] == counts["records_corrupt"] == 0

"""Two engines of other shapes, one prefills and the other decodes; a store is between them."""

from __future__ import annotations

import secrets
import threading

import numpy as np
import pytest
import torch

from kvferry.engine import LLM, SamplingParams
from kvferry.observe import Counters
from tests.engine.rank_threads import ThreadedLLM
from tests.engine.test_llm import prompt
from tests.servers.places import s3_url, valkey_url

NUM_TOKENS, CHUNK_TOKENS = 230, 32
ASKED = {"do_remote_decode": True, "do_remote_prefill": False, "remote_engine_id": None}
OPTIONS = {"chunk_tokens": CHUNK_TOKENS, "audit": "off", "load_timeout_seconds": 30.0}
"""A machine that stalls for seconds shall not cut a hit short."""

HIT = {16: 224, 32: 224}
"""By block size."""


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def store_url(request, tmp_path, monkeypatch):
    """Factory: the URL of an empty store of a kind."""

    def url_of(kind):
        prefix = secrets.token_hex(8)
        match kind:
            case "file":
                return f"file://{tmp_path / prefix}"
            case "valkey":
                return valkey_url(request.getfixturevalue("valkey_server").port, prefix=prefix)
            case "s3":
                server = request.getfixturevalue("seaweed")
                for name, value in server.environment.items():
                    monkeypatch.setenv(name, value)
                return s3_url(server.endpoint, prefix)
            case "mooncake":
                return f"mooncake://{request.getfixturevalue('mooncake').master}/{prefix}"

    return url_of


def params(given, max_tokens=1):
    return SamplingParams(
        max_tokens=max_tokens, ignore_eos=True, return_logits=True, kv_transfer_params=given
    )


def own(path, prompts, num_tokens):
    """What the engine says by its own prefix hit."""
    with LLM(path) as llm:
        llm.generate(prompts, params(None))
        return llm.generate(prompts, params(None, num_tokens))


def hand_over(prefiller, decoder, prompts, num_tokens):
    """The decoder begins while the prefiller's saves are on their way."""
    first = prefiller.generate(prompts, params(ASKED))
    drains = threading.Thread(target=prefiller.drain, args=(60.0,))
    drains.start()
    second = decoder.generate(prompts, [params(each.params, num_tokens) for each in first])
    drains.join()
    return first, second


@pytest.mark.parametrize("arch", ["llama", "gemma3_text"])
@pytest.mark.parametrize(
    ("place", "prefills", "decodes"),
    [
        ("file", (2, 16), (1, 32)),
        ("valkey", (1, 32), (2, 16)),
        ("s3", (2, 16), (1, 32)),
        ("mooncake", (1, 32), (2, 16)),
    ],
)
def test_a_prompt_prefilled_elsewhere_is_decoded_as_by_one_engine(
    model_dir, store_url, arch, place, prefills, decodes
):
    path = model_dir(arch)
    prompts = [prompt(NUM_TOKENS, seed=seed) for seed in (1, 2)]
    expected = own(path, prompts, 6)
    shape = dict(zip(("tensor_parallel_size", "block_size"), prefills, strict=True))
    other = dict(zip(("tensor_parallel_size", "block_size"), decodes, strict=True))
    counters = Counters()
    common = {"store": store_url(place), "connector_options": OPTIONS}
    with (
        ThreadedLLM(path, **common, **shape) as prefiller,
        ThreadedLLM(path, **common, **other, observer=counters) as decoder,
    ):
        first, second = hand_over(prefiller, decoder, prompts, 6)
    for prefilled, decoded, one in zip(first, second, expected, strict=True):
        assert prefilled.params["kvferry"]["chunks"] == NUM_TOKENS // CHUNK_TOKENS
        assert decoded.num_external_tokens == HIT[other["block_size"]]
        assert decoded.token_ids == one.token_ids
        assert np.abs(decoded.first_logits - one.first_logits).max() <= 1e-3
        assert decoded.params is None
    assert counters[f"hit_tokens/{place}"] == 2 * HIT[other["block_size"]]
    assert counters["remote_prefills"] == 2
    assert counters["remote_prefills_computed"] == 0


def test_an_aborted_prefill_has_no_answer(model_dir, tmp_path):
    with LLM(model_dir(), store=f"file://{tmp_path / 'store'}") as llm:
        events = llm.stream(prompt(40, seed=5), params(ASKED, 30))
        next(events)
        (request,) = llm.scheduler.requests
        events.close()
        assert request.outcome.params is None

"""What an engine in one process stored on servers, those of other processes read."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import partial
from typing import NamedTuple

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from kvferry.adapters.transformers import StoredKV
from kvferry.engine import LLM, SamplingParams
from kvferry.observe import Counters
from tests.engine.rank_threads import ThreadedLLM
from tests.engine.test_llm import own_generation, prompt
from tests.servers.places import AllServers, assert_said_if_busy
from tests.transformers_cache import with_cache

pytestmark = pytest.mark.slow

CHUNK_TOKENS, NUM_TOKENS = 32, 230
HIT = NUM_TOKENS // CHUNK_TOKENS * CHUNK_TOKENS
PLACES = ("valkey", "cluster", "s3", "mooncake", "tiers")
OF_TWO = "tiers of two ranks"
FIRST = SamplingParams(max_tokens=1, ignore_eos=True, return_logits=True)


OfTwoRanks = partial(ThreadedLLM, tensor_parallel_size=2)


class Written(NamedTuple):
    store: str | list[str]
    prompt: list[int]
    logits: np.ndarray
    """First ones of the model's own generation."""


@pytest.fixture(scope="module")
def places(valkey_server, valkey_cluster, seaweed, mooncake, tmp_path_factory):
    """The stores by name, for one rank and for two, and the environment that leads to them."""
    patch = pytest.MonkeyPatch()
    for name, value in seaweed.environment.items():
        patch.setenv(name, value)
    # The servers live longer than this, which may be made twice: a worker also takes tests that
    # were left to another one.
    root = tmp_path_factory.mktemp("tiers")
    servers = AllServers(valkey_server, valkey_cluster, seaweed, mooncake, root)
    of_two = servers.urls(f"{root.name}-two")["tiers"]
    yield {**servers.urls(f"{root.name}-one"), OF_TWO: of_two}
    patch.undo()


@pytest.fixture(scope="module")
def written(model_dir, places):
    """What one other process stored, by the name of the store."""
    path = model_dir()
    prompts = {name: prompt(NUM_TOKENS, seed=seed) for seed, name in enumerate(places)}
    writes = [
        {
            "store": places[name],
            "prompt": prompts[name],
            "tensor_parallel_size": 2 if name == OF_TWO else 1,
        }
        for name in places
    ]
    work = {"model_dir": str(path), "chunk_tokens": CHUNK_TOKENS, "writes": writes}
    command = [sys.executable, "-W", "error", "-m", "tests.engine.remote_writer", json.dumps(work)]
    ended = subprocess.run(
        command, env=os.environ, capture_output=True, text=True, timeout=200, check=False
    )
    assert ended.returncode == 0, ended.stderr[-3000:]
    assert not ended.stderr, "the other process said something"
    logits = [first for first, _ in own_generation(path, prompts.values(), 1)]
    return {
        name: Written(places[name], prompts[name], expected)
        for name, expected in zip(places, logits, strict=True)
    }


def read(path, store, token_ids, make=LLM):
    """The completion of a new engine that reads `store`, which it does not audit. A load that does
    not arrive in time is cut short, so a busy machine may need more tries."""
    options = {"chunk_tokens": CHUNK_TOKENS, "audit": "off"}
    counts = Counters()
    with make(path, store=store, connector_options=options, observer=counts) as llm:
        for _ in range(4):
            llm.reset_prefix_cache()
            (completion,) = llm.generate([token_ids], FIRST)
            if completion.num_external_tokens == HIT:
                break
    return completion, counts


@pytest.mark.parametrize(
    ("name", "make"),
    [*((name, LLM) for name in (*PLACES, OF_TWO)), (OF_TWO, OfTwoRanks)],
)
def test_another_process_reads_what_one_stored(model_dir, written, name, make, caplog):
    store, token_ids, logits = written[name]
    completion, counts = read(model_dir(), store, token_ids, make)
    assert completion.num_external_tokens == HIT
    assert np.abs(completion.first_logits - logits).max() <= 1e-3
    assert counts["loaded_tokens"] >= HIT
    # Each rank has a store of its own, of up to three tiers.
    assert_said_if_busy(caplog.messages, num_stores=2 * 3)


@pytest.mark.parametrize("name", ["valkey", "s3", "mooncake", OF_TWO])
def test_transformers_reads_what_the_engine_stored(model_dir, written, name):
    store, token_ids, logits = written[name]
    model = AutoModelForCausalLM.from_pretrained(model_dir(), dtype=torch.float32)
    input_ids = torch.tensor([token_ids])
    with StoredKV(model, store, chunk_tokens=CHUNK_TOKENS, audit="off") as kv:
        cache = kv.prefill(input_ids)
        assert kv.num_loaded == HIT
    with torch.inference_mode():
        output = model(input_ids[:, -1:], **with_cache(cache))
    assert np.abs(output.logits[0, -1].numpy() - logits).max() <= 1e-3

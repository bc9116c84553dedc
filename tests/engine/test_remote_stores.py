"""What an engine in one process stored on servers, those of other processes read."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import NamedTuple

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from kvferry.adapters.transformers import StoredKV
from kvferry.engine import LLM, SamplingParams
from kvferry.observe import Counters
from tests.engine.test_llm import own_generation, prompt
from tests.servers.process import LOCALHOST
from tests.servers.seaweed import BUCKET

CHUNK_TOKENS, NUM_TOKENS = 32, 230
HIT = NUM_TOKENS // CHUNK_TOKENS * CHUNK_TOKENS
FIRST = SamplingParams(max_tokens=1, ignore_eos=True, return_logits=True)


class Written(NamedTuple):
    store: str | list[str]
    prompt: list[int]
    logits: np.ndarray
    """First ones of the model's own generation."""


@pytest.fixture(scope="module")
def places(valkey_server, valkey_cluster, seaweed, mooncake, tmp_path_factory):
    """The stores by name, and the environment that leads to them."""
    patch = pytest.MonkeyPatch()
    for name, value in seaweed.environment.items():
        patch.setenv(name, value)
    valkey = f"valkey://{LOCALHOST}:{valkey_server.port}"
    nodes = ",".join(f"{LOCALHOST}:{node.port}" for node in valkey_cluster.nodes)
    s3 = f"endpoint={seaweed.endpoint}&region=us-east-1"
    directory = tmp_path_factory.mktemp("tiers").as_uri()
    yield {
        "valkey": f"{valkey}/alone",
        "cluster": f"valkey://{nodes}/kv?cluster=true",
        "s3": f"s3://{BUCKET}/alone?{s3}",
        "mooncake": f"mooncake://{mooncake.master}/kv",
        "tiers": [f"{directory}?max_bytes=64MiB", f"{valkey}/tiers", f"s3://{BUCKET}/tiers?{s3}"],
        "valkey of two ranks": f"{valkey}/ranks",
        "s3 of two ranks": f"s3://{BUCKET}/ranks?{s3}",
    }
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
            "tensor_parallel_size": 2 if "ranks" in name else 1,
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


def read(path, store, token_ids):
    """The completion of a new engine that reads `store`, which it does not audit. A load that does
    not arrive in time is cut short, so a busy machine may need more tries."""
    options = {"chunk_tokens": CHUNK_TOKENS, "audit": "off"}
    counts = Counters()
    with LLM(path, store=store, connector_options=options, observer=counts) as llm:
        for _ in range(4):
            llm.reset_prefix_cache()
            (completion,) = llm.generate([token_ids], FIRST)
            if completion.num_external_tokens == HIT:
                break
    return completion, counts


@pytest.mark.parametrize(
    "name",
    ["valkey", "cluster", "s3", "mooncake", "tiers", "valkey of two ranks", "s3 of two ranks"],
)
def test_another_process_reads_what_one_stored(model_dir, written, name, caplog):
    store, token_ids, logits = written[name]
    completion, counts = read(model_dir(), store, token_ids)
    assert completion.num_external_tokens == HIT
    assert np.abs(completion.first_logits - logits).max() <= 1e-3
    assert counts["loaded_tokens"] == HIT
    assert not caplog.records


@pytest.mark.parametrize("tier", [0, 1, 2])
def test_each_tier_has_what_was_stored(model_dir, written, tier):
    stores, token_ids, logits = written["tiers"]
    completion, _ = read(model_dir(), stores[tier], token_ids)
    assert completion.num_external_tokens == HIT
    assert np.abs(completion.first_logits - logits).max() <= 1e-3


@pytest.mark.parametrize(
    "name", ["valkey", "s3", "mooncake", "valkey of two ranks", "s3 of two ranks"]
)
def test_transformers_reads_what_the_engine_stored(model_dir, written, name):
    store, token_ids, logits = written[name]
    model = AutoModelForCausalLM.from_pretrained(model_dir(), dtype=torch.float32)
    input_ids = torch.tensor([token_ids])
    with StoredKV(model, store, chunk_tokens=CHUNK_TOKENS, audit="off") as kv:
        cache = kv.load(input_ids)
    assert cache.get_seq_length() == HIT
    with torch.inference_mode():
        output = model(input_ids[:, HIT:], past_key_values=cache)
    assert np.abs(output.logits[0, -1].numpy() - logits).max() <= 1e-3

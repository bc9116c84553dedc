"""What one engine computed, served from memory by another process, an engine reads as a peer."""

from __future__ import annotations

import logging

import numpy as np
import pytest

from kvferry.engine import LLM
from kvferry.store.url import open_one
from tests.engine.rank_threads import ThreadedLLM
from tests.engine.test_llm import own_generation, prompt
from tests.engine.test_remote_stores import CHUNK_TOKENS, FIRST, HIT, NUM_TOKENS, OfTwoRanks, read
from tests.servers.peer import running_peer


@pytest.fixture(scope="module")
def served(model_dir, tmp_path_factory):
    """The peer, and the prompt whose KV it has."""
    root, path, token_ids = tmp_path_factory.mktemp("peer"), model_dir(), prompt(NUM_TOKENS, seed=7)
    url = (root / "kv").as_uri()
    with LLM(path, store=url, connector_options={"chunk_tokens": CHUNK_TOKENS}) as llm:
        llm.generate([token_ids], FIRST)
        assert llm.drain(60.0)
    with open_one(url) as store:
        (namespace,) = store.namespaces()
    with running_peer(root / "kv", namespace, root) as peer:
        yield peer, token_ids


@pytest.mark.parametrize("make", [LLM, OfTwoRanks], ids=["one rank", "two ranks"])
def test_an_engine_hits_what_a_peer_holds(model_dir, served, make, caplog):
    peer, token_ids = served
    completion, counts = read(model_dir(), peer.url, token_ids, make)
    assert completion.num_external_tokens == HIT
    ((logits, _),) = own_generation(model_dir(), [token_ids], 1)
    assert np.abs(completion.first_logits - logits).max() <= 1e-3
    assert counts["loaded_tokens"] >= HIT
    assert [each for each in caplog.records if each.levelno >= logging.ERROR] == []


def test_a_peer_that_is_killed_costs_its_hits_only(model_dir, served):
    peer, token_ids = served
    ((logits, _),) = own_generation(model_dir(), [token_ids], 1)
    options = {"chunk_tokens": CHUNK_TOKENS, "audit": "off"}
    with ThreadedLLM(model_dir(), store=peer.url, connector_options=options) as llm:
        llm.generate([token_ids], FIRST)
        llm.reset_prefix_cache()
        peer.process.kill()
        try:
            (completion,) = llm.generate([token_ids], FIRST)
        finally:
            peer.start()
    assert np.abs(completion.first_logits - logits).max() <= 1e-3

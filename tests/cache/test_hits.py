"""How much of a prompt is hit, for every length and every ratio of chunk to block."""

from __future__ import annotations

import gc
import weakref
from dataclasses import replace

import pytest
import torch

from kvferry.keys import ChunkKeys
from kvferry.types import ExtraKeys, RequestOptions
from tests.cache.hosts import make_groups, make_shared_storage_host

SIZES = [
    pytest.param(8, 4, id="block divides chunk"),
    pytest.param(4, 8, id="chunk divides block"),
    pytest.param(6, 4, id="neither"),
    pytest.param(4, 6, id="neither, block larger"),
    pytest.param(5, 5, id="equal"),
    pytest.param(1, 3, id="chunk of one token"),
    pytest.param(3, 1, id="block of one token"),
]


@pytest.mark.parametrize(("chunk", "block"), SIZES)
def test_a_prompt_hits_its_equal_by_the_formula(chunk: int, block: int):
    groups = make_groups(block_size=block, num_layers=1, num_kv_heads=1)
    for num_tokens in range(1, 3 * max(chunk, block) + 2):
        # A fresh store per length, so that no shorter prompt helps.
        host = make_shared_storage_host(
            {
                "store": "memory://hits",
                "chunk_tokens": chunk,
                "memory_bytes": 1 << 20,
            },
            groups=groups,
            num_blocks=256,
        )
        prompt = list(range(1000, 1000 + num_tokens))
        first = host.run("cold", prompt)
        host.settle()
        again = host.run("warm", prompt)
        expected = min(num_tokens // chunk * chunk, num_tokens - 1) // block * block
        assert (first.num_external_tokens, again.num_external_tokens) == (0, expected)
        host.stop()


def test_only_what_the_engine_lacks_is_loaded(make_host):
    host = make_host(chunk_tokens=8)
    prompt = list(range(40))
    host.run("first", prompt)
    host.settle()
    loaded = host.observer["loaded_tokens"]
    request = host.run("has 20 locally", prompt, num_local_tokens=20)
    assert request.num_external_tokens == 16
    assert host.observer["loaded_tokens"] - loaded == 16


@pytest.mark.parametrize(("kept", "lost", "hit"), [(0, 0, 36), (8, 0, 28), (12, 0, 24), (4, 1, 4)])
def test_a_host_that_evicts_while_a_hit_is_fetched_gets_what_is_stored(
    make_host, kept: int, lost: int, hit: int
):
    host = make_host(chunk_tokens=8)
    prompt = list(range(40))
    host.run("first", prompt)
    host.settle()
    host.forget_memory()
    request = host.add("waits", prompt)
    assert host.scheduler.lookup(request, 20).num_tokens is None
    host.settle()
    keys = ChunkKeys(host.parts[0].schema.namespace, 8)
    keys.extend(prompt)
    for key in keys.keys[1 : 1 + lost]:
        host.parts[0].store.delete(key)
    assert host.admit(request, num_local_tokens=kept) == hit
    host.prefill(request)
    assert not host.invalid_block_ids


def test_a_local_hit_longer_than_the_store_is_no_negative_hit(make_host):
    host = make_host(chunk_tokens=16)
    prompt = list(range(33))
    host.run("stored", prompt[:17])
    host.settle()
    assert host.run("local is longer", prompt, num_local_tokens=32).num_external_tokens == 0


def test_chunked_prefill_saves_every_chunk_once(make_host):
    host = make_host(chunk_tokens=8)
    prompt = list(range(100, 143))
    host.run("in pieces of 5", prompt, budget=5)
    host.settle()
    assert host.observer["put_stored"] == 5
    assert host.run("again", prompt).num_external_tokens == 40


def test_generated_tokens_are_saved_only_if_asked(make_host):
    prompt, answer = list(range(13)), list(range(500, 515))
    for save_generated, expected in ((False, 8), (True, 24)):
        host = make_host(chunk_tokens=8, save_generated=save_generated)
        host.run("chat", prompt, generate=answer)
        host.settle()
        follow_up = host.run("next turn", [*prompt, *answer, 1, 2, 3])
        assert follow_up.num_external_tokens == expected


def test_a_preempted_request_resumes_from_the_store(make_host):
    host = make_host(chunk_tokens=8)
    request = host.admitted("victim", list(range(30)))
    host.prefill(request, budget=11)
    host.settle()
    host.preempt(request)
    assert host.admit(request) == 24
    host.complete(request)


def test_uncacheable_requests_are_neither_read_nor_written(make_host):
    host = make_host(chunk_tokens=8)
    prompt = list(range(20))
    host.run("hidden", prompt, extra_keys=ExtraKeys(cacheable=False))
    host.settle()
    assert host.observer["put_stored"] == 0
    host.run("open", prompt)
    host.settle()
    again = host.run("hidden again", prompt, extra_keys=ExtraKeys(cacheable=False))
    assert again.num_external_tokens == 0


@pytest.mark.parametrize("event", ["none", "preempted", "reset"])
def test_a_request_whose_keys_become_known_while_it_runs_is_stored(make_host, event):
    """As when its adapter was read meanwhile. A reset in between may have changed the weights."""
    host = make_host(chunk_tokens=8)
    prompt, known = list(range(41)), ExtraKeys(lora="content")
    unread = replace(known, cacheable=False, reason="adapter", why="is being hashed")
    request = host.admitted(
        "first", prompt, extra_keys=unread, options=RequestOptions(explain=True)
    )
    host.step([request], tokens=20)
    if event == "preempted":
        host.preempt(request)
        host.admit(request)
    elif event == "reset":
        host.scheduler.reset()
    request.extra_keys = known
    is_stored, answer = event != "reset", host.complete(request)
    host.settle()
    host.forget_memory()
    if event == "none":
        assert answer["kvferry"]["miss_tokens"] == {"adapter": 41}
        assert answer["kvferry"]["not_stored"] == {"partial": 1}
    again = host.run("again", prompt, extra_keys=known)
    assert again.num_external_tokens == (40 if is_stored else 0)


def test_layers_without_kv_of_ours_are_left_alone(make_host):
    host = make_host(chunk_tokens=8)
    rank = host.ranks[0]
    rank.worker.register_kv_caches({**rank.caches, "mamba.0": torch.zeros(1), "norm": None})
    host.run("writer", list(range(41)))
    host.settle()
    assert host.run("reader", list(range(41))).num_external_tokens == 40


@pytest.mark.parametrize("outcome", ["finished", "never scheduled", "never allocated"])
def test_requests_are_not_kept_alive(make_host, outcome: str):
    host = make_host(chunk_tokens=8)
    request = host.add("r", list(range(41)))
    if outcome != "never allocated":
        host.admit(request)
    if outcome == "finished":
        host.prefill(request)
    host.finish(request)
    gone = weakref.ref(request)
    del request
    host.step([])
    gc.collect()
    assert gone() is None

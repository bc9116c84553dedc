"""What single requests ask of the cache: to store, load, limit, pin and explain."""

from __future__ import annotations

import pytest

from kvferry.contract.handover import read_handover
from kvferry.store.file.store import FileStore
from kvferry.types import ExtraKeys, RequestOptions
from tests.cache.keeping import NUM_CHUNKS, PROMPT, wait_for


@pytest.fixture
def store(tmp_path):
    return FileStore(tmp_path / "store")


@pytest.fixture
def host(make_host, store):
    return make_host(store=store)


def run(host, name, prompt=PROMPT, *, handover=None, extra_keys=None, **options):
    """A whole request; its answer."""
    keys = {} if extra_keys is None else {"extra_keys": extra_keys}
    request = host.admitted(
        name, prompt, options=RequestOptions(**options), handover=handover, **keys
    )
    answer = host.complete(request)
    host.settle()
    return answer


def test_a_request_that_stores_nothing_leaves_nothing(host, store):
    run(host, "private", store=False)
    assert store.stat().num_records == 0
    assert host.pool.num_assigned == 0
    run(host, "plain")
    assert store.stat().num_records == NUM_CHUNKS
    host.forget_memory()
    assert run(host, "reads", store=False, explain=True)["kvferry"]["hit_tokens"] == 40


def test_a_request_that_loads_nothing_computes_all(host):
    run(host, "writer")
    assert run(host, "plain", load=False) is None
    explained = run(host, "asked", load=False, explain=True)["kvferry"]
    assert explained == {
        "prompt_tokens": 41,
        "local_tokens": 0,
        "hit_tokens": 0,
        "by_tier": {},
        "miss_reason": "not_loading",
        "miss_tokens": {"not_loading": 40, "partial": 1},
        "not_stored": {"partial": 1},
    }


@pytest.mark.parametrize(
    ("most", "hit"), [(0, 0), (3, 0), (4, 4), (8, 8), (13, 12), (39, 36), (40, 40), (10**30, 40)]
)
def test_no_more_is_loaded_than_a_request_wants(host, most, hit):
    """With chunks of 8 and blocks of 4."""
    run(host, "writer")
    host.forget_memory()
    explained = run(host, "limited", max_load_tokens=most, explain=True)["kvferry"]
    assert explained["hit_tokens"] == hit
    assert explained["by_tier"] == ({"file": hit} if hit else {})
    if hit < 40:
        assert explained["miss_reason"] == "not_loading"
        assert explained["why"] == f"the request loads {most} tokens at most"
        assert host.observer["fetch_count"] <= -(-most // 8)
    else:
        assert explained["miss_reason"] == "partial"
        assert "why" not in explained


def test_a_limit_behind_what_is_stored_is_not_the_reason(host):
    run(host, "writer", PROMPT[:17])
    explained = run(host, "limited", max_load_tokens=20, explain=True)["kvferry"]
    assert explained["hit_tokens"] == 16
    assert explained["miss_reason"] == "absent"


def test_nothing_is_waited_for_beyond_the_limit(host):
    """A prompt that another engine is said to compute, of which no chunk comes."""
    handover = read_handover({"do_remote_prefill": True})
    request = host.add("r", PROMPT, handover=handover, options=RequestOptions(max_load_tokens=0))
    assert host.scheduler.lookup(request, 0).num_tokens == 0


def test_an_answer_says_what_was_hit_and_why_the_rest_was_computed(host):
    first = run(host, "first", explain=True)["kvferry"]
    assert (first["miss_reason"], first["miss_tokens"]) == ("absent", {"absent": 40, "partial": 1})
    other = run(host, "other", [9] * 41, explain=True, store=False)["kvferry"]
    assert other["not_stored"] == {"not_storing": 40, "partial": 1}
    memory = run(host, "second", [*PROMPT[:24], *range(60, 80)], explain=True)["kvferry"]
    assert (memory["by_tier"], memory["miss_tokens"]) == (
        {"memory": 24},
        {"absent": 16, "partial": 4},
    )
    hidden = run(host, "hidden", explain=True, extra_keys=ExtraKeys(cacheable=False))["kvferry"]
    assert (hidden["miss_reason"], hidden["prompt_tokens"]) == ("not_cacheable", 41)
    keys = ExtraKeys(cacheable=False, reason="adapter", why="it is being hashed")
    hashed = run(host, "hashed", explain=True, extra_keys=keys)["kvferry"]
    assert (hashed["miss_reason"], hashed["why"]) == ("adapter", "it is being hashed")
    assert host.observer["miss_tokens/adapter"] == 41


def test_a_preempted_request_explains_its_first_admission(host):
    run(host, "writer", PROMPT[:17])
    request = host.admitted("r", PROMPT, options=RequestOptions(explain=True))
    host.prefill(request)
    host.settle()
    host.preempt(request)
    assert host.admit(request) == 40
    host.prefill(request)
    assert host.finish(request)["kvferry"]["hit_tokens"] == 16


def test_an_explanation_stands_beside_the_stamp_of_a_prefill(host):
    asked = read_handover({"do_remote_decode": True})
    answer = run(host, "prefill", handover=asked, explain=True)
    assert answer["kvferry"]["chunks"] == NUM_CHUNKS
    assert answer["kvferry"]["miss_reason"] == "absent"
    assert read_handover(answer).source.stamp.num_chunks == NUM_CHUNKS


def pinned(store) -> dict[bytes, float]:
    return {
        entry.key: entry.pinned_until for entry in store.catalogue().scan() if entry.pinned_until
    }


def test_the_chunks_of_a_prompt_are_kept(make_host, store):
    host = make_host(store=store, save_generated=True)
    request = host.admitted("kept", PROMPT[:40], options=RequestOptions(pin=3600.0))
    host.prefill(request)
    for token in range(9):
        request.all_token_ids.append(token)
        host.prefill(request)
    host.finish(request)
    host.settle()
    wait_for(lambda: len(pinned(store)) == NUM_CHUNKS)
    assert store.stat().num_records == NUM_CHUNKS + 1, "of the answer, nothing is pinned"
    assert host.observer["pins_refused"] == 0


def test_a_store_that_cannot_pin_is_counted(make_host):
    host = make_host()  # in memory
    run(host, "r", pin=1e4)
    wait_for(lambda: host.observer["pins_refused"])

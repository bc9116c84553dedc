"""What the scheduler role drops once a command erased it: by salt, namespace or key."""

from __future__ import annotations

import pytest

from kvferry.keys import ChunkKeys, salt_mark
from kvferry.store.erasures import name_of_key, name_of_mark, name_of_namespace
from kvferry.types import ExtraKeys

PROMPT = list(range(300, 340))
CHUNK = 8
ALICE, BOB = ExtraKeys(cache_salt="alice"), ExtraKeys(cache_salt="bob")


def keys_of(host, extra: ExtraKeys) -> list:
    keys = ChunkKeys(host.scheduler.requests.namespace, CHUNK, extra)
    keys.extend(PROMPT)
    return keys.keys


def names(host) -> dict[str, list[str]]:
    namespace = host.scheduler.requests.namespace
    return {
        "salt": [name_of_mark(salt_mark(namespace, "alice"))],
        "keys": [name_of_key(key) for key in keys_of(host, ALICE)],
        "namespace": [name_of_namespace(namespace)],
    }


def hear(host, kind: str = "salt") -> None:
    """As the thread does that reads notices."""
    host.parts[0].store._erasures._hear(dict.fromkeys(names(host)[kind], 0.0))


@pytest.fixture
def host(make_host):
    """With the prompt of two users in memory."""
    host = make_host(chunk_tokens=CHUNK)
    for name, extra in (("alice", ALICE), ("bob", BOB)):
        host.run(name, PROMPT, extra_keys=extra)
    host.settle()
    assert all(host.pool.find(key) for extra in (ALICE, BOB) for key in keys_of(host, extra))
    return host


def held(host, extra: ExtraKeys) -> int:
    return sum(host.pool.find(key) is not None for key in keys_of(host, extra))


@pytest.mark.parametrize("kind", ["salt", "keys", "namespace"])
def test_an_engine_without_requests_lends_it_no_more(host, kind):
    mine, other = keys_of(host, ALICE)[0], keys_of(host, BOB)[0]
    for key in (mine, other):
        host.pool.loans.release(host.pool.loans.lend(key, 5.0))
    hear(host, kind)
    assert host.pool.loans.lend(mine, 5.0) is None
    assert (host.pool.loans.lend(other, 5.0) is None) == (kind == "namespace")


def test_nothing_more_is_saved_of_a_request_that_runs_and_the_next_one_is_saved(host):
    longer = [*PROMPT, *range(900, 940)]
    request = host.add("long", longer, extra_keys=ALICE)
    host.admit(request)
    host.step([request], tokens=8)
    hear(host)
    host.prefill(request)
    host.finish(request)
    host.settle()
    assert held(host, ALICE) == 0
    keys = ChunkKeys(host.scheduler.requests.namespace, CHUNK, ALICE)
    keys.extend(longer)
    assert not any(host.pool.find(key) for key in keys.keys)
    host.run("later", longer, extra_keys=ALICE)
    assert all(host.pool.find(key) for key in keys.keys[5:])


def test_what_was_read_from_a_store_is_known_by_its_salt_too(host):
    host.forget_memory()
    for name, extra in (("alice reads", ALICE), ("bob reads", BOB)):
        assert host.run(name, PROMPT, extra_keys=extra).num_external_tokens == 36
    num_read = held(host, BOB)
    assert held(host, ALICE) == num_read > 0
    hear(host)
    host.step([])
    assert (held(host, ALICE), held(host, BOB)) == (0, num_read)


def test_a_request_that_was_preempted_meanwhile_is_not_saved_either(host):
    longer = [*PROMPT, *range(900, 940)]
    request = host.add("long", longer, extra_keys=ALICE)
    host.admit(request)
    hear(host)
    host.step([request], tokens=8)
    host.preempt(request)
    host.admit(request)
    host.prefill(request)
    host.finish(request)
    host.settle()
    keys = ChunkKeys(host.scheduler.requests.namespace, CHUNK, ALICE)
    keys.extend(longer)
    assert not any(host.pool.find(key) for key in keys.keys[5:])

"""KV with NaN or Inf is neither stored nor lent nor offered, whichever rank computed it; what older
releases stored of it is found by audits, which then cost no other prompt its cache."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from contextlib import AbstractContextManager
from typing import Any
from unittest.mock import patch

import pytest
import torch

from kvferry.record.leaves import Leaves
from kvferry.record.schema import leaf_digests
from kvferry.types import RequestOptions
from tests.cache.hosts import make_groups
from tests.cache.keeping import NUM_CHUNKS, PROMPT, assert_settles, keys_of, open_store, wait_for
from tests.simulated_host import prefix_seeds

CHUNK = 8
BAD = 2
"""Number of the chunk that is not finite."""
OTHER = list(range(300, 341))
VALUES = [math.nan, math.inf, -math.inf]


def spoil(host: Any, ranks: Collection[int], value: float, *, every: bool = False) -> Any:
    """From now on a token of chunk `BAD` has a value in one head of the last layer of some ranks;
    `every`: so have all tokens from there on. Returns a function that ends this."""
    request = host.add("seeds", PROMPT)
    seeds = prefix_seeds(request)
    host.finish(request)
    spoiled = torch.tensor(seeds[BAD * CHUNK :] if every else [seeds[BAD * CHUNK + 3]])
    undo = pytest.MonkeyPatch()
    for number in ranks:
        rank = host.ranks[number]

        def values(layer: Any, prefixes: Any, right: Any = rank.values) -> torch.Tensor:
            found = right(layer, prefixes)
            if layer.layer == 1:
                found[torch.isin(prefixes, spoiled), -1, 5] = value
            return found

        undo.setattr(rank, "values", values)
    return undo.undo


def as_older_releases() -> AbstractContextManager[Any]:
    """Hash without a look at values."""
    return patch(
        "kvferry.blocks.rows.leaves_of", lambda *rows: Leaves(leaf_digests(*rows), are_finite=True)
    )


def settle(host: Any) -> None:
    host.settle()
    assert_settles(host)


def run(host: Any, name: str, prompt: list[int] = PROMPT) -> int:
    """Run a prompt without a check of its KV; return how much was loaded."""
    request = host.add(name, prompt)
    hit = host.admit(request)
    while left := len(prompt) - request.num_computed_tokens:
        host.step([request], tokens=left)
    host.finish(request)
    settle(host)
    return hit


@pytest.fixture
def make(make_host: Any, tmp_path: Any) -> Callable[..., Any]:
    """Makes hosts that share a directory, with whole records on one rank or halves on two."""

    def host(world_size: int = 1, **options: Any) -> Any:
        stores = [open_store(tmp_path / "store") for _ in range(world_size)]
        return make_host(
            store=stores[0],
            rank_stores=stores,
            groups=make_groups(num_kv_heads=4),
            world_size=world_size,
            **options,
        )

    return host


def stored(host: Any) -> list[bool]:
    return [host.parts[0].store.inner.read(key, ()) is not None for key in keys_of(host)]


@pytest.mark.parametrize("value", VALUES)
@pytest.mark.parametrize(
    ("world_size", "ranks"), [(1, [0]), (2, [0]), (2, [1]), (2, [0, 1])], ids=str
)
def test_a_chunk_that_is_not_finite_on_some_rank_is_not_stored(
    make, caplog, world_size, ranks, value
):
    host = make(world_size)
    undo = spoil(host, ranks, value)
    run(host, "bad")
    wait_for(lambda: (host.run_for(0.5), not host.pool.is_writing)[1])
    assert host.observer["save_not_finite"] == 1
    assert host.observer["save_failed"] == 0
    assert not stored(host)[BAD]
    assert host.pool.find(keys_of(host)[BAD]) is None
    assert caplog.text.count("has NaN or Inf: it is not stored") == 1
    undo()
    # The host checks every byte.
    assert host.run("right", PROMPT).num_external_tokens == BAD * CHUNK
    wait_for(lambda: (host.run_for(0.5), all(stored(host)))[1])
    assert make(world_size).run("elsewhere", PROMPT).num_external_tokens == NUM_CHUNKS * CHUNK


@pytest.mark.parametrize(("world_size", "ranks"), [(1, [0]), (2, [1])], ids=str)
def test_nothing_that_a_request_computed_on_it_stays(make, world_size, ranks):
    """The chunks behind it are finite, and so their own values do not show it."""
    host = make(world_size)
    undo = spoil(host, ranks, math.inf)
    request = host.add("bad", PROMPT)
    request.options = RequestOptions(explain=True)
    assert host.admit(request) == 0
    host.prefill(request)
    wait_for(lambda: (host.run_for(0.5), host.observer["save_not_finite"] == 1)[1])
    request.all_token_ids.append(1)
    host.prefill(request, budget=1)
    explained = host.finish(request)
    assert explained is not None
    assert explained["kvferry"]["not_stored"]["not_finite"] == (NUM_CHUNKS - BAD) * CHUNK
    wait_for(lambda: (host.run_for(0.5), stored(host) == [True] * BAD + [False] * 3)[1])
    settle(host)
    undo()
    assert host.run("right", PROMPT).num_external_tokens == BAD * CHUNK


@pytest.mark.parametrize("recomputes", [False, True])
@pytest.mark.parametrize("value", VALUES)
@pytest.mark.parametrize(
    ("world_size", "ranks"), [(1, [0]), (2, [0]), (2, [1]), (2, [0, 1])], ids=str
)
def test_what_older_releases_stored_of_it_goes_and_the_cache_goes_on(
    make, world_size, ranks, value, recomputes
):
    """The first hit is audited: all that it reads is looked at."""
    with as_older_releases():
        old = make(world_size)
        run(old, "other", OTHER)
        spoil(old, ranks, value, every=True)
        run(old, "bad")
        wait_for(lambda: (old.run_for(0.5), all(stored(old)))[1])
    host = make(world_size, audit="first", recomputes=recomputes)
    assert host.run("first", PROMPT).num_external_tokens in (0, CHUNK)  # one is computed again
    wait_for(lambda: (host.run_for(0.5), host.scheduler.identity.state.miss is None)[1])
    assert host.observer["audit_mismatch"] == 0
    assert host.observer["records_corrupt"] >= 1
    assert host.run("other", OTHER).num_external_tokens >= (NUM_CHUNKS - 1) * CHUNK
    wait_for(lambda: (host.run_for(0.5), host.run("again", PROMPT).num_external_tokens == 40)[1])
    removed = {each.detail for each in host.parts[0].store.inner.catalogue().removals(100)}
    assert removed <= {"not_finite"}


@pytest.mark.parametrize(("world_size", "ranks"), [(1, [0]), (2, [1])], ids=str)
def test_with_a_record_go_those_behind_it_though_their_values_are_finite(make, world_size, ranks):
    with as_older_releases():
        old = make(world_size)
        spoil(old, ranks, math.inf)
        run(old, "bad")
        wait_for(lambda: (old.run_for(0.5), all(stored(old)))[1])
    host = make(world_size, audit="first")
    assert host.run("first", PROMPT).num_external_tokens <= BAD * CHUNK
    behind = set(keys_of(host)[BAD:])
    store = host.parts[0].store.inner
    wait_for(lambda: {each.key for each in store.catalogue().removals(100)} == behind)


@pytest.mark.parametrize("side", ["stored", "computed"])
@pytest.mark.parametrize("value", VALUES)
@pytest.mark.parametrize(("world_size", "ranks"), [(1, [0]), (2, [1])], ids=str)
def test_an_audit_of_values_that_are_not_finite_is_no_verdict_on_the_model(
    make, world_size, ranks, value, side
):
    """The compared record came before the audit was drawn, so its values were not looked at."""
    with as_older_releases():
        old = make(world_size)
        if side == "stored":
            spoil(old, ranks, value, every=True)
        run(old, "bad")
        wait_for(lambda: (old.run_for(0.5), all(stored(old)))[1])
    with patch("kvferry.cache.deciding.searches.Searches._bring", _unlooked()):
        host = make(world_size, audit="first")
        undo = spoil(host, ranks, value, every=True) if side == "computed" else lambda: None
        run(host, "first")
    undo()
    assert host.scheduler.identity.state.miss is None
    assert host.observer["audit_mismatch"] == host.observer["audits"] == 0
    if side == "stored":
        last = NUM_CHUNKS - 1
        wait_for(lambda: host.observer["records_corrupt"] == 1)
        wait_for(lambda: not stored(host)[last])
    else:
        assert host.observer["audit_failed"] == 1
        assert all(stored(host))
        assert host.run("second", PROMPT).num_external_tokens >= (NUM_CHUNKS - 1) * CHUNK


def _unlooked() -> Any:
    from kvferry.cache.deciding.host_pool import HostPool
    from kvferry.cache.deciding.searches import Searches

    bring, fetch = Searches._bring, HostPool.fetch

    def unlooked(pool: Any, *args: Any, **_looks: Any) -> Any:
        return fetch(pool, *args)

    def run_unlooked(*args: Any) -> Any:
        with patch.object(HostPool, "fetch", unlooked):
            return bring(*args)

    return run_unlooked

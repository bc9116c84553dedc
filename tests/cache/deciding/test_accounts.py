"""Every token of an admitted prompt is in one account, and each miss has a reason."""

from __future__ import annotations

import logging
from collections import Counter
from pathlib import Path

import pytest

from kvferry.contract.messages import LookupMiss
from kvferry.observe import Counters
from kvferry.store.memory import MemoryStore
from tests.cache.keeping import PROMPT, keys_of, open_store


class Recorder(Counters):
    """Gives sums by the end of their names."""

    def amounts(self, prefix: str) -> Counter[str]:
        """Counters whose names begin so, without what they begin with."""
        counts = self.snapshot().items()
        return Counter(
            {name.removeprefix(prefix): int(n) for name, n in counts if name.startswith(prefix)}
        )


@pytest.fixture
def observer() -> Recorder:
    return Recorder()


@pytest.fixture
def store(make_host) -> MemoryStore:
    """A store that holds the prompt."""
    store = MemoryStore("accounts")
    host = make_host(store=store)
    host.run("writer", PROMPT)
    host.settle()
    return store


def misses(observer: Recorder) -> dict[str, int]:
    """Tokens by reason."""
    return dict(observer.amounts("miss_tokens/"))


def assert_adds_up(observer: Recorder) -> None:
    """`lookup_tokens = local_hit_tokens + hit_tokens/<tier> + miss_tokens/<reason>`."""
    hits, missed = observer.amounts("hit_tokens/"), observer.amounts("miss_tokens/")
    parts = observer["local_hit_tokens"] + hits.total() + missed.total()
    assert observer["lookup_tokens"] == parts
    assert observer["hit_tokens"] == hits.total()
    assert set(missed) <= set(LookupMiss)
    assert all(tokens > 0 for tokens in (*hits.values(), *missed.values()))


# -- reasons ------------------------------------------------------------------------------------


def test_the_answer_is_logged_at_debug(make_host, observer, caplog):
    host = make_host(observer=observer)
    for level, name in ((logging.INFO, "quiet"), (logging.DEBUG, "loud\x1b[31m")):
        with caplog.at_level(level, logger="kvferry"):
            host.run(name, PROMPT)
    (record,) = [each for each in caplog.records if each.message.startswith("request ")]
    assert record.levelname == "DEBUG"
    assert record.message.startswith("request loud\\x1b[31m: of 41 tokens the engine has 0; hits ")


@pytest.mark.parametrize(("num_tokens", "partial"), [(1, 1), (7, 7), (8, 4), (41, 1), (47, 7)])
def test_partial(make_host, observer, store, num_tokens: int, partial: int):
    """With chunks of 8 and blocks of 4, of a prompt whose chunks are all stored."""
    host = make_host(store=store, observer=observer)
    host.run("r", [*PROMPT, *PROMPT][:num_tokens])
    assert misses(observer) == {"partial": partial}
    assert_adds_up(observer)


def test_a_host_that_did_not_ask(make_host, observer, store):
    host = make_host(store=store, observer=observer)
    request = host.add("r", PROMPT)
    host.grow(request, 64)
    host.scheduler.update_after_alloc(request, request.block_ids, 0)
    assert misses(observer) == {"not_loading": 40, "partial": 1}
    assert_adds_up(observer)


# -- tiers --------------------------------------------------------------------------------------


def test_hits_are_counted_by_tier(make_host, observer, directory: Path):
    host = make_host(store=open_store(directory), observer=observer)
    host.run("of the store", PROMPT)
    assert observer.amounts("hit_tokens/") == {"file": 40}
    host.run("of memory", PROMPT)
    assert observer.amounts("hit_tokens/") == {"file": 40, "memory": 40}
    host.pool.drop(keys_of(host)[1])
    host.run("of both", PROMPT, num_local_tokens=4)
    assert observer.amounts("hit_tokens/") == {"file": 48, "memory": 68}
    assert observer["local_hit_tokens"] == 4
    assert observer["hits"] == 3
    assert_adds_up(observer)

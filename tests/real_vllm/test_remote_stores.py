"""Stores on servers: what one process stored, with one rank or two, another reads."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from pathlib import Path

import pytest

from tests.real_vllm.conftest import MakePrompt, Pool
from tests.real_vllm.harness import (
    Oracle,
    Process,
    assert_reused,
    assert_same,
    expected_hit,
    kvferry,
    total,
)
from tests.servers.mooncake import MooncakeServer
from tests.servers.places import AllServers
from tests.servers.seaweed import SeaweedServer
from tests.servers.valkey import ValkeyCluster, ValkeyServer

PLACES = ("valkey", "cluster", "s3", "mooncake", "tiers")
RANKS = {1: {}, 2: {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}}
# Engines take long to start, and what a server does is tested without them. The tiers have all
# others but Mooncake, whose client has a process of its own.
EACH_TIME = [("tiers", 2, 2), ("mooncake", 1, 1)]
CASES = [
    pytest.param(*case, marks=[] if case in EACH_TIME else [pytest.mark.sweep])
    for case in product(PLACES, RANKS, RANKS)
]

# What would take longer to read than to compute is computed, as it may on a busy machine.
NUM_TRIES = 4


@pytest.fixture(scope="module")
def servers(
    valkey_server: ValkeyServer,
    valkey_cluster: ValkeyCluster,
    seaweed: SeaweedServer,
    mooncake: MooncakeServer,
    tmp_path_factory: pytest.TempPathFactory,
) -> AllServers:
    root = tmp_path_factory.mktemp("tiers")
    return AllServers(valkey_server, valkey_cluster, seaweed, mooncake, root)


@pytest.fixture(scope="module")
def pair(pool: Pool, seaweed: SeaweedServer) -> Iterator[tuple[Process, Process]]:
    """One process that writes and one that reads, with the credentials of the servers."""
    names = ("writes to servers", "reads from servers")
    first, second = (pool.get(name, **seaweed.environment) for name in names)
    yield first, second
    for name in names:
        pool.discard(name)


@pytest.mark.parametrize(("place", "writers", "readers"), CASES)
def test_what_one_process_stored_another_reads(
    place: str,
    writers: int,
    readers: int,
    servers: AllServers,
    pair: tuple[Process, Process],
    models: dict[str, Path],
    make_prompt: MakePrompt,
    oracle: Oracle,
) -> None:
    prompts = [make_prompt(n) for n in (300, 385, 777)]
    own = oracle(prompts)
    connector = kvferry(servers.urls(f"{writers}-{readers}")[place])
    writer, reader = pair
    with writer.engine(models["plain"], connector, **RANKS[writers]) as engine:
        cold = engine.generate(prompts)
        count = sum(len(prompt) // 128 for prompt in prompts)
        engine.wait_counted(
            lambda found: total(found, "store_put_records") >= count, f"{count} records are stored"
        )
    hits = [expected_hit(len(prompt)) for prompt in prompts]
    with reader.engine(models["plain"], connector, **RANKS[readers]) as engine:
        for _ in range(NUM_TRIES):
            warm = engine.generate(prompts)
            if warm.external == sum(hits):
                break
            assert_same(own, warm)
            reader.call("reset", 30, connector=False)
    assert_reused(own, cold, warm, hits)

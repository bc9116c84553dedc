"""Stores on servers: what one process stored another reads, and a server that is killed."""

from __future__ import annotations

import time
from pathlib import Path

from tests.real_vllm.conftest import MakePrompt, Pool
from tests.real_vllm.harness import (
    Engine,
    Oracle,
    Process,
    assert_reused,
    assert_same,
    expected_hit,
    kvferry,
)
from tests.servers.process import LOCALHOST
from tests.servers.seaweed import BUCKET, SeaweedServer
from tests.servers.valkey import running_valkey

Models = dict[str, Path]

# Of about seven records: what a prompt left in memory, the next ones take.
SMALL_MEMORY = "4MiB"
BACK_SECONDS = 15.0


def wait_stored(engine: Engine, count: int, seconds: float = 20.0) -> None:
    """Until the engine has stored so many records."""
    until = time.monotonic() + seconds
    while True:
        found = sum(n for name, n in engine.metrics().items() if "store_put_records" in name)
        if found >= count:
            return
        assert time.monotonic() < until, f"{found} of {count} records after {seconds:.0f} s"
        time.sleep(0.05)


def check_reuse(
    url: str, models: Models, prompts: list[list[int]], oracle: Oracle, pair: tuple[Process, ...]
) -> None:
    own = oracle(prompts)
    writer, reader = pair
    with writer.engine(models["plain"], kvferry(url)) as engine:
        cold = engine.generate(prompts)
        wait_stored(engine, sum(len(prompt) // 128 for prompt in prompts))
    with reader.engine(models["plain"], kvferry(url)) as engine:
        warm = engine.generate(prompts)
    assert_reused(own, cold, warm, [expected_hit(len(prompt)) for prompt in prompts])


def test_what_one_process_stored_on_valkey_another_reads(
    models: Models, make_prompt: MakePrompt, oracle: Oracle, first: Process, second: Process
) -> None:
    prompts = [make_prompt(n) for n in (300, 385, 777)]
    with running_valkey() as server:
        url = f"valkey://{LOCALHOST}:{server.port}/kv"
        check_reuse(url, models, prompts, oracle, (first, second))


def test_what_one_process_stored_on_s3_another_reads(
    models: Models, make_prompt: MakePrompt, oracle: Oracle, pool: Pool, seaweed: SeaweedServer
) -> None:
    prompts = [make_prompt(n) for n in (300, 385, 777)]
    url = f"s3://{BUCKET}/kv?endpoint={seaweed.endpoint}&region=us-east-1"
    names = ("first with credentials", "second with credentials")
    pair = tuple(pool.get(name, **seaweed.environment) for name in names)
    check_reuse(url, models, prompts, oracle, pair)
    for name in names:
        pool.discard(name)


def test_a_server_that_is_killed_while_serving_is_a_miss_until_it_is_back(
    models: Models, make_prompt: MakePrompt, oracle: Oracle, first: Process, second: Process
) -> None:
    prompts = [make_prompt(650) for _ in range(4)]
    own = oracle(prompts)
    hits = sum(expected_hit(len(prompt)) for prompt in prompts)
    with running_valkey() as server:
        connector = kvferry(f"valkey://{LOCALHOST}:{server.port}/kv", memory_bytes=SMALL_MEMORY)
        with first.engine(models["plain"], connector) as engine:
            engine.generate(prompts)
            wait_stored(engine, sum(len(prompt) // 128 for prompt in prompts))
        with second.engine(models["plain"], connector) as engine:
            assert engine.generate(prompts[:1]).external == expected_hit(650)
            server.process.kill()
            lost = engine.generate(prompts[1:])
            assert_same(own[1:], lost)
            assert lost.external == 0
            server.start()
            until = time.monotonic() + BACK_SECONDS
            found = 0
            while found < hits:
                assert time.monotonic() < until, f"{found} of {hits} tokens are found again"
                second.call("reset", 30, connector=False)
                again = engine.generate(prompts)
                assert_same(own, again)
                found = again.external

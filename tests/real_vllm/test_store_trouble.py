"""Stores that are full, gone, shared, or written by an engine that dies."""

from __future__ import annotations

import contextlib
import random
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.real_vllm.conftest import MakePrompt, Pool, Stored
from tests.real_vllm.harness import (
    STOP_SECONDS,
    Engine,
    Oracle,
    Process,
    assert_same,
    kvferry,
    records,
    wait_for_records,
)
from tests.real_vllm.stalled_file import stalled

Models = dict[str, Path]


@pytest.fixture
def full_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 3 MiB, in memory."""
    path = tmp_path / "disk"
    path.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=3m", "none", str(path)]
    if subprocess.run(mount, check=False).returncode:
        pytest.skip("no right to mount a file system here: run as root")
    yield path
    subprocess.run(["umount", "--lazy", str(path)], check=True)


def test_a_full_disk_means_not_storing(
    full_disk: Path, models: Models, make_prompt: MakePrompt, oracle: Oracle,
    first: Process, second: Process,
) -> None:  # fmt: skip
    prompts = [make_prompt(900) for _ in range(4)]  # 14 MiB of KV
    own = oracle(prompts)
    store = full_disk / "store"
    with first.engine(models["plain"], kvferry(store)) as engine:
        cold = engine.generate(prompts)
        assert_same(own, cold)
        again = engine.generate(prompts, together=True)
        assert_same(own, again)
        counts = engine.metrics()
    ours = {name: value for name, value in counts.items() if "kvferry" in name and value}
    assert any("no_space" in name for name in ours), ours
    stored = len(records(store))
    assert 0 < stored <= 6
    with second.engine(models["plain"], kvferry(store)) as engine:
        warm = engine.generate(prompts)
    assert_same(own, warm)
    assert warm.external <= stored * 128


@pytest.mark.parametrize("becomes", ["nothing", "a_file"])
def test_a_store_directory_that_goes_away_while_serving_is_a_miss(
    becomes: str, tmp_path: Path, models: Models, make_prompt: MakePrompt,
    oracle: Oracle, stored: Stored, second: Process,
) -> None:  # fmt: skip
    store = stored.copy_to(tmp_path / "store")
    prompts, own = stored.prompts[:4], stored.own[:4]
    with second.engine(models["plain"], kvferry(store)) as engine:
        assert engine.generate(prompts[:1]).external == 384
        shutil.rmtree(store)
        if becomes == "a_file":
            store.write_bytes(b"")
        lost = engine.generate(prompts[1:])
        assert_same(own[1:], lost)
        assert lost.external == 0
        assert lost.counted("vanished", "away", "absent", "failed")
        other = [make_prompt(400) for _ in range(2)]
        assert_same(oracle(other), engine.generate(other))


def test_a_store_that_stalls_in_the_middle_of_a_load_is_waited_for_only_so_long(
    tmp_path: Path, models: Models, make_prompt: MakePrompt, oracle: Oracle,
    stored: Stored, pool: Pool,
) -> None:  # fmt: skip
    store = stored.copy_to(tmp_path / "store")
    unknown = make_prompt(400)
    prompts = [*stored.prompts[:3], unknown]
    own = [*stored.own[:3], *oracle([unknown])]
    _, second, third = (store / file for file in stored.files[0])
    process = pool.get("stalled")
    with stalled(second) as one, stalled(third) as other:  # as many as there are I/O threads
        process.start(models["plain"], kvferry(store))
        engine = Engine(process)
        late = engine.generate(prompts[:1], deadline=60)
        assert one.asked.is_set()
        assert other.asked.is_set()
        assert_same(own[:1], late)
        assert late.external == 128
        assert late.counted('miss_tokens_total{"reason": "deadline"}')
        meanwhile = engine.generate(prompts[1:], together=True, deadline=60)
        assert_same(own[1:], meanwhile)
        one.release()
        other.release()
        assert_same(own, engine.generate(prompts))
        assert not engine.metrics().get("vllm:kvferry_records_corrupt_total")
        process.call("stop", STOP_SECONDS)
    with process.engine(models["plain"], kvferry(store)) as engine:
        healed = engine.generate(prompts)
    assert_same(own, healed)
    # The unknown one is not stored if a slow machine computes it when the store is away already.
    assert healed.external in (3 * 384, 4 * 384)


def test_a_store_that_hangs_while_it_opens_delays_the_start_only_so_long(
    tmp_path: Path, models: Models, stored: Stored, pool: Pool
) -> None:
    store = stored.copy_to(tmp_path / "store")
    prompts, own = stored.prompts[:1], stored.own[:1]
    process = pool.get("stalled")
    connector = kvferry(store, start_timeout_seconds=1)
    with stalled(store / "kvferry.json") as marker:
        began = time.monotonic()
        process.start(models["plain"], connector)
        assert marker.asked.is_set()
        assert time.monotonic() - began < 60
        without = Engine(process).generate(prompts)
        assert_same(own, without)
        assert without.external == 0
        marker.release()
        process.call("stop", STOP_SECONDS)
    with process.engine(models["plain"], connector) as engine:
        assert engine.generate(prompts).external == 384


def test_an_engine_ends_in_time_although_its_store_stalls(
    tmp_path: Path, models: Models, stored: Stored, pool: Pool
) -> None:
    store = stored.copy_to(tmp_path / "store")
    process = pool.get("stalled")
    with contextlib.ExitStack() as stack:
        for file in stored.files[0]:
            stack.enter_context(stalled(store / file))
        process.start(models["plain"], kvferry(store))
        answers = Engine(process).generate(stored.prompts[:1], deadline=60)
        assert_same(stored.own[:1], answers)
        process.call("stop", STOP_SECONDS)
        process.finish(STOP_SECONDS)


def test_two_engines_share_a_directory_at_once(
    tmp_path: Path, models: Models, make_prompt: MakePrompt, oracle: Oracle,
    first: Process, second: Process,
) -> None:  # fmt: skip
    prompts = [make_prompt(520) for _ in range(6)]
    own = oracle(prompts)
    connector = kvferry(tmp_path)
    engines = [Engine(first), Engine(second)]
    for process in (first, second):
        process.start(models["plain"], connector)
    orders = [prompts, prompts[3:] + prompts[:3]]  # each stores what the other will ask for
    for engine, order in zip(engines, orders, strict=True):
        engine.send(order)
    both = [engine.receive() for engine in engines]
    for process in (first, second):
        process.call("stop", STOP_SECONDS)
    assert_same(own, both[0])
    assert_same([*own[3:], *own[:3]], both[1])
    assert len(records(tmp_path)) == 6 * 4
    assert not list(tmp_path.glob("quarantine/*"))
    with first.engine(models["plain"], connector) as engine:
        warm = engine.generate(prompts)
    assert_same(own, warm)
    assert warm.external == 6 * 512


def test_an_engine_killed_while_it_stores_leaves_whole_records_or_none(
    tmp_path: Path, models: Models, make_prompt: MakePrompt, oracle: Oracle,
    pool: Pool, second: Process,
) -> None:  # fmt: skip
    prompts = [make_prompt(1000) for _ in range(12)]
    own = oracle(prompts)
    store = tmp_path / "store"
    source = random.Random(4)
    for name in ("victim-1", "victim-2"):
        victim = pool.get(name)
        victim.start(models["plain"], kvferry(store))
        before = len(records(store))
        Engine(victim).send(prompts[before // 7 :], together=True)
        wait_for_records(store, before + source.randrange(1, 20))
        victim.kill()
    left = records(store)
    assert 0 < len(left) < 12 * 7, "the engine was not killed while it stored"
    with second.engine(models["plain"], kvferry(store)) as engine:
        warm = engine.generate(prompts)
        assert_same(own, warm)
        assert warm.external > 0
        assert not warm.counted("corrupt")
    assert len(records(store)) == 12 * 7
    assert not list(store.glob("quarantine/*"))

"""Engines whose ranks, or stages, run on two machines."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvferry.record.check import RecordInfo, parse_head
from tests.real_vllm.conftest import Pool
from tests.real_vllm.harness import (
    Oracle,
    assert_same,
    expected_hit,
    kvferry,
    records,
    wait_for_records,
)
from tests.real_vllm.host import does
from tests.real_vllm.machines import Machines, two_machines

pytestmark = [
    does("runs an engine on two machines without GPUs", since=(0, 32)),
    pytest.mark.filterwarnings("default:no network namespaces"),
]

LENGTHS = (300, 385, 777)
SPLITS: dict[str, dict[str, Any]] = {
    "ranks": {"tensor_parallel_size": 2},
    "stages": {
        "pipeline_parallel_size": 2,
        "max_num_batched_tokens": 256,
        "worker_extension_cls": "cpu_stages.Stages",
    },
}


@pytest.fixture(scope="module")
def machines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machines]:
    with two_machines(tmp_path_factory.mktemp("machines")) as machines:
        yield machines


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    source = random.Random(61)
    return [[source.randrange(3, 320) for _ in range(length)] for length in LENGTHS]


@pytest.fixture(scope="module")
def store(
    tmp_path_factory: pytest.TempPathFactory,
    models: dict[str, Path],
    pool: Pool,
    prompts: list[list[int]],
) -> Path:
    """A directory in which an engine on one machine has stored the prompts."""
    store = tmp_path_factory.mktemp("machines") / "store"
    with pool.get("first").engine(models["plain"], kvferry(store)) as engine:
        engine.generate(prompts)
        wait_for_records(store, 2 + 3 + 6)
    return store


def others(prompts: list[list[int]]) -> list[list[int]]:
    """Prompts of the same lengths that are stored nowhere."""
    return [[token % 300 + 5 for token in reversed(prompt)] for prompt in prompts]


@pytest.mark.parametrize("split", SPLITS)
def test_machines_read_together_what_one_has_stored_and_store_shards(
    split: str,
    machines: Machines,
    models: dict[str, Path],
    oracle: Oracle,
    prompts: list[list[int]],
    store: Path,
) -> None:
    before, own = records(store), others(prompts) if split == "ranks" else prompts[:0]
    with machines.engine(models["plain"], kvferry(store), **SPLITS[split]) as engine:
        answers = engine.generate(prompts)
        if own:
            engine.generate(own)
            num_shards = 2 if machines.are_apart else 1
            wait_for_records(store, len(before) + num_shards * (2 + 3 + 6))
    assert_same(oracle(prompts), answers)
    assert [answer.cached for answer in answers] == [expected_hit(n) for n in LENGTHS]
    assert answers.external == sum(expected_hit(n) for n in LENGTHS)
    if not (own and machines.are_apart):
        return
    heads = [
        parse_head(memoryview(path.read_bytes()), path.stat().st_size)
        for path in before ^ records(store)
    ]
    assert all(isinstance(head, RecordInfo) and head.of for head in heads)
    # The first requests of another start find them.
    with machines.engine(models["plain"], kvferry(store), **SPLITS[split]) as engine:
        answers = engine.generate(own)
    assert_same(oracle(own), answers)
    assert answers.external == sum(expected_hit(n) for n in LENGTHS)

"""Two tensor-parallel ranks and one read what the other stored.

An engine of two ranks takes long to start, so two of them serve all tests here.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest

from kvferry.record.check import RecordInfo
from kvferry.store.maintenance import inspect
from kvferry.store.url import open_store
from kvferry.testing.models import make_tiny_model
from tests.real_vllm.conftest import MakePrompt, Pool
from tests.real_vllm.harness import (
    Answer,
    Answers,
    Oracle,
    assert_same,
    expected_hit,
    kvferry,
    memory_of,
    random_prompts,
    records,
    wait_for_records,
)
from tests.real_vllm.killed import kill_a_rank

LENGTHS = (300, 385, 777)
PROMPTS = {"one": LENGTHS, "two": LENGTHS, "damaged": (400,), "killed": 4 * (700,)}
TWO_RANKS = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}


@dataclass(frozen=True)
class Runs:
    """What came out.

    Attributes:
        own: by name of the prompts, what one rank says by its own prefix hit.
        runs: by "writer -> reader".
        died: what the engine said whose rank was killed.
        wrong: keys of records found wrong that no test had damaged.
    """

    own: dict[str, list[Answer]]
    runs: dict[str, Answers]
    died: str
    wrong: set[str]


def damage_second_chunk(store: Path, files: set[Path]) -> None:
    """Flip a bit in the payload of the second chunk of the prompt whose records these are."""
    by_key = {path.stem: path for path in files}
    with open_store(f"file://{store}?read_only=true") as opened:
        for entry in opened.catalogue().scan():
            path, info = by_key.get(entry.key.hex()), inspect(opened, entry)
            assert isinstance(info, RecordInfo), f"{entry.key.hex()} is not sound: {info}"
            if path is not None and info.first_token == 128:
                content = bytearray(path.read_bytes())
                content[len(content) * 2 // 3] ^= 0x10
                path.write_bytes(content)


@pytest.fixture(scope="module")
def outcome(
    tmp_path_factory: pytest.TempPathFactory, models: dict[str, Path], pool: Pool, oracle: Oracle
) -> Runs:
    prompts = random_prompts(30, PROMPTS)
    own = {name: list(oracle(asked)) for name, asked in prompts.items()}
    store = tmp_path_factory.mktemp("ranks") / "store"
    model, connector, runs = models["plain"], kvferry(store), {}
    with pool.get("first").engine(model, connector) as engine:
        runs["1"] = engine.generate(prompts["one"])
    stored = len(wait_for_records(store, 2 + 3 + 6))
    with pool.get("ranks").engine(model, connector, **TWO_RANKS) as engine:
        runs["1 -> 2"] = engine.generate(prompts["one"])
        runs["2"] = engine.generate(prompts["two"])
        stored = len(wait_for_records(store, stored + 2 + 3 + 6))
        before = records(store)
        runs["2 before the damage"] = engine.generate(prompts["damaged"])
        new = wait_for_records(store, stored + 3) - before
    # The longest prompt comes last and fills the memory: what is damaged then is not in it.
    small = kvferry(store, memory_bytes=memory_of(store, 6))
    with pool.get("ranks").engine(model, small, **TWO_RANKS) as engine:
        runs["2 -> 2"] = engine.generate(prompts["two"])
        damage_second_chunk(store, new)
        runs["2 damaged -> 2"] = engine.generate(prompts["damaged"])
    pool.get("ranks").start(model, connector, **TWO_RANKS)
    died = kill_a_rank(pool.get("ranks"), store, prompts["killed"], -1)
    pool.discard("ranks")
    with pool.get("second").engine(model, connector) as engine:
        runs["2 -> 1"] = engine.generate(prompts["two"])
        runs["2 killed -> 1"] = engine.generate(prompts["killed"])
    quarantined = [path.name.partition(".")[0] for path in store.glob("quarantine/*")]
    damaged = [path.stem for path in new]
    return Runs(own, runs, died, wrong=set(quarantined) - set(damaged))


@pytest.mark.parametrize(
    ("run", "prompts"), [("1 -> 2", "one"), ("2 -> 2", "two"), ("2 -> 1", "two")]
)
def test_a_number_of_ranks_reads_what_another_number_stored(
    run: str, prompts: str, outcome: Runs
) -> None:
    assert_same(outcome.own[prompts], outcome.runs[run])
    assert [answer.cached for answer in outcome.runs[run]] == [expected_hit(n) for n in LENGTHS]
    assert outcome.runs[run].external == sum(expected_hit(n) for n in LENGTHS)


def test_two_ranks_that_store_say_what_one_says(outcome: Runs) -> None:
    assert_same(outcome.own["two"], outcome.runs["2"])
    assert outcome.runs["2"].external == 0


def test_a_byte_that_one_rank_alone_reads_is_a_miss_for_both(outcome: Runs) -> None:
    damaged = outcome.runs["2 damaged -> 2"]
    assert_same(outcome.own["damaged"], damaged)
    assert damaged.external == 128
    assert damaged.counted("corrupt")


def test_a_rank_that_is_killed_ends_its_engine_and_breaks_no_record(outcome: Runs) -> None:
    assert outcome.died
    assert "TimeoutError" not in outcome.died
    assert_same(outcome.own["killed"], outcome.runs["2 killed -> 1"])
    assert outcome.runs["2 killed -> 1"].external > 0
    assert not outcome.wrong


def test_ranks_that_hold_the_same_head_share_what_one_of_them_moves(
    tmp_path: Path, pool: Pool, make_prompt: MakePrompt
) -> None:
    shape = {"hidden_size": 256, "intermediate_size": 384, "max_position_embeddings": 4096}
    model = make_tiny_model(tmp_path / "model", seed=3, num_key_value_heads=1, **shape)
    prompts = [make_prompt(num_tokens) for num_tokens in LENGTHS]
    store, connector = tmp_path / "store", kvferry(tmp_path / "store")
    alone = Oracle(model, pool.get("second"))
    own = alone(prompts)
    alone.close()
    with pool.get("ranks").engine(model, connector, **TWO_RANKS) as engine:
        assert_same(own, engine.generate(prompts))
        wait_for_records(store, 2 + 3 + 6)
    with pool.get("ranks").engine(model, connector, **TWO_RANKS) as engine:
        warm = engine.generate(prompts)
    assert_same(own, warm)
    assert warm.external == sum(expected_hit(n) for n in LENGTHS)

"""Two pipeline stages, one engine without, and two tensor-parallel ranks read what the others
stored.

An engine with stages takes long to start, so few of them serve all tests here. vLLM keeps two steps
in flight with two stages, and computes prompts in chunks of 256 tokens here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.real_vllm.conftest import Pool
from tests.real_vllm.harness import (
    DEVICE,
    Answer,
    Answers,
    Engine,
    Oracle,
    assert_same,
    expected_hit,
    kvferry,
    memory_of,
    random_prompts,
    records,
    total,
    wait_for_records,
)
from tests.real_vllm.host import RELEASE
from tests.real_vllm.killed import kill_a_rank

pytestmark = pytest.mark.skipif(RELEASE < (0, 24), reason="vLLM tells of one stage only")

LENGTHS = (300, 385, 777)
STAGES: dict[str, Any] = {
    "pipeline_parallel_size": 2,
    "distributed_executor_backend": "mp",
    "max_num_batched_tokens": 256,
    "worker_extension_cls": "cpu_stages.Stages",
}
RANKS = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}
SPLITS: dict[str, dict[str, Any]] = {"stages": STAGES, "one": {}, "ranks": RANKS}
PROCESSES = {"stages": "stages", "one": "second", "ranks": "ranks"}
KILLED = ("first", "last")
PROMPTS = {
    **dict.fromkeys((*SPLITS, "bytes"), LENGTHS),
    "preempted": (250, 251, 253, 254),
    "aborted": 4 * (900,),
    **{f"killed {which}": 4 * (700,) for which in KILLED},
}


@dataclass(frozen=True)
class Runs:
    """What came out.

    Attributes:
        own: by name of the prompts, what one rank says by its own prefix hit.
        runs: by name, or by "writer -> reader".
        died: by which was killed, what the engine said whose stage it was.
        stored: by who wrote them, the bytes of the records of the prompts "bytes".
        wrong: number of records found wrong.
    """

    own: dict[str, list[Answer]]
    runs: dict[str, Answers]
    died: dict[str, str]
    stored: dict[str, dict[str, bytes]]
    wrong: int


@pytest.fixture(scope="module")
def outcome(
    tmp_path_factory: pytest.TempPathFactory, models: dict[str, Path], pool: Pool, oracle: Oracle
) -> Runs:
    prompts = random_prompts(61, PROMPTS)
    many = {"preempted": 40}
    own = {
        name: list(oracle(asked, max_tokens=many.get(name, 4))) for name, asked in prompts.items()
    }
    folder = tmp_path_factory.mktemp("stages")
    model, store, runs = models["plain"], folder / "store", {}
    stored: dict[str, dict[str, bytes]] = {}

    def run(name: str, call: Callable[[Engine], Answers], **options: Any) -> None:
        """Run an engine of the split that is the last word of `name`."""
        split = name.rpartition(" ")[2]
        connector = options.pop("connector", kvferry(store))
        with pool.get(PROCESSES[split]).engine(
            model, connector, **SPLITS[split] | options
        ) as engine:
            runs[name] = call(engine)

    def store_all(engine: Engine, name: str) -> Answers:
        before = len(records(store))
        answers = engine.generate(prompts[name], together=True)
        wait_for_records(store, before + 2 + 3 + 6)
        return answers

    def store_bytes(engine: Engine, name: str, place: Path) -> Answers:
        """Store prompts by the steps that any engine with this batch size would compute."""
        before = records(place)
        answers = engine.generate(prompts["bytes"])
        found = wait_for_records(place, len(before) + 2 + 3 + 6) - before
        stored[name] = {path.name: path.read_bytes() for path in found}
        return answers

    def store_both(engine: Engine) -> Answers:
        store_bytes(engine, "stages", store)
        return store_all(engine, "stages")

    def read_and_store(engine: Engine, name: str) -> Answers:
        found = engine.generate(prompts["stages"])
        store_all(engine, name)
        return found

    run("stages", store_both)
    alone = folder / "alone"
    run(
        "bytes of one",
        lambda engine: store_bytes(engine, "one", alone),
        connector=kvferry(alone),
        max_num_batched_tokens=STAGES["max_num_batched_tokens"],
    )
    run("stages -> one", lambda engine: read_and_store(engine, "one"))
    run("stages -> ranks", lambda engine: read_and_store(engine, "ranks"))

    def read_all(engine: Engine) -> Answers:
        for name in SPLITS:
            runs[f"{name} -> stages"] = engine.generate(prompts[name], together=name == "one")
        runs["killed last"] = engine.generate(prompts["killed last"])
        aborted = [
            {"token_ids": prompt, "abort_after": index}
            for index, prompt in enumerate(prompts["aborted"])
        ]
        engine.generate(aborted, max_tokens=6, together=True)
        runs["aborted"] = engine.generate(prompts["aborted"], together=True)
        runs["usage"] = Answers(answers=[], metrics=engine.metrics())
        assert engine.process.call("reset", 30, connector=True)["done"]
        runs["reset"] = engine.generate(prompts["one"])
        return runs["reset"]

    died, before = {}, len(records(store))
    for rank, which in zip((0, -1), KILLED, strict=True):
        process = pool.get("stages")
        process.start(model, kvferry(store, audit="1.0"), **STAGES)
        if which == "last":
            runs["killed first"] = Engine(process).generate(prompts["killed first"])
            counts = Engine(process).wait_counted(
                lambda found: total(found, "audits_total") > 0, "a hit is compared"
            )
            runs["audits"] = Answers(answers=[], metrics=counts)
            wait_for_records(store, before + 4 * (700 // 128))  # what the kill waits for is its own
        died[which] = kill_a_rank(process, store, prompts[f"killed {which}"], rank)
        pool.discard("stages")
    run("all -> stages", read_all, connector=kvferry(store, memory_bytes=memory_of(store, 20)))

    def preempt(engine: Engine) -> Answers:
        for name in ("preempting", "preempted"):
            runs[name] = engine.generate(prompts["preempted"], max_tokens=40, together=True)
            assert engine.process.call("reset", 30, connector=False)["done"]
        return runs[name]

    small = {"num_gpu_blocks_override": 10, "max_model_len": 512}
    run("small stages", preempt, connector=kvferry(store, save_generated=True), **small)
    wrong = len(list(store.glob("quarantine/*")))
    return Runs(own, runs, died, stored, wrong)


@pytest.mark.parametrize(
    ("writer", "reader"),
    [("stages", "one"), ("stages", "ranks"), *((writer, "stages") for writer in SPLITS)],
)
def test_what_one_split_stored_another_reads(writer: str, reader: str, outcome: Runs) -> None:
    answers = outcome.runs[f"{writer} -> {reader}"]
    assert_same(outcome.own[writer], answers)
    assert [answer.cached for answer in answers] == [expected_hit(n) for n in LENGTHS]
    assert answers.external == sum(expected_hit(n) for n in LENGTHS)


def test_stages_that_store_in_chunks_and_steps_that_overlap_say_what_one_engine_says(
    outcome: Runs,
) -> None:
    assert_same(outcome.own["stages"], outcome.runs["stages"])
    assert outcome.runs["stages"].external == 0


@pytest.mark.skipif("VLLM_CPU_OMP_THREADS_BIND" not in DEVICE.env, reason="bytes of a CPU")
def test_stages_store_the_very_bytes_of_an_engine_without(outcome: Runs) -> None:
    assert len(outcome.stored["one"]) == 2 + 3 + 6
    assert outcome.stored["stages"] == outcome.stored["one"]


def test_aborts_leave_stages_that_serve_and_leak_no_block(outcome: Runs) -> None:
    assert_same(outcome.own["aborted"], outcome.runs["aborted"])
    assert outcome.runs["usage"].metrics["vllm:kv_cache_usage_perc"] == 0


def test_after_a_reset_stages_read_nothing_of_before(outcome: Runs) -> None:
    assert_same(outcome.own["one"], outcome.runs["reset"])
    assert outcome.runs["reset"].external == 0


def test_requests_that_stages_preempt_and_resume_say_the_same(outcome: Runs) -> None:
    for name in ("preempting", "preempted"):
        run = outcome.runs[name]
        assert_same(outcome.own["preempted"], run)
        assert run.metrics["vllm:num_preemptions_total"] > 0
        assert not run.counted("load_failed", "hook_failed")
    assert outcome.runs["preempted"].external >= 4 * 128


@pytest.mark.parametrize("which", KILLED)
def test_a_stage_that_is_killed_ends_its_engine_and_the_next_start_works(
    which: str, outcome: Runs
) -> None:
    assert outcome.died[which]
    assert "TimeoutError" not in outcome.died[which]
    run = outcome.runs[f"killed {which}"]
    assert_same(outcome.own[f"killed {which}"], run)
    # An audited hit may be compared at its first chunk; then nothing is loaded.
    assert which == "first" or run.external > 0
    assert outcome.wrong == 0


def test_stages_compute_what_they_read(outcome: Runs) -> None:
    found = outcome.runs["audits"]
    assert found.counted("audits_total") > 0
    assert not found.counted("audit_mismatch", "audit_failed")

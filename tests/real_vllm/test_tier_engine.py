"""An engine with kvferry as a tier of vLLM's own offloading says what it says without."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.real_vllm import wrong_model
from tests.real_vllm.conftest import MakePrompt, Pool
from tests.real_vllm.harness import (
    EXAMPLES,
    Answers,
    Engine,
    Oracle,
    Process,
    assert_same,
    wait_for_records,
)
from tests.real_vllm.host import serves_tiers
from tests.real_vllm.scripted_tier import SECONDS, TIER
from tests.real_vllm.test_identity import make_adapter
from tests.real_vllm.test_proxy import model_with_tokenizer
from tests.real_vllm.test_ranks import TWO_RANKS

pytestmark = serves_tiers()

Models = dict[str, Path]

LENGTHS = (300, 777)
CHUNKS = sum(length // 128 for length in LENGTHS)
HITS = CHUNKS * 128


def offloading(store: Path, **extra: Any) -> dict[str, Any]:
    """The configuration of vLLM's connector, with our tier behind it."""
    tier = {**TIER, "store": store.as_uri(), "load_timeout_seconds": SECONDS}
    return wrong_model.offloading(tier, **extra)


def assert_counters_agree(answers: Answers, rows: int) -> None:
    """Assert that vLLM counted as many hits of rows as the tier did."""
    assert answers.metrics.get("vllm:kv_offload_tiering_chunk_hits_total", 0) == rows
    assert answers.counted("/hit") == rows
    assert answers.counted("hook_failed", "failed") == 0


def store_all(
    engine: Engine, store: Path, prompts: list[list[int]], make_prompt: MakePrompt, count: int
) -> Answers:
    cold = engine.generate(prompts)
    engine.generate([make_prompt(20)])  # vLLM offloads in the steps that follow
    wait_for_records(store, count)
    return cold


def test_an_engine_says_the_same_with_rows_of_another_process(
    tmp_path: Path, models: Models, make_prompt: MakePrompt, oracle: Oracle,
    first: Process, second: Process,
) -> None:  # fmt: skip
    prompts = [make_prompt(length) for length in LENGTHS]
    own = oracle(prompts)
    with first.engine(models["plain"], offloading(tmp_path)) as engine:
        cold = store_all(engine, tmp_path, prompts, make_prompt, CHUNKS)
    with second.engine(models["plain"], offloading(tmp_path)) as engine:
        warm = engine.generate(prompts)
    assert_same(own, cold)
    assert_same(own, warm)
    assert warm.external == HITS
    assert_counters_agree(warm, CHUNKS)


@pytest.mark.parametrize("canonical", [True, pytest.param(False, marks=pytest.mark.sweep)])
def test_two_ranks_say_the_same_with_rows_of_before(
    *, canonical: bool, tmp_path: Path, models: Models, make_prompt: MakePrompt, oracle: Oracle,
    first: Process, pool: Pool,
) -> None:  # fmt: skip
    prompts = [make_prompt(length) for length in LENGTHS]
    own = oracle(prompts)
    connector = offloading(tmp_path, canonical_layout=canonical)
    with pool.get("ranks").engine(models["plain"], connector, **TWO_RANKS) as engine:
        cold = store_all(engine, tmp_path, prompts, make_prompt, CHUNKS)
    with pool.get("ranks").engine(models["plain"], connector, **TWO_RANKS) as engine:
        warm = engine.generate(prompts)
    assert_same(own, cold)
    assert_same(own, warm)
    assert warm.external == HITS
    assert_counters_agree(warm, CHUNKS)
    with first.engine(models["plain"], connector) as engine:
        alone = engine.generate(prompts)
    assert_same(own, alone)
    # Rows of one layout for any number of ranks, or of two ranks alone.
    assert alone.external == (HITS if canonical else 0)
    assert_counters_agree(alone, CHUNKS if canonical else 0)


def test_the_example_reads_in_a_second_process(tmp_path: Path) -> None:
    model = model_with_tokenizer(tmp_path)
    store = (tmp_path / "store").as_uri()
    out = subprocess.run(
        [sys.executable, str(EXAMPLES / "vllm_tiers.py"), str(model), store],
        env=os.environ | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "TORCHDYNAMO_DISABLE": "1"},
        capture_output=True, text=True, check=True, timeout=280,
    ).stdout  # fmt: skip
    [tokens] = {int(number) for number in re.findall(r"(\d+) prompt tokens", out)}
    read = [int(number) for number in re.findall(r"(\d+) read by the tier", out)]
    assert read == [0, tokens // 128 * 128]


def test_rows_of_requests_under_an_adapter_are_kept_under_a_weights_version_alone(
    tmp_path: Path, models: Models, make_prompt: MakePrompt, first: Process, second: Process,
) -> None:  # fmt: skip
    adapters = [make_adapter(tmp_path / name, seed) for seed, name in enumerate(("a", "b"))]
    place = shutil.copytree(adapters[0], tmp_path / "served")
    tuned = {"name": "tuned", "id": 1, "path": str(place)}
    prompts = [make_prompt(length) for length in LENGTHS]
    requests = [{"token_ids": prompt, "lora": tuned} for prompt in prompts]
    lora = {"enable_lora": True, "max_lora_rank": 8, "max_loras": 2}
    connector = offloading(tmp_path / "store")
    with first.engine(models["plain"], connector, **lora) as engine:
        engine.generate(requests)
        # Rows of the same engine without an adapter are stored as ever.
        store_all(engine, tmp_path / "store", prompts, make_prompt, CHUNKS)
    shutil.copytree(adapters[1], place, dirs_exist_ok=True)
    with second.engine(models["plain"], connector, **lora) as engine:
        assert engine.generate(requests).external == 0
        assert engine.generate(prompts).external == HITS
    connector["kv_connector_extra_config"]["secondary_tiers"][0]["weights_version"] = "b"
    with first.engine(models["plain"], connector, **lora) as engine:
        engine.generate(requests)
        engine.generate([make_prompt(20)])
        wait_for_records(tmp_path / "store", 2 * CHUNKS)
    with second.engine(models["plain"], connector, **lora) as engine:
        assert engine.generate(requests).external == HITS

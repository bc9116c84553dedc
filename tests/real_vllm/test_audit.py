"""Hits are compared with what vLLM computes itself, and honest ones are never suspected."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.real_vllm.conftest import MakePrompt
from tests.real_vllm.harness import (
    Engine,
    Process,
    assert_same,
    kvferry,
    total,
    wait_for_records,
)
from tests.real_vllm.test_models import CHUNKS, SMALL_STEPS, windowed
from tests.real_vllm.test_ranks import TWO_RANKS

__all__ = ["windowed"]

LENGTHS = (130, 257, 300, 513, 777, 1000)
ROUNDS = 4


def audits(engine: Engine, at_least: int) -> tuple[float, float]:
    """Comparisons so far that passed, and those that did not, once there are so many."""
    names = ("audits_total", "audit_mismatch", "audit_failed")
    found = engine.wait_counted(
        lambda found: total(found, *names) >= at_least, f"{at_least} hits are compared"
    )
    return total(found, names[0]), total(found, *names[1:])


@pytest.mark.parametrize(
    ("arch", "dtype", "options"),
    [
        ("plain", "float32", {}),
        ("plain", "bfloat16", SMALL_STEPS),
        ("plain", "float16", {"block_size": 32}),
        ("plain", "bfloat16", TWO_RANKS),
        ("gemma3_text", "bfloat16", {"block_size": 64}),
        ("mistral", "float16", {"block_size": 64}),
        ("gpt_oss", "bfloat16", SMALL_STEPS),
    ],
)
def test_an_honest_engine_is_never_suspected(
    arch: str, dtype: str, options: dict[str, Any], tmp_path: Path, models: dict[str, Path],
    windowed: dict[str, Path], make_prompt: MakePrompt, first: Process, second: Process,
) -> None:  # fmt: skip
    model = models.get(arch) or windowed[arch]
    prompts = [make_prompt(n) for n in LENGTHS]
    with first.engine(model, kvferry(tmp_path, **CHUNKS), dtype=dtype, block_size=64) as engine:
        engine.generate(prompts, together=True)
    stored = wait_for_records(tmp_path, sum(n // 64 for n in LENGTHS))
    connector = kvferry(tmp_path, **CHUNKS, audit=1.0)
    with second.engine(model, connector, dtype=dtype, **options) as engine:
        engine.wait_until_known(stored)
        for _ in range(ROUNDS):
            engine.generate(prompts, max_tokens=2, together=True)
            assert second.call("reset", 30, connector=False)["done"]
        passed, others = audits(engine, ROUNDS * len(LENGTHS) - 2)  # some may come late
    assert others == 0
    assert passed >= ROUNDS * len(LENGTHS) - 2


def test_the_first_hit_is_audited_and_later_ones_are_whole(
    tmp_path: Path, models: dict[str, Path], make_prompt: MakePrompt,
    first: Process, second: Process,
) -> None:  # fmt: skip
    prompts = [make_prompt(400), make_prompt(300)]
    with first.engine(models["plain"], kvferry(tmp_path)) as engine:
        own = engine.generate(prompts)
    stored = wait_for_records(tmp_path, 5)
    with second.engine(models["plain"], kvferry(tmp_path, audit="first")) as engine:
        engine.wait_until_known(stored)
        warm = engine.generate(prompts[:1]).answers
        is_at_end = warm[0].cached == 256  # the last of three chunks is compared
        audits(engine, 1)  # until it ends, others are audited, too
        warm += engine.generate(prompts[1:])
        compared = audits(engine, 1 if is_at_end else 2)
    assert_same(own, warm)
    if is_at_end:
        assert (warm[1].cached, compared) == (256, (1, 0))
    else:  # the first one was, and so the next hit is audited, too
        assert (warm[0].cached, compared) == (0, (2, 0))
        assert warm[1].cached in (0, 128)

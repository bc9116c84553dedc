"""Hits are compared with what vLLM computes itself, and honest ones are never suspected."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.real_vllm.conftest import MakePrompt
from tests.real_vllm.harness import Engine, Process, assert_same, kvferry, wait_for_records
from tests.real_vllm.test_models import CHUNKS, SMALL_STEPS, windowed
from tests.real_vllm.test_ranks import TWO_RANKS

__all__ = ["windowed"]

LENGTHS = (130, 257, 300, 513, 777, 1000)
ROUNDS = 4


def audits(engine: Engine) -> tuple[int, int]:
    """Comparisons so far, and those that did not pass."""
    engine.generate([[7, 8, 9]], max_tokens=2)  # counts travel with steps
    counts = engine.metrics()
    passed, *others = (
        sum(int(n) for name, n in counts.items() if kind in name)
        for kind in ("audits", "audit_mismatch", "audit_failed")
    )
    return passed, sum(others)


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
        passed, others = audits(engine)
    assert others == 0
    assert passed >= ROUNDS * len(LENGTHS) - 2  # the last of each engine may not be reported yet


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
        warm = engine.generate(prompts)
        compared = audits(engine)
    assert_same(own, warm)
    if warm[0].cached:  # the last of three chunks was compared
        assert (warm[0].cached, warm[1].cached, compared) == (256, 256, (1, 0))
    else:  # the first one was, and so the next hit is audited, too
        assert warm[1].cached in (0, 128)
        assert compared == (2, 0)

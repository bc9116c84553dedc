"""A step of a real vLLM that goes wrong: what it computed is not stored."""

from __future__ import annotations

from pathlib import Path

from tests.real_vllm.conftest import MakePrompt
from tests.real_vllm.harness import Process, assert_same, kvferry, wait_for_records

BAD = 2
LARGE = 2.0**120
"""Factor of the norms at which the first MLP overflows, and that can be taken back exactly."""


def test_later_processes_read_all_prompts_but_the_one_that_went_wrong(
    tmp_path: Path, models: dict[str, Path], make_prompt: MakePrompt,
    first: Process, second: Process,
) -> None:  # fmt: skip
    prompts = [make_prompt(n) for n in (300, 280, 400, 270, 260)]
    with first.engine(models["plain"], kvferry(tmp_path)) as engine:
        before = engine.metrics()
        for number, prompt in enumerate(prompts):
            if number == BAD:
                first.call("scale_norms", 60, factor=LARGE)
            engine.generate([prompt])
            if number == BAD:
                first.call("scale_norms", 60, factor=1 / LARGE)
        assert len(wait_for_records(tmp_path, 8)) == 8
        counted = engine.metrics()
    names = [name for name in counted if "save_not_finite" in name and "created" not in name]
    assert sum(counted[name] - before.get(name, 0.0) for name in names) == 3
    with second.engine(models["plain"]) as engine:
        own = engine.generate(prompts)
    with second.engine(models["plain"], kvferry(tmp_path, audit="first")) as engine:
        warm = engine.generate(prompts)
    assert_same(own, warm)
    cached = [answer.cached for answer in warm]
    assert cached.pop(BAD) == 0
    # The first hit of a process is audited: its last chunk is computed. A machine that stalls
    # computes what does not come in time.
    assert {*cached} <= {0, 128, 256}
    assert sum(each > 0 for each in cached) >= 2

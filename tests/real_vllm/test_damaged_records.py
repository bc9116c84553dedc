"""Records that are not what was stored: a miss, seen in a metric, under both load-failure policies.

Each engine gets a copy of one store, and every damage has a prompt of its own.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.real_vllm.conftest import Pool, Stored
from tests.real_vllm.damage import DAMAGES, delete
from tests.real_vllm.harness import assert_same, kvferry, memory_of, records

FAULT_METRICS = (
    "corrupt", "failed", "damaged", "absent", "vanished", "away", "quarantined", "broken",
)  # fmt: skip


def damage_all(stored: Stored, store: Path) -> None:
    for damage, files in zip(DAMAGES, stored.files, strict=False):
        damage([store / file for file in files])


@pytest.mark.parametrize(
    ("policy", "when"),
    [("fail", "before_opening"), ("fail", "while_serving"), ("recompute", "while_serving")],
)
def test_a_damaged_record_is_a_miss_that_is_counted(
    policy: str, when: str, tmp_path: Path, models: dict[str, Path], pool: Pool, stored: Stored
) -> None:
    store = stored.copy_to(tmp_path / "store")
    sound = stored.prompts[-1]
    connector = kvferry(store, policy, memory_bytes=memory_of(store, 3))
    if when == "before_opening":
        damage_all(stored, store)
    with pool.get("second").engine(models["plain"], connector) as engine:
        # Everything is known to be there once this one is found, and it fills the memory.
        [own], warm = stored.own[-1:], engine.generate([sound])
        assert_same([own], warm)
        assert warm.external == 3 * 128
        if when == "while_serving":
            damage_all(stored, store)
        for damage, prompt, own in zip(DAMAGES, stored.prompts, stored.own, strict=False):
            answers = engine.generate([prompt])
            assert_same([own], answers)
            assert answers.external <= 128, f"{damage.__name__}: damaged chunks were served"
            # A record that is gone is one that is not there: what it costs is seen as saved anew.
            names = ("saved_bytes",) if damage is delete else FAULT_METRICS
            assert answers.counted(*names), f"{damage.__name__} in no metric: {answers.metrics}"


def test_a_damaged_record_is_stored_again_and_read_again(
    tmp_path: Path, models: dict[str, Path], pool: Pool, stored: Stored
) -> None:
    store = stored.copy_to(tmp_path / "store")
    damage_all(stored, store)
    process = pool.get("first")
    with process.engine(models["plain"], kvferry(store)) as engine:
        assert_same(stored.own, engine.generate(stored.prompts))
        # Damage that was found too late to be stored anew at once is gone by now.
        process.call("reset", 30, connector=False)
        assert_same(stored.own, engine.generate(stored.prompts))
    with pool.get("second").engine(models["plain"], kvferry(store)) as engine:
        answers = engine.generate(stored.prompts)
    assert_same(stored.own, answers)
    for damage, answer in zip(DAMAGES, answers, strict=False):
        assert answer.cached == 3 * 128, f"{damage.__name__} was not healed"
    assert len(records(store)) == 3 * len(stored.prompts)

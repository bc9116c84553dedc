"""What changes a model's KV without changing its files: options, code, weights changed in place."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.real_vllm.conftest import MakePrompt, Pool
from tests.real_vllm.harness import (
    DRIVER,
    Process,
    assert_same,
    kvferry,
    records,
    total,
    wait_for_records,
)
from tests.real_vllm.host import does

Models = dict[str, Path]

OTHER_OPTIONS = {
    "rope": {
        "hf_overrides": {
            "rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}
        }
    },
    "class": {"model_class_overrides": {"LlamaForCausalLM": "scaled_model:ScaledLlama"}},
    "transformers": {"model_impl": "transformers"},
}
"""By what they change. The first two change KV by much, the last by rounding in this model."""


@pytest.mark.parametrize(
    "changed",
    [
        "rope",
        pytest.param("class", marks=does("takes a class by option", since=(0, 28))),
        "transformers",
    ],
)
def test_a_model_run_in_another_way_reads_nothing_that_was_stored_before(
    changed: str, tmp_path: Path, models: Models, make_prompt: MakePrompt, pool: Pool
) -> None:
    prompts = [make_prompt(n) for n in (400, 300)]
    options: dict[str, Any] = OTHER_OPTIONS[changed]
    with pool.get("first").engine(models["plain"], kvferry(tmp_path)) as engine:
        before = engine.generate(prompts)
    stored = wait_for_records(tmp_path, 5)
    # A process keeps the classes that it was given. vLLM looks at them in a process of its own.
    process = pool.get(changed, PYTHONPATH=os.pathsep.join([str(DRIVER.parent), *sys.path]))
    with process.engine(models["plain"], **options) as engine:
        own = engine.generate(prompts)
    with process.engine(models["plain"], kvferry(tmp_path), **options) as engine:
        cold = engine.generate(prompts)
    assert len(wait_for_records(tmp_path, 10) - stored) == 5
    with process.engine(models["plain"], kvferry(tmp_path), **options) as engine:
        warm = engine.generate(prompts)
    pool.discard(changed)
    if changed != "transformers":
        with pytest.raises(AssertionError):
            assert_same(before, own)
    assert cold.external == 0
    assert_same(own, cold)
    assert warm.external == 384 + 256
    assert_same(own, warm)


def change_weights(process: Process, change: str, models: Models) -> None:
    """Change the weights of the running engine in place, without a reset."""
    if change == "apply_model":
        process.call("scale_norms", 60, factor=1.5)
    else:
        process.call("call_workers", 60, method=change, weights_path=str(models["other"]))


@pytest.mark.parametrize(
    "change",
    [
        "apply_model",
        pytest.param("reload_weights", marks=does("reloads other files", since=(0, 28))),
    ],
)
def test_after_weights_changed_in_place_a_reset_keeps_the_old_kv_from_the_new_model(
    change: str, tmp_path: Path, models: Models, make_prompt: MakePrompt,
    first: Process, second: Process,
) -> None:  # fmt: skip
    prompts = [make_prompt(n) for n in (400, 300)]
    with second.engine(models["plain"]) as engine:
        before = engine.generate(prompts)
        change_weights(second, change, models)
        assert second.call("reset", 30, connector=False)["done"]
        own = engine.generate(prompts)
    with pytest.raises(AssertionError):
        assert_same(before, own)
    with first.engine(models["plain"], kvferry(tmp_path)) as engine:
        assert_same(before, engine.generate(prompts))
        engine.wait_until_known(wait_for_records(tmp_path, 5))  # or the miss would say nothing
        change_weights(first, change, models)
        assert first.call("reset", 30, connector=True)["done"]
        after = engine.generate(prompts)
        assert (after.local, after.external) == (0, 0)
        assert_same(own, after)
        engine.wait_until_known(wait_for_records(tmp_path, 10))
        assert first.call("reset", 30, connector=False)["done"]
        again = engine.generate(prompts)
        assert (again.local, again.external) == (0, 384 + 256)
        assert_same(own, again)
    # Another engine with the weights of the files reads what they computed, and that alone.
    with second.engine(models["plain"], kvferry(tmp_path)) as engine:
        others = engine.generate(prompts)
    assert others.external == 384 + 256
    assert_same(before, others)


@does("resets the connector when it goes to sleep", since=(0, 28))
@pytest.mark.parametrize(
    ("level", "weights"),
    [(1, "have no name"), (1, "have their old name"), (2, "have another name")],
)
def test_an_engine_that_slept_reads_what_it_stored_if_a_file_names_the_same_weights(
    level: int, weights: str, tmp_path: Path, models: Models, make_prompt: MakePrompt,
    first: Process, second: Process,
) -> None:  # fmt: skip
    """On a CPU weights and memory stay where they are: what is tested is that vLLM resets, and that
    the connector takes the tensors again."""
    prompt, name, store = make_prompt(400), tmp_path / "name", tmp_path / "store"
    name.write_text("step 1")
    named = {} if weights == "have no name" else {"weights_version_file": str(name)}
    with first.engine(models["plain"], kvferry(store, **named)) as engine:
        before = engine.generate([prompt])
        stored = wait_for_records(store, 3)
        engine.wait_until_known(stored)
        first.call("sleep", 60, level=level)
        if weights == "have another name":
            change_weights(first, "apply_model", models)
            name.write_text("step 2")
        after = engine.generate([prompt])
        is_read = weights == "have their old name"
        assert (after.local, after.external) == (0, 384 if is_read else 0)
        if weights == "have another name":
            with pytest.raises(AssertionError):
                assert_same(before, after)
        else:
            assert_same(before, after)
        if is_read:
            assert records(store) == stored
        else:
            engine.wait_until_known(wait_for_records(store, 6))
            assert first.call("reset", 30, connector=False)["done"]
            again = engine.generate([prompt])
            assert (again.local, again.external) == (0, 384)
            assert_same(after, again)
    # Another engine with the weights of the files reads what they computed, and that alone.
    with second.engine(models["plain"], kvferry(store)) as engine:
        others = engine.generate([prompt])
    assert others.external == 384
    assert_same(before, others)


def test_weights_changed_in_place_without_a_reset_are_noticed_at_the_first_hit(
    tmp_path: Path, models: Models, make_prompt: MakePrompt, first: Process, second: Process
) -> None:
    prompts = [make_prompt(n) for n in (400, 300)]
    with first.engine(models["plain"], kvferry(tmp_path)) as engine:
        engine.generate(prompts)
    stored = wait_for_records(tmp_path, 5)
    with second.engine(models["plain"]) as engine:
        change_weights(second, "apply_model", models)
        own = engine.generate(prompts)
    with first.engine(models["plain"], kvferry(tmp_path, audit="first")) as engine:
        change_weights(first, "apply_model", models)
        engine.wait_until_known(stored)
        engine.generate(prompts[:1])
        engine.wait_counted(
            lambda found: total(found, "audit_mismatch") > 0, "the audit of the first hit"
        )
        later = engine.generate(prompts[1:])
        new = engine.generate([make_prompt(300)])
    assert later.external == 0
    assert_same(own[1:], later)
    assert new.external == 0
    # The record that differs is taken out, and nothing is stored.
    assert records(tmp_path) < stored
    assert len(stored - records(tmp_path)) == 1

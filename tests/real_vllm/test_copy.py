"""What vLLM stored, in another store."""

from __future__ import annotations

import json
from pathlib import Path

from kvferry.cli.main import main
from tests.real_vllm.conftest import MakePrompt
from tests.real_vllm.harness import Oracle, Process, assert_same, kvferry, wait_for_records

Models = dict[str, Path]


def test_an_engine_hits_what_was_copied_from_another_ones_store(
    tmp_path: Path, models: Models, make_prompt: MakePrompt, oracle: Oracle,
    first: Process, second: Process,
) -> None:  # fmt: skip
    prompt = make_prompt(400)
    here, there = tmp_path / "here", tmp_path / "there"
    with first.engine(models["plain"], kvferry(here)) as engine:
        engine.generate([prompt, make_prompt(300)])
    wait_for_records(here, 3 + 2)
    tokens = tmp_path / "tokens"
    tokens.write_text(json.dumps(prompt))
    chosen = ["--model", str(models["plain"]), "--tokens", str(tokens)]
    assert main(["copy", here.as_uri(), there.as_uri(), *chosen]) == 0
    with second.engine(models["plain"], kvferry(there)) as engine:
        warm = engine.generate([prompt])
    assert warm.external == 384
    assert_same(oracle([prompt]), warm)

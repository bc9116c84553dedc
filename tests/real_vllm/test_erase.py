"""`kvferry rm --salt` while engines run: all of one person, wherever it was named."""

from __future__ import annotations

import contextlib
import io
import json
from pathlib import Path
from typing import Any

from kvferry.cli.main import main
from kvferry.testing.stores.hooks import wait_until
from tests.real_vllm.conftest import MakePrompt
from tests.real_vllm.harness import Engine, Process, kvferry, records, wait_for_records
from tests.real_vllm.test_request_options import ask

CHUNKS = 2
"""Of a prompt of 300 tokens."""


def run(*command: str) -> tuple[int, str]:
    with contextlib.redirect_stdout(io.StringIO()) as out:
        code = main(list(command))
    return code, out.getvalue()


def hit(engine: Engine, prompt: list[int], salt: str) -> int:
    """Tokens that the connector brings for a prompt that the engine itself forgot. Stores
    nothing."""
    assert engine.process.call("reset", 60, connector=False)["done"]
    return engine.generate([{**ask(prompt, store=False), "salt": salt}], max_tokens=1).external


def test_nothing_of_one_salt_is_served_any_more_by_engines_that_run_and_another_keeps_its_hits(
    tmp_path: Path, models: dict[str, Path], make_prompt: MakePrompt,
    first: Process, second: Process,
) -> None:  # fmt: skip
    """Two tiers, a copy, a pinned prompt, an engine that stored it and one that read it."""
    near, far, copied = (tmp_path / name for name in ("near", "far", "copied"))
    named = [each.as_uri() for each in (near, far, copied)]
    quota = f"{near.as_uri()}?max_bytes=1GiB"
    prompt, alice, bob = make_prompt(300), "alice@example.org", "bob@example.org"
    connector = kvferry([quota, far.as_uri()])
    with (
        first.engine(models["plain"], connector) as writer,
        second.engine(models["plain"], connector) as reader,
    ):
        writer.generate([{"token_ids": prompt, "salt": salt} for salt in (alice, bob)])
        for store in (near, far):
            reader.wait_until_known(wait_for_records(store, 2 * CHUNKS))
        whole = hit(reader, prompt, bob)
        assert whole > 0
        assert [hit(each, prompt, alice) for each in (writer, reader)] == [whole, whole]
        (ids := tmp_path / "ids").write_text(json.dumps(prompt))
        [space] = [path.stem for path in (near / "namespaces").iterdir()]
        pinned = ["pin", quota, "--namespace", space, "--tokens", str(ids), "--salt", alice]
        assert run(*pinned, "--until", "1h")[0] == 0
        assert run("copy", named[0], named[2])[0] == 0
        code, said = run("rm", *named, "--salt", alice, "--yes", "--json", "-")
        report: dict[str, Any] = json.loads(said)
        assert code == 0
        # Whoever was first: the engines take back what they wrote.
        assert [row["records"] for row in report["stores"]] == [CHUNKS] * 3
        assert [row["left"] for row in report["stores"]] == [None] * 3
        for name, engine in (("writer", writer), ("reader", reader)):
            wait_until(
                lambda engine=engine: hit(engine, prompt, alice) == 0,
                f"the {name} heeds the notice", 60,
            )  # fmt: skip
            assert hit(engine, prompt, bob) == whole
        # Far tiers bring nothing back.
        assert [len(records(store)) for store in (near, far, copied)] == [CHUNKS] * 3
        for engine in (writer, reader):
            assert engine.metrics()["vllm:kvferry_hook_failed_total"] == 0
            assert hit(engine, prompt, alice) == 0
    held = [each for each in tmp_path.rglob("*") if each.is_file()]
    assert not [each for each in held if alice.encode() in each.read_bytes()]

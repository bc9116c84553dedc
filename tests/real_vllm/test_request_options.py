"""Options of single requests, and `kvferry explain` on the store and journal of real engines: the
most common reasons of misses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kvferry.store.url import open_one
from tests.real_vllm.conftest import Explain, MakePrompt
from tests.real_vllm.harness import (
    Engine,
    Process,
    expected_hit,
    kvferry,
    memory_of,
    records,
    wait_for_records,
)
from tests.servers.process import LOCALHOST, free_ports


def ask(prompt: list[int], **options: Any) -> dict[str, Any]:
    """A request as HTTP brings it."""
    params = {"kv_transfer_params": {"kvferry": options}}
    return {"token_ids": prompt, "sampling": {"extra_args": params}}


def explained(engine: Engine, prompt: list[int], **options: Any) -> dict[str, Any]:
    """What the answer to a prompt says of it."""
    [answer] = engine.generate([ask(prompt, explain=True, **options)])
    assert answer.reason == "length"
    said: dict[str, Any] = answer.params["kvferry"]
    return said


def store_prompt(engine: Engine, store: Path, prompt: list[int], **options: Any) -> set[Path]:
    """Run a prompt; the files of its chunks."""
    # vLLM before 0.24 learns in its next step only that the writes before have left their memory.
    engine.generate([prompt[40:0:-1]], max_tokens=1)
    before = records(store)
    engine.generate([ask(prompt, **options)], max_tokens=1)
    return wait_for_records(store, len(before) + len(prompt) // 128) - before


def forget(engine: Engine, make_prompt: MakePrompt) -> None:
    """Have the engine's memory filled by other prompts, and its prefix cache emptied."""
    for _ in range(3):
        engine.generate([make_prompt(300)], max_tokens=1)
    assert engine.process.call("reset", 60, connector=False)["done"]


def test_the_most_common_reasons_are_named_and_requests_have_options_of_their_own(
    tmp_path: Path, models: dict[str, Path], make_prompt: MakePrompt, explain: Explain,
    first: Process, second: Process,
) -> None:  # fmt: skip
    store, journal = tmp_path / "store", tmp_path / "journal.jsonl"
    [port] = free_ports(1)
    away = f"valkey://{LOCALHOST}:{port}/kv"
    foreign, damaged, kept, evicted, private, never = (make_prompt(300) for _ in range(6))
    with second.engine(models["plain"], kvferry([f"file://{store}", away], tenant="b")) as engine:
        said = explained(engine, foreign)
        assert said["miss_tokens"] == {"away": 256, "partial": 44}
        assert "valkey server" in said["why"]
        wait_for_records(store, 2)
    [other] = [path.stem for path in (store / "namespaces").iterdir()]
    url = f"file://{store}?max_bytes={memory_of(store, 30)}B"
    options = {"memory_bytes": memory_of(store, 4), "record": str(journal)}
    with first.engine(models["plain"], kvferry(url, **options)) as engine:
        # Never stored, shorter than a chunk, and the last token.
        said = explained(engine, private, store=False)
        assert said["miss_reason"] == "absent"
        assert said["not_stored"] == {"not_storing": 256, "partial": 44}
        assert explained(engine, private[:100])["miss_tokens"] == {"partial": 100}
        files_damaged = store_prompt(engine, store, damaged)
        store_prompt(engine, store, kept, pin=3600)
        files_evicted = store_prompt(engine, store, evicted)
        [space] = [path.stem for path in (store / "namespaces").iterdir() if path.stem != other]
        mine = ["--namespace", space]
        said = explain([url], never, *mine)
        assert (said["hit_tokens"], said["reason"]) == (0, "absent")
        assert explain([url], private, *mine)["reason"] == "absent"
        said = explain([url], damaged[:257], *mine)
        assert (said["hit_tokens"], said["reason"]) == (256, "partial")
        # Whole chunks, of which an engine computes the last block.
        forget(engine, make_prompt)
        hit = explained(engine, damaged[:256])["hit_tokens"]
        block = str(256 - hit)
        assert explain([url], damaged[:256], *mine, "--block-size", block)["hit_tokens"] == hit
        said = explain([url], never[:100], *mine)
        assert "shorter than a chunk of 128 tokens" in said["summary"]
        # Another namespace, and a tier that is away.
        said = explain([url], foreign, *mine)
        assert said["reason"] == "other_namespace"
        assert list(said["elsewhere"]["differs"]) == ["tenant"]
        said = explain([url, away], never, *mine)
        assert said["reason"] == "away"
        # Options.
        forget(engine, make_prompt)
        assert explained(engine, evicted, load=False)["miss_reason"] == "not_loading"
        assert engine.process.call("reset", 60, connector=False)["done"]
        said = explained(engine, evicted, max_load_tokens=200)
        assert (said["hit_tokens"], said["miss_reason"]) == (128, "not_loading")
        assert said["by_tier"] in ({"file": 128}, {"memory": 128})
        refused: list[Any] = [{"lode": False}, {"pin": "long"}, {"store": 0}, [1]]
        answers = engine.generate(
            [{**ask(never[:40]), "sampling": {"extra_args": {"kvferry": each}}} for each in refused]
        )
        assert [each.reason for each in answers] == ["length"] * len(refused)
        assert [each.params for each in answers] == [None] * len(refused)
        # Damaged on its medium: quarantined by the load that meets it.
        forget(engine, make_prompt)
        for path in files_damaged:
            content = bytearray(path.read_bytes())
            content[-1] ^= 1
            path.write_bytes(content)
        assert explained(engine, damaged, store=False)["miss_reason"] == "damaged"
        said = explain([url], damaged, *mine)
        assert said["reason"] == "damaged"
        # Evicted, but for what was pinned.
        for _ in range(60):  # two chunks each, unless the memory is busy
            if not any(path.exists() for path in files_evicted):
                break
            engine.generate([make_prompt(300)], max_tokens=1)
        assert explain([url], evicted, *mine)["reason"] == "evicted"
        assert explain([url], kept, *mine)["hit_tokens"] == expected_hit(300)
        counts = engine.metrics()
        assert counts["vllm:kvferry_hook_failed_total"] == 0
        assert counts["vllm:kvferry_pins_refused_total"] == 0
    log = first.log.read_text(errors="replace")
    for name in ("'lode'; did you mean 'load'?", "`$.pin`", "`$.store`", "kvferry is a list"):
        assert log.count(name) == 1, name
    with open_one(url) as opened:
        assert opened.wait_indexed(60)
        assert sum(entry.pinned_until > 0 for entry in opened.catalogue().scan()) == 2
    requests = explain([], None, "--journal", str(journal), "-n", "100")["requests"]
    reasons = {reason for each in requests for reason in each["misses"]}
    assert {"absent", "partial", "not_loading", "damaged"} <= reasons

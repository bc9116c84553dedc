"""What an operator sees: Prometheus metrics and KV events."""

from __future__ import annotations

import socket
from pathlib import Path

from kvferry.testing.stores.hooks import wait_until
from tests.real_vllm.conftest import MakePrompt
from tests.real_vllm.harness import Process, kvferry, wait_for_records

Models = dict[str, Path]


def test_metrics_say_what_was_stored_hit_and_missed(
    tmp_path: Path, models: Models, make_prompt: MakePrompt, first: Process, second: Process
) -> None:
    prompts = [make_prompt(n) for n in (300, 100)]
    with first.engine(models["plain"], kvferry(tmp_path)) as engine:
        cold = engine.generate(prompts)
        size = sum(path.stat().st_size for path in wait_for_records(tmp_path, 2))
        counts = engine.wait_counted(
            lambda found: found["vllm:kvferry_saved_bytes_total"] >= size, f"{size} bytes"
        )
    assert counts["vllm:kvferry_saved_bytes_total"] == size
    assert cold.counted("requests_missed_total") == 2
    assert counts["vllm:kvferry_hits_total"] == 0
    with second.engine(models["plain"], kvferry(tmp_path)) as engine:
        engine.generate(prompts)
        counts = engine.metrics()
    assert counts["vllm:kvferry_hits_total"] == 1
    assert counts['vllm:kvferry_hit_tokens_total{"tier": "file"}'] == 256
    assert counts["vllm:kvferry_loaded_tokens_total"] == 256
    assert counts["vllm:kvferry_requests_missed_total"] == 1
    assert counts["vllm:external_prefix_cache_hits_total"] == 256
    for name in ("hook_failed", "load_failed_chunks", "records_corrupt", "save_failed"):
        assert counts[f"vllm:kvferry_{name}_total"] == 0


def test_stored_and_removed_chunks_are_published_with_their_tier(
    tmp_path: Path, models: Models, make_prompt: MakePrompt, second: Process
) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        endpoint = f"tcp://*:{probe.getsockname()[1]}"
    small = f"file://{tmp_path / 'store'}?max_bytes=3MiB"  # five chunks
    with second.engine(models["plain"], kvferry(small), kv_events_endpoint=endpoint) as engine:
        stored, removed = [], []

        def are_seen() -> bool:
            engine.generate([make_prompt(400)])
            for event in second.call("take_events", 60)["events"]:
                if event["medium"] == "STORAGE":
                    (stored if event["type"] == "BlockStored" else removed).append(event)
            counts = [sum(each["num_blocks"] for each in some) for some in (stored, removed)]
            return counts[0] >= 12 and counts[1] >= 3

        wait_until(are_seen, "12 stored chunks, and 3 that were removed", 120.0)
    assert {event["block_size"] for event in stored} == {128}
    assert all(event["num_tokens"] == 128 * event["num_blocks"] for event in stored)
    assert {event["type"] for event in removed} == {"BlockRemoved"}

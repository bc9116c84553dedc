"""Engines one of whose ranks is killed at work."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from tests.real_vllm.harness import Engine, EngineError, Process, records, wait_for_records


def kill_a_rank(process: Process, store: Path, prompts: Sequence[list[int]], rank: int) -> str:
    """Kill a rank of the engine that a process runs while it stores prompts. Return what became of
    the engine; nothing if it went on."""
    before = len(records(store))
    engine = Engine(process)
    engine.send(prompts, together=True, max_tokens=300)  # at work for some seconds
    wait_for_records(store, before + 8)
    os.kill(ranks_of(process.pid)[rank], signal.SIGKILL)
    try:
        engine.receive()
    except EngineError as error:
        return str(error)
    return ""


def ranks_of(pid: int) -> list[int]:
    """Return the worker processes of an engine, in the order in which it started them."""
    found = []
    for listed in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(OSError):  # a thread that has just ended
            for child in listed.read_text().split():
                is_rank = "Worker" in Path(f"/proc/{child}/comm").read_text()
                found += [int(child)] if is_rank else ranks_of(int(child))
    return sorted(found)

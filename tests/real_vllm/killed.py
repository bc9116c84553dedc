"""Engines one of whose ranks is killed at work."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from tests.real_vllm.harness import Engine, EngineError, Process, kvferry, records, wait_for_records


def kill_a_rank(
    process: Process,
    model: Path,
    store: Path,
    prompts: Sequence[list[int]],
    rank: int,
    **ranks: Any,
) -> str:
    """Start an engine, and kill a rank while it stores. Return what became of the engine; nothing
    if it went on.

    Args:
        ranks: options of the engine that give it several.
    """
    before = len(records(store))
    engine = Engine(process)
    process.start(model, kvferry(store), **ranks)
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

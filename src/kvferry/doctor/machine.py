"""Checks of the machine: the software on it, and its memory."""

from __future__ import annotations

import platform
import sqlite3
from functools import cache
from importlib.metadata import PackageNotFoundError, packages_distributions, version

from kvferry.cache.config import default_memory_bytes
from kvferry.cache.memory import slot_size
from kvferry.config import format_size
from kvferry.doctor.findings import Finding, Problem
from kvferry.doctor.stores import Model
from kvferry.keys import JsonValue

MODULES = ("kvferry", "torch", "transformers", "vllm", "obstore", "mooncake", "triton")

_distributions = cache(packages_distributions)


def software() -> dict[str, JsonValue]:
    """Return versions by name."""
    found: dict[str, JsonValue] = {
        "python": platform.python_version(),
        "sqlite": sqlite3.sqlite_version,
    }
    for name in MODULES:
        try:
            # vLLM for CPUs, for example, is a package of another name.
            found[name] = version(_distributions().get(name, [name])[0])
        except PackageNotFoundError:
            found[name] = "not installed"
    return found


def check_checksums(is_compiled: bool) -> list[Finding]:
    """Check that hashing was compiled: without a compiler the installation says so in a line that
    pip hides."""
    return [] if is_compiled else [Problem.IN_PYTHON.at("machine")]


def check_pool(
    here: int, given: int | None, model: Model | None, step_tokens: int
) -> list[Finding]:
    """Check that the host pool fits into memory and holds two records. It should also hold what two
    steps of the engine compute: one is written to the stores while the next is copied.

    Args:
        here: bytes of memory of this machine or container.
        given: size of the pool; None: the default.
        step_tokens: most tokens of a step; 0 if not known.
    """
    token_bytes, record_bytes = (model.token_bytes, model.record_bytes) if model else (0, 0)
    pool = default_memory_bytes(token_bytes, step_tokens, here) if given is None else given
    steps, records = 2 * step_tokens * token_bytes, 2 * slot_size(record_bytes)
    if pool > here // 2:
        problem = Problem.POOL_ABOVE_MEMORY
    elif pool < records:
        problem = Problem.POOL_BELOW_RECORDS
    elif pool < steps:
        problem = Problem.POOL_BELOW_STEPS
    else:
        return []
    sizes = {"pool": pool, "here": here, "needed": max(steps, records)}
    texts = {name: format_size(size) for name, size in sizes.items()}
    return [problem.at("machine", **texts, step=f"{step_tokens:,}")]

"""The type of a finding, and the checks of the machine: software and memory."""

from __future__ import annotations

import platform
import sqlite3
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import NamedTuple

from kvferry.cache.config import default_memory_bytes
from kvferry.config import format_size

PACKAGES = (
    "kvferry", "torch", "transformers", "vllm", "obstore", "mooncake-transfer-engine", "triton"
)  # fmt: skip


class Finding(NamedTuple):
    """Something that is wrong.

    Attributes:
        where: a store, "vllm", "config" or "machine".
        what: what is wrong. May quote text from outside.
        todo: what to do about it.
    """

    where: str
    what: str
    todo: str


def software() -> dict[str, str | None]:
    """Return versions by package name; None for a package that is not installed."""
    found: dict[str, str | None] = {
        "python": platform.python_version(),
        "sqlite": sqlite3.sqlite_version,
    }
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = None
    return found


def memory_limit(root: Path = Path("/")) -> int | None:
    """Return the bytes of memory that this process's container may use; None without a limit.
    Reads control groups of both versions.

    Args:
        root: directory that holds proc and sys.
    """
    limits = []
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controllers and "memory" not in controllers.split(","):
            continue
        base = root / ("sys/fs/cgroup/memory" if controllers else "sys/fs/cgroup")
        file = "memory.limit_in_bytes" if controllers else "memory.max"
        place = base / path.lstrip("/")
        # The limits of all enclosing groups count. In a container, the own group may be the root.
        while True:
            text = _read(place / file).strip()
            # Version 1 writes a number near 2^63 if there is no limit.
            if text.isdigit() and int(text) < 1 << 60:
                limits.append(int(text))
            if place == base or base not in place.parents:
                break
            place = place.parent
    return min(limits, default=None)


def check_memory(limit: int, memory_bytes: int) -> list[Finding]:
    """Check that the host pool fits into the container, or into the machine."""
    if memory_bytes <= limit // 2:
        return []
    return [
        Finding(
            "machine",
            f"the host pool ({format_size(memory_bytes)}) takes more than half of the memory "
            f"here ({format_size(limit)}): the kernel may kill the engine",
            "lower memory_bytes, or give the machine or container more memory",
        )
    ]


def check_steps(limit: int, memory_bytes: int, token_bytes: int, step_tokens: int) -> list[Finding]:
    """Check that the host pool holds what two steps of the engine compute: one is written to the
    stores while the next is copied."""
    default = default_memory_bytes(token_bytes, step_tokens, limit)
    needed, has = 2 * step_tokens * token_bytes, memory_bytes or default
    if has >= needed:
        return []
    todo = f"set memory_bytes to at least {format_size(max(needed, default))}"
    if needed > limit // 2:
        todo = "lower max_num_batched_tokens, or give the machine or container more memory"
    return [
        Finding(
            "machine",
            f"the host pool ({format_size(has)}) is smaller than the KV of two steps of "
            f"{step_tokens:,} tokens ({format_size(needed)}), so chunks are not stored",
            todo,
        )
    ]


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""

"""What a benchmark's figures were measured on, and the table they are printed as.

No host, user or path names: a result can be published as it is.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

from rich.table import Table

from kvferry.bench import Row
from kvferry.store.filesystem import file_system

MachineFacts = Mapping[str, str | int | float | None]


def machine(directory: Path) -> MachineFacts:
    """Facts about this machine that decide speed.

    Args:
        directory: where the benchmark writes; its file system is named.
    """
    return {
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0))
        if hasattr(os, "sched_getaffinity")
        else os.cpu_count(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "kernel": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "torch": version("torch"),
        "kvferry": version("kvferry"),
        "file_system": file_system(directory),
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
    }


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:  # not Linux
        return platform.processor() or platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def table(name: str, facts: MachineFacts, rows: Sequence[Row]) -> Table:
    """The rows as a table; below it the machine, and what rows have as `note`."""
    columns = list(dict.fromkeys(column for row in rows for column in row if column != "note"))
    notes = dict.fromkeys(f"{row.get('case')}: {row['note']}" for row in rows if row.get("note"))
    result = Table(
        title=name,
        title_justify="left",
        caption="\n".join([_caption(facts), *notes]),
        caption_justify="left",
    )
    for column in columns:
        is_number = any(isinstance(row.get(column), int | float) for row in rows)
        result.add_column(column, justify="right" if is_number else "left", no_wrap=True)
    for row in rows:
        result.add_row(*(_cell(row.get(column)) for column in columns))
    return result


def _caption(facts: MachineFacts) -> str:
    shown = {**facts, "cores": f"{facts['cores']} cores", "torch": f"torch {facts['torch']}"}
    if isinstance(memory := facts["memory_bytes"], int):
        shown["memory_bytes"] = f"{memory / 2**30:.0f} GiB"
    hidden = ("python", "kvferry")
    return ", ".join(str(fact) for name, fact in shown.items() if fact and name not in hidden)


def _cell(value: str | float | None) -> str:
    if value is None:
        return ""
    if isinstance(value, float):
        # Four digits are more than a benchmark can vouch for, and none is lost in the JSON.
        return f"{value:.4g}" if abs(value) < 1e4 else f"{value:.0f}"
    return str(value)

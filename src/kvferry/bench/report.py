"""The machine that a benchmark ran on, and the table of its figures.

No host, user or path names: a result can be published as it is.
"""

from __future__ import annotations

import itertools
import os
import platform
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

from rich.console import Group, JustifyMethod
from rich.table import Table
from rich.text import Text

from kvferry.bench import Row
from kvferry.filesystem import file_system

_MAX_WIDTH = 80
_MAX_TEXT = 18
_GAP = 2


def machine(directory: Path) -> Row:
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


def table(name: str, facts: Row, rows: Sequence[Row]) -> Group:
    """The rows as a table; below it the machine, and every `note` of a row.

    Columns beyond 80 characters stand in further tables, which repeat the leading columns of text.
    """
    columns = list(dict.fromkeys(column for row in rows for column in row if column != "note"))
    cells = {column: [_cell(row.get(column)) for row in rows] for column in columns}
    numbers = {
        column
        for column in columns
        if any(isinstance(row.get(column), int | float) for row in rows)
    }
    # The least width that cuts no word of a name and no number; a long text wraps.
    widths = {
        column: max(*map(len, column.split("_")), min(_MAX_TEXT, max(map(len, cells[column]))))
        for column in columns
    }
    leading = list(itertools.takewhile(lambda column: column not in numbers, columns))
    leading = leading or columns[:1]
    parts = [list(leading)]
    for column in columns[len(leading) :]:
        if sum(widths[each] + _GAP for each in [*parts[-1], column]) > _MAX_WIDTH:
            parts.append(list(leading))
        parts[-1].append(column)
    shown: list[Text | Table] = [Text(name)]
    for part in parts:
        drawn = Table(box=None, padding=(0, _GAP, 0, 0))
        for column in part:
            side: JustifyMethod = "right" if column in numbers else "left"
            heading = column.replace("_", " ")
            drawn.add_column(heading, justify=side, width=widths[column], overflow="fold")
        for row in zip(*(cells[column] for column in part), strict=True):
            drawn.add_row(*map(Text, row))
        shown += [drawn, Text("")]
    notes = dict.fromkeys(f"{row.get('case')}: {row['note']}" for row in rows if row.get("note"))
    return Group(*shown, Text("\n".join([_caption(facts), *notes])))


def _caption(facts: Row) -> str:
    shown = {**facts, "cores": f"{facts['cores']} cores", "torch": f"torch {facts['torch']}"}
    if isinstance(memory := facts["memory_bytes"], int):
        shown["memory_bytes"] = f"{memory / 2**30:.0f} GiB"
    hidden = ("python", "kvferry")
    return ", ".join(str(fact) for name, fact in shown.items() if fact and name not in hidden)


def _cell(value: str | float | None) -> str:
    if value is None:
        return ""
    if isinstance(value, float):
        # No benchmark is exact to more than four digits; the JSON has them all.
        return f"{value:.4g}" if abs(value) < 1e4 else f"{value:.0f}"
    return str(value)

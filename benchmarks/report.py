"""The table of a measurement, and the machine that it ran on.

A result names no host, user or path, so it can be published as it is.
"""

from __future__ import annotations

import itertools
import os
import platform
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

from rich.text import Text

from kvferry.filesystem import file_system
from kvferry.processors import process_cpus

Row = Mapping[str, str | int | float | None]
"""One case of a benchmark: the names and values that identify it, and its figures."""

_MAX_WIDTH = 80
_MAX_LABEL = 38
_MAX_TEXT = 18
_GAP = 2


def machine(directory: Path) -> Row:
    """Return the facts about this machine that decide speed.

    Args:
        directory: where the benchmark writes; the facts name its file system.
    """
    return {
        "cpu": _cpu_model(),
        "cores": len(process_cpus()),
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


def table(name: str, facts: Row, rows: Sequence[Row]) -> Text:
    """Return a table with a line per figure and a column per row. The machine and the `note` of
    every row follow below.

    The leading figures that tell the rows apart head the columns. Columns that do not fit into 80
    characters go to further tables, which repeat the names of the figures.
    """
    figures = list(dict.fromkeys(figure for row in rows for figure in row if figure != "note"))
    num_heads = 1
    while len({tuple(map(row.get, figures[:num_heads])) for row in rows}) < len(rows):
        num_heads += 1
    labels = [figure.replace("_", " ") for figure in figures]
    columns = [[_cell(row.get(figure)) for figure in figures] for row in rows]
    parts = [name]
    while columns:
        ends = itertools.accumulate(map(_width, columns), initial=_width(labels, _MAX_LABEL) - _GAP)
        count = max(1, sum(end <= _MAX_WIDTH for end in ends) - 1)
        parts.append("\n".join(_lines(labels, columns[:count], num_heads)))
        columns = columns[count:]
    notes = dict.fromkeys(f"{row.get('case')}: {row['note']}" for row in rows if row.get("note"))
    caption = textwrap.fill(_caption(facts), _MAX_WIDTH)
    return Text("\n\n".join([*parts, "\n".join([caption, *notes])]))


def _lines(labels: list[str], columns: list[list[str]], num_heads: int) -> Iterator[str]:
    """Yield the lines of one table. A figure that no column has is left out."""
    widths = [_width(labels, _MAX_LABEL) - _GAP, *map(_width, columns)]
    for number, cells in enumerate(zip(labels, *columns, strict=True)):
        if number == num_heads:
            yield "-" * sum(widths)
        if number < num_heads or any(cells[1:]):
            texts = [textwrap.wrap(cell, _MAX_TEXT) for cell in cells[1:]]
            label = textwrap.wrap(cells[0], _MAX_LABEL)
            for first, *others in itertools.zip_longest(label, *texts, fillvalue=""):
                values = zip(others, widths[1:], strict=True)
                line = "".join(text.rjust(width) for text, width in values)
                yield f"{first.ljust(widths[0])}{line}".rstrip()


def _width(cells: Sequence[str], limit: int = _MAX_TEXT) -> int:
    """Return the width of a column, including the gap before it."""
    return _GAP + min(limit, max(map(len, cells)))


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

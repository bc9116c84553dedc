"""Prints what commands found, as a table or as JSON; reads sizes and files among their options."""

from __future__ import annotations

import json
import os
import re
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from enum import IntEnum
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, NoReturn

import typer
from rich.console import Console, RenderableType
from rich.progress import MofNCompleteColumn, Progress
from rich.table import Table
from rich.text import Text

from kvferry.config import format_size, parse_size, printable
from kvferry.errors import ConfigError, install_hint
from kvferry.filesystem import private
from kvferry.keys import JsonValue


class Exit(IntEnum):
    """The exit codes of all commands. `meaning` is what docs/operate.md says of each."""

    meaning: str

    def __new__(cls, code: int, meaning: str) -> Exit:
        member = int.__new__(cls, code)
        member._value_ = code
        member.meaning = meaning
        return member

    DONE = 0, "done"
    NO = (
        1,
        "nothing was found to do it with, which one line says; or something is wrong: `doctor` has "
        "findings, `verify`, `ls URL KEY` or `copy` found a bad record, `warm` could not serve a "
        "prompt, `demo` differs",
    )
    MISUSE = 2, "it could not run as asked; one line on stderr says why"
    LEFT = 3, "`rm` is partly done: what is left is named; run the same again"
    INTERRUPTED = 130, "interrupted by Ctrl-C; `status --watch` then ends with 0"
    READER_LEFT = 141, "the reader of the output closed the pipe, as `head` does"
    """A shell reports the same for a command ended by SIGPIPE."""


class NothingFound(ConfigError):
    """A command has nothing to do: what it was asked for is not there. Ends it with `Exit.NO` and
    one line."""


def _check_target(context: typer.Context, target: str | None) -> str | None:
    """Refuse a target of --json that cannot be written, before the command does its work. A file
    that stdout goes to is taken for '-': the table would be mixed into the JSON."""
    if target is None or target == "-":
        return target
    if os.path.realpath(target) == os.path.realpath("/dev/stdout"):
        return "-"
    path = Path(target)
    # The result of `demo` may go into the directory that it makes.
    if context.info_name != "demo" or path.parent.exists():
        require_writable(path)
    return target


def require_writable(path: Path) -> None:
    """Raise ConfigError for a file that cannot be written, before the command does its work."""
    if path.is_dir():
        raise ConfigError(f"cannot write {path}: Is a directory; name a file")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        why = "Permission denied" if path.parent.is_dir() else "No such directory"
        raise ConfigError(f"cannot write {path}: {why}")


def require_targets(source: Path | None, *targets: Path | None) -> None:
    """As `require_writable`; also refuse to replace `source`, or to write one file twice."""
    taken = set() if source is None else {source.resolve()}
    for target in targets:
        if target is not None:
            if target.resolve() in taken:
                why = "is the input file, or is named twice"
                raise ConfigError(f"{target} {why}; choose another file")
            taken.add(target.resolve())
            require_writable(target)


def require_extra(what: str, extra: str, *modules: str) -> None:
    """Raise ConfigError if a module of an optional extra, which `what` needs, is missing."""
    missing = [name for name in modules if find_spec(name) is None]
    if missing:
        raise ConfigError(f"{what} needs {', '.join(missing)}: {install_hint(extra)}")


JsonOption = Annotated[
    str | None,
    typer.Option(
        "--json",
        metavar="FILE",
        help="Also write the result as JSON to FILE; '-' prints it instead of the table.",
        callback=_check_target,
    ),
]

YesOption = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")]


def confirm(question: str, *, yes: bool) -> None:
    """Ask before something that cannot be undone; with `yes` (option --yes), do not ask. Raises
    ConfigError without a terminal to ask at, typer.Exit (code 0) if the answer was no."""
    if yes:
        return
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        raise ConfigError("this cannot be undone, and there is no terminal to ask at; give --yes")
    if not typer.confirm(printable(question), err=True):
        print("nothing was changed", file=sys.stderr)
        raise typer.Exit


JsonRow = dict[str, JsonValue]
"""Facts by name."""

_PIPE_WIDTH = 80
"""Width of a table in characters when stdout is no terminal."""

_TABLE_ROWS = 1000
"""Most rows of a table. The widths of its columns follow from all of them."""

_SHOWN_NAMESPACES = 20

_KEY_DIGITS = 16
"""Digits of a key or namespace in a table; `kvferry ls URL KEY` finds a record by them."""

_DIGEST_DIGITS = 64

_REQUEST_CHARACTERS = 24
"""Characters of a request's id in a table; `kvferry explain --request` finds it by them."""

_PATH_CHARACTERS = 32
"""Most characters of a model's name in a table, which is often a path."""

_IDS = ("key", "namespace", "request")
"""Facts that people copy: no line ends within them."""

_SECONDS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0, "w": 7 * 86400.0}


def emit(value: JsonValue, json_target: str | None, *renderables: RenderableType) -> None:
    """Print the result of a command.

    Args:
        value: the result, for programs.
        json_target: None for no JSON, "-" for JSON alone on stdout, else a file that is replaced.
        *renderables: the result, for people; text is shown as it is and not wrapped.

    Raises ConfigError if the file cannot be written.
    """
    text = json.dumps(value, indent=2) + "\n"
    if json_target != "-":
        console = Console(highlight=False, width=None if sys.stdout.isatty() else _PIPE_WIDTH)
        for each in renderables:
            if isinstance(each, str):
                console.print(plain(each), soft_wrap=True)
            else:
                console.print(each)
    if json_target == "-":
        sys.stdout.write(text)
        sys.stdout.flush()
    elif json_target is not None:
        write_text(json_target, text)


@contextmanager
def writing(path: Path | str) -> Iterator[None]:
    """Raise ConfigError if the file cannot be written in the block."""
    try:
        yield
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}") from error


def write_text(path: Path | str, text: str) -> None:
    """Write or replace a file that the user named. It may hold what keys and times tell of prompts,
    so a new one is for this user alone. Raises ConfigError if it cannot be written."""
    with writing(path), open(path, "w", encoding="utf-8", opener=private) as file:
        file.write(text)


def say_nothing(value: JsonRow, json_target: str | None, why: str) -> NoReturn:
    """End a command that found nothing to do: `emit` its result for programs alone, and raise
    NothingFound with `why`."""
    emit(value, json_target)
    raise NothingFound(why)


def read_text(what: str, path: Path) -> str:
    """Return the text of a file that the user named. Raises ConfigError if it cannot be read, or is
    not UTF-8."""
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot read {what} {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{what} {path} is not UTF-8 text ({error.reason})") from error


def plain(text: str) -> Text:
    """Return `text` for rich: nothing in it is markup, and control characters are escaped."""
    return Text(printable(text))


def make_table(
    columns: Mapping[str, str], rows: Iterable[Mapping[str, JsonValue]], *, title: str | None = None
) -> Table:
    """A table of facts. Numbers are right-aligned, ids stand on one line, paths keep their end, and
    other long texts wrap.

    Args:
        columns: name of the fact in each column, by heading.
        rows: facts by name; a fact that is absent, or None, leaves its cell empty.
    """
    table = Table(
        title=plain(title) if title else None, title_justify="left", header_style="bold",
        box=None, padding=(0, 2, 0, 0), pad_edge=False,
    )  # fmt: skip
    rows = list(rows)
    for heading, name in columns.items():
        if any(isinstance(row.get(name), int | float) for row in rows):
            table.add_column(heading, justify="right", no_wrap=True)
        elif name in _IDS:
            table.add_column(heading, no_wrap=True)
        else:
            table.add_column(heading, overflow="fold")
    for row in rows:
        table.add_row(*(plain(_readable(name, row.get(name))) for name in columns.values()))
    return table


def make_tables(columns: Mapping[str, str], rows: Sequence[Mapping[str, JsonValue]]) -> list[Table]:
    """Make tables, as `make_table` does, of a list that may be long."""
    starts = range(0, max(1, len(rows)), _TABLE_ROWS)
    return [make_table(columns, rows[start : start + _TABLE_ROWS]) for start in starts]


def make_namespace_table(
    title: str, spaces: Sequence[JsonRow], more: Mapping[str, str] | None = None
) -> Table:
    """Make a table of namespaces. `spaces` come largest first; `more` are further columns, as for
    `make_table`."""
    left = len(spaces) - _SHOWN_NAMESPACES
    title += f", {left} smaller ones not shown" if left > 0 else ""
    shown = spaces[:_SHOWN_NAMESPACES]
    rows = [{**row, "namespace": row["namespace"] or "not known yet"} for row in shown]
    columns = {"namespace": "namespace", "records": "num_records", "size": "num_bytes"}
    if len({row.get("dtype") for row in shown}) > 1:  # what an engine of another one left
        columns["dtype"] = "dtype"
    return make_table({**columns, "model": "model", **(more or {})}, rows, title=title)


def _readable(name: str, value: JsonValue) -> str:
    """A value as text, by its type and its name."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return format_size(value) if name.endswith(("bytes", "maxmemory")) else f"{value:,}"
    if name == "pinned_until" and isinstance(value, float):
        return f"{format_age(time.time(), value)} more"
    if name in ("last_used", "last_at", "at") and isinstance(value, float):
        return f"{format_age(value)} ago"
    if name in ("key", "namespace") and len(str(value)) == _DIGEST_DIGITS:
        return str(value)[:_KEY_DIGITS]
    if name == "request":
        return str(value)[:_REQUEST_CHARACTERS]
    return _end_of(str(value)) if name == "model" else str(value)


def _end_of(path: str) -> str:
    """The last parts of a path, as many as fit; all of a short name."""
    if len(path) <= _PATH_CHARACTERS:
        return path
    tail = path[3 - _PATH_CHARACTERS :]
    return f"...{tail[max(0, tail.find('/')) :]}"


def make_fact_table(facts: Mapping[str, JsonValue]) -> Table:
    """One line per fact, with digests and sizes in full."""
    rows: list[JsonRow] = []
    for name, value in facts.items():
        text = _readable(name, value)
        if value is None:
            text = "no limit" if name == "max_bytes" else "not known"
        elif name.endswith("_bytes"):
            text = f"{text} ({value:,} bytes)"
        elif isinstance(value, str):
            text = value
        rows.append({"what": name.replace("_", " "), "value": text})
    return make_table({"what": "what", "value": "value"}, rows)


def progress() -> Progress:
    """A progress bar on stderr; shows nothing where stderr is no terminal."""
    console = Console(stderr=True)
    columns = (*Progress.get_default_columns(), MofNCompleteColumn())
    return Progress(*columns, console=console, disable=not console.is_terminal, transient=True)


def format_age(since: float, now: float | None = None) -> str:
    """The time from `since` (seconds since the epoch) to now, in one unit."""
    seconds = max(0.0, (time.time() if now is None else now) - since)
    for unit in ("w", "d", "h", "m"):
        if seconds >= 2 * _SECONDS[unit]:
            return f"{seconds / _SECONDS[unit]:.0f} {unit}"
    return f"{seconds:.0f} s"


def require_size(option: str, text: str) -> int:
    """Parse the text of `option` into bytes. Raises ConfigError if it is not a size, or, unless it
    is zero, has no unit."""
    num_bytes = parse_size(text)
    if num_bytes and not text.strip().lower().endswith("b"):
        raise ConfigError(f"{option} {text}: no unit; write for example 512MiB, or {text.strip()}B")
    return num_bytes


def parse_duration(text: str) -> float:
    """Parse a text such as "36h" into seconds. Units: s, m, h, d, w. Raises ConfigError."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([smhdw])", text.strip())
    if match is None:
        raise ConfigError(f"{text!r} is not a duration; write a number and a unit, for example 36h")
    return float(match[1]) * _SECONDS[match[2]]

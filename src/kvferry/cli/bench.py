"""`kvferry bench`: measures stores beside the plain clients of their servers."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Annotated

import typer

from kvferry.bench import machine, run, table
from kvferry.cli.output import JsonOption, JsonRow, emit
from kvferry.config import unknown
from kvferry.errors import ConfigError

IN_REPOSITORY = (
    "audit",
    "away",
    "datapath",
    "handover",
    "layout",
    "lookup",
    "peer",
    "proxied",
    "serving",
    "step",
    "tier",
    "vllm",
)
"""Benchmarks that are not installed: they run in the repository, by `make bench`."""


def bench(
    name: Annotated[str, typer.Argument(metavar="NAME", help="What is measured: stores.")],
    directory: Annotated[
        Path | None,
        typer.Option(
            "--dir",
            help="Directory for files, which are removed again; by default a temporary one.",
        ),
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="Few records, to see that it runs.")
    ] = False,
    threads: Annotated[int, typer.Option(help="Threads that use a store at once.")] = 2,
    store: Annotated[
        list[str] | None, typer.Option(help="URL of a store; may be given several times.")
    ] = None,
    json: JsonOption = None,
) -> None:
    """Measure the speed of stores, beside that of their plain clients with the same bytes.

    Example: kvferry bench stores --store valkey://cache/kv --quick
    """
    if name in IN_REPOSITORY:
        raise ConfigError(
            f"kvferry bench {name}: run `make bench NAME={name}` in the repository of kvferry"
        )
    if name != "stores":
        raise ConfigError(unknown("benchmark", name, ("stores", *IN_REPOSITORY)))
    if directory is not None and not directory.is_dir():
        raise ConfigError(f"--dir {directory}: not a directory; make it first")
    with tempfile.TemporaryDirectory(prefix="kvferry-bench-", dir=directory) as scratch:
        facts = machine(Path(scratch))
        rows = run(Path(scratch), store or (), threads=threads, quick=quick)
    value: JsonRow = {"machine": dict(facts), "rows": [dict(row) for row in rows]}
    emit(value, json, table(name, facts, rows))

"""`kvferry bench`: one benchmark, as a table and as JSON."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Annotated

import typer

from kvferry.bench import BENCHMARKS, BenchOptions, load
from kvferry.cli.output import JsonOption, JsonRow, emit
from kvferry.errors import ConfigError


def bench(
    name: Annotated[str, typer.Argument(metavar="NAME", help=f"One of: {', '.join(BENCHMARKS)}.")],
    directory: Annotated[
        Path | None,
        typer.Option(
            "--dir",
            help="Directory for files, which are removed again; by default a temporary one.",
        ),
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="Small sizes, to see that it runs.")
    ] = False,
    threads: Annotated[int, typer.Option(help="Threads for I/O and copies.")] = 2,
    seed: Annotated[int, typer.Option(help="Seed of all random content.")] = 0,
    rounds: Annotated[
        int | None, typer.Option(help="Rounds of the benchmarks vllm and away.")
    ] = None,
    store: Annotated[
        list[str] | None,
        typer.Option(help="URL for the stores benchmark; may be given several times."),
    ] = None,
    json: JsonOption = None,
) -> None:
    """Measure one part of kvferry beside the machine's own limits.

    Example: kvferry bench lookup --quick --json lookup.json
    """
    # Not at the top: all commands, and the help, would wait for it.
    from kvferry.bench import report

    run = load(name)
    if directory is not None and not directory.is_dir():
        raise ConfigError(f"--dir {directory}: not a directory; make it first")
    with tempfile.TemporaryDirectory(prefix="kvferry-bench-", dir=directory) as scratch:
        options = BenchOptions(
            directory=Path(scratch),
            quick=quick,
            threads=threads,
            seed=seed,
            rounds=rounds,
            stores=tuple(store or ()),
        )
        facts = report.machine(options.directory)
        rows = run(options)
    value: JsonRow = {"machine": facts, "rows": [dict(row) for row in rows]}
    emit(value, json, report.table(name, facts, rows))

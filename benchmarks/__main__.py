"""Runs one benchmark for `python -m benchmarks NAME` and `make bench`; prints a table or JSON."""

from __future__ import annotations

import argparse
import importlib
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks import BENCHMARKS, Options
from benchmarks.report import Row, machine, table
from kvferry.cli.output import JsonRow, emit
from kvferry.errors import KVError

EXIT_FAILED = 1
EXIT_MISUSE = 2


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one benchmark, or list them; returns the exit code: 1 if what a row checks has failed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=main.__doc__)
    parser.add_argument("name", nargs="?", choices=BENCHMARKS, help="none: list them")
    parser.add_argument("--dir", type=Path, help="for files, which are removed again")
    parser.add_argument("--quick", action="store_true", help="small sizes, to see that it runs")
    parser.add_argument("--threads", type=int, default=2, help="for I/O and copies")
    parser.add_argument("--seed", type=int, default=0, help="of all random content")
    parser.add_argument("--rounds", type=int, help="of vllm, away, handover, proxied")
    parser.add_argument("--store", action="append", default=[], help="of stores; repeatable")
    parser.add_argument("--part", action="append", default=[], help="of device; repeatable")
    parser.add_argument("--json", metavar="FILE", help='"-" writes JSON alone to stdout')
    given = parser.parse_args(arguments)
    if given.name is None:
        print("\n".join(f"{name:10}{what}" for name, what in BENCHMARKS.items()))
        return 0
    # The import waits until here because some benchmarks load torch.
    module = importlib.import_module(f"benchmarks.{given.name}")
    run: Callable[[Options], Sequence[Row]] = module.run
    try:
        with tempfile.TemporaryDirectory(prefix="kvferry-bench-", dir=given.dir) as scratch:
            options = Options(
                directory=Path(scratch).resolve(),
                quick=given.quick,
                threads=given.threads,
                seed=given.seed,
                rounds=given.rounds,
                stores=tuple(given.store),
                parts=tuple(given.part),
            )
            facts = machine(options.directory)
            rows = run(options)
        value: JsonRow = {"machine": dict(facts), "rows": [dict(row) for row in rows]}
        emit(value, given.json, table(given.name, facts, rows))
    except (KVError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_MISUSE
    return EXIT_FAILED if any(row.get("failed") for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())

"""The benchmarks by name. A module is imported when its benchmark runs, and not before.

A benchmark is a module of this package with

    def run(options: BenchOptions) -> Sequence[Row]: ...

that measures the subject of its name beside a limit of the machine, in one run. `report` makes the
table; a key that a row lacks is an empty cell.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from kvferry.config import unknown
from kvferry.errors import ConfigError

Row = Mapping[str, str | int | float | None]

BENCHMARKS: Mapping[str, str] = {
    "audit": "hits that are compared with what the engine computes, beside hits that are not",
    "away": "an engine whose store on a server is away, beside one without a connector",
    "datapath": "KV of an 8B model in and out of paged blocks, beside memcpy and plain file I/O",
    "layout": "reads that convert TP, block size and layout, beside reads that need not",
    "lookup": "finding the stored prefix of a prompt among many chunks",
    "step": "time inside our hooks on a decode step without hits",
    "stores": "stores of any URL, beside the plain clients of their servers",
    "vllm": "real vLLM with kvferry, with other connectors and with none",
}
"""Name to what it measures."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchOptions:
    """The options of every benchmark.

    Attributes:
        directory: for files; its file system is part of the result.
        quick: small sizes, to see that it runs; the figures mean little.
        threads: for I/O and copies.
        seed: of all random content.
        rounds: of the vllm and away benchmarks; None for their defaults.
        stores: URLs for the stores benchmark; empty for its default.
    """

    directory: Path
    quick: bool = False
    threads: int = 2
    seed: int = 0
    rounds: int | None = None
    stores: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.threads < 1:
            raise ConfigError(f"threads is {self.threads}; it must be 1 or more")
        if self.rounds is not None and self.rounds < 1:
            raise ConfigError(f"rounds is {self.rounds}; it must be 1 or more")


def load(name: str) -> Callable[[BenchOptions], Sequence[Row]]:
    """The `run` function of benchmark `name`.

    Raises:
        ConfigError: there is no benchmark of this name.
    """
    if name not in BENCHMARKS:
        raise ConfigError(unknown("benchmark", name, BENCHMARKS))
    module = importlib.import_module(f"kvferry.bench.{name}")
    return cast("Callable[[BenchOptions], Sequence[Row]]", module.run)

"""`kvferry simulate`: hit rates that caches of any size would have had on recorded requests."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvferry.cli.output import (
    JsonOption,
    JsonRow,
    emit,
    make_fact_table,
    make_table,
    require_extra,
    require_size,
    require_targets,
    writing,
)
from kvferry.config import printable
from kvferry.errors import ConfigError

if TYPE_CHECKING:
    from kvferry.simulate.simulator import Fact


def simulate(
    trace: Annotated[
        Path,
        typer.Argument(metavar="TRACE", help="A Mooncake trace, or an engine's journal."),
    ],
    sizes: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE,...", help="Cache sizes: blocks, or 64GiB; by default 1, 2, 5, 10, ..."
        ),
    ] = None,
    bytes_per_token: Annotated[
        str | None, typer.Option(metavar="SIZE", help="KV of one token, e.g. 128KiB.")
    ] = None,
    state_every: Annotated[
        int | None,
        typer.Option(
            min=1,
            metavar="TOKENS",
            help="Tokens between two recurrent states, which an engine's first lines name: hits "
            "end at a state.",
        ),
    ] = None,
    png: Annotated[Path | None, typer.Option(metavar="FILE", help="The curve as PNG.")] = None,
    json: JsonOption = None,
) -> None:
    """Show the hit rates of LRU at every size on recorded requests, beside Belady's optimum.

    Example: kvferry simulate trace.jsonl --sizes 10000,100000 --png curve.png
    """
    from kvferry.simulate.simulator import Simulator, default_capacities, write_png
    from kvferry.simulate.trace import read_trace

    token_bytes = None
    if bytes_per_token is not None:
        token_bytes = require_size("--bytes-per-token", bytes_per_token)
        if token_bytes < 1:
            raise ConfigError(f"--bytes-per-token {bytes_per_token}: must be at least 1B")
    require_targets(trace, png, None if json in (None, "-") else Path(json))
    if png is not None:
        require_extra("--png", "demo", "matplotlib")
    read = read_trace(trace)
    capacities = default_capacities(read.num_unique)
    if sizes is not None:
        asked = map(str.strip, sizes.split(","))
        capacities = [_blocks(size, read.block_tokens, token_bytes) for size in asked]
    simulator = Simulator(read, _state_blocks(state_every, read.block_tokens))
    curve = [simulator.point(capacity, token_bytes) for capacity in capacities]
    if png is not None:
        with writing(png):
            write_png(png, curve, printable(trace.name))
    facts = simulator.facts()
    columns = {"blocks": "capacity_blocks"} | ({"size": "capacity_bytes"} if token_bytes else {})
    columns |= {"lru": "lru", "optimum": "optimum", "tokens hit by lru": "lru_hit_tokens"}
    shown = [_rounded(row) for row in curve]
    tables = make_fact_table(_rounded(facts)), make_table(columns, shown, title="hit rates")
    emit({"trace": dict(facts), "curve": [dict(row) for row in curve]}, json, *tables)


def _state_blocks(state_every: int | None, block_tokens: int) -> int:
    """Return the blocks between two states; 1 where hits end anywhere. Raises ConfigError if it is
    no number of whole blocks."""
    if state_every is None:
        return 1
    if state_every % block_tokens:
        raise ConfigError(
            f"--state-every {state_every}: no multiple of the trace's blocks of {block_tokens} "
            "tokens"
        )
    return state_every // block_tokens


def _rounded(row: Mapping[str, Fact]) -> JsonRow:
    """Format a row for people: floats with four decimals, seconds as whole numbers."""

    def rounded(name: str, value: Fact) -> Fact:
        if not isinstance(value, float):
            return value
        return round(value) if "seconds" in name else f"{value:.4f}"

    return {name: rounded(name, value) for name, value in row.items()}


def _blocks(size: str, block_tokens: int, token_bytes: int | None) -> int:
    """Parse a size and return it in blocks. Numbers are blocks; sizes with a unit are bytes. Raises
    ConfigError: no size, no room for a block, or bytes while those of a token are unknown."""
    if size.isdecimal():
        num_blocks = int(size)
    else:
        num_bytes = require_size("--sizes", size)
        if token_bytes is None:
            raise ConfigError(f"--sizes {size}: to turn bytes into blocks, give --bytes-per-token")
        num_blocks = num_bytes // (block_tokens * token_bytes)
    if num_blocks < 1:
        raise ConfigError(f"--sizes {size}: holds no block of {block_tokens} tokens")
    return num_blocks

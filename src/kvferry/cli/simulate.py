"""`kvferry simulate`: hit rates that caches of given sizes would have had on recorded requests."""

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
)
from kvferry.config import printable
from kvferry.errors import ConfigError

if TYPE_CHECKING:
    from kvferry.simulate.simulator import Curve, Fact, Facts, Rates, Simulator


def simulate(
    trace: Annotated[
        Path,
        typer.Argument(metavar="TRACE", help="A Mooncake trace, or an engine's journal."),
    ],
    tiers: Annotated[
        str,
        typer.Option(metavar="SIZE,...", help="Cache sizes, smallest first: blocks, or 64GiB."),
    ] = "10000",
    policy: Annotated[
        str,
        typer.Option(
            metavar="NAME,...", help="Policies: lru, pool (the one engines use), chances, repeated."
        ),
    ] = "pool",
    bytes_per_token: Annotated[
        str | None, typer.Option(metavar="SIZE", help="KV of one token, e.g. 128KiB.")
    ] = None,
    prefill_rate: Annotated[
        float | None,
        typer.Option(metavar="TOKENS/S", help="Tokens that the engine prefills per second."),
    ] = None,
    tier_rates: Annotated[
        str | None, typer.Option(metavar="GB/S,...", help="Read speed of each tier.")
    ] = None,
    capacities: Annotated[
        str | None,
        typer.Option(metavar="SIZE,...", help="Sizes of the curve; by default 1, 2, 5, 10, ..."),
    ] = None,
    csv: Annotated[Path | None, typer.Option(metavar="FILE", help="The curve as CSV.")] = None,
    png: Annotated[Path | None, typer.Option(metavar="FILE", help="The curve as PNG.")] = None,
    json: JsonOption = None,
) -> None:
    """Replay recorded requests; show hit rates by tier and policy, beside Belady's optimum.

    Example: kvferry simulate trace.jsonl --tiers 10000,100000 --csv curve.csv
    """
    from kvferry.simulate.policies import check_policy
    from kvferry.simulate.simulator import Simulator
    from kvferry.simulate.trace import read_trace

    policies = list(dict.fromkeys(_split("--policy", policy)))
    for name in policies:
        check_policy(name)
    rates = _rates(bytes_per_token, prefill_rate, tier_rates, len(_split("--tiers", tiers)))
    require_targets(trace, csv, png, None if json in (None, "-") else Path(json))
    if png is not None:
        require_extra("--png", "demo", "matplotlib")
    simulator = Simulator(read_trace(trace))
    sizes = _blocks("--tiers", tiers, simulator, rates)
    curve: Curve = []
    if csv is not None or png is not None or capacities is not None:
        steps = None
        if capacities is not None:
            steps = _blocks("--capacities", capacities, simulator, rates)
        curve = simulator.curve(policies, steps, rates)
    rows = simulator.tiers(policies, sizes, rates)
    _write(curve, csv, png, trace.name, sizes)
    _show(simulator, rows, curve, json)


def _write(curve: Curve, csv: Path | None, png: Path | None, title: str, sizes: list[int]) -> None:
    from kvferry.simulate.simulator import write_csv, write_png

    if csv is not None:
        write_csv(csv, curve)
    if png is not None:
        names = {size: f"tier {number}" for number, size in enumerate(sizes, 1)}
        write_png(png, curve, printable(title), names)


def _show(simulator: Simulator, rows: list[Facts], curve: Curve, json: str | None) -> None:
    facts = simulator.facts()
    shown = [_rounded(row) for row in rows]
    columns = {"policy": "policy", "tier": "tier", "blocks": "capacity_blocks"}
    columns |= {
        "hit rate": "hit_rate",
        "with nearer": "hit_rate_so_far",
        "of optimum": "of_optimum",
    }
    moved = {"policy": "policy", "tier": "tier", "hit tokens": "hit_tokens"}
    moved |= {"blocks written": "written_blocks", "read": "read_bytes", "written": "written_bytes"}
    moved |= {"seconds saved": "seconds_saved"}
    moved = {heading: name for heading, name in moved.items() if name in rows[0]}
    tables = [
        make_fact_table(_rounded(facts)),
        make_table(columns, shown),
        make_table(moved, shown),
    ]
    if curve:
        names = {name.removeprefix("capacity_"): name for name in curve[0]}
        tables.append(make_table(names, [_rounded(row) for row in curve], title="hit rates"))
    value: JsonRow = {"trace": dict(facts), "tiers": [dict(row) for row in rows]}
    emit({**value, "curve": [dict(row) for row in curve]}, json, *tables)


def _rounded(row: Mapping[str, Fact]) -> JsonRow:
    """Format a row for people: floats with four decimals, seconds as whole numbers."""
    return {
        name: value
        if not isinstance(value, float)
        else round(value)
        if "seconds" in name
        else f"{value:.4f}"
        for name, value in row.items()
    }


def _split(option: str, text: str) -> list[str]:
    parts = [part.strip() for part in text.split(",")]
    if not all(parts):
        raise ConfigError(f"{option} {text!r}: an entry is empty; separate entries by one comma")
    return parts


def _blocks(option: str, text: str, simulator: Simulator, rates: Rates) -> list[int]:
    """Parse capacities and return them in blocks. Numbers are blocks; sizes with a unit are bytes.

    Raises:
        ConfigError: an entry is no size, holds no block, is not larger than the one before, or is
            in bytes while the bytes of a token are unknown.
    """
    block_tokens = simulator.trace.block_tokens
    sizes: list[int] = []
    for part in _split(option, text):
        if part.isdecimal():
            size = int(part)
        elif rates.bytes_per_token is None:
            require_size(option, part)
            raise ConfigError(f"{option} {part}: to turn bytes into blocks, give --bytes-per-token")
        else:
            size = require_size(option, part) // (block_tokens * rates.bytes_per_token)
        if size < 1:
            raise ConfigError(f"{option} {part}: holds no block of {block_tokens} tokens")
        if sizes and size <= sizes[-1]:
            raise ConfigError(
                f"{option} {text}: {part} is not larger than the size before it; give the smallest "
                "first"
            )
        sizes.append(size)
    return sizes


def _rates(
    bytes_per_token: str | None, prefill: float | None, tiers: str | None, num_tiers: int
) -> Rates:
    from kvferry.simulate.simulator import Rates

    token_bytes = None
    if bytes_per_token is not None:
        token_bytes = require_size("--bytes-per-token", bytes_per_token)
        if token_bytes < 1:
            raise ConfigError(f"--bytes-per-token {bytes_per_token}: must be at least 1B")
    if prefill is not None:
        _rate("--prefill-rate", str(prefill))
    if tiers is None:
        return Rates(bytes_per_token=token_bytes, prefill_tokens=prefill)
    if token_bytes is None or prefill is None:
        raise ConfigError("--tier-rates needs --bytes-per-token and --prefill-rate")
    parts = _split("--tier-rates", tiers)
    if len(parts) != num_tiers:
        raise ConfigError(f"--tier-rates {tiers}: {len(parts)} rates for {num_tiers} tiers")
    return Rates(
        bytes_per_token=token_bytes,
        prefill_tokens=prefill,
        tier_bytes=tuple(1e9 * _rate("--tier-rates", part) for part in parts),
    )


def _rate(option: str, text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 1e-6 <= number <= 1e15:  # beyond, seconds could be inf or NaN
        raise ConfigError(f"{option} {text!r}: must be a number from 1e-6 to 1e15")
    return number

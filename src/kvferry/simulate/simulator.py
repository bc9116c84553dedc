"""Figures of `kvferry simulate`: rows by policy and tier, a curve over capacities, CSV and PNG."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from kvferry.errors import ConfigError
from kvferry.simulate.policies import CHANCES, LRU, POOL, REPEATED, Chances, Lru, replay
from kvferry.simulate.reuse import (
    NEVER,
    Replay,
    lru_outcome,
    optimum,
    previous_references,
    reuse_distances,
)
from kvferry.simulate.trace import Ints, Trace

OPTIMUM = "optimum"
"""Belady's optimum, as the policy of a row."""

Fact = str | int | float | None
Facts = dict[str, Fact]
"""Facts by name, as in the JSON."""

Curve = Sequence[Mapping[str, float]]
"""Rows with `capacity_blocks`, perhaps `capacity_bytes`, and the hit rate of each policy."""

_PERCENTILES = (25, 50, 75, 90, 99)
_COLOURS = {
    OPTIMUM: "#8d99ae",
    LRU: "#2a7f62",
    POOL: "#2a7f62",
    CHANCES: "#c8553d",
    REPEATED: "#6a4c93",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """Rates that turn blocks into bytes and seconds. Figures that need a missing rate are left out.

    Attributes:
        bytes_per_token: bytes of KV per token, over all layers and ranks.
        prefill_tokens: tokens that the engine computes per second.
        tier_bytes: bytes that each tier reads per second, nearest tier first.
    """

    bytes_per_token: int | None = None
    prefill_tokens: float | None = None
    tier_bytes: tuple[float, ...] = ()


class Simulator:
    """The simulations of one trace. What they share is computed once."""

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        self._previous = previous_references(trace.blocks)
        self._tokens = trace.tokens()

    @cached_property
    def distances(self) -> Ints:
        """See `reuse_distances`."""
        return reuse_distances(self._previous)

    def outcome(self, policy: str, capacity: int) -> Replay:
        """Simulate a cache of `capacity` blocks under one of `POLICIES` or the optimum."""
        if policy == OPTIMUM:
            return optimum(self._previous, capacity)
        if policy == LRU:
            return lru_outcome(self.distances, capacity)
        order = Chances(capacity) if policy == CHANCES else Lru()
        return replay(self.trace, capacity, order, repeated=policy == REPEATED)

    def facts(self) -> Facts:
        """Return figures of the trace. Distances are in blocks."""
        trace = self.trace
        distances = self.distances[self.distances != NEVER]
        facts: Facts = {
            "requests": trace.num_requests,
            "seconds": trace.seconds,
            "block_tokens": trace.block_tokens,
            "prompt_tokens": int(trace.num_tokens.sum()),
            "block_references": trace.num_references,
            "unique_blocks": trace.num_unique,
            "hit_rate_without_limit": len(distances) / trace.num_references,
        }
        for percent in _PERCENTILES if len(distances) else ():
            facts[f"reuse_distance_p{percent}"] = int(np.percentile(distances, percent))
        return facts

    def tiers(
        self, policies: Sequence[str], capacities: Sequence[int], rates: Rates
    ) -> list[Facts]:
        """Return a row for each policy and tier; the last policy is the optimum.

        Every tier sees all requests: a saved block goes to each tier, and a request touches its
        prefix in each. A block that several tiers hold is a hit of the nearest.

        Args:
            capacities: blocks of each tier, nearest first, each larger than the one before.
        """
        best = [self.outcome(OPTIMUM, capacity) for capacity in capacities]
        rows = []
        for policy in [*policies, OPTIMUM]:
            nearer = np.zeros(self.trace.num_references, np.bool_)
            for number, capacity in enumerate(capacities):
                outcome = best[number]
                if policy != OPTIMUM:
                    outcome = self.outcome(policy, capacity)
                own = Replay(outcome.hits & ~nearer, outcome.num_written)
                nearer |= outcome.hits
                total = int(nearer.sum())
                most = int(best[number].hits.sum())
                rows.append(
                    {
                        "policy": policy,
                        "tier": number + 1,
                        "capacity_blocks": capacity,
                        "hit_rate": int(own.hits.sum()) / self.trace.num_references,
                        "hit_rate_so_far": total / self.trace.num_references,
                        "of_optimum": total / most if most else 1.0,
                        **self._moved(own, number, rates),
                    }
                )
        return rows

    def _moved(self, outcome: Replay, tier: int, rates: Rates) -> Facts:
        """Return tokens and, with rates, bytes and seconds of the hits of one tier."""
        hit_tokens = int(self._tokens[outcome.hits].sum())
        facts: Facts = {"hit_tokens": hit_tokens, "written_blocks": outcome.num_written}
        if rates.bytes_per_token is not None:
            block_bytes = self.trace.block_tokens * rates.bytes_per_token
            facts["read_bytes"] = hit_tokens * rates.bytes_per_token
            facts["written_bytes"] = outcome.num_written * block_bytes
        if rates.prefill_tokens is not None:
            seconds = hit_tokens / rates.prefill_tokens
            if rates.bytes_per_token is not None and rates.tier_bytes:
                seconds -= hit_tokens * rates.bytes_per_token / rates.tier_bytes[tier]
            facts["seconds_saved"] = seconds
        return facts

    def curve(
        self, policies: Sequence[str], capacities: Sequence[int] | None, rates: Rates
    ) -> list[dict[str, float]]:
        """Return the hit rates of LRU, these policies and the optimum by capacity. `capacities`
        None stands for `default_capacities`."""
        rows = []
        if capacities is None:
            capacities = default_capacities(self.trace.num_unique)
        for capacity in capacities:
            row: dict[str, float] = {"capacity_blocks": capacity}
            if rates.bytes_per_token is not None:
                row["capacity_bytes"] = capacity * self.trace.block_tokens * rates.bytes_per_token
            for policy in dict.fromkeys([LRU, *policies, OPTIMUM]):
                row[policy] = float(self.outcome(policy, capacity).hits.mean())
            rows.append(row)
        return rows


def default_capacities(num_unique: int) -> list[int]:
    """Return 1, 2, 5, 10, ... from a five hundredth of a trace's blocks up to all of them."""
    steps = [digit * 10**power for power in range(19) for digit in (1, 2, 5)]
    return [step for step in steps if num_unique / 500 < step < num_unique] + [num_unique]


def write_csv(path: Path, rows: Curve) -> None:
    """Write a curve, one line for each capacity.

    Raises:
        ConfigError: the file cannot be written.
    """
    try:
        with path.open("w", encoding="utf-8", newline="") as file:
            writer = csv.DictWriter(file, list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}") from error


def write_png(path: Path, rows: Curve, title: str, tiers: Mapping[int, str]) -> None:
    """Draw a curve, and the names in `tiers` at their capacities. Needs no display.

    Raises:
        ConfigError: the file cannot be written.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), dpi=130, layout="constrained")
    axes = figure.add_subplot()
    capacities = [row["capacity_blocks"] for row in rows]
    for name in rows[0]:
        if not name.startswith("capacity"):
            style = "--" if name in (OPTIMUM, POOL) else "-"
            rates = [row[name] for row in rows]
            axes.plot(capacities, rates, style, marker=".", color=_COLOURS.get(name), label=name)
    for capacity, name in tiers.items():
        axes.axvline(capacity, color="#cccccc", zorder=0)
        axes.text(capacity, 0.01, f" {name}", color="#666666")
    axes.set_xscale("log")
    axes.set_ylim(bottom=0)
    axes.set_xlabel("capacity, blocks")
    axes.set_ylabel("block hit rate")
    axes.set_title(title, loc="left")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    try:
        figure.savefig(path, format="png")
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}") from error

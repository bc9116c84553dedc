"""Figures of `kvferry simulate`: facts of a trace, a curve over cache sizes, and its picture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from kvferry.simulate.reuse import NEVER, optimum, previous_references, reuse_distances
from kvferry.simulate.trace import Trace

Fact = str | int | float | None
Facts = dict[str, Fact]
"""Facts by name, as in the JSON."""

_PERCENTILES = (25, 50, 75, 90, 99)
_COLOURS: Final = {"lru": "#2a7f62", "optimum": "#8d99ae"}


class Simulator:
    """The simulations of one trace. What they share is computed once.

    Args:
        state_blocks: blocks between two recurrent states: hits end at one. 1: they end anywhere.
    """

    def __init__(self, trace: Trace, state_blocks: int = 1) -> None:
        self.trace = trace
        self._state_blocks = state_blocks
        self._previous = previous_references(trace.blocks)
        self._distances = reuse_distances(trace.blocks, trace.starts)

    def facts(self) -> Facts:
        """Return figures of the trace. Distances are in blocks."""
        trace = self.trace
        distances = self._distances[self._distances != NEVER]
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

    def point(self, capacity: int, token_bytes: int | None) -> dict[str, float]:
        """Return what a cache of `capacity` blocks hits by LRU, and the most that any order does.

        Args:
            token_bytes: bytes of KV per token, over all layers and ranks; None leaves bytes out.
        """
        hits = self._up_to_states(self._distances < capacity)
        size: dict[str, float] = {"capacity_blocks": capacity}
        if token_bytes is not None:
            size["capacity_bytes"] = capacity * self.trace.block_tokens * token_bytes
        return size | {
            "lru": float(hits.mean()),
            "optimum": float(self._up_to_states(optimum(self._previous, capacity)).mean()),
            "lru_hit_tokens": int(self.trace.tokens()[hits].sum()),
        }

    def _up_to_states(self, hits: NDArray[np.bool_]) -> NDArray[np.bool_]:
        """Return the hits of each request up to the last state that so many blocks reach: at most
        what a model with states hits, as one is not kept at every such place."""
        if self._state_blocks == 1:
            return hits
        starts = self.trace.starts
        before = np.concatenate([[0], np.cumsum(hits)])
        of_request = np.diff(before[starts])
        kept = of_request // self._state_blocks * self._state_blocks
        counts = np.diff(starts)
        number = before[1:] - np.repeat(before[starts[:-1]], counts)  # of a hit in its request
        found: NDArray[np.bool_] = hits & (number <= np.repeat(kept, counts))
        return found


def default_capacities(num_unique: int) -> list[int]:
    """Return 1, 2, 5, 10, ... from a five hundredth of a trace's blocks up to all of them."""
    steps = [digit * 10**power for power in range(19) for digit in (1, 2, 5)]
    return [step for step in steps if num_unique / 500 < step < num_unique] + [num_unique]


def write_png(path: Path, rows: Sequence[Mapping[str, float]], title: str) -> None:
    """Draw the hit rates of `Simulator.point` over the sizes. Needs no display."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), dpi=130, layout="constrained")
    axes = figure.add_subplot()
    capacities = [row["capacity_blocks"] for row in rows]
    for name, colour in _COLOURS.items():
        axes.plot(capacities, [row[name] for row in rows], marker=".", color=colour, label=name)
    axes.set_xscale("log")
    axes.set_ylim(bottom=0)
    axes.set_xlabel("capacity, blocks")
    axes.set_ylabel("block hit rate")
    axes.set_title(title, loc="left")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    figure.savefig(path, format="png")

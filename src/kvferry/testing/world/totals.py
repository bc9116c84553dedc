"""What runs of scenarios come to: kept in a file, which one run after another adds to."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import msgspec

from kvferry.testing.world.scenario import Outcome


class Failed(msgspec.Struct, frozen=True):
    """A seed that failed, what was broken, and the line that replays it."""

    seed: int
    what: str
    replay: str


class Totals(msgspec.Struct, forbid_unknown_fields=True):
    """See the module.

    Attributes:
        ranges: the first of seeds that were run, and the one after the last.
        happened: how often each action, fault and end of a request took place.
    """

    ranges: list[tuple[int, int]] = []
    scenarios: int = 0
    virtual_hours: float = 0.0
    cpu_seconds: float = 0.0
    failures: list[Failed] = []
    happened: dict[str, int] = {}

    @property
    def next_seed(self) -> int:
        """The first seed after all that were run."""
        return max((stop for _, stop in self.ranges), default=0)

    def has_run(self, seed: int) -> bool:
        return any(first <= seed < stop for first, stop in self.ranges)

    def add(self, seed: int, outcome: Outcome, cpu_seconds: float) -> None:
        """Add a scenario; seeds come in order."""
        if self.ranges and self.ranges[-1][1] == seed:
            self.ranges[-1] = (self.ranges[-1][0], seed + 1)
        else:
            self.ranges.append((seed, seed + 1))
        self.scenarios += 1
        self.virtual_hours += outcome.seconds / 3600
        self.cpu_seconds += cpu_seconds
        self.happened = dict(sorted((Counter(self.happened) + outcome.happened).items()))

    def lines(self) -> Iterator[str]:
        yield (
            f"{self.scenarios} scenarios, {self.virtual_hours:.1f} virtual hours, "
            f"{self.cpu_seconds:.0f} CPU seconds, {len(self.failures)} failures"
        )
        yield ", ".join(f"{what} {count}" for what, count in self.happened.items())


def read_totals(path: Path) -> Totals:
    """The totals of a file; those of none, if it is not there. Raises OSError, and
    msgspec.DecodeError: it holds something else."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=Totals)
    except FileNotFoundError:
        return Totals()


def write_totals(path: Path, totals: Totals) -> None:
    """Replace the file as a whole: a run may be ended at any time."""
    made = path.with_name(f"{path.name}.new")
    made.write_bytes(msgspec.json.format(msgspec.json.encode(totals)) + b"\n")
    os.replace(made, path)

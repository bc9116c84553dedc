"""The command `python -m kvferry.testing.world`."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

import msgspec

from kvferry.testing.world.named import SCENARIOS
from kvferry.testing.world.running import run, worlds
from kvferry.testing.world.scenario import Outcome, Scenario, without
from kvferry.testing.world.seeds import draw, shortened
from kvferry.testing.world.threads import Seam
from kvferry.testing.world.totals import Failed, Totals, read_totals, write_totals

COMMAND = "python -m kvferry.testing.world"
MAX_SEED = 1 << 63
WRITTEN_EVERY = 100
"""A run writes its totals after so many seeds, since people end long runs by a signal."""

HELP = """Run the whole cache in simulated worlds, each decided by its seed: engines, tiers, peers,
faults, restarts, in virtual time. Stops at the first failure, and prints the line that replays
it."""
EPILOG = """exit status:
  0  everything held
  1  an invariant was broken; the last line replays it
  2  nothing was run: no such seed or scenario; one line says why"""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        print(f"{COMMAND}: {message}", file=sys.stderr)
        raise SystemExit(2)


def _seed(text: str) -> int:
    if not (text.isdecimal() and int(text) < MAX_SEED):
        raise argparse.ArgumentTypeError(f"{text!r} is no seed; a seed is a number from 0 on")
    return int(text)


def _parser() -> _Parser:
    parser = _Parser(COMMAND, description=HELP, epilog=EPILOG,
                     formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    parser.add_argument("--seeds", type=_seed, default=100, help="how many seeds to run")
    parser.add_argument("--first", type=_seed, help="the first of them; 0, or the next of --totals")
    parser.add_argument("--minutes", type=float, help="go on with further seeds for so long")
    parser.add_argument("--seed", type=_seed, help="run this seed alone, and show what happened")
    parser.add_argument("--keep", help="with --seed: only these of its actions, as 0,3,4")
    parser.add_argument("--scenario", help=f"run a scenario: {', '.join(SCENARIOS)}")
    parser.add_argument("--all", action="store_true", help="go on after a failure")
    parser.add_argument("--totals", type=Path, help="a JSON file to which this run adds its totals")
    return parser


def _chosen(parser: _Parser, seed: int | None, keep: str | None, name: str | None) -> Scenario:
    if name is not None:
        if name not in SCENARIOS:
            parser.error(f"there is no scenario {name!r}; there are {', '.join(SCENARIOS)}")
        return SCENARIOS[name]
    assert seed is not None
    scenario = draw(seed)
    if keep is None:
        return scenario
    given = keep.split(",") if keep else []
    places = range(len(scenario.actions))
    if not all(each.isdecimal() and int(each) in places for each in given):
        parser.error(f"--keep {keep!r}: seed {seed} has the actions 0 to {places.stop - 1}")
    kept = {int(each) for each in given}
    return without(scenario, [place for place in places if place not in kept])


def _show(scenario: Scenario, outcome: Outcome) -> None:
    for shape in scenario.engines:
        print(shape)
    print("\n".join(outcome.trace))
    said = "held" if outcome.failure is None else f"FAILED: {outcome.failure}"
    print(f"{said}; {outcome.seconds:.0f} virtual seconds, trace {outcome.digest}")


def _shorten(scenario: Scenario, outcome: Outcome, seam: Seam) -> str:
    """Shorten a scenario that failed; return the line that replays it."""
    failure = outcome.failure
    assert failure is not None

    def fails(tried: Scenario) -> Outcome | None:
        found = run(tried, seam)
        is_same = found.failure is not None and found.failure.what == failure.what
        return found if is_same else None

    short, kept = shortened(scenario, fails)
    for action in short.actions:
        print(f"  {action}")
    return f"{COMMAND} --seed {scenario.seed} --keep {','.join(map(str, kept))}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return its exit status."""
    parser = _parser()
    given = parser.parse_args(arguments)
    if given.keep is not None and given.seed is None:
        parser.error("--keep goes with --seed")
    if given.seed is not None or given.scenario is not None:
        scenario = _chosen(parser, given.seed, given.keep, given.scenario)
        with worlds() as seam:
            outcome = run(scenario, seam)
        _show(scenario, outcome)
        return 0 if outcome.failure is None else 1
    return _run_on(parser, given)


def _run_on(parser: _Parser, given: argparse.Namespace) -> int:
    totals = Totals()
    if given.totals is not None:
        try:
            totals = read_totals(given.totals)
        except (OSError, msgspec.DecodeError) as error:
            parser.error(f"--totals {given.totals}: {error}")
    seed = totals.next_seed if given.first is None else given.first
    if totals.has_run(seed):
        parser.error(f"--first {seed}: {given.totals} has that seed; for other code, use another")
    stop, until = seed + given.seeds, time.monotonic() + 60 * (given.minutes or 0.0)
    num_before = len(totals.failures)
    with suppress(KeyboardInterrupt), worlds() as seam:
        while seed < stop or time.monotonic() < until:
            began = time.process_time()
            scenario = draw(seed)
            outcome = run(scenario, seam)
            totals.add(seed, outcome, time.process_time() - began)
            if outcome.failure is not None:
                print(f"seed {seed}: {outcome.failure}")
                replay = _shorten(scenario, outcome, seam)
                print(replay, flush=True)
                totals.failures.append(Failed(seed, str(outcome.failure), replay))
                if not given.all:
                    break
            if given.totals is not None and seed % WRITTEN_EVERY == 0:
                write_totals(given.totals, totals)
            seed += 1
    if given.totals is not None:
        write_totals(given.totals, totals)
    print("\n".join(totals.lines()))
    return 1 if len(totals.failures) > num_before else 0


if __name__ == "__main__":
    raise SystemExit(main())

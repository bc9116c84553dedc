"""The cache holds what it promises in simulated worlds, and worlds are functions of their seeds."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from kvferry.testing.world.__main__ import main
from kvferry.testing.world.named import SCENARIOS
from kvferry.testing.world.running import run, worlds
from kvferry.testing.world.seeds import draw

NUM_SEEDS = 64
PER_TEST = 16


@pytest.mark.parametrize("first", range(0, NUM_SEEDS, PER_TEST))
def test_everything_holds_in_the_worlds_of_these_seeds(first, capsys):
    status = main(["--first", str(first), "--seeds", str(PER_TEST)])
    assert status == 0, capsys.readouterr().out


@pytest.mark.parametrize("name", SCENARIOS)
def test_everything_holds_in_a_scenario(name, capsys):
    assert main(["--scenario", name]) == 0, capsys.readouterr().out


def test_a_world_is_the_same_in_every_process():
    code = (
        "from kvferry.testing.world.named import SCENARIOS\n"
        "from kvferry.testing.world.running import run, worlds\n"
        "from kvferry.testing.world.seeds import draw\n"
        "lived = [*SCENARIOS.values(), *map(draw, range(5))]\n"
        "with worlds() as seam:\n"
        "    print([run(scenario, seam).digest for scenario in lived])\n"
    )
    said = [
        subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONHASHSEED": number},
            check=True,
            capture_output=True,
            text=True,
        ).stdout
        for number in ("1", "2")
    ]
    with worlds() as seam:
        lived = [*SCENARIOS.values(), *map(draw, range(5))]
        here = [run(scenario, seam).digest for scenario in lived]
    assert said == [f"{here}\n"] * 2


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--seed", "one"], "'one' is no seed"),
        (["--seed", "-1"], "is no seed"),
        (["--scenario", "none"], "there is no scenario 'none'; there are "),
        (["--seed", "1", "--keep", "1,99"], "seed 1 has the actions 0 to"),
        (["--keep", "1"], "--keep goes with --seed"),
        (["--nothing"], "unrecognized arguments: --nothing"),
    ],
)
def test_what_does_not_exist_is_one_line_and_status_2(arguments, said, capsys):
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1

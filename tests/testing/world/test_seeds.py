"""The cache holds what it promises in simulated worlds, and worlds are functions of their seeds."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter

import pytest

from kvferry.testing.world.__main__ import main
from kvferry.testing.world.named import SCENARIOS
from kvferry.testing.world.running import run, worlds
from kvferry.testing.world.scenario import Action, Scenario
from kvferry.testing.world.seeds import PLACES, draw
from kvferry.testing.world.shapes import EngineShape
from kvferry.testing.world.totals import read_totals

NUM_SEEDS = 64
PER_TEST = 16


@pytest.mark.parametrize("first", range(0, NUM_SEEDS, PER_TEST))
def test_everything_holds_in_the_worlds_of_these_seeds(first, capsys):
    status = main(["--first", str(first), "--seeds", str(PER_TEST)])
    assert status == 0, capsys.readouterr().out


@pytest.mark.parametrize("name", SCENARIOS)
def test_everything_holds_in_a_scenario(name, capsys):
    assert main(["--scenario", name]) == 0, capsys.readouterr().out


FOUND = {
    "what was erased is read until the write of it is taken back": (
        *(300781, "0,1,2,3,5,6,7,9,10,11,12,13,14,15,16,17,18,19,20,22,23,24"),
    ),
    "a store in memory keeps what was erased": (76, "0,1"),
    "what a store could not delete in time stays": (210, "0,1,2,3"),
    "what was written while a store hangs is heard of too late": (
        *(2000077, "3,4,6,8,10,17,18,26,30"),
    ),
    "what was written before a store was away is heard of too late": (
        *(6002423, "0,2,3,4,5,6,7,8,13,14,16,22,23,27"),
    ),
    "an engine blames a peer for NaN of its own": (7500351, "4,7,8,17,21,23"),
    "of an idle engine, a server that lost all has no namespace to erase": (
        *(8506675, "1,10,13,19"),
    ),
    "what outlived a reset is saved once a load of it failed": (11506834, "4,5,10,14"),
    "NaN stays on a farther server": (184, "0,1,2,3,4,5,6,7,11,12,13,14,15,16,17,18,19"),
    "a client of an engine that was killed is closed by no one": (400753, "30,31,35"),
    "rule: a host offers nothing that it computed behind a failed load": (
        *(6001750, "7,38,39,43,45,46,49,53,55,56,57,58"),
    ),
    "rule: files that people remove make saves fail": (6002674, "34,35,36,37,38,39,40"),
    "rule: an idle engine hears with its next request that a write ended": (
        *(6002509, "0,1,2,4,5,7,8"),
    ),
    "rule: what was refused stays on a server that was away": (8000188, "0,1,2,4,5,7,8,9"),
    "rule: what was refused is saved again": (9001856, "0,2,3"),
    "rule: an operator erases again after a server lost all": (7501039, "7,14,16,18"),
    "rule: what a request that lost a load computes may not be counted": (
        *(10502851, "2,4,6,7,8"),
    ),
}
"""What worlds have found, in kvferry or in their own rules, and what shows it."""


@pytest.mark.parametrize(("seed", "kept"), FOUND.values(), ids=FOUND)
def test_what_worlds_have_found_stays_mended(seed, kept, capsys):
    assert main(["--seed", str(seed), "--keep", kept]) == 0, capsys.readouterr().out


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


def test_what_scenarios_break_is_there():
    shape = EngineShape(name="a", tiers=("sim://m0/kv",), strict=False)
    actions = tuple(Action(1.0, "break_at", ("a", place, 1 << 30)) for place in PLACES)
    scenario = Scenario(seed=0, engines=(shape,), media={"m0": None}, actions=actions)
    with worlds() as seam:
        assert run(scenario, seam).failure is None


def test_runs_add_up_in_a_file(tmp_path, capsys):
    file = tmp_path / "totals.json"
    for _ in range(2):
        assert main(["--seeds", "2", "--totals", str(file)]) == 0
    capsys.readouterr()
    totals = read_totals(file)
    with worlds() as seam:
        lived = [run(draw(seed), seam) for seed in range(4)]
    assert totals.ranges == [(0, 4)]
    assert totals.scenarios == 4
    assert totals.happened == sum((each.happened for each in lived), Counter())
    assert totals.virtual_hours == pytest.approx(sum(each.seconds for each in lived) / 3600)
    with pytest.raises(SystemExit) as ended:
        main(["--first", "3", "--totals", str(file)])
    assert ended.value.code == 2
    assert "has that seed" in capsys.readouterr().err
    assert read_totals(file) == totals


def test_a_file_that_has_no_totals_is_one_line(tmp_path, capsys):
    file = tmp_path / "totals.json"
    for content in ('{"scenarios": "many"}', "none", '{"other": 1}'):
        file.write_text(content)
        with pytest.raises(SystemExit) as ended:
            main(["--totals", str(file)])
        assert ended.value.code == 2
        assert capsys.readouterr().err.count("\n") == 1
        assert file.read_text() == content


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


def test_a_wrong_record_on_a_server_ends_the_world_although_clients_errors_are_caught(monkeypatch):
    monkeypatch.setattr("kvferry.testing.world.truth.payload_of", lambda content: b"none")
    with worlds() as seam:
        failure = run(SCENARIOS["restart"], seam).failure
    assert failure is not None
    assert str(failure).startswith("wrong record: m0 has wrong KV")

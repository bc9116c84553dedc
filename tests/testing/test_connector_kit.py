"""The conformance kit finds bugs, survives connectors that do not, and finds none in ours."""

from __future__ import annotations

import json
import subprocess
import sys
from xml.etree import ElementTree

import pytest

from kvferry.testing.connector import RULES
from kvferry.testing.connector.__main__ import main
from kvferry.testing.connector.content import EMPTIED
from kvferry.testing.connector.lab import Lab, write_models
from kvferry.testing.connector.own_host import OwnHost
from kvferry.testing.connector.runner import CaseOutcome, Limits, Runner, Target
from kvferry.testing.connector.suite import ConnectorTests
from tests.testing import public_bugs
from tests.testing.seeded import OPTIONS, SEEDED, Ours

RULE = {rule.name: rule for rule in RULES}
SECONDS = 240
COMMAND = [sys.executable, "-m", "kvferry.testing.connector"]


PATIENT = Limits(part=240.0, patience=60.0)
"""Nothing that these look for is ever missed, so waiting for it costs nothing."""


class TestOurs(ConnectorTests):
    connector = "tests.testing.seeded:Ours"
    options = OPTIONS


class TestPlain(ConnectorTests):
    """The connector that bugs are made of has none itself."""

    connector = "tests.testing.plain:Plain"
    options = public_bugs.OPTIONS
    limits = Limits(part=300.0, patience=2.0)


def run_seeded(name: str, case: str, limits: Limits):
    module, options = "seeded", OPTIONS
    if hasattr(public_bugs, name):
        module, options = "public_bugs", public_bugs.OPTIONS
    with Runner(Target(f"tests.testing.{module}", name, options), 0, limits) as runner:
        return runner.run_case(RULE[case])


HANG = {
    "Hangs", "NeverShutsDown", "AsksAgainForEver", "NeverReportsTheEnd",
    "ForgetsLoadsOfEndedRequests", "KeepsBlocksOfAbortedLoads", "KeepsBlocksOfWaitingRequests",
    "LoadsInSteppedForwardsOnly",
}  # fmt: skip
MISS = {
    "AnswersNegativeCounts", "EndsWithinABlock", "IgnoresItsRank", "LosesTheLastBlock",
    "MatchesWholePromptsOnly", "SeesFirstChunksOnly", "StoresInMemory", "StoresNothing",
    "KeysByPythonsHash", "OnlyRankZeroSaves",
}  # fmt: skip
"""They show by a miss: no need to wait long for a hit."""


@pytest.mark.parametrize(("name", "case"), [*SEEDED.items(), *public_bugs.FOUND.items()])
def test_a_seeded_bug_is_found(name, case):
    limits = Limits(5.0, 1.0, 800) if name in HANG else PATIENT
    if name in MISS:
        limits = limits._replace(patience=1.0, steps=800)
    outcome = run_seeded(name, case, limits)
    assert not RULE[case].is_kept(outcome.verdict), outcome
    assert (outcome.verdict == "hangs") == (name in HANG) or name == "IgnoresItsRank", outcome


@pytest.mark.parametrize("name", ["EndsTheProcess", "Crashes", "EatsMemory"])
def test_the_next_case_runs_whatever_a_class_does(name):
    found: list[CaseOutcome] = []
    rules = [RULE[case] for case in ("starts", "reuse", "salt")]
    with Runner(Target("tests.testing.seeded", name, OPTIONS), limits=PATIENT) as runner:
        runner.run(rules, lambda _rule, outcome: found.append(outcome))
    assert [each.verdict for each in found] == ["right", "engine dead", "engine dead"], found


@pytest.mark.parametrize("name", ["SkipsTheLastLayer", "AppendsBlocksOfResumedRequests"])
def test_what_is_found_is_the_same_twice_and_names_token_layer_and_head(name):
    once, twice = (run_seeded(name, SEEDED[name], PATIENT) for _ in range(2))
    assert once == twice
    assert "token" in once.detail
    assert "layer" in once.detail
    assert "head" in once.detail


@pytest.fixture
def lab(tmp_path):
    (tmp_path / "models").mkdir()
    write_models(tmp_path / "models")
    lab = Lab(Ours, OPTIONS, OwnHost, tmp_path, tmp_path / "models", 0, 0, 60.0)
    yield lab
    lab.close()


def values(host, blocks):
    [memory] = host.memories
    return {float(x) for kv in memory.tensors.values() for x in kv[sorted(blocks)].unique()}


def test_blocks_that_are_promised_hold_nothing_until_they_are_loaded(lab):
    host = lab.start()
    stored = lab.store_prompt(lab.ask(69))
    seen = []
    host.after_promise = lambda: seen.append(values(host, *host.promised.values()))
    lab.expect(lab.again(stored), 64)
    assert seen == [{EMPTIED}]


def test_blocks_that_a_request_lost_are_overwritten_in_the_next_step(lab):
    host = lab.start()
    row = host.add(lab.ask(69, max_tokens=9))
    host.step(3)
    host.preempt()
    lost = host.lost
    assert len(lost) == 5
    host.abort(row)  # else it gets the same blocks again
    host.step()
    assert values(host, lost) == {EMPTIED}


def test_names_of_rules_are_unique_and_each_says_what_it_expects_and_where_from():
    assert len(RULE) == len(RULES) > 50
    for rule in RULES:
        assert rule.expects.endswith("."), rule
        assert rule.source, rule


def test_the_command_reports_in_words_in_json_and_for_junit(tmp_path):
    files = tmp_path / "report.json", tmp_path / "report.xml"
    done = subprocess.run([
        *COMMAND, "tests.testing.seeded:Crashes", "--config", json.dumps(OPTIONS), "--seed", "3",
        "--case", "starts", "--case", "reuse", "--json", str(files[0]), "--junit", str(files[1]),
    ], capture_output=True, text=True, timeout=SECONDS, check=False)  # fmt: skip
    assert done.returncode == 1, done.stderr
    assert "1 rules kept, 1 broken, 0 not run here" in done.stdout
    report = json.loads(files[0].read_text())
    assert [case["verdict"] for case in report["cases"]] == ["right", "engine dead"]
    replay = report["cases"][1]["replay"]
    assert replay in done.stdout
    assert replay.endswith("--seed 3 --case reuse")
    suite = ElementTree.parse(files[1]).getroot()
    assert [len(case) for case in suite] == [0, 1]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["seeded"], "names no class; write MODULE:CLASS"),
        (["nowhere:Class"], "No module named 'nowhere'"),
        (["json:JSONDecoder"], "is no V1 connector"),
        (["tests.testing.seeded:Nothing"], "has no Nothing"),
        (["a:B", "--config", "{"], "--config is no JSON"),
        (["a:B", "--config", "[]"], "must be a JSON object"),
        (["a:B", "--seed", "-1"], "there is no seed '-1'"),
        (["a:B", "--case", "resue"], "did you mean 'reuse'?"),
        (["tests.testing.seeded:NeedsADevice"], "no CUDA device"),
    ],
)
def test_input_that_cannot_be_used_costs_one_line(words, said, capfd):
    assert main(words) == 2
    out, err = capfd.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert said in err

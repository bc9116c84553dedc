"""The conformance kit finds bugs, survives connectors that do not, and finds none in ours."""

from __future__ import annotations

import json
import subprocess
import sys
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from xml.etree import ElementTree

import pytest

from kvferry.testing.connector import QUICK, RULES
from kvferry.testing.connector.__main__ import _add, _summarise, main
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
    limits = Limits(part=300.0, patience=1.0)


def run_seeded(name: str, case: str, limits: Limits):
    module, options = "seeded", OPTIONS
    if hasattr(public_bugs, name):
        module, options = "public_bugs", public_bugs.OPTIONS
    with Runner(Target(f"tests.testing.{module}", name, options), 0, limits) as runner:
        return runner.run_case(RULE[case])


HANG = {
    "Hangs", "NeverShutsDown", "AsksAgainForEver", "NeverReportsTheEnd",
    "ForgetsLoadsOfEndedRequests", "KeepsBlocksOfAbortedLoads", "KeepsBlocksOfWaitingRequests",
    "LoadsInSteppedForwardsOnly", "NeverFreesBlocks",
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


def run_command(*words: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [*COMMAND, *words], capture_output=True, text=True, timeout=SECONDS, check=False
    )


def test_the_command_reports_in_words_in_json_and_for_junit(tmp_path):
    files = tmp_path / "report.json", tmp_path / "report.xml"
    names = "starts", "full-pool", "salt", "reuse"
    cases = [word for name in names for word in ("--case", name)]
    done = run_command(
        "tests.testing.seeded:Crashes", "--config", json.dumps(OPTIONS), "--seed", "3",
        "--known", "starts", "--known", "full-pool", *cases, "--json", str(files[0]),
        "--junit", str(files[1]),
    )  # fmt: skip
    assert done.returncode == 1, done.stderr
    assert "on kvferry.v1 (the embedded engine of kvferry " in done.stdout.splitlines()[0]
    assert "starts is kept again: take --known starts out" in done.stdout
    assert "1 rules kept, 3 broken, 1 known to be, 0 not run here" in done.stdout
    again = done.stdout.partition("-- broken")[2]
    assert again.index("reuse") < again.index("salt")
    assert "full-pool" not in again
    report = json.loads(files[0].read_text())
    assert [case["verdict"] for case in report["cases"]] == ["right", *["engine dead"] * 3]
    assert report["host"].startswith("kvferry.v1")
    replay = report["cases"][1]["replay"]
    assert replay in done.stdout
    assert replay.endswith("--seed 3 --case reuse")
    suite = ElementTree.parse(files[1]).getroot()
    assert [[part.tag for part in case] for case in suite] == [
        [], ["failure"], ["skipped"], ["failure"],
    ]  # fmt: skip
    assert {name: suite.get(name) for name in ("tests", "failures", "errors", "skipped")} == {
        "tests": "4", "failures": "2", "errors": "0", "skipped": "1",
    }  # fmt: skip
    seconds = [float(case.get("time")) for case in suite]
    assert min(seconds) > 0
    assert float(suite.get("time")) == pytest.approx(sum(seconds), abs=0.01)


def test_broken_rules_are_repeated_with_the_narrow_ones_first():
    report = {"cases": []}
    outcome = CaseOutcome("wrong", "a detail")
    for name in ("random-walk", "full-pool", "flipped", "preempted"):
        _add({"connector": "m:C", "options": {}, "seed": 0, **report}, (), RULE[name], outcome)
    with redirect_stdout(StringIO()) as out:
        assert not _summarise(report, 0)
    _, *lines, _ = out.getvalue().splitlines()
    assert [line.split()[1] for line in lines] == [
        "preempted", "flipped", "random-walk", "full-pool",
    ]  # fmt: skip


@pytest.mark.slow
def test_where_blocks_are_never_freed_the_verdict_comes_first_and_the_rest_is_not_tried():
    words = (
        "tests.testing.public_bugs:NeverFreesBlocks",
        "--config",
        json.dumps(public_bugs.OPTIONS),
    )
    done = run_command(*words)
    assert done.returncode == 1, done.stderr
    first = next(
        line for line in done.stdout.splitlines() if not line.startswith(("right", "--", "tests."))
    )
    assert first.split()[:2] == ["hangs", "reuse"]
    assert "blocks of ended requests are never freed" in first
    assert f"{len(RULES) - 2} rules not tried" in done.stdout


def test_once_a_case_has_hung_later_ones_get_less_time():
    target = Target("tests.testing.public_bugs", "NeverFreesBlocks", public_bugs.OPTIONS)
    limits = Limits(steps=300)
    with Runner(target, limits=limits) as runner:
        found: list[CaseOutcome] = []
        rules = [RULE[case] for case in ("starts", "reuse", "salt")]
        runner.run(rules, lambda _rule, outcome: found.append(outcome), jobs=1)
        assert runner._limits == limits.after_a_hang(runner.seconds["starts"])
    assert [each.verdict for each in found] == ["right", "hangs", "hangs"]
    assert Limits(part=60.0).after_a_hang(2.0) == Limits(part=16.0, steps=1_500)


def test_what_is_known_to_be_broken_fails_no_run():
    words = "tests.testing.seeded:LooksAtFiles", "--config", json.dumps(OPTIONS)
    cases = "--case", "salt", "--case", "quick-look-ups"
    done = run_command(*words, *cases, "--known", "quick-look-ups")
    assert done.returncode == 0, done.stderr
    assert "1 rules kept, 1 broken, 1 known to be, 0 not run here" in done.stdout


def test_rules_are_listed_with_the_quick_ones_marked(capsys):
    with pytest.raises(SystemExit) as end:
        main(["--list"])
    assert end.value.code == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == [rule.name for rule in RULES]
    assert tuple(line.split()[0] for line in lines if " quick " in line) == QUICK
    assert all(line.endswith(".") for line in lines)


def test_a_bug_that_no_case_finds_is_named_in_the_docs():
    page = (Path(__file__).parents[2] / "docs/conformance.md").read_text(encoding="utf-8")
    for name in public_bugs.MISSED:
        assert f"`{name}`" in page, name
    assert f"Each of {len(RULES)} rules" in page
    num_bugs = len(SEEDED) + len(public_bugs.FOUND) + len(public_bugs.MISSED)
    assert f"{num_bugs} bugs are seeded" in page
    assert f"{len(QUICK)} narrow rules" in page


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
        (["a:B", "--known", "slat"], "did you mean 'salt'?"),
        (["a:B", "--jobs", "0"], "--jobs 0: 1 to 256 cases"),
        (["a:B", "--quick", "--case", "salt"], "--quick and --case exclude each other"),
        (["tests.testing.seeded:NeedsADevice"], "no CUDA device"),
    ],
)
def test_input_that_cannot_be_used_costs_one_line(words, said, capfd):
    assert main(words) == 2
    out, err = capfd.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert said in err

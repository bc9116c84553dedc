"""The command `python -m kvferry.testing.connector`."""

from __future__ import annotations

import argparse
import json
import platform
import shlex
import sys
from difflib import get_close_matches
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from kvferry.errors import ConfigError
from kvferry.testing.connector import RULES
from kvferry.testing.connector.rules import Rule
from kvferry.testing.connector.runner import CaseOutcome, Runner, Target

COMMAND = "python -m kvferry.testing.connector"


def _versions(module: str) -> dict[str, str]:
    """What decides a run's results: the package of the connector, and the host."""
    packages = metadata.packages_distributions()
    names = {name for root in (module.partition(".")[0], "vllm") for name in packages.get(root, ())}
    found = {name: metadata.version(name) for name in sorted(names)}
    return found | {"Python": platform.python_version()}


def _begin(target: Target, seed: int) -> dict[str, Any]:
    """The report of a run, without cases."""
    name, versions = f"{target.module}:{target.name}", _versions(target.module)
    said = ", ".join(f"{name} {version}" for name, version in versions.items())
    print(f"{name}, seed {seed}, {said}")
    options = target.options
    return {"connector": name, "options": options, "seed": seed, "versions": versions, "cases": []}


def _add(report: dict[str, Any], rule: Rule, outcome: CaseOutcome) -> None:
    """Add a case to the report, and print it, with the command that runs it again."""
    config = ["--config", json.dumps(report["options"])] if report["options"] else []
    words = [report["connector"], *config, "--seed", str(report["seed"]), "--case", rule.name]
    replay, kept = f"{COMMAND} {shlex.join(words)}", rule.is_kept(outcome.verdict)
    said = {"chapter": rule.chapter, "expects": rule.expects, "source": rule.source}
    case = {"name": rule.name, **outcome._asdict(), "kept": kept, **said, "replay": replay}
    if not report["cases"] or report["cases"][-1]["chapter"] != rule.chapter:
        print(f"-- {rule.chapter}")
    report["cases"].append(case)
    print(f"{outcome.verdict:11} {rule.name:22} {outcome.detail}".rstrip())
    for note in outcome.notes:
        print(f"{'':34} {note}")
    if not kept:
        print(f"{'':11}   rule:   {rule.expects} [{rule.source}]")
        print(f"{'':11}   replay: {replay}", flush=True)


def _as_junit(cases: list[dict[str, Any]]) -> str:
    suite = ElementTree.Element("testsuite", name="kvferry.testing.connector")
    for case in cases:
        names = {"classname": case["chapter"], "name": case["name"]}
        element = ElementTree.SubElement(suite, "testcase", names)
        message = f"{case['verdict']}: {case['detail']}"
        if case["verdict"] == "not run":
            ElementTree.SubElement(element, "skipped", message=message)
        elif not case["kept"]:
            failure = ElementTree.SubElement(element, "failure", message=message)
            failure.text = f"{case['expects']} [{case['source']}]\n{case['replay']}"
    return ElementTree.tostring(suite, encoding="unicode")


def _arguments(words: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog=COMMAND, description=(__doc__ or "").strip())
    parser.add_argument("connector", metavar="MODULE:CLASS", help="the V1 connector class")
    parser.add_argument("--config", metavar="JSON", default="{}", help="the connector's options; "
                        "{dir} in them stands for a fresh directory")  # fmt: skip
    parser.add_argument("--seed", metavar="N", default="0", help="decides prompts and schedules")
    parser.add_argument("--case", metavar="NAME", action="append", help="run this case alone")
    parser.add_argument("--json", metavar="FILE", type=Path, help="write the report as JSON")
    parser.add_argument("--junit", metavar="FILE", type=Path, help="write it for JUnit's readers")
    return parser.parse_args(words)


def _read(given: argparse.Namespace) -> tuple[Target, int, list[Rule]]:
    """Raises ConfigError for input that cannot be used."""
    module, _, name = given.connector.partition(":")
    if not module or not name.isidentifier():
        raise ConfigError(f"{given.connector!r} names no class; write MODULE:CLASS")
    try:
        options = json.loads(given.config)
    except ValueError as error:
        raise ConfigError(f"--config is no JSON: {error}") from error
    if not isinstance(options, dict):
        raise ConfigError('--config must be a JSON object, such as \'{"path": "{dir}"}\'')
    if not given.seed.isdecimal() or int(given.seed) >= 1 << 32:
        raise ConfigError(f"there is no seed {given.seed!r}; seeds are 0 to {(1 << 32) - 1}")
    rules = {rule.name: rule for rule in RULES}
    for each in given.case or ():
        if each not in rules:
            near = get_close_matches(each, rules, 1) or ["reuse"]
            raise ConfigError(f"there is no case {each!r}; did you mean {near[0]!r}?")
    chosen = [rules[each] for each in given.case or rules]
    return Target(module, name, options), int(given.seed), chosen


def main(words: list[str]) -> int:
    """Run the command; return its exit status: 0 if all rules are kept, 1 if not, 2 for input that
    cannot be used, or a connector that does not start here."""
    given = _arguments(words)
    try:
        target, seed, rules = _read(given)
        with Runner(target, seed) as runner:
            started = runner.run_case(RULES[0])
            if started.verdict == "refused":
                raise ConfigError(f"{target.name} does not start here: {started.detail}")
            report = _begin(target, seed)
            if RULES[0] in rules or started.verdict != "right":
                _add(report, RULES[0], started)
            if started.verdict == "right":
                rest = [rule for rule in rules if rule is not RULES[0]]
                runner.run(rest, partial(_add, report))
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if given.json:
        given.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    if given.junit:
        given.junit.write_text(_as_junit(report["cases"]), encoding="utf-8")
    skipped = sum(case["verdict"] == "not run" for case in report["cases"])
    broken = sum(not case["kept"] for case in report["cases"])
    kept = len(report["cases"]) - broken - skipped
    print(f"{kept} rules kept, {broken} broken, {skipped} not run here")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

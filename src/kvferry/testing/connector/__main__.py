"""The command `python -m kvferry.testing.connector`."""

from __future__ import annotations

import argparse
import json
import os
import platform
import shlex
import sys
from collections.abc import Sequence
from difflib import get_close_matches
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any, NoReturn
from xml.etree import ElementTree

from kvferry.errors import ConfigError
from kvferry.testing.connector import QUICK, RULES
from kvferry.testing.connector.rules import Rule
from kvferry.testing.connector.runner import CaseOutcome, Runner, Target

COMMAND = "python -m kvferry.testing.connector"
BASE = "reuse"
"""The rule on which all but `starts` rest: where it hangs, they do."""

HELP = """Try a V1 KV connector on made-up KV, without a GPU, a server or a model. The host is
vLLM's own scheduler for a class that inherits from vLLM's base class, and that of kvferry's
embedded engine for one that was written for kvferry.v1."""
EPILOG = """verdicts:
  right, miss (nothing reused where the rule expects it), refused (it did not start), engine dead,
  hangs, wrong (wrong KV, an illegal answer), not run (the class or the host has no such thing)

exit status:
  0  all rules are kept, or known to be broken
  1  a rule is broken that is not known to be
  2  nothing was run: no such class, no device for it, wrong options; one line says why

example:
  python -m kvferry.testing.connector my_package.connector:MyConnector \\
      --config '{"path": "{dir}"}' --quick --known quiet --junit report.xml

docs/conformance.md says how to read a verdict."""


def _versions(module: str) -> dict[str, str]:
    """What decides a run's results: the package of the connector, and the host."""
    packages = metadata.packages_distributions()
    names = {name for root in (module.partition(".")[0], "vllm") for name in packages.get(root, ())}
    found = {name: metadata.version(name) for name in sorted(names)}
    return found | {"Python": platform.python_version()}


def _begin(target: Target, seed: int, host: str) -> dict[str, Any]:
    """The report of a run, without cases."""
    name, versions = f"{target.module}:{target.name}", _versions(target.module)
    said = ", ".join(f"{name} {version}" for name, version in versions.items())
    print(f"{name}, seed {seed}, on {host or 'no host'}; installed: {said}")
    return {"connector": name, "options": target.options, "seed": seed, "host": host,
            "versions": versions, "cases": []}  # fmt: skip


def _add(report: dict[str, Any], known: Sequence[str], rule: Rule, outcome: CaseOutcome) -> None:
    """Add a case to the report, and print it, with the command that runs it again."""
    config = ["--config", json.dumps(report["options"])] if report["options"] else []
    words = [report["connector"], *config, "--seed", str(report["seed"]), "--case", rule.name]
    replay, kept = f"{COMMAND} {shlex.join(words)}", rule.is_kept(outcome.verdict)
    said = {"chapter": rule.chapter, "expects": rule.expects, "source": rule.source}
    case = {"name": rule.name, **outcome._asdict(), "kept": kept, "known": rule.name in known,
            **said, "replay": replay}  # fmt: skip
    if not report["cases"] or report["cases"][-1]["chapter"] != rule.chapter:
        print(f"-- {rule.chapter}")
    report["cases"].append(case)
    print(f"{outcome.verdict:11} {rule.name:28} {outcome.detail}".rstrip())
    for note in outcome.notes:
        print(f"{'':40} {note}")
    if not kept:
        print(f"{'':11}   rule:   {rule.expects} [{rule.source}]")
        print(f"{'':11}   replay: {replay}")
    sys.stdout.flush()


def _summarise(report: dict[str, Any], untried: int) -> bool:
    """Print what is broken once more, narrow rules first, and the counts. Return whether every
    broken rule is known."""
    cases = {case["name"]: case for case in report["cases"]}
    broken = [rule for rule in RULES if rule.name in cases and not cases[rule.name]["kept"]]
    new = [rule for rule in broken if not cases[rule.name]["known"]]
    if new:
        print("-- broken, narrow rules first: these name one cause each")
    for rule in sorted(new, key=lambda rule: rule.wide):
        case = cases[rule.name]
        print(f"{case['verdict']:11} {rule.name:28} {case['detail']}".rstrip())
    for name, case in cases.items():
        if case["known"] and case["verdict"] == "right":
            print(f"{name} is kept again: take --known {name} out")
    skipped = sum(case["verdict"] == "not run" for case in cases.values())
    kept = len(cases) - len(broken) - skipped
    more = f", {len(broken) - len(new)} known to be" if len(new) < len(broken) else ""
    print(f"{kept} rules kept, {len(broken)} broken{more}, {skipped} not run here")
    if untried:
        print(f"{untried} rules not tried: they rest on {BASE}, which hangs; --case NAME tries one")
    return not new


def _as_junit(cases: list[dict[str, Any]], seconds: dict[str, float]) -> str:
    skipped = sum(case["verdict"] == "not run" for case in cases)
    failures = sum(not case["kept"] and not case["known"] for case in cases)
    took = {case["name"]: seconds.get(case["name"], 0.0) for case in cases}
    known = sum(not case["kept"] and case["known"] for case in cases)
    counts = {"tests": len(cases), "failures": failures, "errors": 0, "skipped": skipped + known}
    says = {"name": "kvferry.testing.connector", "time": f"{sum(took.values()):.3f}"}
    suite = ElementTree.Element("testsuite", says | {k: str(v) for k, v in counts.items()})
    for case in cases:
        names = {"classname": case["chapter"], "name": case["name"]}
        element = ElementTree.SubElement(suite, "testcase", names, time=f"{took[case['name']]:.3f}")
        message = f"{case['verdict']}: {case['detail']}"
        if case["verdict"] == "not run":
            ElementTree.SubElement(element, "skipped", message=message)
        elif not case["kept"] and case["known"]:
            ElementTree.SubElement(element, "skipped", message=f"known to be broken: {message}")
        elif not case["kept"]:
            failure = ElementTree.SubElement(element, "failure", message=message)
            failure.text = f"{case['expects']} [{case['source']}]\n{case['replay']}"
    return ElementTree.tostring(suite, encoding="unicode")


class _List(argparse.Action):
    """Print the rules, and end."""

    def __call__(self, *_: object, **__: object) -> NoReturn:
        for rule in RULES:
            quick = "quick" if rule.name in QUICK else ""
            print(f"{rule.name:28} {rule.chapter:10} {quick:6} {rule.expects}")
        sys.exit(0)


def _arguments(words: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog=COMMAND, description=HELP, epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    add = parser.add_argument
    add("connector", metavar="MODULE:CLASS", help="the V1 connector class")
    add("--config", metavar="JSON", default="{}", help="the connector's own options; {dir} in them "
        "stands for a fresh directory, which the kit also damages")  # fmt: skip
    add("--seed", metavar="N", default="0", help="decides the tokens of prompts, and which requests"
        " come, end and are preempted when (default: 0)")  # fmt: skip
    add("--list", action=_List, nargs=0, help="list the rules: name, chapter, sentence")
    add("--case", metavar="NAME", action="append", help="try this rule alone; may be repeated")
    add("--quick", action="store_true", help=f"try the {len(QUICK)} rules for each push alone")
    add("--known", metavar="NAME", action="append", default=[], help="this rule is known to be "
        "broken, and fails no run; may be repeated")  # fmt: skip
    add("--jobs", metavar="N", default=str(max(2, os.cpu_count() or 2)), help="cases side by side "
        "(default: one for each processor, at least 2)")  # fmt: skip
    add("--json", metavar="FILE", type=Path, help="write the report as JSON")
    add("--junit", metavar="FILE", type=Path, help="write it for JUnit's readers")
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
    if not given.jobs.isdecimal() or not 1 <= int(given.jobs) <= 256:
        raise ConfigError(f"--jobs {given.jobs}: 1 to 256 cases side by side")
    if given.quick and given.case:
        raise ConfigError("--quick and --case exclude each other")
    rules = {rule.name: rule for rule in RULES}
    for each in (*(given.case or ()), *given.known):
        if each not in rules:
            near = get_close_matches(each, rules, 1) or ["reuse"]
            raise ConfigError(f"there is no case {each!r}; did you mean {near[0]!r}?")
    names = QUICK if given.quick else given.case or rules
    chosen = [rules[each] for each in dict.fromkeys(names)]
    return Target(module, name, options), int(given.seed), chosen


def main(words: list[str]) -> int:
    """Run the command; return its exit status, see `EPILOG`."""
    given, untried = _arguments(words), 0
    try:
        target, seed, rules = _read(given)
        with Runner(target, seed) as runner:
            started = runner.run_case(RULES[0])
            if started.verdict == "refused":
                raise ConfigError(f"{target.name} does not start here: {started.detail}")
            report = _begin(target, seed, runner.host)
            add = partial(_add, report, given.known)
            if RULES[0] in rules or started.verdict != "right":
                add(RULES[0], started)
            if started.verdict == "right":
                rest = [rule for rule in rules if rule is not RULES[0]]
                # An early verdict: nothing else can be seen where this one has no end.
                first = [rule for rule in rest if rule.name == BASE]
                runner.run(first, add)
                hangs = any(case["verdict"] == "hangs" and not case["known"]
                            for case in report["cases"])  # fmt: skip
                rest = [rule for rule in rest if rule not in first]
                untried, rest = (len(rest), []) if hangs else (0, rest)
                runner.run(rest, add, int(given.jobs))
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if given.json:
        given.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    if given.junit:
        given.junit.write_text(_as_junit(report["cases"], runner.seconds), encoding="utf-8")
    return 0 if _summarise(report, untried) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""The command `python -m kvferry.testing.connector`."""

from __future__ import annotations

import argparse
import json
import platform
import shlex
import sys
from difflib import get_close_matches
from importlib import metadata
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from kvferry.errors import ConfigError
from kvferry.testing.connector import RULES
from kvferry.testing.connector.rules import Rule
from kvferry.testing.connector.runner import CaseOutcome, Runner, Target

COMMAND = "python -m kvferry.testing.connector"


class CaseReport:
    """Prints outcomes as they come, and writes them as files."""

    def __init__(self, target: Target, seed: int) -> None:
        self._target, self._seed = target, seed
        self._found: list[tuple[Rule, CaseOutcome]] = []
        self.versions = versions(target.module)
        said = ", ".join(f"{name} {version}" for name, version in self.versions.items())
        print(f"{target.module}:{target.name}, seed {seed}, {said}")

    def replay(self, rule: Rule) -> str:
        """The command that runs one case again."""
        words = [f"{self._target.module}:{self._target.name}"]
        if self._target.options:
            words += ["--config", json.dumps(self._target.options)]
        return f"{COMMAND} {shlex.join([*words, '--seed', str(self._seed), '--case', rule.name])}"

    def add(self, rule: Rule, outcome: CaseOutcome) -> None:
        self._found.append((rule, outcome))
        print(f"{outcome.verdict:11} {rule.name:22} {outcome.detail}".rstrip())
        for note in outcome.notes:
            print(f"{'':11} {'':22} {note}")
        if not rule.is_kept(outcome.verdict):
            print(f"{'':11}   rule:   {rule.expects} [{rule.source}]")
            print(f"{'':11}   replay: {self.replay(rule)}", flush=True)

    def end(self) -> int:
        """Print the sum; return the exit status."""
        broken = [rule.name for rule, outcome in self._found if not rule.is_kept(outcome.verdict)]
        skipped = sum(outcome.verdict == "not run" for _, outcome in self._found)
        kept = len(self._found) - len(broken) - skipped
        print(f"{kept} rules kept, {len(broken)} broken, {skipped} not run here")
        return 1 if broken else 0

    def as_json(self) -> dict[str, Any]:
        return {
            "connector": f"{self._target.module}:{self._target.name}",
            "options": self._target.options,
            "seed": self._seed,
            "versions": self.versions,
            "cases": [
                {
                    "name": rule.name, "chapter": rule.chapter, "verdict": outcome.verdict,
                    "kept": rule.is_kept(outcome.verdict), "detail": outcome.detail,
                    "notes": list(outcome.notes), "expects": rule.expects, "source": rule.source,
                    "replay": self.replay(rule),
                }
                for rule, outcome in self._found
            ],
        }  # fmt: skip

    def as_junit(self) -> str:
        suite = ElementTree.Element("testsuite", name="kvferry.testing.connector")
        for rule, outcome in self._found:
            names = {"classname": rule.chapter, "name": rule.name}
            case = ElementTree.SubElement(suite, "testcase", names)
            message = f"{outcome.verdict}: {outcome.detail}"
            if outcome.verdict == "not run":
                ElementTree.SubElement(case, "skipped", message=message)
            elif not rule.is_kept(outcome.verdict):
                failure = ElementTree.SubElement(case, "failure", message=message)
                failure.text = f"{rule.expects} [{rule.source}]\n{self.replay(rule)}"
        return ElementTree.tostring(suite, encoding="unicode")


def versions(module: str) -> dict[str, str]:
    """What decides a run's results: the package of the connector, and the host."""
    packages = metadata.packages_distributions()
    names = {name for root in (module.partition(".")[0], "vllm") for name in packages.get(root, ())}
    found = {name: metadata.version(name) for name in sorted(names)}
    return found | {"Python": platform.python_version()}


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
    chosen = [rules[each] for each in given.case] if given.case else RULES
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
            report = CaseReport(target, seed)
            if RULES[0] in rules or started.verdict != "right":
                report.add(RULES[0], started)
            if started.verdict == "right":
                runner.run([rule for rule in rules if rule is not RULES[0]], report.add)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if given.json:
        given.json.write_text(json.dumps(report.as_json(), indent=1) + "\n", encoding="utf-8")
    if given.junit:
        given.junit.write_text(report.as_junit(), encoding="utf-8")
    return report.end()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""The kit as tests of pytest."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar

import pytest

from kvferry.testing.connector import RULES
from kvferry.testing.connector.rules import Rule
from kvferry.testing.connector.runner import Limits, Runner, Target


class ConnectorTests:
    """One test for each rule. Inherit from it in a test module, as `TestMyConnector`.

    Attributes:
        connector: "module:Class"; `options` are its own, with `{dir}` for a fresh directory.
        seed: decides prompts and schedules.
        known: reasons, by rule, why it is broken; a rule that is kept after all fails the test.
    """

    connector: ClassVar[str]
    options: ClassVar[dict[str, Any]] = {}
    seed: ClassVar[int] = 0
    limits: ClassVar[Limits] = Limits(part=300.0, patience=8.0, for_misses=2.0)
    known: ClassVar[dict[str, str]] = {}

    @pytest.fixture(scope="class")
    @classmethod
    def runner(cls) -> Iterator[Runner]:
        module, _, name = cls.connector.partition(":")
        with Runner(Target(module, name, cls.options), cls.seed, cls.limits) as runner:
            yield runner

    @pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
    def test_rule(self, runner: Runner, rule: Rule) -> None:
        outcome = runner.run_case(rule)
        said = f"{rule.expects} [{rule.source}]\n{outcome.verdict}: {outcome.detail}"
        if outcome.verdict == "not run":
            pytest.skip(outcome.detail)
        if rule.name in self.known:
            assert not rule.is_kept(outcome.verdict), f"known to be broken, and is kept: {said}"
            pytest.xfail(f"{self.known[rule.name]}: {outcome.verdict}")
        assert rule.is_kept(outcome.verdict), said

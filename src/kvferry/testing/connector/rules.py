"""Rules: each has a name, a sentence, the place where hosts rely on it, and a case that tries it.

A case is a public function of its chapter's module, or an entry of the module's `TABLE`. Its
docstring, or the entry's text, is the rule, with the source in brackets at the end. `FLAGS` has
what else there is to say about some of the cases.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Literal

from kvferry.testing.connector.lab import Lab

Case = Callable[[Lab], None]
Changes = dict[str, Any]
Verdict = Literal["right", "miss", "refused", "engine dead", "hangs", "wrong", "not run"]


@dataclass(frozen=True, kw_only=True)
class Rule:
    """A rule and its case.

    Attributes:
        chapter: life, partition or faults.
        expects: the rule, in a sentence.
        source: where hosts rely on it, or who met it.
        may: verdicts that keep it, besides "right" and "not run".
        parts: processes that the case runs in, one after the other, over one store.
        killed: the part that ends its process.
        needs_files: whether it works on the files of the connector's store.
    """

    name: str
    chapter: str
    expects: str
    source: str
    run: Case
    may: tuple[Verdict, ...] = ()
    parts: int = 1
    killed: int | None = None
    needs_files: bool = False

    def is_kept(self, verdict: Verdict) -> bool:
        return verdict in ("right", "not run", *self.may)


def rules_of(module: ModuleType) -> list[Rule]:
    """The rules of a chapter: those of the table, then those of the functions."""
    cases = {
        name: (case.__doc__, case)
        for name, case in vars(module).items()
        if not name.startswith("_") and getattr(case, "__module__", "") == module.__name__
    }
    chapter, rules = module.__name__.rpartition(".")[2], []
    for name, (text, case) in {**module.TABLE, **cases}.items():
        found = re.fullmatch(r"(.*) \[(.*)\]", " ".join(text.split()))
        assert found is not None, f"{name} names no source"
        flags: dict[str, Any] = module.FLAGS.get(name, {})
        rule = Rule(name=name.replace("_", "-"), chapter=chapter, expects=found[1], run=case,
                    source=found[2], needs_files=chapter == "faults", **flags)  # fmt: skip
        rules.append(rule)
    return rules


# --- kinds of cases -------------------------------------------------------------------------------


def stored(*counts: int, **setup: Any) -> Case:  # noqa: ANN401
    """Prompts of these lengths are stored and reused by a host that runs so."""

    def case(lab: Lab) -> None:
        lab.start(**setup)
        for count in counts:
            lab.store_prompt(lab.ask(count))

    return case


def restarted(first: Changes, second: Changes, *, must: bool = False) -> Case:
    """A prompt is stored, and asked for by an engine that runs otherwise. If it `must`, it is
    reused."""

    def case(lab: Lab) -> None:
        lab.start(**(second if lab.part else first))
        ask = lab.ask(101)
        if lab.part == 0:
            lab.store_prompt(ask)
        elif must:
            lab.expect(ask, 96)
        elif lab.serve(ask)[0].hit:
            lab.notes.append("shared, and right")

    return case

"""Rules: each has a name, a sentence, the place where hosts rely on it, and a case that tries it.

A case is a public function of its chapter's module, or an entry of the module's `TABLE`. Its
docstring, or the entry's text, is the rule, with the source in brackets at the end.
"""

# ruff: noqa: ANN401 - fields of setups and rules

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from kvferry.testing.connector.host import Verdict
from kvferry.testing.connector.lab import Lab

Case = Callable[[Lab], object]
Table = tuple[tuple[str, str, Case], ...]
"""Name, text and case."""
Changes = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Rule:
    """A rule and its case."""

    name: str
    chapter: str  # life, partition or faults
    expects: str  # the rule, in a sentence
    source: str  # where hosts rely on it, or who met it
    run: Case
    may: tuple[Verdict, ...] = ()  # verdicts that keep it, besides "right" and "not run"
    parts: int = 1  # processes that the case runs in, one after the other, over one store
    killed: int | None = None  # the part that ends its process
    wide: bool = False  # whether many bugs break it, so that the others say more
    fresh: bool = False  # whether later parts share nothing with the first, such as hash seeds
    models: tuple[str, ...] = ()  # which of `MODELS` is at the same path, by part

    def is_kept(self, verdict: Verdict) -> bool:
        return verdict in ("right", "not run", *self.may)


def flags(**values: Any) -> Callable[[Case], Case]:
    """Give fields of `Rule` to a case."""

    def add(case: Case) -> Case:
        vars(case).update(flags=values)
        return case

    return add


def rules_of(module: ModuleType) -> list[Rule]:
    """The rules of a chapter: those of the table, then those of the functions."""
    cases = [
        (name, case.__doc__, case)
        for name, case in vars(module).items()
        if not name.startswith("_") and getattr(case, "__module__", "") == module.__name__
    ]
    chapter, rules = module.__name__.rpartition(".")[2], []
    for name, text, case in (*module.TABLE, *cases):
        found = re.fullmatch(r"(.*) \[(.*)\]", " ".join(text.split()))
        assert found is not None, f"{name} names no source"
        rule = Rule(name=name.replace("_", "-"), chapter=chapter, expects=found[1], run=case,
                    source=found[2], **vars(case).get("flags", {}))  # fmt: skip
        rules.append(rule)
    return rules


def stored(*counts: int, **setup: Any) -> Case:
    """A case: prompts of these lengths are stored and reused by an engine that runs so."""

    def case(lab: Lab) -> None:
        lab.start(**setup)
        for count in counts:
            lab.store_prompt(lab.ask(count))

    return case


def replaced(first: str, second: str) -> Case:
    """A case: a prompt is stored by an engine of one of `MODELS`, and asked for when files of the
    other one have replaced those of the first, at the same path."""

    @flags(parts=2, may=("miss", "refused"), models=(first, second))
    def case(lab: Lab) -> None:
        restarted({"model": first}, {"model": second})(lab)

    return case


def restarted(first: Changes, second: Changes, *, must: bool = False, fresh: bool = False) -> Case:
    """A case: a prompt is stored, and asked for by an engine that runs otherwise. If it `must`, it
    is reused."""

    @flags(parts=2, may=() if must else ("miss", "refused"), fresh=fresh)
    def case(lab: Lab) -> None:
        lab.start(**(second if lab.part else first))
        ask = lab.ask(101)
        if lab.part == 0:
            lab.store_prompt(ask)
        elif must:
            lab.expect(ask, 96)
        else:
            # Not at once, if a store takes time to open; but most often there is nothing to find.
            lab.host.wanted[ask.name] = 96
            lab.patience /= 2
            if lab.serve(ask)[0].hit:
                lab.notes.append("shared, and right")

    return case

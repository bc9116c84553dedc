"""Rules: each has a name, a sentence, the place where hosts rely on it, and a case that tries it.

A case is a public function of its chapter's module. Its docstring is the rule, with the source in
brackets at the end. `FLAGS` of the module has what else there is to say about some of the cases.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Literal

from kvferry.testing.connector.lab import Lab

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
    run: Callable[[Lab], None]
    may: tuple[Verdict, ...] = ()
    parts: int = 1
    killed: int | None = None
    needs_files: bool = False

    def is_kept(self, verdict: Verdict) -> bool:
        return verdict in ("right", "not run", *self.may)


def rules_of(module: ModuleType) -> list[Rule]:
    """The rules of a chapter, in the order in which their cases are written."""
    flags: dict[str, dict[str, Any]] = module.FLAGS
    rules = []
    for name, case in vars(module).items():
        if name.startswith("_") or getattr(case, "__module__", "") != module.__name__:
            continue
        found = re.fullmatch(r"(.*) \[(.*)\]", " ".join(case.__doc__.split()))
        assert found is not None, f"{name} names no source"
        chapter = module.__name__.rpartition(".")[2]
        expects, source = found.groups()
        rules.append(
            Rule(
                name=name.replace("_", "-"),
                chapter=chapter,
                expects=expects,
                source=source,
                run=case,
                needs_files=chapter == "faults",
                **flags.get(name, {}),
            )
        )
    return rules

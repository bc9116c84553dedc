"""A store answers nothing that it cannot know. One that lacks a method is no store, to mypy as at
the start (of engines and doctor: `test_kinds`). No call has a default that a composite inherits."""

from __future__ import annotations

import inspect
import subprocess
import sys
from pathlib import Path

import pytest

from kvferry.errors import ContractError
from kvferry.store.base import Store
from kvferry.store.catalogue import Catalogue
from kvferry.store.tiers.tiered import TieredStore
from kvferry.store.wrappers import WrapperStore

FOLLOWS = {
    Store: {"catalogue", "check_medium", "put_all", "values_per_put"},
    Catalogue: {"described", "namespaces", "stored"},
}
"""What is not abstract is made of what is."""


def methods(of: type) -> set[str]:
    return {
        name
        for name, value in vars(of).items()
        if name[0] != "_" and (inspect.isfunction(value) or isinstance(value, property))
    }


@pytest.mark.parametrize("of", FOLLOWS)
def test_every_call_is_abstract_or_follows_from_abstract_ones(of: type) -> None:
    assert methods(of) == of.__abstractmethods__ | FOLLOWS[of]


@pytest.mark.parametrize("composite", [TieredStore, WrapperStore])
def test_a_store_in_front_of_others_inherits_no_answer(composite: type[Store]) -> None:
    assert composite.__bases__ == (Store,)
    assert Store.__abstractmethods__ <= vars(composite).keys()


@pytest.mark.parametrize("of", FOLLOWS)
def test_one_that_lacks_a_method_cannot_be_made(of: type) -> None:
    for lacking in sorted(of.__abstractmethods__):
        others = dict.fromkeys(of.__abstractmethods__ - {lacking}, lambda *_: None)
        with pytest.raises(ContractError, match=f"^Stub lacks {lacking}$"):
            type("Stub", (of,), others)()


@pytest.mark.slow  # half a minute where mypy has no cache yet
def test_one_that_lacks_a_method_does_not_type_check(tmp_path: Path) -> None:
    """Of each method, a stub with all others; and one with all."""
    lines = ["from typing import Any", "from kvferry.store.base import Store"]
    lines += ["from kvferry.store.catalogue import Catalogue", ""]
    expected = []
    for of in FOLLOWS:
        names = sorted(of.__abstractmethods__)
        for lacking in (None, *names):
            stub = f"{of.__name__}Without_{lacking}"
            lines.append(f"class {stub}({of.__name__}):")
            lines += [f"    {name}: Any = None" for name in names if name != lacking]
            lines += [f"def make_{stub}() -> {of.__name__}:", f"    return {stub}()"]
            expected += [lacking] if lacking else []
    stub_file = tmp_path / "stub_store.py"
    stub_file.write_text("\n".join(lines) + "\n")
    ran = subprocess.run(
        [sys.executable, "-m", "mypy", "--strict", str(stub_file)],
        cwd=Path(__file__).parents[2],
        check=False,
        capture_output=True,
        text=True,
        timeout=600,
    )
    errors = [line for line in ran.stdout.splitlines() if ": error: " in line]
    assert len(errors) == len(expected), ran.stdout + ran.stderr
    for lacking, error in zip(expected, errors, strict=True):
        assert f'with abstract attribute "{lacking}"' in error

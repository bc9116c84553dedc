"""A store answers nothing that it cannot know. One that lacks a method is no store, to mypy as at
the start (of engines and doctor: `test_kinds`). No call has a default that a composite inherits.
What not every store can do touches the stores that can, and nothing in between."""

from __future__ import annotations

import importlib
import inspect
import subprocess
import sys
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TypeVar

import pytest

from kvferry.errors import ContractError, FaultKind, StoreError
from kvferry.store.base import Store
from kvferry.store.catalogue import Catalogue, Indexed
from kvferry.store.file.catalogue import FileCatalogue
from kvferry.store.file.store import FileStore
from kvferry.store.kinds import MODULES
from kvferry.store.memory import MemoryStore
from kvferry.store.tiers.tiered import TieredStore
from kvferry.testing.wrappers import WrapperStore

T = TypeVar("T")

FOLLOWS = {
    Store: {"catalogue", "check_medium", "put_all", "values_per_put"},
    Catalogue: {"described", "namespaces", "stored"},
    Indexed: set(),
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
    assert methods(of) == of.__abstractmethods__ & vars(of).keys() | FOLLOWS[of]


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


def made_from(of: type[T]) -> Iterator[type[T]]:
    for each in of.__subclasses__():
        yield each
        yield from made_from(each)


def test_no_class_of_src_hands_calls_on_by_hand() -> None:
    """A method that each store has is written for each medium, and for tiers, which decide whom to
    ask; so is one of catalogues, for those that have it. One wrapper serves all others."""
    for module in (*MODULES.values(), "kvferry.store.url"):
        importlib.import_module(module)
    ours = {
        each.__name__
        for of in (Store, Catalogue)
        for each in made_from(of)
        if each.__module__.startswith("kvferry.store.")
    }
    assert ours == {
        "FileStore", "MemoryStore", "PeerStore", "RemoteStore", "ServerStore", "SingleStore",
        "TieredStore", "WrapperStore",
        "FileCatalogue", "Indexed", "MemoryCatalogue", "RemoteCatalogue",
    }  # fmt: skip


class Counting(Catalogue):
    """An ability that some stores are to have from now on."""

    @abstractmethod
    def num_folders(self) -> int: ...


class CountingCatalogue(FileCatalogue, Counting):
    def num_folders(self) -> int:
        return 32


class CountingStore(FileStore):
    def catalogues(self) -> Sequence[Catalogue]:
        return [CountingCatalogue(self, self._faults, self._max_bytes, self._settings.wall)]


@pytest.mark.parametrize(
    "front", [lambda each: each, WrapperStore, lambda each: TieredStore([each])]
)
def test_an_ability_touches_the_stores_that_have_it_and_nothing_else(
    tmp_path: Path, front: type[Store]
) -> None:
    """Its class, and the catalogue that has it: tiers and wrappers know nothing of it, and no other
    store answers for it."""
    with front(CountingStore(tmp_path / "store")) as store:
        assert Counting.of(store, "cannot count").num_folders() == 32
        assert Indexed.of(store, "has no index").removals(1) == []
    with front(MemoryStore("x")) as store:
        assert Counting.find(store) is None
        with pytest.raises(StoreError, match=r"^memory://x cannot count$") as error:
            Counting.of(store, "cannot count")
        assert error.value.fault.kind is FaultKind.UNUSABLE
    lacking = type("Lacking", (FileCatalogue, Counting), {})
    with pytest.raises(ContractError, match=r"^Lacking lacks num_folders$"):
        lacking()


@pytest.mark.slow  # half a minute where mypy has no cache yet
def test_one_that_lacks_a_method_does_not_type_check(tmp_path: Path) -> None:
    """Of each method, a stub with all others; and one with all."""
    lines = ["from typing import Any", "from kvferry.store.base import Store"]
    lines += ["from kvferry.store.catalogue import Catalogue, Indexed", ""]
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

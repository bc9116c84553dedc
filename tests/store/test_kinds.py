"""Kinds of stores: found by scheme, also in installed packages, and told apart by trait."""

from __future__ import annotations

import ast
import importlib
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import kvferry
from kvferry.doctor import stores as doctor_stores
from kvferry.errors import ConfigError, StoreError
from kvferry.observe import Counters
from kvferry.store import kinds
from kvferry.store.base import Where
from kvferry.store.kind import Opening
from kvferry.store.url import open_one, open_store, parse_store_url
from kvferry.testing.stores import make_key, read_value
from kvferry.testing.stores.hooks import wait_until
from tests.cli.conftest import run
from tests.cli.test_doctor import found

__all__ = ["found", "run"]

SRC = Path(kvferry.__file__).parent

# -- traits ---------------------------------------------------------------------------------------

OF_STORES = ("store/servers", "store/file", "store/memory.py", "store/kinds.py")
HINTS = {
    # What is shown of a URL that cannot be parsed, and what was meant by it.
    "store/kind.py": {"file", "memory"},
    "store/url.py": {"file", "memory"},
}


def named_schemes(source: str) -> Iterator[tuple[str, int]]:
    """Schemes with which a comparison or `startswith` asks what kind a store is of."""
    for node in ast.walk(ast.parse(source)):
        asked: list[ast.expr] = []
        if isinstance(node, ast.Compare):
            asked = [node.left, *node.comparators]
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith(".startswith"):
            asked = node.args
        for each in asked:
            parts = each.elts if isinstance(each, ast.Tuple | ast.List | ast.Set) else [each]
            for part in parts:
                if isinstance(part, ast.Constant) and isinstance(part.value, str):
                    scheme = part.value.partition(":")[0]
                    if scheme in kinds.MODULES:
                        yield scheme, node.lineno


def test_no_file_but_those_of_stores_asks_for_a_scheme() -> None:
    found = []
    for path in sorted(SRC.rglob("*.py")):
        place = path.relative_to(SRC).as_posix()
        if not place.startswith(OF_STORES):
            for scheme, line in named_schemes(path.read_text("utf-8")):
                if scheme not in HINTS.get(place, ()):
                    found.append(f"{place}:{line} {scheme}")
    assert found == []


def test_what_asks_for_a_scheme_is_found() -> None:
    lines = ["a == 'file'", "b.startswith(('peer:', 'x'))", "c in ('memory',)", "d = 'file'"]
    found = list(named_schemes("\n".join(lines)))
    assert found == [("file", 1), ("peer", 2), ("memory", 3)]


# -- packages -------------------------------------------------------------------------------------

Install = Callable[..., None]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """Install a package with a module and entry points of our group, by scheme. The threads of the
    test end before its packages go: one that then asked for a kind could keep the next test's
    packages out of the cache, as `functools.cache` stores what was begun before a `cache_clear`."""
    before = set(threading.enumerate())
    site = tmp_path / "site"
    site.mkdir()
    monkeypatch.syspath_prepend(site)
    modules = []

    def make(name: str, code: str, **schemes: str) -> None:
        about = site / f"{name}-1.5.dist-info"
        about.mkdir()
        (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.5\n")
        lines = [f"{scheme} = {value}" for scheme, value in schemes.items()]
        (about / "entry_points.txt").write_text("\n".join(["[kvferry.stores]", *lines, ""]))
        (site / f"{name}.py").write_text(code)
        modules.append(name)
        importlib.invalidate_caches()
        kinds._installed.cache_clear()

    yield make
    wait_until(lambda: set(threading.enumerate()) <= before, "the threads of the test end")
    kinds._installed.cache_clear()
    for name in modules:
        sys.modules.pop(name, None)


BLOBS = """
from tests.store.toy import KIND
"""


def test_a_store_of_an_installed_package_is_opened_by_its_url(install: Install) -> None:
    install("blobs", BLOBS, blobs="blobs:KIND")
    with open_one("blobs://shelf:7/a?refuses=no", Opening(namespace=b"n" * 32)) as store:
        assert store.put(make_key(), [b"value"]).is_there
        assert read_value(store, make_key()) == b"value"
        assert store.tier_of(make_key()) == "blobs"
    with pytest.raises(ConfigError, match="unknown option 'refuse'; did you mean 'refuses'"):
        open_one("blobs://shelf?refuse=yes")
    with pytest.raises(ConfigError, match="did you mean 'blobs'"):
        parse_store_url("blob://shelf")


def test_a_package_does_not_replace_a_kind_of_ours(install: Install) -> None:
    install("blobs", BLOBS, memory="blobs:KIND")
    with open_one("memory://x") as store:
        assert type(store).__name__ == "MemoryStore"
    assert kinds.schemes() == list(kinds.MODULES)


BAD_POINTS = {
    "no module": ("", "nowhere:KIND", "nowhere:KIND of blobs 1.5 cannot be loaded: ModuleNotFound"),
    "no attribute": ("", "blobs:KIND", "blobs:KIND of blobs 1.5 cannot be loaded: AttributeError"),
    "a module": (BLOBS, "blobs", "blobs of blobs 1.5 is of type module, not a StoreKind; name"),
    "another object": (
        "KIND = 5",
        "blobs:KIND",
        "blobs:KIND of blobs 1.5 is of type int, not a StoreK",
    ),
    "a class": (
        "class KIND: ...",
        "blobs:KIND",
        "blobs:KIND of blobs 1.5 is of type type, not a S",
    ),
    "an error": (
        "raise RuntimeError('two\\nlines')",
        "blobs:KIND",
        "blobs:KIND of blobs 1.5 cannot be loaded: RuntimeError: two lines",
    ),
    "wrong syntax": ("def", "blobs:KIND", "blobs:KIND of blobs 1.5 cannot be loaded: SyntaxError"),
}


@pytest.mark.parametrize(("code", "value", "said"), BAD_POINTS.values(), ids=BAD_POINTS)
def test_a_kind_that_cannot_be_used_is_named_with_its_package(
    install: Install, found, code: str, value: str, said: str
) -> None:
    install("blobs", code, blobs=value)
    with pytest.raises(ConfigError) as refusal:
        open_store("blobs://shelf", start_seconds=1.0)
    assert str(refusal.value).startswith(said)
    assert "\n" not in str(refusal.value)
    (line,) = found("blobs://shelf")
    assert said in line
    parse_store_url("memory://others")  # work on


def test_two_packages_for_one_scheme_are_both_named(install: Install) -> None:
    install("blobs", BLOBS, blobs="blobs:KIND")
    install("others", BLOBS, blobs="others:KIND")
    with pytest.raises(ConfigError, match=r"for blobs://: .*blobs 1.5.*; uninstall all but one"):
        parse_store_url("blobs://shelf")


OPENERS = {
    "nothing": ("return None", "it returned a NoneType, not a RemoteStore"),
    "a client": ("return ToyClient('a', refuses=False)", "it returned a ToyClient, not a Remote"),
    "no text as its URL": (
        "return RemoteStore(url, ToyClient('a', refuses=False), opening)",
        "the URL of its RemoteStore is a StoreUrl, not text",
    ),
    "a store": ("return MemoryStore()", "it returned a MemoryStore, not a RemoteStore"),
    "a store of its own": (
        "return Shelf('x', ToyClient('a', refuses=False))",
        "it returned a Shelf, not a RemoteStore",
    ),
    "a bug": ("return url.host", "AttributeError (blobs.py, line 15)"),
    "a store that lacks methods": ("return Half()", "Half lacks accepts, "),
    "a client that lacks one": ("return Deaf()", "Deaf lacks exists"),
    "no opening": (
        "return RemoteStore(str(url), ToyClient('a', refuses=False))",
        "its RemoteStore must have the `opening` that it was given",
    ),
    "a clock of its own": (
        "return RemoteStore(str(url), ToyClient('a', refuses=False), opening, clock=lambda: 0.0)",
        "its RemoteStore must have the `opening` that it was given, and no clock of its own",
    ),
    "no client": ("return RemoteStore(str(url), object(), opening)", "TypeError"),
}


@pytest.mark.parametrize(("body", "said"), OPENERS.values(), ids=OPENERS)
def test_what_an_opener_does_wrong_is_named_with_it_and_the_engine_serves_on(
    install: Install, found, caplog: pytest.LogCaptureFixture, body: str, said: str
) -> None:
    code = f"""
from dataclasses import replace
from kvferry.store.base import Store, Where
from tests.store import toy
from tests.store.toy import ToyClient
from kvferry.store.memory import MemoryStore
from kvferry.store.servers.remote import RemoteClient, RemoteStore
class Shelf(RemoteStore):
    where = probe = None
class Half(Store):
    url, multi_process = "blobs://shelf", True
class Deaf(RemoteClient):
    read = put = delete = scan = close = None
def open_it(url, options, opening):
    {body}
KIND = replace(toy.KIND, open=open_it)
"""
    install("blobs", code, blobs="blobs:KIND")
    with pytest.raises(StoreError) as refusal:
        open_one("blobs://shelf")
    assert str(refusal.value).startswith(f"blobs://shelf: blobs.open_it failed: {said}")
    # A start does not wait for it: it goes on without the store.
    with open_store("blobs://shelf", start_seconds=0.2) as store:
        assert not store.put(make_key(), [b"value"]).is_there
        assert store.where(make_key()) is Where.ABSENT
    assert any(said in line for line in caplog.messages)
    assert any(f"blobs.open_it failed: {said}" in line for line in found("blobs://shelf"))


PARTS = {
    "a path's check": (
        "check_path=refuse, hosts=''",
        "blobs.refuse failed: KeyError (blobs.py, li",
    ),
    "options": ("options=Options", "blobs.Options failed: KeyError (blobs.py, line"),
    "no options": ("options=5", "builtins.int failed: TypeError ("),
}


@pytest.mark.parametrize(("part", "said"), PARTS.values(), ids=PARTS)
def test_a_part_of_a_kind_that_fails_is_one_line_of_engines_and_doctor(
    install: Install, found, part: str, said: str
) -> None:
    """It is a wrong configuration, as an option that does not exist."""
    code = f"""
from dataclasses import dataclass, replace
from tests.store import toy
def refuse(*_arguments):
    raise KeyError("secret")
@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    __post_init__ = refuse
KIND = replace(toy.KIND, {part})
"""
    install("blobs", code, blobs="blobs:KIND")
    with pytest.raises(ConfigError) as refusal:
        open_store("blobs://shelf", start_seconds=0.2)
    assert str(refusal.value).startswith(said)
    (line,) = found("blobs://shelf")
    assert line.startswith("bug blobs://shelf: ")
    assert said in line


def test_an_opener_that_does_not_end_is_named_by_engines_and_doctor(
    install: Install, found, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor_stores, "CLEAN_SECONDS", 0.1)
    code = """
import threading
from dataclasses import replace
from tests.store import toy
ends = threading.Event()
def open_it(url, options, opening):
    ends.wait(120)
    return toy.KIND.open(url, options, opening)
KIND = replace(toy.KIND, open=open_it)
"""
    install("blobs", code, blobs="blobs:KIND")
    counts = Counters()
    try:
        with open_store("blobs://shelf", observer=counts, start_seconds=0.2) as store:
            said = "did not open within 0.2 s, in blobs.open_it"
            assert [line for line in caplog.messages if "blobs" in line] == [
                f"store blobs://shelf {said}: serving without it until it does"
            ]
            assert counts["store_open_failed"] == 1
            assert str(store.tiers()[0].fault) == f"opening: {said}"
            assert store.where(make_key()) is Where.ABSENT
            assert not store.put(make_key(), [b"value"]).is_there
            (line,) = found("blobs://shelf", "--timeout", 1)
            assert line.endswith("opening it took more than 1 s, in blobs.open_it")
    finally:
        sys.modules["blobs"].ends.set()


@pytest.mark.parametrize("hosts", [False, True])
@pytest.mark.parametrize("fault", ["raise KeyError('secret')", "return []"])
def test_doctor_looks_up_in_a_server_of_ones_own_as_engines_do(
    install: Install, found, monkeypatch: pytest.MonkeyPatch, fault: str, hosts: bool
) -> None:
    code = f"""
from dataclasses import replace
from kvferry.store.servers.remote import RemoteStore
from tests.store import toy
class Shelf(toy.ToyClient):
    def exists(self, *_args, **_options):
        {fault}
def open_it(url, options, opening):
    return RemoteStore("blobs://shelf", Shelf("a", refuses=False), opening)
KIND = replace(toy.KIND, open=open_it{"" if hosts else ", hosts=None"})
"""
    install("blobs", code, blobs="blobs:KIND")
    monkeypatch.setattr(doctor_stores, "ANSWER_SECONDS", 60.0)  # on a machine that stalls
    lines = found("blobs://shelf", "--timeout", 300)
    assert "Shelf.exists failed" in " ".join(lines)

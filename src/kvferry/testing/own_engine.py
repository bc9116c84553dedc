"""Drives an engine of your own with the cache: does it keep the rules, and are its answers those
that it computes?

    def opened(store, observer, *, strict):
        return MyEngine(MODEL, store, observer, strict=strict)  # guard and driver get both

    def test_my_engine(tmp_path):
        assert not try_engine(opened, tmp_path)

Every case opens the engine anew on a store of a directory, as another process would. An engine that
takes wrong KV for its own, or stores it, gives other tokens than one that computes all.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple, Protocol

from kvferry.errors import ContractError
from kvferry.observe import Counters

logger = logging.getLogger(__name__)

NEW_TOKENS = 4


class Engine(Protocol):
    """What is driven."""

    def generate(self, request_id: str, prompt: list[int], num_tokens: int) -> Sequence[int]:
        """Serve a request to its end. Return the tokens behind the prompt, chosen greedily."""

    def close(self) -> None:
        """Let what is to be stored be stored, and close."""


class Open(Protocol):
    """Opens the engine on a store, with the observer and `strict` for guard and driver."""

    def __call__(self, store: str, observer: Counters, *, strict: bool) -> Engine: ...


class Finding(NamedTuple):
    """What is wrong with the engine."""

    case: str
    said: str


class _Lab:
    """Engines and prompts for the cases."""

    def __init__(
        self, opened: Open, directory: Path, tokens: Sequence[int], num_tokens: int, strict: bool
    ) -> None:
        self._open, self._directory, self._strict = opened, directory, strict
        self._tokens, self._num_tokens = tokens, num_tokens
        self._known: dict[tuple[int, ...], list[int]] = {}
        self.case, self.findings = "", list[Finding]()

    def find(self, said: str) -> None:
        self.findings.append(Finding(self.case, said))

    def prompt(self, number: int, length: float = 1.0) -> list[int]:
        """One of several prompts; a longer one begins with a shorter one of the same number."""
        size = len(self._tokens)
        count = int(self._num_tokens * length)
        return [self._tokens[(number * 7 + at * at + at // 3) % size] for at in range(count)]

    @contextmanager
    def engine(self, store: str) -> Iterator[tuple[Engine, Counters]]:
        """An engine on a store. Notes what is counted of broken rules and faults."""
        observer = Counters()
        engine = self._open(
            (self._directory / store).absolute().as_uri(), observer, strict=self._strict
        )
        try:
            yield engine, observer
        finally:
            engine.close()
        for name in ("contract_violation", "hook_failed"):
            if number := int(observer[name]):
                self.find(f"{name}: {number} (the log says which)")

    def expected(self, prompt: list[int]) -> list[int]:
        """The tokens behind a prompt, computed on an empty store."""
        if tuple(prompt) not in self._known:
            with self.engine(f"alone-{len(self._known)}") as (engine, _):
                found = engine.generate("alone", list(prompt), NEW_TOKENS)
            self._known[tuple(prompt)] = list(found)
        return self._known[tuple(prompt)]

    def ask(self, engine: Engine, name: str, prompt: list[int]) -> None:
        found = list(engine.generate(name, list(prompt), NEW_TOKENS))
        if found != (expected := self.expected(prompt)):
            self.find(f"request {name}: tokens {found}, computed on an empty store {expected}")

    def run(self, store: str, *prompts: list[int], hits: bool = True) -> None:
        """Ask an engine for prompts, one after another. `hits`: some are stored."""
        with self.engine(store) as (engine, observer):
            for number, prompt in enumerate(prompts):
                self.ask(engine, f"{self.case} {number}", prompt)
        if hits and not observer["hits"]:
            self.find("nothing was read of what another engine stored: does `close` wait for it?")

    def records(self, store: str) -> list[Path]:
        return [each for each in (self._directory / store).rglob("*.safetensors") if each.is_file()]


def _again(lab: _Lab) -> None:
    lab.run("store", lab.prompt(1), hits=False)
    lab.run("store", lab.prompt(1))


def _grows(lab: _Lab) -> None:
    lab.run("grows", lab.prompt(2, 0.5), hits=False)
    lab.run("grows", lab.prompt(2))
    lab.run("grows", lab.prompt(2, 1.5), lab.prompt(2))


def _others(lab: _Lab) -> None:
    lab.run("others", *(lab.prompt(each) for each in (3, 4, 5)), hits=False)
    lab.run("others", *(lab.prompt(each) for each in (5, 6, 3, 4)))


def _damaged(lab: _Lab) -> None:
    lab.run("damaged", lab.prompt(7), hits=False)
    for record in lab.records("damaged"):
        content = bytearray(record.read_bytes())
        content[-1] ^= 0x40
        record.write_bytes(content)
    lab.run("damaged", lab.prompt(7), hits=False)


def _gone(lab: _Lab) -> None:
    lab.run("gone", lab.prompt(8), hits=False)
    with lab.engine("gone") as (engine, _):
        for record in lab.records("gone"):
            record.unlink()
        lab.ask(engine, "gone", lab.prompt(8))


CASES: dict[str, Callable[[_Lab], None]] = {
    "a prompt is read by another engine": _again,
    "prompts that begin alike": _grows,
    "requests one after another": _others,
    "damaged records": _damaged,
    "records that vanish": _gone,
}


def try_engine(
    opened: Open,
    directory: Path,
    *,
    tokens: Sequence[int] = range(3, 100),
    prompt_tokens: int = 600,
    strict: bool = True,
) -> list[Finding]:
    """Try every case; return what is wrong, and nothing for a right engine.

    Args:
        directory: an empty directory for stores.
        tokens: ids that prompts are made of.
        prompt_tokens: length of most prompts: several chunks (128 tokens at most, by default).
        strict: for guard and driver. False shows what the engine would do in service: rules that it
            breaks are counted and, if they would make KV wrong, refused.
    """
    lab = _Lab(opened, directory, tokens, prompt_tokens, strict)
    for lab.case, case in CASES.items():
        try:
            case(lab)
        except ContractError as error:
            lab.find(f"a rule is broken: {error}")
        except Exception as error:  # of the engine that is tried: a finding, and the next case
            logger.exception("the engine raised in: %s", lab.case)
            lab.find(f"it raised {error!r}")
    return lab.findings

"""The processes of one phase of a round: those of all cases side by side, in turn."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from kvferry.bench.vllm.cases import Case
from kvferry.bench.vllm.process import Child, ChildFailedError
from kvferry.errors import ConfigError

Json = dict[str, Any]


@dataclass(slots=True)
class Measured:
    """What one case gave.

    Attributes:
        case: which.
        cold: results of its first processes, one per round.
        warm: of its second ones; empty if it stores nothing.
        stored_bytes: after each first process.
        computed: tokens in whole blocks that each first process computed.
        failure: why it was given up, if it was.
    """

    case: Case
    cold: list[Json]
    warm: list[Json]
    stored_bytes: list[int]
    computed: list[int]
    failure: str | None = None


class Phase:
    """Processes of several cases with an engine each. All but one are stopped at any time.

    A case whose process fails is given up. On leaving the context no process is left, whatever
    happened.

    Args:
        cases: each has a folder of its name in `directory`, for the log.
        directory: of the round.
    """

    def __init__(self, cases: Sequence[Measured], directory: Path) -> None:
        self._cases = cases
        self._directory = directory
        self._children: dict[str, Child] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        for child in self._children.values():
            child.kill()

    def start(self, turn: int, command: Callable[[Case], Json]) -> None:
        """Start the processes; each has done its command before the next one is started."""
        for measured in in_turn(self._cases, turn):
            name = measured.case.name
            with giving_up(measured):
                self._children[name] = Child(self._directory / name / "log")
                self._children[name].ask(command(measured.case))

    def ask(
        self, turn: int, command: Json, cases: Sequence[Measured] | None = None
    ) -> dict[str, Json]:
        """Answers by name of the case, of all cases or of some."""
        answers: dict[str, Json] = {}
        for measured in in_turn(self._cases if cases is None else cases, turn):
            with giving_up(measured):
                answers[measured.case.name] = self._children[measured.case.name].ask(command)
        return answers

    def close(self) -> None:
        """End all processes, one after the other."""
        for measured in live(self._cases):
            with giving_up(measured):
                self._children[measured.case.name].close()


def live(cases: Sequence[Measured]) -> list[Measured]:
    """Those that have not been given up."""
    return [measured for measured in cases if measured.failure is None]


def in_turn(cases: Sequence[Measured], turn: int) -> Iterator[Measured]:
    """Those that have not been given up, in the order of a turn.

    Another one goes first in each turn: whoever does may find a quieter machine. Once all did, the
    order is turned round, so that nobody always follows the same one, whose files may still be on
    their way to the disk.
    """
    if not cases:
        return
    laps, first = divmod(turn, len(cases))
    order = [*cases[first:], *cases[:first]]
    for measured in order[::-1] if laps % 2 else order:
        if measured.failure is None:
            yield measured


@contextmanager
def giving_up(measured: Measured) -> Iterator[None]:
    """Note a failure of the case.

    Raises:
        ConfigError: it is required.
    """
    try:
        yield
    except (ChildFailedError, ConfigError) as error:
        if measured.case.required:
            raise ConfigError(f"vLLM with {measured.case.name} failed: {error}") from error
        measured.failure = str(error)

"""What a scenario is: engines, media, and actions with their times."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from hashlib import sha256
from typing import Any, NamedTuple

from kvferry.testing.world.loop import Wrong
from kvferry.testing.world.shapes import EngineShape
from kvferry.types import DEFAULT_OPTIONS, RequestOptions

DIRECTORY = "file:///world"
"""Begins the URLs of directories; a run has its own in this place."""


class Ask(NamedTuple):
    """A prompt: the first tokens of a document, then some of its own; and what goes with it.
    `unread`: so many seconds its extra keys are unknown, as while an adapter is read."""

    document: int
    length: int
    tail: int = 3
    salt: str | None = None
    lora: str | None = None
    image: tuple[int, int] | None = None
    max_tokens: int = 2
    options: RequestOptions = DEFAULT_OPTIONS
    turns: int = 1
    abort_after: float | None = None
    unread: float | None = None


class Action(NamedTuple):
    """Something that happens in a scenario, so many seconds after its begin.

    `what` is the name of a method of `World`, which gets `given`.
    """

    at: float
    what: str
    given: tuple[Any, ...]

    def __str__(self) -> str:
        return f"{self.at:8.3f} {self.what} {', '.join(map(_shown, self.given))}"


def _shown(given: object) -> str:
    if not isinstance(given, Ask):
        return repr(given)
    usual = Ask._field_defaults
    changed = {name: each for name, each in given._asdict().items() if each != usual.get(name)}
    return f"Ask({', '.join(f'{name}={each!r}' for name, each in changed.items())})"


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """What a world is made of, and what happens in it.

    Attributes:
        seed: decides the order of tasks, and how long calls take.
        media: what each keeps at most, in bytes; None: everything.
        checks_liveness: whether what is asked for twice must hit in the end.
    """

    seed: int
    engines: tuple[EngineShape, ...]
    media: Mapping[str, int | None] = field(default_factory=dict)
    actions: tuple[Action, ...] = ()
    checks_liveness: bool = True

    @property
    def has_files(self) -> bool:
        """Whether some engine has a directory. Its files are real, and so are their times."""
        return any(url.startswith(DIRECTORY) for each in self.engines for url in each.tiers)


@dataclass
class Outcome:
    """How a scenario went.

    Attributes:
        failure: the broken invariant; None if all held.
        trace: what happened, a line each.
        seconds: virtual seconds that it took.
        happened: how often each action took place.
    """

    failure: Wrong | None
    trace: list[str]
    seconds: float
    happened: Counter[str]

    @property
    def digest(self) -> str:
        return sha256("\n".join(self.trace).encode()).hexdigest()[:16]


def without(scenario: Scenario, places: Sequence[int]) -> Scenario:
    """A scenario that lacks some of its actions."""
    left = tuple(each for place, each in enumerate(scenario.actions) if place not in places)
    return replace(scenario, actions=left)

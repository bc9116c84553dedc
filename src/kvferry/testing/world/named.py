"""Scenarios with a name: rules that are worth reading, in a few lines each."""

from __future__ import annotations

from typing import Any

from kvferry.testing.world.engine import EngineShape
from kvferry.testing.world.host import HostShape
from kvferry.testing.world.scenario import Action, Ask, Scenario

_ONE = EngineShape(name="a", tiers=("sim://m0/kv",))
_NO_CACHE = HostShape(prefix_caching=False)
_DOCUMENT = Ask(1, 64, max_tokens=1)


def _scenario(*actions: tuple[Any, ...], engines: tuple[EngineShape, ...]) -> Scenario:
    made = tuple(Action(at, what, tuple(given)) for at, what, *given in actions)
    return Scenario(seed=0, engines=engines, media={"m0": None, "m1": None}, actions=made)


def _pair(**options: object) -> tuple[EngineShape, EngineShape]:
    """A producer and a consumer over one server."""
    producer = EngineShape(name="p", tiers=("sim://m0/kv",), options=options, host=_NO_CACHE)
    return producer, EngineShape(name="c", tiers=("sim://m0/kv",), options=options, host=_NO_CACHE)


SCENARIOS: dict[str, Scenario] = {
    # What one engine computed, the next one loads, also after the first is gone.
    "restart": _scenario(
        (1.0, "send", "a", _DOCUMENT),
        (5.0, "restart", "a", 1.0),
        (9.0, "send", "a", _DOCUMENT),
        engines=(_ONE,),
    ),
    # A server hangs while a consumer waits for its producer, whose engine is killed.
    "producer-dies": _scenario(
        (1.0, "handover", "p", "c", _DOCUMENT),
        (1.01, "fault", "m0", "hang", 20.0, ""),
        (1.05, "kill", "p", 2.0),
        (2.0, "send", "c", _DOCUMENT),
        engines=_pair(),
    ),
}

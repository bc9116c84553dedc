"""Scenarios with a name: rules that are worth reading, in a few lines each."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from kvferry.testing.world.scenario import DIRECTORY, Action, Ask, Scenario
from kvferry.testing.world.shapes import EngineShape, HostShape

_ONE = EngineShape(name="a", tiers=("sim://m0/kv",))
_NO_CACHE = HostShape(prefix_caching=False)
_ALONE = replace(_ONE, host=_NO_CACHE)
_DOCUMENT = Ask(1, 64, max_tokens=1)
_SECRET = _DOCUMENT._replace(salt="s")


def _scenario(*actions: tuple[Any, ...], engines: tuple[EngineShape, ...]) -> Scenario:
    made = tuple(Action(at, what, tuple(given)) for at, what, *given in actions)
    return Scenario(seed=0, engines=engines, media={"m0": None, "m1": None}, actions=made)


def _pair(url: str = "sim://m0/kv", **shape: Any) -> tuple[EngineShape, EngineShape]:
    """A producer and a consumer over one store."""
    producer = EngineShape(name="p", tiers=(url,), host=_NO_CACHE, **shape)
    return producer, replace(producer, name="c")


def _peers() -> tuple[EngineShape, EngineShape]:
    """Two engines that read each other's memory, and have stores of their own."""
    a, b = "127.0.0.1:7000", "127.0.0.1:7001"
    return (
        EngineShape(name="a", tiers=("sim://m0/kv", f"peer://{b}"), options={"serve": a}),
        EngineShape(name="b", tiers=("sim://m1/kv", f"peer://{a}"), options={"serve": b}),
    )


SCENARIOS: dict[str, Scenario] = {
    # What one engine computed, the next one loads, also after the first is gone.
    "restart": _scenario(
        (1.0, "expect", "a", _DOCUMENT, False),
        (5.0, "restart", "a", 1.0),
        (9.0, "expect", "a", _DOCUMENT, True),
        engines=(_ONE,),
    ),
    # An engine that is killed loses at most what it was writing.
    "kill": _scenario(
        (1.0, "send", "a", _DOCUMENT),
        (5.0, "kill", "a", 1.0),
        (9.0, "expect", "a", _DOCUMENT, True),
        engines=(_ONE,),
    ),
    # A server hangs while a consumer waits for its producer, whose engine is killed.
    "producer-dies": _scenario(
        (1.0, "handover", "p", "c", _DOCUMENT),
        (1.0, "fault", "m0", "hang", 20.0, ""),
        (1.0, "upon", "c", "asking again", 10.0, "kill", ("p", 2.0)),
        engines=_pair(),
    ),
    # While a server is away, engines compute; what memory holds, they load all the same.
    "server-away": _scenario(
        (1.0, "send", "a", _DOCUMENT),
        (5.0, "fault", "m0", "error", 60.0, ""),
        (6.0, "expect", "a", _DOCUMENT, True),
        (7.0, "expect", "a", Ask(2, 64, max_tokens=1), False),
        engines=(_ALONE,),
    ),
    # Of wrong bytes nothing is served: the prompt is computed, and the records are replaced.
    "wrong-bytes": _scenario(
        (1.0, "send", "p", _DOCUMENT),
        (5.0, "fault", "m0", "flip", 5.0, "c"),
        (6.0, "expect", "c", _DOCUMENT, False),
        engines=_pair(),
    ),
    # After the weights changed in place, nothing that was stored before is loaded.
    "new-weights": _scenario(
        (1.0, "send", "a", _DOCUMENT),
        (5.0, "reset", "a", True),
        (6.0, "expect", "a", _DOCUMENT, False),
        engines=(_ONE,),
    ),
    # What an engine holds in memory, a peer loads, without a store that both share.
    "peer": _scenario(
        (1.0, "send", "a", _DOCUMENT),
        (5.0, "expect", "b", _DOCUMENT, True),
        engines=_peers(),
    ),
    # What an operator erased is in no engine ten seconds later. After a minute it is stored again,
    # also for engines that start later.
    "erase": _scenario(
        (1.0, "send", "a", _SECRET),
        (5.0, "erase", "s"),
        (20.0, "expect", "a", _SECRET, False),
        (80.0, "send", "a", _SECRET),
        (90.0, "expect", "a", _SECRET, True),
        (100.0, "restart", "a", 1.0),
        (105.0, "expect", "a", _SECRET, True),
        engines=(_ALONE,),
    ),
    # So it is if the server is slow, and does not delete in time what was written meanwhile.
    "erase-slow": _scenario(
        (1.0, "fault", "m0", "slow", 40.0, ""),
        (1.1, "send", "a", _SECRET),
        (1.5, "erase", "s"),
        engines=(_ALONE,),
    ),
    # And if it is written to another server behind the first.
    "erase-behind": _scenario(
        (1.0, "fault", "m1", "slow", 40.0, ""),
        (1.1, "send", "a", _SECRET),
        (3.0, "erase", "s"),
        engines=(replace(_ALONE, tiers=("sim://m0/kv", "sim://m1/kv")),),
    ),
    # And if it is in a store that no command reaches, and was there for long.
    "erase-in-memory": _scenario(
        (1.0, "send", "a", _SECRET),
        (90.0, "erase", "s"),
        (155.0, "expect", "a", _SECRET, False),
        engines=(replace(_ALONE, tiers=("memory://near?max_bytes=80KiB", "sim://m0/kv")),),
    ),
    # And if another engine writes it afterwards, since it has not heard yet.
    "erase-late": _scenario(
        (1.0, "fault", "m0", "slow", 40.0, "b"),
        (1.1, "send", "b", _SECRET),
        (3.0, "erase", "s"),
        (6.0, "send", "a", _SECRET),
        (9.0, "expect", "a", _SECRET, False),
        engines=(_ALONE, replace(_ALONE, name="b")),
    ),
    # A hit that ends earlier needs another part of a window, which memory lacks and the store has.
    "window": _scenario(
        (1.0, "expect", "p", _DOCUMENT, False),
        (5.0, "expect", "c", _DOCUMENT, True),
        (6.0, "expect", "c", Ask(1, 40, max_tokens=1), True),
        engines=tuple(replace(each, window=12) for each in _pair()),
    ),
    # A decode waits for what its prefill has not stored yet.
    "handover": _scenario(
        (1.0, "fault", "m0", "slow", 3.0, "p"),
        (1.0, "handover", "p", "c", _DOCUMENT, True),
        engines=_pair(),
    ),
    # Also in a directory.
    "handover-directory": _scenario(
        (1.0, "handover", "p", "c", _DOCUMENT, True),
        engines=_pair(f"{DIRECTORY}/d"),
    ),
    # What the prefill stores elsewhere is not waited for without end.
    "handover-elsewhere": _scenario(
        (1.0, "handover", "p", "c", _DOCUMENT, False),
        engines=(_pair()[0], _pair("sim://m1/kv")[1]),
    ),
    # Once weights were loaded anew, a prefill hands over as before if they are the same.
    "handover-same-weights": _scenario(
        (1.0, "reset", "p", False),
        (2.0, "handover", "p", "c", _DOCUMENT, True),
        engines=_pair(names_weights=True),
    ),
    # If they changed, nothing of it is for others.
    "handover-new-weights": _scenario(
        (1.0, "reset", "p", True),
        (2.0, "handover", "p", "c", _DOCUMENT, False),
        engines=_pair(names_weights=True),
    ),
    # A read that hangs costs a bounded time. Its slots come back once it has ended.
    "read-hangs": _scenario(
        (1.0, "send", "p", _DOCUMENT),
        (5.0, "upon", "c", "fetching", 9.0, "fault", ("m0", "stuck", 60.0, "")),
        (5.0, "send", "c", _DOCUMENT),
        (90.0, "expect", "c", _DOCUMENT, True),
        engines=_pair(),
    ),
    # A client that leaves while its prompt is read leaves no slot in use.
    "client-leaves": _scenario(
        (1.0, "send", "p", _DOCUMENT),
        (5.0, "upon", "c", "fetching", 9.0, "abort", ("c",)),
        (5.0, "send", "c", _DOCUMENT),
        (6.0, "expect", "c", _DOCUMENT, True),
        engines=_pair(),
    ),
    # What is written when the weights change is under the key of the weights before.
    "new-weights-while-writing": _scenario(
        (1.0, "upon", "a", "writing", 9.0, "reset", ("a", True)),
        (1.0, "send", "a", _DOCUMENT),
        (9.0, "expect", "a", _DOCUMENT, True),
        engines=(replace(_ONE, host=_NO_CACHE),),
    ),
    # Nor is what is read then loaded under the new ones.
    "new-weights-while-reading": _scenario(
        (1.0, "send", "p", _DOCUMENT),
        (5.0, "upon", "c", "fetching", 9.0, "reset", ("c", True)),
        (5.0, "expect", "c", _DOCUMENT, False),
        (9.0, "expect", "c", _DOCUMENT, True),
        engines=_pair(),
    ),
    # Records under each other's names are taken for none of them.
    "names-mixed-up": _scenario(
        (1.0, "send", "p", _DOCUMENT),
        (5.0, "suffer", "m0", "foreign"),
        (6.0, "send", "c", _DOCUMENT),
        (20.0, "expect", "c", _DOCUMENT, True),
        engines=_pair(),
    ),
    # An engine that finds that it cannot be right loads nothing more.
    "switched-off": _scenario(
        (1.0, "send", "a", _DOCUMENT),
        (5.0, "switch_off", "a"),
        (6.0, "expect", "a", _DOCUMENT, False),
        engines=(replace(_ONE, host=_NO_CACHE),),
    ),
}

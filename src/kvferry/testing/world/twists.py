"""Several things at once that random actions seldom bring together: short scripts of actions, on an
engine that is set up for them.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from kvferry.contract.spec import Mode
from kvferry.testing.world.media import NOT_FINITE
from kvferry.testing.world.scenario import Action, Ask
from kvferry.testing.world.shapes import NEAR, EngineShape

Script = list[tuple[float, str, tuple[Any, ...]]]
"""Actions with their times, and what they are given."""


def _draw_ask(rng: random.Random) -> Ask:
    return Ask(document=0, length=rng.choice((40, 64)), tail=0, max_tokens=20)


def _uncached(rng: random.Random, name: str, _media: Sequence[str]) -> Script:
    """A request whose adapter is read as it runs is preempted, waits with pins, and is aborted."""
    ask = _draw_ask(rng)
    return [
        (0.0, "send", (name, ask)),
        (7.0, "forget", (name,)),
        (8.0, "upon", (name, "ran uncached", 10.0, "preempt", (name, 3))),
        *[(8.0, "upon", (name, "pinned again", 10.0, "abort", (name,)))] * 3,
        *[(8.0, "send", (name, ask._replace(tail=1, unread=0.01)))] * 3,
    ]


def _fault_in_search(rng: random.Random, name: str, _media: Sequence[str]) -> Script:
    """Something unforeseen happens while a search settles that is to be audited."""
    ask = _draw_ask(rng)
    return [
        (0.0, "send", (name, ask)),
        (5.0, "forget", (name,)),
        (5.0, "break_at", (name, "_searches._learn", rng.randrange(2))),
        *[(5.0, "send", (name, ask._replace(tail=3)))] * 2,
    ]


def _fault_before_plan(rng: random.Random, name: str, _media: Sequence[str]) -> Script:
    """Something unforeseen happens before a plan is begun; in one of the rounds, the plan loads."""
    ask = _draw_ask(rng)
    script: Script = [(0.0, "send", (name, ask))]
    for at in range(5, 35, 3):
        script += [
            (at, "forget", (name,)),
            (at, "break_at", (name, "_erased.heed", rng.randrange(12))),
            (at, "send", (name, ask._replace(tail=3, max_tokens=1))),
        ]
    return script


def _no_record(rng: random.Random, name: str, media: Sequence[str]) -> Script:
    """Values that are no records stand under the names of what a producer writes."""
    ask = _draw_ask(rng)
    foreign = [(5.0, "suffer", (medium, "foreign")) for medium in media]
    return [(0.0, "send", (name, ask)), *foreign, (6.0, "send", (name, ask))]


def _long_outage(rng: random.Random, name: str, media: Sequence[str]) -> Script:
    """A server is away for a minute or two, and asked meanwhile."""
    kind, seconds = rng.choice(("error", "hang")), 40.0 + 60.0 * rng.random()
    away = [(0.0, "fault", (medium, kind, seconds, "")) for medium in media]
    return [*away, *[(0.1 + at, "send", (name, _draw_ask(rng))) for at in range(3)]]


def _shared_failure(rng: random.Random, name: str, _media: Sequence[str]) -> Script:
    """A load fails whose blocks other requests share, which go on; what they compute is saved."""
    ask = _draw_ask(rng)
    script: Script = [(0.0, "send", (name, ask._replace(max_tokens=1)))]
    for at in (5.0, 10.0, 15.0):
        crowd = ask._replace(tail=20)
        script += [
            (at, "forget", (name,)),
            (at, "break_load", (name, rng.randrange(1, 4))),
            *[(at, "send", (name, crowd))] * 3,
        ]
    return script


def _slow_erasure(rng: random.Random, name: str, media: Sequence[str]) -> Script:
    """Writes wait for a slow server while what they write is erased."""
    script: Script = [(0.0, "fault", (medium, "slow", 40.0, "")) for medium in media]
    for number in range(2):
        ask = Ask(number, 64, tail=0, salt="salt", max_tokens=1)
        script.append((0.1, "send", (name, ask)))
    return [*script, (rng.choice((3.0, 5.0)), "erase", ("salt",))]


def _erasure(rng: random.Random, name: str, _media: Sequence[str]) -> Script:
    """What is erased is in a store in memory, and was written some time before."""
    ask = Ask(0, rng.choice((40, 64)), tail=0, salt="salt", max_tokens=1)
    return [(0.0, "send", (name, ask)), (rng.choice((6.0, 90.0)), "erase", ("salt",))]


def _not_finite(_rng: random.Random, name: str, media: Sequence[str]) -> Script:
    """An audit finds NaN in records of an older release. Others were promised them, and wait for
    blocks."""
    script: Script = []
    for number in range(4):
        ask, at = Ask(number, 64, tail=0, max_tokens=1), 12.0 * number
        older = [(at + 4.0, "suffer", (medium, NOT_FINITE)) for medium in media] * 3
        script += [
            (at, "send", (name, ask)),
            *(older if number else ()),  # the first hit passes its audit: later ones may have none
            (at + 5.0, "forget", (name,)),
            *[(at + 5.0, "send", (name, ask._replace(tail=20, max_tokens=10)))] * 5,
        ]
    return script


def _blip(rng: random.Random, name: str, media: Sequence[str]) -> Script:
    """What was computed behind NaN is being written when the NaN shows, and the weights change."""
    script: Script = [(0.0, "fault", (medium, "slow", 60.0, "")) for medium in media]
    for number in range(4):
        at, ask = 15.0 * number + 0.1, Ask(number, 64, tail=0, max_tokens=20)
        script += [
            (at, "glitch", (name, False)),
            (at, "send", (name, ask)),
            (at + rng.choice((0.2, 0.5, 1.0)), "reset", (name, True)),
        ]
    return script


class Twist(NamedTuple):
    """A script, and how it sets up its engine."""

    script: Callable[[random.Random, str, Sequence[str]], Script]
    shape: Mapping[str, Any] = {}
    host: Mapping[str, Any] = {}
    options: Mapping[str, Any] = {}


_CROWDED = {"block_size": 4, "num_blocks": 30, "max_requests": 4, "prefix_caching": False}

TWISTS = (
    Twist(_uncached, host=_CROWDED, options={"audit": "off"}),
    Twist(_fault_in_search, shape={"strict": False}, options={"audit": 1.0}),
    Twist(_fault_before_plan, shape={"strict": False}, options={"audit": "off"}),
    Twist(_no_record, shape={"mode": Mode.WRITE}),
    Twist(_long_outage),
)


_SHARING = {
    "prefix_caching": True,
    "offers_early": True,
    "spares_others": True,
    "num_blocks": 96,
    "max_tokens": 200,
    "max_requests": 4,
}

LATER_TWISTS = (
    Twist(_shared_failure, host=_SHARING, options={"audit": "off"}),
    Twist(
        _erasure,
        shape={"tiers": (f"{NEAR}?max_bytes=81920", "sim://m0/kv"), "world_size": 1},
    ),
    Twist(_slow_erasure, shape={"num_slots": 24, "late_weights": 0.0}, options={"io_threads": 1}),
)
"""Apart from the others, so that what was drawn before stays as it is."""


NOT_FINITE_TWISTS = (
    Twist(
        _not_finite,
        shape={"late_weights": 0.0},
        host={**_CROWDED, "max_tokens": 64, "decode_tokens": 1},
        options={"audit": 0.5},
    ),
    Twist(
        _blip,
        shape={"late_weights": 0.0, "num_slots": 24},
        host={"max_tokens": 64, "decode_tokens": 1, "tokens_per_second": 2000.0},
    ),
)


def twisted(
    rng: random.Random, shape: EngineShape, media: Sequence[str], twist: Twist
) -> tuple[EngineShape, tuple[Action, ...]]:
    """An engine as a script needs it, and the script."""
    at = 1.0 + 3.0 * rng.random()
    made = _timed(at, twist.script(rng, shape.name, media))
    far = tuple(url for url in shape.tiers if not url.startswith(NEAR))
    set_up: dict[str, Any] = {
        "host": replace(shape.host, **twist.host),
        "options": {**shape.options, **twist.options},
        "mode": Mode.BOTH,
        "tiers": far or shape.tiers,
        **twist.shape,
    }
    return replace(shape, **set_up), made


def in_vain(
    rng: random.Random, producer: EngineShape, consumer: EngineShape
) -> tuple[tuple[EngineShape, EngineShape], tuple[Action, ...]]:
    """Two engines and a script: the store takes nothing of a prompt that one hands to the other,
    which waits for it."""
    engines = tuple(
        replace(
            each,
            tiers=("sim://m0/kv",),
            mode=Mode.BOTH,
            num_slots=24,
            late_weights=0.0,
            options={name: each.options[name] for name in each.options if name != "serve"},
        )
        for each in (producer, consumer)
    )
    script: Script = [(0.0, "fault", ("m0", "refuse", 200.0, producer.name))]
    script += [
        (at, "handover", (producer.name, consumer.name, _draw_ask(rng)._replace(document=number)))
        for number, at in enumerate((0.1, 5.0, 20.0))
    ]
    return (engines[0], engines[1]), _timed(1.0 + 3.0 * rng.random(), script)


def _timed(begin: float, script: Script) -> tuple[Action, ...]:
    return tuple(Action(round(begin + after, 3), what, given) for after, what, given in script)


def lending(
    rng: random.Random, lender: EngineShape, reader: EngineShape
) -> tuple[tuple[EngineShape, EngineShape], tuple[Action, ...]]:
    """Two engines and a script: over a slow wire, one reads from the memory of the other, which
    needs its slots for other prompts meanwhile."""
    host, port = lender.options["serve"].split(":")
    engines = (
        replace(
            lender,
            tiers=tuple(url for url in lender.tiers if host not in url),  # none of an engine
            mode=Mode.BOTH,
            num_slots=8,
            late_weights=0.0,
        ),
        replace(
            reader,
            tiers=(f"peer://{host}:{port}",),
            mode=Mode.BOTH,
            world_size=1,
            late_weights=0.0,
            options={**reader.options, "load_timeout_seconds": 5.0, "audit": "off"},
        ),
    )
    ask, at = _draw_ask(rng), 1.0 + 3.0 * rng.random()
    script: Script = [
        (0.0, "send", (lender.name, ask)),
        (4.0, "send", (reader.name, ask._replace(tail=3, max_tokens=1))),  # learns what is there
        (5.0, "forget", (reader.name,)),
        (5.0, "fault", ("wire", "slow", 30.0, "")),
        (5.0, "send", (reader.name, ask._replace(tail=3))),
    ]
    for number in range(30):
        other = ask._replace(document=10 + number, max_tokens=1)
        script.append((5.2 + 0.15 * number, "send", (lender.name, other)))
    return engines, _timed(at, script)

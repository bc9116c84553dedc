"""Draws scenarios from seeds, and shortens those that fail."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

import msgspec

from kvferry.contract.spec import Mode
from kvferry.testing.world.media import DAMAGE, NOT_FINITE, OFFENCES, OUTAGES
from kvferry.testing.world.moments import MOMENTS
from kvferry.testing.world.scenario import DIRECTORY, Action, Ask, Outcome, Scenario, without
from kvferry.testing.world.shapes import NEAR, EngineShape, HostShape
from kvferry.testing.world.twists import (
    LATER_TWISTS,
    NOT_FINITE_TWISTS,
    TWISTS,
    in_vain,
    lending,
    twisted,
)
from kvferry.types import DEFAULT_OPTIONS, RequestOptions

FIRST_PORT = 7000
RECORD_BYTES = 4096
SALTS = ("salt", "other")
TWISTED = 0.3
"""The part of scenarios that have a script of several things at once."""
SPARES = 0.3
"""The part of hosts that let others go on after a failed load."""
LENDING = 0.25
"""The part of scenarios with peers in which one reads what the other needs room for."""
IN_VAIN = 0.05
"""The part of others with several engines in which what is handed over never comes."""
LATER = 0.2
"""The part of others that have such a script and nothing else."""
BAD_VALUES = 0.1
"""The part of scenarios with NaN that an older release stored, or with a script about NaN."""
WINDOWS = 0.25
"""The part of models that have a group with a window."""
FILES = 0.04
"""The part of scenarios with a directory: real files take longest."""


class _Mix(NamedTuple):
    """What is common in the requests of a scenario: the less varied they are, the more hit."""

    documents: int
    salted: float
    adapted: float
    shown: float
    unread: float
    explained: float
    aborted: float


def draw(seed: int) -> Scenario:
    """The scenario of a seed: the same in every process and release of Python."""
    rng = random.Random(f"scenario {seed}")
    media = {"m0": rng.choice((None, None, None, 40 * RECORD_BYTES))}
    if rng.random() < 0.4:
        media["m1"] = None
    names = ["a", "b", "c"][: rng.choice((1, 2, 2, 3))]
    has_peers = len(names) > 1 and rng.random() < 0.5
    is_apart = has_peers and rng.random() < 0.5  # each has servers of its own, or none
    chunk_tokens, num_groups = rng.choice((8, 8, 12)), rng.choice((1, 1, 2))
    engines = tuple(
        _engine(
            rng,
            name,
            number,
            list(media)[number : number + 1] if is_apart else list(media),
            names if has_peers else [],
        )
        for number, name in enumerate(names)
    )
    if rng.random() < FILES:
        quota = rng.choice(("", "?max_bytes=200KiB"))
        engines = tuple(_with_directory(rng, each, quota) for each in engines)
    engines = tuple(_of_model(each, chunk_tokens, num_groups) for each in engines)
    actions = _actions(rng, engines, list(media))
    if rng.random() < TWISTED:
        first, script = twisted(rng, engines[0], list(media), rng.choice(TWISTS))
        engines, actions = (first, *engines[1:]), (*actions, *script)
        if rng.random() < 0.5 and not has_peers:  # nothing else hides what it does
            engines, actions = (first,), tuple(script)
    if any(url.startswith(DIRECTORY) for each in engines for url in each.tiers):
        actions = (*actions, *_losses(rng, actions[-1].at))
    more = random.Random(f"more {seed}")  # so that what was drawn before stays
    engines = tuple(
        replace(each, host=replace(each.host, spares_others=more.random() < SPARES))
        for each in engines
    )
    if has_peers and more.random() < LENDING:
        engines, actions = lending(more, engines[0], engines[1])
    elif len(engines) > 1 and more.random() < IN_VAIN:
        engines, actions = in_vain(more, engines[0], engines[1])
    elif more.random() < LATER:
        first, actions = twisted(more, engines[0], list(media), more.choice(LATER_TWISTS))
        engines = (first, *engines[1:])
    bad = random.Random(f"not finite {seed}")
    if bad.random() < BAD_VALUES / 2:
        first, actions = twisted(bad, engines[0], list(media), bad.choice(NOT_FINITE_TWISTS))
        engines = (first, *engines[1:]) if has_peers else (first,)
    elif bad.random() < BAD_VALUES / 2:
        actions = (*actions, *_not_finite(bad, list(media), actions[-1].at))
    if more.random() < WINDOWS:
        window = more.choice((chunk_tokens, 14, 20, 33))
        engines = tuple(_with_window(each, window) for each in engines)
    in_order = tuple(sorted(actions, key=lambda action: action.at))
    return Scenario(seed=seed, engines=engines, media=media, actions=in_order)


def _losses(rng: random.Random, last: float) -> list[Action]:
    """What happens to the files of a directory."""
    at = [round(last * rng.random(), 3) for _ in range(rng.choice((0, 1, 2, 3)))]
    return [Action(each, "lose_files", (rng.choice(("records", "index", "all")),)) for each in at]


def _not_finite(rng: random.Random, media: Sequence[str], last: float) -> list[Action]:
    """What an older release stored."""
    at = [round(last * rng.random(), 3) for _ in range(3)]
    return [Action(each, "suffer", (rng.choice(media), NOT_FINITE)) for each in at]


def _of_model(shape: EngineShape, chunk_tokens: int, num_groups: int) -> EngineShape:
    return replace(shape, chunk_tokens=chunk_tokens, num_groups=num_groups)


def _with_window(shape: EngineShape, window: int) -> EngineShape:
    """An engine whose model has a group with a window, and blocks for two tables."""
    host = replace(shape.host, num_blocks=2 * shape.host.num_blocks)
    return replace(shape, window=window, host=host)


def _with_directory(rng: random.Random, shape: EngineShape, quota: str) -> EngineShape:
    """An engine whose nearest tier is a directory, which all engines of the machine share."""
    far = tuple(url for url in shape.tiers if not url.startswith(NEAR))
    return replace(shape, tiers=(f"{DIRECTORY}/d{quota}", *far[rng.randrange(2) :]))


def _engine(
    rng: random.Random, name: str, number: int, media: Sequence[str], peers: Sequence[str]
) -> EngineShape:
    world_size = rng.choice((1, 1, 1, 2, 2, 4))
    tiers = [f"sim://{each}/kv" for each in media]
    if world_size == 1 and (not tiers or rng.random() < 0.3):
        tiers.insert(0, f"{NEAR}?max_bytes={rng.choice((8, 20)) * RECORD_BYTES}")
    options: dict[str, object] = {
        "load_timeout_seconds": rng.choice((0.5, 2.0, 5.0)),
        "io_threads": rng.choice((1, 2, 4)),
        "audit": rng.choice(("off", "off", "first", 0.3, 1.0)),
        "save_generated": rng.random() < 0.3,
    }
    if peers:
        options["serve"] = f"127.0.0.1:{FIRST_PORT + number}"
        others = [FIRST_PORT + i for i, other in enumerate(peers) if other != name]
        tiers.append("peer://" + ",".join(f"127.0.0.1:{port}" for port in others))
    host = HostShape(
        block_size=rng.choice((4, 4, 8, 16)),
        num_blocks=rng.choice((30, 40, 96, 200)),
        max_tokens=rng.choice((10, 16, 64, 200)),
        max_requests=rng.choice((2, 4, 8)),
        prefix_caching=rng.random() < 0.5,
        late=rng.random() < 0.3,
        offers_early=rng.random() < 0.4,
        decode_tokens=rng.choice((1, 4, 8)),
        tokens_per_second=rng.choice((300.0, 2000.0, 50_000.0)),
    )
    return EngineShape(
        name=name,
        tiers=tuple(tiers),
        host=host,
        options=options,
        num_slots=rng.choice((8, 12, 16, 24)),
        world_size=world_size,
        recomputes=rng.random() < 0.5,
        strict=rng.random() < 0.6,
        names_weights=rng.random() < 0.3,
        late_weights=rng.choice((0.0,) * 7 + (0.5, 5.0)),
        mode=rng.choice((Mode.BOTH,) * 8 + (Mode.READ, Mode.WRITE)),
    )


# What happens how often, where it happens at all. Each scenario has some of these only: a bug that
# another fault would explain, or hide, shows where that fault is missing.
_WEIGHTS = {
    "send": 60,
    "forget": 8,
    "upon": 25,
    "handover": 10,
    "fault": 12,
    "damage": 10,
    "suffer": 6,
    "kill": 3,
    "restart": 3,
    "reset": 4,
    "sleep": 3,
    "glitch": 3,
    "break_load": 4,
    "break_at": 6,
    "plan_twice": 2,
    "switch_off": 1,
    "reset_within": 2,
    "preempt": 3,
    "abort": 3,
    "erase": 4,
}
_AT_A_MOMENT = (
    *("reset", "sleep", "abort", "abort", "preempt", "preempt", "erase", "erase", "suffer"),
    *("fault", "damage", "kill", "restart", "forget", "break_load", "break_load"),
    *("break_at", "break_at"),
)
PLACES = (
    *("policy.begin_step", "_erased.heed", "_searches._learn", "saves.plan", "saves.poll_writes"),
    *("audits.plan", "pool.touch", "pool.pop_orders", "pool.pop_orders"),
)
"""Parts of the scheduler role that fail once, if something unforeseen happens."""


def _actions(
    rng: random.Random, engines: Sequence[EngineShape], media: Sequence[str]
) -> tuple[Action, ...]:
    made: list[Action] = []
    at = 1.0
    kinds = [
        "send",
        *(kind for kind in ("forget", "upon") if rng.random() < 0.7),
        *(kind for kind in list(_WEIGHTS)[3:] if rng.random() < 0.35),
    ]
    mix = _Mix(
        rng.choice((1, 2, 4)),
        rng.choice((0.3, 0.6)) if "erase" in kinds else rng.choice((0.0, 0.0, 0.4)),
        rng.choice((0.0, 0.0, 0.3)),
        rng.choice((0.0, 0.0, 0.4)),
        rng.choice((0.0, 0.0, 0.3)),
        rng.choice((0.1, 0.5)),
        rng.choice((0.0, 0.2, 0.4)),
    )
    pace = rng.choice((0.2, 1.0, 3.0))
    for _ in range(rng.randrange(8, 50)):
        at += pace * rng.choice((0.0, 0.01, 0.1, 1.0)) * rng.random()
        what = rng.choices(kinds, [_WEIGHTS[kind] for kind in kinds])[0]
        name = rng.choice(engines).name
        if what in ("reset", "sleep", "preempt") and rng.random() < 0.5:
            # A request that waits for blocks for the second time is aborted.
            made.append(
                Action(round(at, 3), "upon", (name, "asking once more", 3.0, "abort", (name,)))
            )
        given = _given(rng, mix, what, name, engines, media)
        action = Action(round(at, 3), "fault" if what == "damage" else what, given)
        made += [action] * (rng.choice((1, 1, 1, 2, 3)) if what == "send" else 1)  # a crowd
    return tuple(made)


def _given(
    rng: random.Random,
    mix: _Mix,
    what: str,
    name: str,
    engines: Sequence[EngineShape],
    media: Sequence[str],
) -> tuple[object, ...]:
    if what == "upon":
        then = rng.choice(_AT_A_MOMENT)
        given = _given(rng, mix, then, name, engines, media)
        moment, seconds = rng.choice(tuple(MOMENTS)), rng.choice((2.0, 20.0))
        return name, moment, seconds, "fault" if then == "damage" else then, given
    if what == "send":
        return name, _ask(rng, mix)
    if what == "handover":
        ask = _ask(rng, mix)._replace(turns=1, unread=None)
        return name, rng.choice(engines).name, ask
    if what in ("fault", "damage"):
        kind = rng.choice(DAMAGE if what == "damage" else OUTAGES)
        owner = rng.choice(("", name)) if kind != "partition" else name
        seconds = round(rng.choice((0.3, 3.0, 30.0, 200.0)) * rng.random(), 3)
        places = media if kind == "odd" else [*media, "wire"]
        return rng.choice(places), kind, seconds, owner
    if what == "suffer":
        return rng.choice(media), rng.choice(OFFENCES)
    if what in ("break_load", "preempt"):
        return name, rng.randrange(1, 4)
    if what == "break_at":
        return name, rng.choice(PLACES), rng.randrange(4)
    if what == "erase":
        return (rng.choice(SALTS),)
    if what == "sleep":
        return name, round(3 * rng.random(), 3), rng.random() < 0.4
    if what == "reset":
        return name, rng.random() < 0.6
    if what in ("kill", "restart"):
        return name, round(5 * rng.random(), 3)
    return (name,)


def _ask(rng: random.Random, mix: _Mix) -> Ask:
    length = rng.choice((10, 24, 40, 64, 90))
    options = DEFAULT_OPTIONS
    if rng.random() < 0.2:
        options = RequestOptions(
            store=rng.random() < 0.7,
            load=rng.random() < 0.7,
            max_load_tokens=rng.choice((None, 8, 20)),
            pin=rng.choice((0.0, 0.0, 20.0)),
        )
    if rng.random() < mix.explained:
        options = msgspec.structs.replace(options, explain=True)
    is_shown = rng.random() < mix.shown
    return Ask(
        document=rng.randrange(mix.documents),
        length=length,
        tail=rng.choice((1, 3, 20, 40)),
        salt=rng.choice(SALTS) if rng.random() < mix.salted else None,
        lora="adapter" if rng.random() < mix.adapted else None,
        image=(rng.randrange(2), rng.choice((6, length - 2))) if is_shown else None,
        max_tokens=rng.choice((1, 2, 5, 20)),
        options=options,
        turns=rng.choice((1, 1, 1, 2, 3)),
        abort_after=round(rng.random() ** 2, 3) if rng.random() < mix.aborted else None,
        unread=round(rng.random() ** 2, 3) if rng.random() < mix.unread else None,
    )


def shortened(
    scenario: Scenario, fails: Callable[[Scenario], Outcome | None], most: int = 200
) -> tuple[Scenario, list[int]]:
    """Leave out actions while the same invariant is broken.

    Args:
        fails: runs a scenario; returns its outcome if it fails in the same way.
        most: runs at most.

    Returns:
        The short scenario, and the places of the actions that it keeps.
    """
    kept = list(range(len(scenario.actions)))
    size, left = max(1, len(kept) // 2), most
    while size and left > 0:
        start = 0
        while start < len(kept) and left > 0:
            tried = kept[:start] + kept[start + size :]
            left -= 1
            gone = [place for place in range(len(scenario.actions)) if place not in tried]
            if fails(without(scenario, gone)) is not None:
                kept = tried
            else:
                start += size
        size //= 2
    gone = [place for place in range(len(scenario.actions)) if place not in kept]
    return without(scenario, gone), kept

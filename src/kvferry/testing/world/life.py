"""The life of a world: the actions of its scenario, the end of all faults, liveness, the close of
everything, and what must hold then.
"""

from __future__ import annotations

from kvferry.store.kinds import is_peer
from kvferry.testing.world.engine import Engine
from kvferry.testing.world.looks import SETTLE_SECONDS, look_again
from kvferry.testing.world.loop import Wrong
from kvferry.testing.world.media import NOT_FINITE
from kvferry.testing.world.scenario import Ask
from kvferry.testing.world.world import World

LAST_REQUEST_SECONDS = 900.0
"""Within this time after the last action, every request has ended."""

_NAN = ("glitch", f"suffer {NOT_FINITE}")
_DAMAGE = ("fault flip", "fault cut", "suffer spoil", "suffer foreign", *_NAN)
_OUTAGES = (
    *(
        "break_at",
        "fault odd",
        "fault slow",
        "fault error",
        "fault hang",
        "fault stuck",
        "fault refuse",
        "fault partition",
    ),
    *("glitch", "kill", "restart"),
)

NEVER = {
    "hook_failed": ("break_at",),
    "contract_violation": ("plan_twice",),
    "save_refused": (),
    "peer_overdue_loans": (),
    "audit_mismatch": _DAMAGE,
    "records_corrupt": _DAMAGE,
    "store_quarantined": _DAMAGE,
    "save_not_finite": _NAN,
    "load_failed_chunks": ("break_load", "break_at", "reset_within", *_NAN),
    "save_failed": (*_OUTAGES, "erase", "lose_files"),
    "store_probe_failed": (*_OUTAGES, *_DAMAGE, "reset", "reset_within", "sleep"),
}
"""Counters that stay at 0, unless one of these things happened. A peer of another epoch refuses
questions, and none is asked that sent too much that was wrong."""


def live(world: World) -> None:
    """Run a world to its end. Runs in: its main task. Raises Wrong."""
    _act(world)
    _await_requests(world)
    for engine in world.engines.values():
        engine.await_no_moment()
    _end_faults(world)
    _await_requests(world)
    if world.scenario.checks_liveness:
        world.loop.sleep(SETTLE_SECONDS)
        look_again(world)
    _close_all(world)
    for engine in world.past:
        _check_counts(world, engine)


def _act(world: World) -> None:
    for shape in world.scenario.engines:
        world.start(shape.name)
    began = world.loop.now
    for action in world.scenario.actions:
        world.loop.sleep(began + action.at - world.loop.now)
        world.note(str(action))
        world.do(action.what, action.given)


def _end_faults(world: World) -> None:
    """Wait for the ends of faults and restarts, then for the engines that start."""
    while tasks := [task for task in world.loop.of("scenario") if not task.is_killed]:
        world.loop.join(tasks[0])
    world.mend_devices()
    if world.unsure:
        world.loop.sleep(SETTLE_SECONDS)  # a server that lost all learns which namespaces there are
        world.erase_again()
    until = world.loop.now + SETTLE_SECONDS
    while any(engine.host is None for engine in world.engines.values()):
        if world.loop.now > until:
            raise Wrong("starts too long", f"{[*world.engines]}")
        world.loop.sleep(0.5)


def _await_requests(world: World) -> None:
    until = world.loop.now + LAST_REQUEST_SECONDS
    while any(engine.is_busy for engine in world.engines.values()):
        if world.loop.now > until:
            left = [each for each in world.requests if not each.outcome]
            raise Wrong("waits too long", f"{left} have not ended")
        world.loop.sleep(1.0)


# -- the end ------------------------------------------------------------------------------------


def _close_all(world: World) -> None:
    loop = world.loop
    _begin_hang(world)
    for engine in list(world.engines.values()):
        engine.end()
        if not loop.join(engine.task, loop.now + 300.0):
            raise Wrong("closes too long", f"{engine.name} has not ended")
        world.lose(engine)
    for medium in world.media.by_name.values():
        medium.faults.clear()
    for engine in world.past:
        if not engine.is_closed:
            engine.close_what_died()
    loop.sleep(60.0)
    left = [each for each in loop.tasks.values() if each is not loop.current and not each.is_killed]
    if left:
        raise Wrong("left behind", f"threads {left}")
    for owner, client in world.media.clients:
        closed = [each for each in world.past if each.name == owner and each.is_closed]
        if closed and not client.is_closed:
            raise Wrong("left behind", f"a client of {owner} is open")


def _begin_hang(world: World) -> None:
    """In some worlds, servers answer no more when engines are closed."""
    hang = world.draw().choice((None, None, "hang", "stuck"))
    if hang is None or not world.scenario.checks_liveness:
        return
    for medium in world.media.by_name.values():
        medium.faults[hang] = ""
    world.happened[f"fault {hang}"] += 1
    for engine in world.engines.values():
        engine.send(world.request_of(engine, Ask(world.new_document(), 40, max_tokens=1)))
    world.loop.sleep(0.3)


def _check_counts(world: World, engine: Engine) -> None:
    failed = [
        each.name for each in world.media.by_name.values() if engine.name in each.failed_questions
    ]
    if (
        failed
        and len(world.past) == len(world.scenario.engines)
        and not engine.observer["store_probe_failed"]
    ):
        raise Wrong("counts", f"questions of {engine.name} to {failed} failed, and it says nothing")
    is_late = any(each.late_weights for each in world.scenario.engines)
    reads_only = all(is_peer(url) for url in engine.shape.tiers)
    for counter, reasons in NEVER.items():
        if counter == "save_failed" and reads_only:
            continue  # nothing takes what it saves
        if counter in ("store_probe_failed", "save_failed") and is_late:
            continue  # a peer without a name refuses others; stores open once weights have one
        number = engine.observer[counter]
        if number and not any(world.happened[reason] for reason in reasons):
            raise Wrong("counts", f"{counter} is {number} in {engine.name}")

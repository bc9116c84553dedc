"""The life of a world: the actions of its scenario, the end of all faults, liveness, the close of
everything, and what must hold then.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvferry.contract.spec import Mode
from kvferry.store.kinds import is_peer
from kvferry.testing.world.engine import Engine
from kvferry.testing.world.loop import Wrong
from kvferry.testing.world.scenario import Ask
from kvferry.testing.world.world import World

SETTLE_SECONDS = 60.0
"""After the end of the last fault, everything works again within this time."""

LAST_REQUEST_SECONDS = 900.0
"""Within this time after the last action, every request has ended."""

_DAMAGE = ("fault flip", "fault cut", "suffer spoil", "suffer foreign", "glitch")
_OUTAGES = (
    *(
        "break_plan",
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
    "hook_failed": ("break_plan",),
    "contract_violation": (),
    "save_refused": (),
    "peer_overdue_loans": (),
    "audit_mismatch": _DAMAGE,
    "records_corrupt": _DAMAGE,
    "store_quarantined": _DAMAGE,
    "save_not_finite": ("glitch",),
    "load_failed_chunks": ("break_load", "break_plan", "glitch", "reset_within"),
    "save_failed": (*_OUTAGES, "erase"),
    "store_probe_failed": (*_OUTAGES, "reset", "reset_within", "sleep"),  # a peer refuses others
}
"""Counters that stay at 0, unless one of these things happened."""


def live(world: World) -> None:
    """Live a world through. Runs in: its main task. Raises Wrong."""
    _act(world)
    _end_faults(world)
    _await_requests(world)
    if world.scenario.checks_liveness:
        world.loop.sleep(SETTLE_SECONDS)
        for engine in list(world.engines.values()):
            _check_liveness(world, engine)
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
        kind = f" {action.given[1]}" if action.what in ("fault", "suffer") else ""
        world.happened[f"{action.what}{kind}"] += 1
        getattr(world, action.what)(*action.given)


def _end_faults(world: World) -> None:
    """Wait for the ends of faults and restarts, then for the engines that start."""
    while tasks := [task for task in world.loop.of("scenario") if not task.is_killed]:
        world.loop.join(tasks[0])
    world.mend_devices()
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


# -- liveness -----------------------------------------------------------------------------------


def _check_liveness(world: World, engine: Engine) -> None:
    """What was asked for once is found, in memory and in stores; and every tier is up, also one
    that had refused a value, since it has taken another."""
    if engine.shape.mode is Mode.BOTH:
        _check_hits(world, engine)
    else:  # it learns what became of its saves in the steps of another request, and saves that
        ask = Ask(world.new_document(), 2 * engine.shape.chunk_tokens, tail=0)
        _probe(world, engine, ask, world.tokens_of(ask))
    world.loop.sleep(10.0)
    engine.check_slots()
    is_reset = any(world.happened[what] for what in ("reset", "reset_within", "sleep"))
    is_peer_lost = is_reset or any(
        world.happened[f"fault {what}"] for what in ("flip", "cut")
    )  # another model is served there, or wrong records came: it stays away by design
    for tier in engine.parts[0].store.tiers():
        may_be_away = is_peer(tier.stat.url) and is_peer_lost
        if engine.shape.mode is Mode.READ and tier.state == "refuses writes":
            continue  # nothing was written since
        if tier.state != "up" and not may_be_away:
            raise Wrong("liveness", f"{tier.name} of {engine.name} is {tier.state}: {tier}")


def _check_hits(world: World, engine: Engine) -> None:
    chunk, name = engine.shape.chunk_tokens, engine.name
    fresh = Ask(world.new_document(), 4 * chunk, tail=chunk)
    for what, ask in (("new", fresh), ("known", Ask(0, 4 * chunk, tail=chunk))):
        tokens = world.tokens_of(ask)
        _probe(world, engine, ask, tokens)
        if not any(_probe(world, engine, ask, tokens) for _ in range(3)):
            raise Wrong("liveness", f"{name} never hits a {what} prompt that it has computed")
    has_quota = any("max_bytes" in url for url in engine.shape.tiers)
    if has_quota or not all(medium.keeps_all for medium in world.media.by_name.values()):
        return
    tokens = world.tokens_of(fresh)
    for _ in range(2):
        _fill_memory(world, engine)
        if _probe(world, engine, fresh, tokens):
            return
        world.loop.sleep(5.0)
    raise Wrong("liveness", f"{name} never loads from a store what it has computed")


def _fill_memory(world: World, engine: Engine) -> None:
    """Have it compute so many other prompts that its host memory holds nothing else."""
    chunk = engine.shape.chunk_tokens
    length = min(10 * chunk, (engine.shape.host.num_blocks - 2) * engine.shape.host.block_size)
    for _ in range(0, engine.num_slots, length // chunk - 1):
        ask = Ask(world.new_document(), length - chunk, tail=0)
        _probe(world, engine, ask, world.tokens_of(ask), pause=0.2)


def _probe(
    world: World, engine: Engine, ask: Ask, tokens: Sequence[int], pause: float = 5.0
) -> int:
    """Ask an engine that forgets its own prefixes; return how many tokens were loaded, or could
    have been: they were computed for an audit."""
    num_audited = engine.observer["miss_tokens/audit"]
    engine.tell(lambda host: host.pool.reset())
    request = world.request(engine, ask, tokens)
    engine.send(request)
    until = world.loop.now + SETTLE_SECONDS
    while not request.outcome:
        if world.loop.now > until:
            raise Wrong("waits too long", f"{request!r} has not ended")
        world.loop.sleep(0.1)
    world.loop.sleep(pause)
    num_loaded = (request.admitted or (0, 0, 0))[2]
    return num_loaded + engine.observer["miss_tokens/audit"] - num_audited


# -- the end ------------------------------------------------------------------------------------


def _close_all(world: World) -> None:
    loop = world.loop
    for engine in list(world.engines.values()):
        engine.end()
        if not loop.join(engine.task, loop.now + 300.0):
            raise Wrong("closes too long", f"{engine.name} has not ended")
        world.lose(engine)
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
    for counter, reasons in NEVER.items():
        number = engine.observer[counter]
        if number and not any(world.happened[reason] for reason in reasons):
            raise Wrong("counts", f"{counter} is {number} in {engine.name}")

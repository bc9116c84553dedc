"""A second look at everything, a while after the last fault: what is known is found, each tier
alone holds what it should, and nothing wrong or erased is left.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from kvferry.contract.spec import Mode
from kvferry.store.kinds import is_peer
from kvferry.testing.world.engine import Engine
from kvferry.testing.world.loop import Wrong
from kvferry.testing.world.media import NOT_FINITE, OUTAGES, Medium, key_in
from kvferry.testing.world.requests import HostRequest
from kvferry.testing.world.scenario import Ask
from kvferry.testing.world.world import HEED_SECONDS, World
from kvferry.types import RequestOptions

SETTLE_SECONDS = 60.0
"""After the end of the last fault, everything works again within this time."""

WRONG_SECONDS = 65.0
"""So long after a wrong record was found, its key is looked for in stores once more."""

UNREACHED = ("kill", "restart", *(f"fault {what}" for what in OUTAGES if what != "slow"))
"""What may keep an engine from a server."""

LEAST_BYTES = 1024
"""A record has more."""

MOST_ASKED = 3
"""Prompts of the scenario that an engine is asked for once more."""

_APART = RequestOptions(store=False)


def look_again(world: World) -> None:
    """Runs in: the main task. Raises Wrong."""
    _check_refused(world)
    _restart_writers(world)
    engines = _serving(world)
    for engine in engines:
        _check_erased_here(world, engine)
        _ask_again(world, engine)
    for engine in engines:
        _check_liveness(world, engine)
    for engine in engines:
        _check_second(world, engine)
    for engine, other in zip(engines, [*engines[1:], *engines[:1]], strict=True):
        if other is not engine:
            _check_across(world, engine, other)
    _check_erased(world)


def _serving(world: World) -> list[Engine]:
    return [each for each in world.engines.values() if not (each.off or each.has_lost_plan)]


def _check_refused(world: World) -> None:
    """What an engine refused is on no server, unless it was saved again: also what it wrote
    meanwhile, whose end it may hear with its next request. One that ended then may have left it
    there; so may one that did not reach the server, which it tries once."""
    happened = {what for what, number in world.happened.items() if number}
    if len(world.scenario.engines) > 1 or not happened.isdisjoint(UNREACHED):
        return
    up_since: dict[str, float] = {}  # by medium
    for engine in _serving(world) if world.truth.refused else ():
        _ask_new(world, engine)
        for tier in engine.parts[0].store.tiers():
            up_since[_host_of(tier.stat().url)] = world.loop.now - (world.wall() - tier.since)
    for medium in world.media.by_name.values():
        since = up_since.get(medium.name, -math.inf)
        for name in medium.values:
            if name.endswith(".json") or name in medium.failed_deletes:
                continue
            if world.truth.refused.get(key_in(name), -math.inf) > since:
                raise Wrong("verdict", f"{medium.name} has {name}, which was refused")


def _restart_writers(world: World) -> None:
    """An engine that never reads takes what it has stored for right, until it starts again."""
    writes = [each for each in world.engines.values() if each.shape.mode is Mode.WRITE]
    for engine in writes if world.happened["suffer foreign"] else ():
        world.restart(engine.name, 0.5)
        until = world.loop.now + SETTLE_SECONDS
        while world.engines.get(engine.name) in (engine, None) and world.loop.now < until:
            world.loop.sleep(0.5)
        while world.engines[engine.name].host is None and world.loop.now < until:
            world.loop.sleep(0.5)


def _ask_again(world: World, engine: Engine) -> None:
    """Some of what was asked for in the scenario, once more: from stores, and until no more of that
    turns out to be wrong."""
    asked = list(world.asked)
    world.draw().shuffle(asked)
    room = engine.shape.has_room
    again = [each for each in asked if room(each.length + each.tail + each.max_tokens)]
    again = again[:MOST_ASKED]
    pause = 5.0 if engine.shape.mode is Mode.WRITE else 0.5  # for its writes, and second writes
    # Each time, a prompt may load up to the next wrong record of its own.
    most = max((each.length + each.tail for each in again), default=0)
    for _ in range(2 + len(engine.shape.tiers) * (1 + most // engine.shape.chunk_tokens)):
        num_corrupt = engine.observer["records_corrupt"]
        requests = [
            _probe(world, engine, ask, world.tokens_of(ask), pause=pause)[0] for ask in again
        ]
        if engine.shape.mode is Mode.WRITE:
            _check_sizes(world, engine, requests)
        if engine.observer["records_corrupt"] == num_corrupt:
            return
        world.loop.sleep(WRONG_SECONDS)
    if not world.happened[f"suffer {NOT_FINITE}"]:  # only hits that are audited find these
        raise Wrong("liveness", f"{engine.name} finds wrong records again and again")


def _check_sizes(world: World, engine: Engine, requests: Sequence[HostRequest]) -> None:
    """What an engine writes that never reads takes the place of what is no record at all, in its
    nearest store: the others get what that one did not have."""
    keys = {key for each in requests if each.options.store for key in each.chunk_keys}
    has_saved = not engine.observer["save_no_slot"]
    is_nearest = has_saved and engine.shape.tiers[0].startswith("sim://")
    for medium in _media_of(world, engine)[:1] if is_nearest else ():
        for name, value in medium.values.items():
            is_record = name.endswith(".json") or len(value) > LEAST_BYTES
            if not is_record and key_in(name) in keys:
                raise Wrong("liveness", f"{medium.name} keeps what is no record: {name}")


def _check_liveness(world: World, engine: Engine) -> None:
    """What was asked for once is found, in memory and in stores; and every tier is up, also one
    that had refused a value, since it has taken another."""
    if engine.shape.mode is Mode.BOTH:
        _check_hits(world, engine)
    else:  # it learns what became of its saves in the steps of another request, and saves that
        _ask_new(world, engine)
    world.loop.sleep(10.0)
    engine.check_slots()
    is_reset = any(world.happened[what] for what in ("reset", "reset_within", "sleep"))
    was_wrong = any(
        world.happened[what] for what in ("fault flip", "fault cut", f"suffer {NOT_FINITE}")
    )
    is_peer_lost = is_reset or was_wrong  # by design: of another model, or it sent wrong records
    for tier in engine.parts[0].store.tiers():
        may_be_away = is_peer(tier.stat().url) and is_peer_lost
        if engine.shape.mode is Mode.READ and tier.state == "refuses writes":
            continue  # nothing was written since
        if tier.state != "up" and not may_be_away:
            raise Wrong("liveness", f"{tier.name} of {engine.name} is {tier.state}: {tier}")


def _check_hits(world: World, engine: Engine) -> None:
    chunk, name = engine.shape.chunk_tokens, engine.name
    fresh = Ask(world.new_document(), 2 * chunk, tail=chunk)  # half of the slots are enough
    requests = []
    for what, ask in (("new", fresh), ("known", Ask(0, 4 * chunk, tail=chunk))):
        tokens = world.tokens_of(ask)
        requests.append(_probe(world, engine, ask, tokens, forgets=False)[0])
        if not _hits(world, engine, ask, tokens, forgets=False):
            raise Wrong("liveness", f"{name} never hits a {what} prompt that it has computed")
    if all(medium.keeps_all for medium in _media_of(world, engine)):
        world.loop.sleep(5.0)
        _check_tiers(world, engine, requests[0])
    if engine.has_quota or not _media_of(world, engine):
        return
    if not all(each.keeps_all for each in world.media.by_name.values()):
        return
    if not _hits(world, engine, fresh, world.tokens_of(fresh), forgets=True):
        raise Wrong("liveness", f"{name} never loads from a store what it has computed")


def _check_tiers(world: World, engine: Engine, request: HostRequest) -> None:
    """Each server alone has all of a prompt that was computed a while ago."""
    for medium in _media_of(world, engine):
        has = {key_in(name) for name in medium.values if not name.endswith(".json")}
        lacks = sum(key not in has for key in request.chunk_keys[:2])
        if lacks:
            raise Wrong("liveness", f"{medium.name} lacks {lacks} chunks that {engine.name} has")


def _check_second(world: World, engine: Engine) -> None:
    """What one server does not give, the next one does, at once."""
    media = _media_of(world, engine)
    is_slow = engine.scheduler.policy.is_any_slow
    if engine.shape.mode is not Mode.BOTH or engine.has_quota or len(media) < 2 or is_slow:
        return
    if not all(each.keeps_all for each in media):
        return
    chunk = engine.shape.chunk_tokens
    ask = Ask(world.new_document(), 2 * chunk, tail=chunk)
    tokens = world.tokens_of(ask)
    _probe(world, engine, ask, tokens)
    world.do("fault", (media[0].name, "error", 2.0, ""))
    if not _probe(world, engine, ask, tokens)[1] and not engine.scheduler.policy.is_any_slow:
        raise Wrong("liveness", f"{engine.name} does not load from {media[1].name} meanwhile")
    until = world.loop.now + SETTLE_SECONDS
    while world.loop.now < until and (media[0].faults or not _are_up(world)):
        world.loop.sleep(1.0)


def _are_up(world: World) -> bool:
    stores = [each.parts[0].store for each in world.engines.values()]
    return all(tier.state == "up" for store in stores for tier in store.tiers())


def _check_across(world: World, engine: Engine, other: Engine) -> None:
    """An engine finds what another has computed, also if it had found before that it is nowhere."""
    namespaces = {each.scheduler.requests.namespace for each in (engine, other)}
    shared = [each for each in _media_of(world, engine) if each in _media_of(world, other)]
    reads, writes = engine.shape.mode is not Mode.WRITE, other.shape.mode is not Mode.READ
    if len(namespaces) > 1 or not (reads and writes and shared and shared[0].keeps_all):
        return
    chunk = engine.shape.chunk_tokens
    ask = Ask(world.new_document(), 2 * chunk, tail=chunk)
    tokens = world.tokens_of(ask)
    _probe(world, engine, ask._replace(options=_APART), tokens, pause=2.0)
    _probe(world, other, ask, tokens)
    if not _hits(world, engine, ask, tokens, forgets=True):
        raise Wrong("liveness", f"{engine.name} never finds what {other.name} has computed")


def _check_erased_here(world: World, engine: Engine) -> None:
    """Nothing that was erased is in the memory of an engine that has served a request since. One
    whose tiers are all its own hears of no erasure."""
    if not engine.shape.hears_of_erasures:
        return
    _ask_new(world, engine)
    before = world.loop.now - HEED_SECONDS
    for key in engine.scheduler.pool._by_key:
        if world.truth.is_erased(key, before):
            raise Wrong("erased", f"{engine.name} holds {key.hex()}, which was erased")


def _check_erased(world: World) -> None:
    """Nothing that was erased is stored once more, unless it was computed since."""
    before = world.loop.now - HEED_SECONDS
    for medium in world.media.by_name.values():
        for name, value in medium.values.items():
            key = key_in(name) if not name.endswith(".json") else None
            if key and world.truth.is_erased(key, before) and world.truth.is_of(key, value):
                raise Wrong("erased", f"{medium.name} has {name}, which was erased")


def _media_of(world: World, engine: Engine) -> list[Medium]:
    """The servers among its tiers."""
    return [world.media.by_name[host] for host in map(_host_of, engine.shape.tiers) if host]


def _host_of(url: str) -> str:
    return url.partition("sim://")[2].partition("/")[0]


def _hits(world: World, engine: Engine, ask: Ask, tokens: Sequence[int], *, forgets: bool) -> bool:
    """Whether a prompt hits: at once, or when it is asked for again a little later."""
    return any(_probe(world, engine, ask, tokens, forgets=forgets)[1] for _ in range(3))


def _ask_new(world: World, engine: Engine) -> None:
    """Have an engine step, and so hear what ended since its last request."""
    ask = Ask(world.new_document(), 2 * engine.shape.chunk_tokens, tail=0)
    _probe(world, engine, ask, world.tokens_of(ask), forgets=False)


def _probe(
    world: World,
    engine: Engine,
    ask: Ask,
    tokens: Sequence[int],
    *,
    pause: float = 5.0,
    forgets: bool = True,
) -> tuple[HostRequest, int]:
    """Ask an engine whose host forgets its own prefixes, and that `forgets` what its memory holds.
    Return how many tokens were loaded, or could have been: they were computed for an audit."""
    num_audited = engine.observer["miss_tokens/audit"]
    if forgets:
        engine.forget()
    else:
        engine.tell(lambda host: host.memory.reset())
    request = world.request(engine, ask, tokens)
    engine.send(request)
    until = world.loop.now + SETTLE_SECONDS
    while not request.outcome:
        if world.loop.now > until:
            raise Wrong("waits too long", f"{request!r} has not ended")
        world.loop.sleep(0.1)
    world.loop.sleep(pause)
    num_loaded = (request.admitted or (0, 0, 0))[2]
    return request, num_loaded + engine.observer["miss_tokens/audit"] - num_audited

"""A world: engines, media and peers under one seed, the actions of a scenario, and what must hold.

`run` lives a scenario through, in virtual time: its actions, then the end of all faults, then
liveness, then the close of everything. It returns a trace; equal scenarios have equal traces.
"""

from __future__ import annotations

import gc
import logging
import random
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from hashlib import sha256
from typing import Any, NamedTuple

from kvferry.cache import build
from kvferry.contract.handover import read_handover
from kvferry.contract.spec import Mode
from kvferry.store import kinds
from kvferry.store.servers import peer
from kvferry.testing.world.engine import Engine, EngineShape
from kvferry.testing.world.host import HostRequest, Wrong
from kvferry.testing.world.loop import START, Killed, Loop, Stuck
from kvferry.testing.world.media import FAULTS, OFFENCES, Media, Medium, Peers, forget
from kvferry.testing.world.threads import Seam, in_world
from kvferry.types import DEFAULT_OPTIONS, NO_EXTRA_KEYS, ExtraKeys, MultimodalItem, RequestOptions

SETTLE_SECONDS = 60.0
"""After the end of the last fault, everything works again within this time."""

LAST_REQUEST_SECONDS = 900.0
"""Within this time after the last action, every request has ended."""

VOCABULARY = 97


class Ask(NamedTuple):
    """A prompt: the first tokens of a document, then some of its own; and what goes with it."""

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
    changed = {name: each for name, each in given._asdict().items() if each not in (None, 1)}
    if given.options == DEFAULT_OPTIONS:
        del changed["options"]
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


class World:
    """See the module. Actions are its methods without an underscore that a scenario names."""

    def __init__(self, scenario: Scenario, loop: Loop, media: Media, peers: Peers) -> None:
        self.scenario = scenario
        self.loop = loop
        self.media = media
        self.peers = peers
        self.engines: dict[str, Engine] = {}
        self.past: list[Engine] = []
        self.trace: list[str] = []
        self.happened: Counter[str] = Counter()
        self.requests: list[HostRequest] = []
        self.weights: dict[str, int] = {}
        self._num_runs = 0
        self._num_prompts = 0
        self._random = random.Random(f"world {scenario.seed}")
        for name, max_bytes in scenario.media.items():
            media.by_name[name] = Medium(name, loop, scenario.seed, max_bytes)
        media.by_name["wire"] = peers.wire

    def note(self, line: str) -> None:
        self.trace.append(f"{self.loop.now - START:.6f} {line}")

    # -- actions --------------------------------------------------------------------------------

    def send(self, engine: str, ask: Ask) -> None:
        """A client asks for something, perhaps in several turns."""
        if (running := self._running(engine)) is None:
            return
        tokens = self._tokens(ask)
        self._turn(running, ask, tokens, ask.turns)

    def _turn(self, engine: Engine, ask: Ask, tokens: list[int], turns: int) -> None:
        if not engine.shape.host.has_room(len(tokens) + ask.max_tokens):
            return

        def go_on() -> None:
            if turns > 1 and request.outcome == "done" and engine.is_alive:
                more = [self._random.randrange(VOCABULARY) for _ in range(1 + ask.length // 3)]
                self._turn(engine, ask, request.all_token_ids + more, turns - 1)

        request = self._request(engine, ask, tokens, then=go_on)
        engine.send(request)

    def handover(self, producer: str, consumer: str, ask: Ask) -> None:
        """One engine prefills a prompt, and another decodes it."""
        if (first := self._running(producer)) is None:
            return
        tokens = self._tokens(ask)
        shapes = [each.host for each in self.scenario.engines]
        if not all(each.has_room(len(tokens) + ask.max_tokens) for each in shapes):
            return

        def decode() -> None:
            second = self._running(consumer)
            if prefill.outcome == "done" and second is not None:
                second.send(self._request(second, ask, tokens, params=prefill.params))

        asked = {"do_remote_decode": True}
        short = ask._replace(max_tokens=1)
        prefill = self._request(first, short, tokens, params=asked, then=decode)
        first.send(prefill)

    def fault(self, medium: str, what: str, seconds: float, owner: str) -> None:
        """A medium fails for a while: for one engine, or for all (owner "")."""
        assert what in FAULTS
        faults = self.media.by_name[medium].faults
        faults[what] = owner

        def end() -> None:
            self.loop.sleep(seconds)
            faults.pop(what, None)

        self.loop.spawn(end, f"{what} of {medium}", owner="scenario")

    def suffer(self, medium: str, what: str) -> None:
        """Something happens to what a medium holds."""
        assert what in OFFENCES
        self.media.by_name[medium].suffer(what)

    def kill(self, engine: str, seconds: float) -> None:
        """An engine dies, and starts again after a while."""
        running = self._running(engine)
        if running is None:
            return
        self.loop.kill(engine)
        forget(self.peers, engine)
        self._lose(running)
        self._start_later(engine, seconds)

    def restart(self, engine: str, seconds: float) -> None:
        """An engine is closed, and starts again after a while."""
        running = self._running(engine)
        if running is None:
            return

        def close() -> None:
            running.end()
            self.loop.join(running.task)
            self._lose(running)
            self._start_later(engine, seconds)

        self.loop.spawn(close, f"restart of {engine}", owner="scenario")

    def reset(self, engine: str, changes: bool) -> None:
        """The weights of an engine change in place, or are loaded once more."""
        if (running := self._running(engine)) is not None:
            self.weights[engine] += changes
            running.reset(self.weights[engine])

    # -- parts of actions -----------------------------------------------------------------------

    def _running(self, engine: str) -> Engine | None:
        found = self.engines.get(engine)
        if found is None or found.host is None or found.is_ending or not found.is_alive:
            return None
        return found

    def _tokens(self, ask: Ask) -> list[int]:
        document = random.Random(f"document {ask.document}")
        tokens = [document.randrange(VOCABULARY) for _ in range(ask.length)]
        return tokens + [self._random.randrange(VOCABULARY) for _ in range(ask.tail)]

    def _request(
        self,
        engine: Engine,
        ask: Ask,
        tokens: Sequence[int],
        *,
        params: Mapping[str, Any] | None = None,
        then: Callable[[], None] = lambda: None,
    ) -> HostRequest:
        self._num_prompts += 1
        items = () if ask.image is None else (_image(*ask.image),)
        extra = ExtraKeys(cache_salt=ask.salt, lora=ask.lora, items=items)
        request = HostRequest(
            f"r{self._num_prompts}",
            list(tokens),
            ask.max_tokens,
            extra_keys=NO_EXTRA_KEYS if extra == NO_EXTRA_KEYS else extra,
            handover=None if params is None else read_handover(params),
            options=ask.options,
        )

        def ended() -> None:
            self.note(f"{engine.name} {request.request_id} {request.outcome} {request.admitted}")
            self.happened[f"request {request.outcome}"] += 1
            then()

        request.on_end = ended
        self.requests.append(request)
        if ask.abort_after is not None:
            seconds = ask.abort_after

            def abort() -> None:
                self.loop.sleep(seconds)
                engine.tell(lambda host: host.abort(request))

            self.loop.spawn(abort, "abort", owner="scenario")
        return request

    def _start(self, name: str) -> Engine:
        shape = next(each for each in self.scenario.engines if each.name == name)
        self._num_runs += 1
        engine = Engine(
            self.loop, shape, self.scenario.seed, self._num_runs, self.weights.setdefault(name, 0)
        )
        self.engines[name] = engine
        return engine

    def _start_later(self, name: str, seconds: float) -> None:
        def start() -> None:
            self.loop.sleep(seconds)
            self._start(name)

        self.loop.spawn(start, f"start of {name}", owner="scenario")

    def _lose(self, engine: Engine) -> None:
        """An engine has ended; so have its requests."""
        self.past.append(engine)
        if self.engines.get(engine.name) is engine:
            del self.engines[engine.name]
        for request in list(engine.host.requests.values()) if engine.host else ():
            request.outcome = "lost"
            self.note(f"{engine.name} {request.request_id} lost")

    # -- the whole life -------------------------------------------------------------------------

    def live(self) -> None:
        """Runs in: the main task."""
        for shape in self.scenario.engines:
            self._start(shape.name)
        began = self.loop.now
        for action in self.scenario.actions:
            self.loop.sleep(began + action.at - self.loop.now)
            self.note(str(action))
            kind = f" {action.given[1]}" if action.what in ("fault", "suffer") else ""
            self.happened[f"{action.what}{kind}"] += 1
            getattr(self, action.what)(*action.given)
        self._end_faults()
        self._await_requests()
        if self.scenario.checks_liveness:
            self.loop.sleep(SETTLE_SECONDS)
            for engine in list(self.engines.values()):
                self._check_liveness(engine)
        self._close_all()

    def _end_faults(self) -> None:
        """Wait for the ends of faults and restarts, then for the engines that start."""
        while tasks := [task for task in self.loop.of("scenario") if not task.is_killed]:
            self.loop.join(tasks[0])
        for medium in self.media.by_name.values():
            medium.faults.clear()
        until = self.loop.now + SETTLE_SECONDS
        while any(engine.host is None for engine in self.engines.values()):
            if self.loop.now > until:
                raise Wrong("starts too long", f"{[*self.engines]}")
            self.loop.sleep(0.5)

    def _await_requests(self) -> None:
        until = self.loop.now + LAST_REQUEST_SECONDS
        while any(engine.host and engine.host.requests for engine in self.engines.values()):
            if self.loop.now > until:
                left = [each for each in self.requests if not each.outcome]
                raise Wrong("waits too long", f"{left} have not ended")
            self.loop.sleep(1.0)

    def _check_liveness(self, engine: Engine) -> None:
        """What was asked for once is found, and every tier is up: also one that had refused a
        value, since it has taken another."""
        if engine.shape.mode is Mode.BOTH:
            self._check_hits(engine)
        is_peer_lost = self.happened["reset"] or any(
            self.happened[f"fault {what}"] for what in ("flip", "cut")
        )  # another model is served there, or wrong records came: it stays away by design
        for tier in engine.parts[0].store.tiers():
            may_be_away = tier.name.startswith("peer") and is_peer_lost
            if tier.state != "up" and not may_be_away:
                raise Wrong("liveness", f"{tier.name} of {engine.name} is {tier.state}: {tier}")

    def _check_hits(self, engine: Engine) -> None:
        chunk = engine.shape.chunk_tokens
        ask = Ask(1_000_000 + self._num_prompts, 4 * chunk, tail=chunk)
        tokens = self._tokens(ask)
        found = [self._probe(engine, ask, tokens) for _ in range(4)][1:]
        if not any(found):
            raise Wrong("liveness", f"{engine.name} never hits a prompt that it computed")

    def _probe(self, engine: Engine, ask: Ask, tokens: Sequence[int]) -> int:
        """Ask an engine that forgets its own prefixes; return how many tokens were loaded."""
        engine.tell(lambda host: host.pool.reset())
        request = self._request(engine, ask, tokens)
        engine.send(request)
        until = self.loop.now + SETTLE_SECONDS
        while not request.outcome:
            if self.loop.now > until:
                raise Wrong("waits too long", f"{request!r} has not ended")
            self.loop.sleep(0.5)
        self.loop.sleep(5.0)
        return (request.admitted or (0, 0, 0))[2]

    def _close_all(self) -> None:
        for engine in list(self.engines.values()):
            engine.end()
            if not self.loop.join(engine.task, self.loop.now + 300.0):
                raise Wrong("closes too long", f"{engine.name} has not ended")
            self._lose(engine)
        for engine in self.past:
            if not engine.is_closed:
                engine.close_what_died()
        self.loop.sleep(60.0)
        left = [task for task in self.loop.tasks.values() if task is not self.loop.current]
        if left := [task for task in left if not task.is_killed]:
            raise Wrong("left behind", f"threads {left}")
        for owner, client in self.media.clients:
            closed = [each for each in self.past if each.name == owner and each.is_closed]
            if closed and not client.is_closed:
                raise Wrong("left behind", f"a client of {owner} is open")


def _image(number: int, length: int) -> MultimodalItem:
    return MultimodalItem(digest=f"image {number}", offset=2, length=length)


# -- running ------------------------------------------------------------------------------------


class _Errors(logging.Handler):
    """Errors that kvferry logs: it logs none unless something is wrong with it or its host."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        error = record.exc_info[1] if record.exc_info else None
        if not isinstance(error, Killed | Wrong):
            self.lines.append(f"{record.getMessage()}: {error!r}" if error else record.getMessage())


@contextmanager
def _watched() -> Iterator[_Errors]:
    """Collect errors that are logged; show nothing."""
    logger = logging.getLogger("kvferry")
    errors, before = _Errors(), (logger.propagate, logger.level)
    logger.addHandler(errors)
    logger.propagate = False
    logger.setLevel(logging.WARNING)
    was_enabled = gc.isenabled()
    gc.disable()  # finalisers run when references go, at the same place in every run
    try:
        yield errors
    finally:
        logger.removeHandler(errors)
        logger.propagate, level = before
        logger.setLevel(level)
        if was_enabled:
            gc.enable()


def run(scenario: Scenario, seam: Seam) -> Outcome:
    """Live a scenario through. Needs the block of `worlds` around it."""
    loop = seam.loop = Loop(scenario.seed)
    seam.random = random.Random(f"seam {scenario.seed}")
    media, peers = seam.media, seam.peers = Media(loop), Peers(loop, scenario.seed)
    world = World(scenario, loop, media, peers)
    failure: Wrong | None = None
    with _watched() as errors:
        main = loop.spawn(world.live, "main", owner="world")
        try:
            loop.run(main)
        except Wrong as wrong:
            failure = wrong
        except Stuck as stuck:
            failure = Wrong("stuck", str(stuck))
        except Exception as error:  # of kvferry: whatever it is, the world found it
            failure = Wrong("raised", f"{type(error).__name__}: {error}")
            failure.__cause__ = error
        if failure is None and errors.lines:
            failure = Wrong("logged", errors.lines[0])
        seconds = loop.now - START
        world.note(f"ended after {loop.num_turns} turns: {failure}")
        errors.lines.clear()
        loop.dispose()
    return Outcome(failure, world.trace, seconds, world.happened)


class _Point:
    """The entry point of the kind of store that a world brings."""

    value = "kvferry.testing.world.media"
    dist = None

    def __init__(self, seam: Seam) -> None:
        self._seam = seam

    def load(self) -> Any:
        return self._seam.media.load()


@contextmanager
def worlds() -> Iterator[Seam]:
    """The block in which worlds run: kvferry's modules find virtual time, and no sockets."""
    with in_world() as seam:
        point = _Point(seam)
        seam.put(kinds, "_installed", lambda: {"sim": (point,)})
        seam.put(build, "PeerServer", lambda *a, **k: seam.peers.server(*a, **k))
        seam.put(peer, "PeerClient", lambda *a, **k: seam.peers.client(*a, **k))
        yield seam


def without(scenario: Scenario, places: Sequence[int]) -> Scenario:
    """A scenario that lacks some of its actions."""
    left = tuple(each for place, each in enumerate(scenario.actions) if place not in places)
    return replace(scenario, actions=left)

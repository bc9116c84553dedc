"""A world: engines, media and peers under one seed, what can happen to them, and what it knows of
all KV that was computed.
"""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from kvferry.contract.handover import read_handover
from kvferry.keys import salt_mark
from kvferry.store.base import Store
from kvferry.store.erasures import HEAD_BYTES, add_to_notice, name_of_mark, names_in
from kvferry.store.kind import Opening
from kvferry.store.url import open_one
from kvferry.testing.world.engine import Engine
from kvferry.testing.world.host import Host
from kvferry.testing.world.loop import START, Loop, Wrong
from kvferry.testing.world.media import FAULTS, LOSSES, NOTICE, Media, Medium, Peers, forget
from kvferry.testing.world.moments import MOMENTS
from kvferry.testing.world.requests import UNREAD, HostRequest, Scheduled
from kvferry.testing.world.scenario import DIRECTORY, Ask, Scenario
from kvferry.testing.world.truth import Truth
from kvferry.types import NO_EXTRA_KEYS, ChunkKey, ExtraKeys, MultimodalItem

VOCABULARY = 97

_DIR = re.compile(r".*/([0-9a-f]{64})/").match

HEED_SECONDS = 10.0
"""Within this time after an erasure, and after the last fault, no engine serves what was erased."""

AGAIN_SECONDS = 60.0
"""If an engine ends within this time after an erasure, its operator erases once more."""


class World:
    """See the module. Actions are its methods without an underscore that a scenario names."""

    def __init__(
        self,
        scenario: Scenario,
        loop: Loop,
        media: Media,
        peers: Peers,
        wall: Callable[[], float],
        directory: str,
    ) -> None:
        self.wall = wall
        self.directory = directory
        self.files_at = (DIRECTORY, f"file://{directory}")
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
        self.faults_until = 0.0
        self.truth = Truth()
        self.asked: dict[Ask, None] = {}
        self._erased: dict[str, float] = {}  # by salt, when an operator erased it
        self._lost_at = -1.0  # when an engine ended last, or a server lost its notice
        self._device_faults: Counter[str] = Counter()
        self._num_runs = 0
        self._num_prompts = 0
        self._num_documents = 0
        self._random = random.Random(f"world {scenario.seed}")
        self._looks = random.Random(f"looks {scenario.seed}")
        for name, max_bytes in scenario.media.items():
            media.by_name[name] = Medium(name, loop, scenario.seed, max_bytes, self.truth)
        media.by_name["wire"] = peers.wire
        engines = scenario.engines
        media.alone = {each.name for each in engines if each.world_size == len(each.tiers) == 1}

    def note(self, line: str) -> None:
        self.trace.append(f"{self.loop.now - START:.6f} {line}")

    def do(self, what: str, given: tuple[Any, ...]) -> None:
        """Do and count an action."""
        if what != "upon":
            self.happened[f"{what} {given[1]}" if what in ("fault", "suffer") else what] += 1
        getattr(self, what)(*given)

    # -- actions --------------------------------------------------------------------------------

    def send(self, engine: str, ask: Ask) -> None:
        """A client asks for something, perhaps in several turns."""
        if (running := self._running(engine)) is None:
            return
        tokens = self.tokens_of(ask)
        self.asked.setdefault(ask._replace(turns=1, abort_after=None, unread=None))
        self._turn(running, ask, tokens, ask.turns)

    def _turn(self, engine: Engine, ask: Ask, tokens: list[int], turns: int) -> None:
        if not engine.shape.has_room(len(tokens) + ask.max_tokens):
            return

        def go_on() -> None:
            if turns > 1 and request.outcome == "done" and engine.is_alive:
                more = [self._random.randrange(VOCABULARY) for _ in range(1 + ask.length // 3)]
                self._turn(engine, ask, request.all_token_ids + more, turns - 1)

        request = self.request(engine, ask, tokens, then=go_on)
        engine.send(request)

    def handover(self, producer: str, consumer: str, ask: Ask, is_hit: bool | None = None) -> None:
        """One engine prefills a prompt, and another decodes it; `is_hit` as of `expect`."""
        if (first := self._running(producer)) is None:
            return
        tokens = self.tokens_of(ask)
        shapes = self.scenario.engines
        if not all(each.has_room(len(tokens) + ask.max_tokens) for each in shapes):
            return

        def decode() -> None:
            second = self._running(consumer)
            if prefill.outcome == "done" and second is not None:
                self._expect(second, ask, tokens, is_hit, prefill.params)

        asked = {"do_remote_decode": True}
        short = ask._replace(max_tokens=1)
        prefill = self.request(first, short, tokens, params=asked, then=decode)
        first.send(prefill)

    def expect(self, engine: str, ask: Ask, is_hit: bool) -> None:
        """As `send`, for scenarios with a name: whether some of the prompt must be loaded."""
        running = self._running(engine)
        if running is None:
            raise Wrong("expected", f"{engine} does not run")

        self._expect(running, ask, self.tokens_of(ask), is_hit)

    def _expect(
        self,
        engine: Engine,
        ask: Ask,
        tokens: Sequence[int],
        is_hit: bool | None,
        params: Mapping[str, Any] | None = None,
    ) -> None:
        def ended() -> None:
            loaded = (request.admitted or (0, 0, 0))[2]
            if is_hit is not None and (loaded > 0) is not is_hit:
                raise Wrong("expected", f"{request!r} of {engine.name} has {loaded} tokens loaded")

        request = self.request(engine, ask, tokens, params=params, then=ended)
        engine.send(request)

    def fault(self, medium: str, what: str, seconds: float, owner: str) -> None:
        """A medium fails for a while: for one engine, or for all (owner "")."""
        assert what in FAULTS
        faults = self.media.by_name[medium].faults
        faults[what] = owner
        self.faults_until = max(self.faults_until, self.loop.now + seconds)

        def end() -> None:
            self.loop.sleep(seconds)
            faults.pop(what, None)

        self.loop.spawn(end, f"{what} of {medium}", owner="scenario")

    def suffer(self, medium: str, what: str) -> None:
        """Something happens to what a medium holds."""
        self.media.by_name[medium].suffer(what)
        if what in LOSSES:
            self._lost_at = self.loop.now

    def lose_files(self, what: str) -> None:
        """People remove files of the directory: some of its records, its index, or all but the
        notice of erasures, which no engine may have read yet."""
        place = Path(self.directory) / "d"
        pattern = {"records": "records/*/*", "index": "index.sqlite3*", "all": "**/*"}[what]
        for path in sorted(path for path in place.glob(pattern) if path.is_file()):
            if path.name == Path(NOTICE).name:
                continue
            if what != "records" or self._random.random() < 0.5:
                path.unlink(missing_ok=True)

    def kill(self, engine: str, seconds: float) -> None:
        """An engine is killed, and starts again after a while."""
        running = self._running(engine)
        if running is None:
            return
        self.loop.kill(engine)
        forget(self.peers, engine)
        self.media.forget(engine)
        self._lose_early(running)
        self._start_later(engine, seconds)

    def restart(self, engine: str, seconds: float) -> None:
        """An engine is closed, and starts again after a while."""
        running = self._running(engine)
        if running is None:
            return

        running.end()

        def close() -> None:
            self.loop.join(running.task)
            self._lose_early(running)
            self._start_later(engine, seconds)

        self.loop.spawn(close, f"restart of {engine}", owner="scenario")

    def reset(self, engine: str, changes: bool) -> None:
        """The weights of an engine change in place, or are loaded once more."""
        if (running := self._running(engine)) is not None:
            running.reset(self._change_weights(engine, changes))

    def sleep(self, engine: str, seconds: float, changes: bool) -> None:
        """An engine gives up its KV memory for a while, and perhaps wakes with other weights."""
        if (running := self._running(engine)) is not None:
            running.sleep(seconds, self._change_weights(engine, changes))

    def _change_weights(self, engine: str, changes: bool) -> int:
        self.weights[engine] += changes
        Path(self.weights_file(engine)).write_text(f"weights {self.weights[engine]}")
        return self.weights[engine]

    def weights_file(self, engine: str) -> str:
        return f"{self.directory}/{engine}.weights"

    def glitch(self, engine: str, spreads: bool = True) -> None:
        """The device computes NaN for the next request that runs: in all that follows, too, or in
        one block, which does no harm to what follows."""
        if (running := self._running(engine)) is not None and running.host is not None:
            running.host.device.num_glitches += spreads
            running.host.device.num_blips += not spreads

    def break_at(self, engine: str, place: str, number: int) -> None:
        """A part of the scheduler role raises an unforeseen error, once. Needs engines that are not
        strict."""
        if (running := self._running(engine)) is not None and not running.shape.strict:
            running.break_at(place, number)

    def plan_twice(self, engine: str) -> None:
        """The host builds a second plan for a step. Needs engines that are not strict, and a host
        that is checked."""
        running = self._running(engine)
        if running is None or running.host is None:
            return
        if not (running.shape.strict or running.shape.host.spares_others):
            running.host.plans_twice = True

    def switch_off(self, engine: str) -> None:
        """Some part of an engine finds that nothing may be loaded or saved any more."""
        if (running := self._running(engine)) is not None:
            running.switch_off("a part of this world")

    def forget(self, engine: str) -> None:
        """Other prompts have taken the place of all that an engine held."""
        if (running := self._running(engine)) is not None:
            running.forget()

    def preempt(self, engine: str, number: int) -> None:
        """A host takes the blocks of some requests back."""
        if (running := self._running(engine)) is not None and running.host is not None:
            running.host.num_preemptions += number

    def abort(self, engine: str) -> None:
        """The client of some request leaves."""
        if (running := self._running(engine)) is not None:
            running.tell(self._abort_any)

    def _abort_any(self, host: Host) -> None:
        again = [each for each in host.waiting if each.turn]
        if kinds := list(filter(None, (again, list(host.waiting), list(host.requests.values())))):
            host.abort(self._random.choice(self._random.choice(kinds)))

    def upon(
        self, engine: str, moment: str, seconds: float, what: str, given: tuple[Any, ...]
    ) -> None:
        """Do something else at the first such moment of an engine."""
        assert moment in MOMENTS
        if (running := self._running(engine)) is None:
            return

        def do() -> None:
            self.note(f"{moment}: {what} {given}")
            self.happened[f"moment {moment}"] += 1
            self.do(what, given)

        running.upon(moment, seconds, do)

    def reset_within(self, engine: str) -> None:
        """The connector is reset between a promise and the plan that is to keep it."""
        if (running := self._running(engine)) is not None and running.host is not None:
            running.host.resets_within = True

    def break_load(self, engine: str, num_copies: int) -> None:
        """The next copies from slots into blocks fail."""
        self._device_faults[engine] += num_copies

    def erase(self, salt: str) -> None:
        """An operator erases what was stored for a salt, as `kvferry rm` does."""
        self._erased[salt] = self.loop.now
        if self.scenario.has_files:
            self.loop.spawn(lambda: self._erase(salt), "erase", owner="operator")
        else:
            self._erase(salt)

    def _erase(self, salt: str) -> None:
        """The notice in each store has the names for the namespaces of all of them."""
        media = self.media.by_name.values()
        with ExitStack() as closing:
            directories = [closing.enter_context(each) for each in self._directories()]
            entries = [
                (store, entry) for store in directories for entry in store.catalogue().scan()
            ]
            namespaces = {entry.namespace for _, entry in entries}
            for store in directories:
                namespaces.update(store.catalogue().described())
            for each in media:
                found = (_DIR(name) for name in each.values)
                namespaces |= {bytes.fromhex(match[1]) for match in found if match}
            marks = {salt_mark(namespace, salt) for namespace in namespaces}
            if all(shape.hears_of_erasures for shape in self.scenario.engines):
                self.truth.erased.update(dict.fromkeys(marks, self.loop.now))
            names = {name_of_mark(mark) for mark in marks}
            for medium in media:
                for name, value in list(medium.values.items()):
                    if not names.isdisjoint(names_in((ChunkKey(b""), [value]))):
                        del medium.values[name]
                notice = medium.values.get(NOTICE, b"").decode()
                said = add_to_notice(notice, sorted(names), self.wall())
                medium.values[NOTICE] = said.encode()
            for store, entry in entries:
                head = bytearray(HEAD_BYTES)
                store.read(entry.key, [(0, memoryview(head))])
                if not names.isdisjoint(names_in((entry.key, [head]))):
                    store.delete(entry.key)
            for store in directories:
                catalogue = store.catalogue()
                catalogue.notice(add_to_notice(catalogue.notice(), sorted(names), self.wall()))

    def _directories(self) -> Iterator[Store]:
        """The directories of this world, open for a command."""
        places = Path(self.directory).iterdir() if self.scenario.has_files else ()
        for place in sorted(each for each in places if each.is_dir()):
            yield open_one(f"file://{place}", Opening(index=False, may_create=False))

    def mend_devices(self) -> None:
        self._device_faults.clear()
        for engine in self.engines.values():
            engine.mend()
            if engine.host is not None:
                engine.host.device.heal()
                engine.host.num_preemptions = 0
                engine.host.plans_twice = engine.host.resets_within = False

    # -- what it knows --------------------------------------------------------------------------

    def begin_copy(self) -> bool:
        """The current task's engine copies into its blocks. Whether that fails."""
        assert self.loop.current is not None
        owner = self.loop.current.owner
        engine = self.engines.get(owner)
        if engine is not None and engine.host is not None:
            engine.host.num_copies += 1
        is_failing = self._device_faults[owner] > 0
        self._device_faults[owner] -= is_failing
        return is_failing

    def computed(self, engine: Engine, item: Scheduled) -> None:
        seeds = item.request.seeds[item.num_computed_tokens : item.stop]
        self.truth.computed.update(dict.fromkeys(seeds, self.loop.now))

    def loaded(self, engine: Engine, request: HostRequest, start: int, stop: int) -> None:
        """What was erased is loaded only once it was computed again."""
        keys, _ = request.noted
        erased_at = None if keys is None else self.truth.erased.get(keys.mark)
        if erased_at is None:
            return
        if self.loop.now < max(erased_at, self.faults_until) + HEED_SECONDS:
            return
        ends = range(start + engine.shape.chunk_tokens - 1, stop, engine.shape.chunk_tokens)
        if self.truth.is_old([request.seeds[end] for end in ends], erased_at):
            raise Wrong("erased", f"{engine.name} loads for {request!r} what was erased")

    # -- parts of actions -----------------------------------------------------------------------

    def _running(self, engine: str) -> Engine | None:
        found = self.engines.get(engine)
        if found is None or found.host is None or found.is_ending or not found.is_alive:
            return None
        return found

    def draw(self) -> random.Random:
        """What the second look draws from: later actions draw the same without it."""
        return self._looks

    def request_of(self, engine: Engine, ask: Ask) -> HostRequest:
        return self.request(engine, ask, self.tokens_of(ask))

    def new_document(self) -> int:
        """The number of a document that no request has asked for."""
        self._num_documents += 1
        return 1_000_000 + self._num_documents

    def tokens_of(self, ask: Ask) -> list[int]:
        document = random.Random(f"document {ask.document}")
        tokens = [document.randrange(VOCABULARY) for _ in range(ask.length)]
        return tokens + [self._random.randrange(VOCABULARY) for _ in range(ask.tail)]

    def request(
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
        if ask.unread is not None:
            request.extra_keys = UNREAD

            def read() -> None:
                self.loop.sleep(ask.unread or 0.0)
                request.extra_keys = request.true_keys

            self.loop.spawn(read, "adapter", owner="scenario")
        self.requests.append(request)
        if ask.abort_after is not None:
            seconds = ask.abort_after

            def abort() -> None:
                self.loop.sleep(seconds)
                engine.tell(lambda host: host.abort(request))

            self.loop.spawn(abort, "abort", owner="scenario")
        return request

    def start(self, name: str) -> Engine:
        shape = next(each for each in self.scenario.engines if each.name == name)
        self._num_runs += 1
        seed = f"{self.scenario.seed} {self._num_runs}"
        self.weights.setdefault(name, 0)
        self._change_weights(name, changes=False)
        engine = Engine(self.loop, shape, seed, self.weights[name], self)
        self.engines[name] = engine
        return engine

    def _start_later(self, name: str, seconds: float) -> None:
        def start() -> None:
            self.loop.sleep(seconds)
            self.start(name)

        self.loop.spawn(start, f"start of {name}", owner="scenario")

    def lose(self, engine: Engine) -> None:
        """An engine has ended; so have its requests."""
        self.past.append(engine)
        if self.engines.get(engine.name) is engine:
            del self.engines[engine.name]
        for request in list(engine.host.requests.values()) if engine.host else ():
            request.outcome = "lost"
            self.note(f"{engine.name} {request.request_id} lost")

    def _lose_early(self, engine: Engine) -> None:
        """As `lose`, of an engine that may have had writes under way."""
        self.lose(engine)
        self._lost_at = self.loop.now
        self.erase_again()

    def erase_again(self) -> None:
        """The operator erases once more what was erased a short while before an engine ended or a
        server lost all, as docs/operate.md says: writes of that engine may have landed behind the
        erasure, and not all may have heard of it from that server."""
        for salt in self.unsure:
            self.note(f"erase again {salt!r}")
            self.erase(salt)

    @property
    def unsure(self) -> list[str]:
        """Salts that are to be erased once more."""
        until = self._lost_at - AGAIN_SECONDS
        erased = self._erased.items()
        return [
            salt
            for salt, at in erased
            if at <= self._lost_at and until < max(at, self.faults_until)
        ]


def _image(number: int, length: int) -> MultimodalItem:
    return MultimodalItem(digest=f"image {number}", offset=2, length=length)

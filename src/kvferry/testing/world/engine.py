"""An engine of a world: one process with a scheduler role and the workers of its ranks, over a
simulated host. It opens the cache as real hosts do, by `PrefixCache`.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

from kvferry.cache.build import PrefixCache
from kvferry.contract.driver import StepDriver
from kvferry.contract.guard_scheduler import GuardedScheduler
from kvferry.observe import Counters
from kvferry.store.memory import MemoryStore
from kvferry.testing.pools import check_pool
from kvferry.testing.world.host import Host
from kvferry.testing.world.kv import Content, RankKV
from kvferry.testing.world.loop import Loop, Task, Wrong
from kvferry.testing.world.moments import MOMENTS
from kvferry.testing.world.requests import HostRequest, Scheduled
from kvferry.testing.world.shapes import EngineShape
from kvferry.testing.world.threads import Event
from kvferry.testing.world.truth import Truth
from kvferry.types import ChunkKey

CLOSE_SECONDS = 60.0
"""How long an engine may take to close, whatever hangs."""


class WorldWatch(Protocol):
    """As `Watch`, of several engines.

    Attributes:
        files_at: how URLs of directories begin, and what stands there in this run.
        truth: what is known of all chunks.
    """

    files_at: tuple[str, str]
    truth: Truth

    def computed(self, engine: Engine, item: Scheduled) -> None: ...
    def loaded(self, engine: Engine, request: HostRequest, start: int, stop: int) -> None: ...
    def weights_file(self, engine: str) -> str: ...


class Planned(NamedTuple):
    """Something that is to happen to an engine at the first of such moments."""

    moment: str
    until: float
    do: Callable[[], object]


class Engine:
    """One run of an engine, from its start to its end or death.

    Attributes:
        weights: number of the weights that it runs; a change in place is another number.
        watch: hears what its host computes and loads.
        host: None until the cache is open.
        is_ending: whether it is to close.
        off: why it loads and saves nothing more; empty if it does.
    """

    def __init__(
        self, loop: Loop, shape: EngineShape, seed: str, weights: int, watch: WorldWatch
    ) -> None:
        self.watch = watch
        self.loop = loop
        self.shape = shape
        self.weights = weights
        self.observer = Counters()
        self.host: Host | None = None
        self.scheduler: Any = None
        self.parts: list[PrefixCache] = []
        self.is_closed = False
        self._random = random.Random(f"engine {shape.name} {seed}")
        self.has_quota = any("max_bytes" in url for url in shape.tiers)
        self._checked_values: dict[ChunkKey, bytes] = {}
        self._checked: dict[int, object] = {}  # slots whose chunk was compared, by place
        self._condemned: dict[int, object] = {}  # slots of what was found to be wrong
        self._planned: list[Planned] = []
        self._inbox: deque[Callable[[Host], object]] = deque()
        self._woken = Event(loop)
        self.is_ending = False
        self.off = ""
        self._broken: list[tuple[Any, str]] = []
        self.task: Task = loop.spawn(self._live, "main", owner=shape.name)

    @property
    def name(self) -> str:
        return self.shape.name

    @property
    def is_alive(self) -> bool:
        return not (self.task.is_killed or self.task.ended)

    @property
    def is_busy(self) -> bool:
        return self.host is not None and bool(self.host.requests)

    @property
    def is_named(self) -> bool:
        """Whether the weights have a name by now."""
        return self.scheduler.identity.state.epoch is not None

    @property
    def has_lost_plan(self) -> bool:
        return self.host is not None and self.host.has_lost_plan

    @property
    def num_slots(self) -> int:
        """Chunks that host memory holds: at least as many as its shape says."""
        return self.parts[0].num_slots

    # -- what clients and operators do ----------------------------------------------------------

    def tell(self, what: Callable[[Host], object]) -> None:
        """Have something done between two steps."""
        self._inbox.append(what)
        self._woken.set()

    def upon(self, moment: str, seconds: float, do: Callable[[], object]) -> None:
        """Have something done between two steps, at the first moment of a kind within a time."""
        self._planned.append(Planned(moment, self.loop.now + seconds, do))
        self._woken.set()

    def await_no_moment(self) -> None:
        self._planned.clear()

    def forget(self) -> None:
        """Other prompts have taken the place of all that the host and its memory held."""

        def begin(host: Host) -> None:
            host.memory.reset()
            self.scheduler.pool.clear()

        self.tell(begin)

    def switch_off(self, why: str) -> None:
        """Some part of the process finds that nothing may be loaded or saved any more."""

        def begin(host: Host) -> None:
            self.off = host.off = why
            self.scheduler.identity.stop(why)

        self.tell(begin)

    def send(self, request: HostRequest) -> None:
        self.tell(lambda host: host.add(request))

    def reset(self, weights: int) -> None:
        """The weights change in place, perhaps to the same."""

        def begin(host: Host) -> None:
            self.weights = weights
            host.reset(weights)

        self.tell(begin)

    def break_at(self, place: str, number: int) -> None:
        """The call with this number from now on, of a part of the scheduler role, raises an
        unforeseen error."""

        def begin(host: Host) -> None:
            host.is_broken = True
            path, _, name = place.rpartition(".")
            part = self.scheduler
            for each in path.split(".") if path else ():
                part = getattr(part, each)

            real, left = getattr(part, name), iter(range(number))

            def fail(*given: Any, **named: Any) -> Any:
                if next(left, None) is not None:
                    return real(*given, **named)
                vars(part).pop(name, None)
                raise ZeroDivisionError("of this world")

            setattr(part, name, fail)
            self._broken.append((part, name))

        self.tell(begin)

    def mend(self) -> None:
        """What was to fail, and has not been called since, works again."""
        for part, name in self._broken:
            vars(part).pop(name, None)
        self._broken.clear()

    def sleep(self, seconds: float, weights: int) -> None:
        """It loses its KV memory for a while; other weights may be loaded meanwhile."""

        def begin(host: Host) -> None:
            self.weights = weights
            host.sleep(seconds, weights)

        self.tell(begin)

    def end(self) -> None:
        """Close it, after the step under way; its requests are aborted."""
        self.is_ending = True
        self._woken.set()

    # -- its life -------------------------------------------------------------------------------

    def _live(self) -> None:
        self._open()
        host = self.host
        assert host is not None
        while not self.is_ending:
            while self._inbox:
                self._inbox.popleft()(host)
            if self._planned:
                self._do_planned()
            if host.has_work:
                host.step()
            else:
                self._check_rest()
                self._woken.clear()
                self._woken.wait(5.0)
        for request in list(host.requests.values()):
            host.abort(request)
        self._close()

    def _do_planned(self) -> None:
        """Do what is to be done at this moment."""
        for planned in list(self._planned):
            if planned.until < self.loop.now:
                self._planned.remove(planned)
            elif MOMENTS[planned.moment](self):
                self._planned.remove(planned)
                planned.do()
                self.loop.pause()  # it may have been killed

    def _open(self) -> None:
        shape = self.shape
        record_bytes = 4096 * 2
        options = {
            "store": [url.replace(*self.watch.files_at) for url in shape.tiers],
            "chunk_tokens": shape.chunk_tokens,
            "memory_bytes": shape.num_slots * record_bytes,
            "audit": "off",
            **shape.options,
        }
        if shape.names_weights:
            options["weights_version_file"] = self.watch.weights_file(self.name)
        specs = [shape.spec(rank, self.weights) for rank in range(shape.world_size)]
        self.parts = [
            PrefixCache(spec, options, self.observer, has_scheduler=rank == 0)
            for rank, spec in enumerate(specs)
        ]
        for part in self.parts if shape.late_weights else ():
            self._name_later(part, self.weights.to_bytes(32))
        draw = random.Random(self._random.random()).random
        self.scheduler = self.parts[0].scheduler(draw=draw)
        self._see_verdicts()
        role = GuardedScheduler(
            self.scheduler,
            self.observer,
            block_size=shape.host.block_size,
            strict=shape.strict,
            checks_host=not shape.host.spares_others,  # as in vLLM
        )
        ranks = []
        for spec, part in zip(specs, self.parts, strict=True):
            kv = RankKV(spec, shape.host.num_blocks, shape.host.block_size)
            driver = StepDriver(part.worker(), self.observer, strict=True)
            driver.role.register_kv_caches(kv.tensors)
            ranks.append((driver, kv))
        self.host = Host(self.loop, shape.host, role, ranks, self, self._random)
        self.host.weights = self.weights
        self.host.longest_wait = 2.0 * self.parts[0].config.load_timeout_seconds + 3.0

    def _see_verdicts(self) -> None:
        """Know which slots have what the scheduler finds to be wrong."""
        pool, take_out = self.scheduler.pool, self.scheduler.audits.take_out
        assign, refused, again = pool.save, self.watch.truth.refused, set[ChunkKey]()

        def save(key: ChunkKey, *given: Any) -> Any:
            slot = assign(key, *given)
            if slot is not None and refused.pop(key, None) is not None:
                again.add(key)  # computed by another request: this may stay
            return slot

        def condemn(keys: Sequence[ChunkKey], *given: Any) -> None:
            found = [slot for slot in map(pool.find, keys) if slot is not None]
            self._condemned.update((id(slot), slot) for slot in found)
            take_out(keys, *given)

        def refuse(keys: Sequence[ChunkKey], *given: Any) -> None:
            for key in keys:
                slot = pool.find(key)
                if key not in again or (slot is not None and slot.failed):
                    refused[key] = self.loop.now
            condemn(keys, *given)

        pool.save = save
        self.scheduler.audits.take_out = condemn
        self.scheduler.saves._take_out = refuse

    def _name_later(self, part: PrefixCache, weights: bytes) -> None:
        """A rank hashes its weights while it serves."""
        seconds = self.shape.late_weights * self._random.uniform(0.5, 1.5)

        def name() -> None:
            self.loop.sleep(seconds)
            part.identity.name(weights)

        self.loop.spawn(name, "hash of weights")

    def _close(self) -> None:
        assert self.host is not None
        began = self.loop.now
        self.scheduler.close()
        for driver, _ in self.host.ranks:
            driver.close()
        for part in self.parts:
            part.close()
        self.is_closed = True
        if (took := self.loop.now - began) > CLOSE_SECONDS:
            raise Wrong("closes too long", f"{self.name} took {took:.1f} s")

    def close_what_died(self) -> None:
        """Let go of what a killed process held in this one."""
        for part in self.parts:
            part.store.close()

    # -- invariants -----------------------------------------------------------------------------

    def asked(self, request: HostRequest) -> None:
        """Note what the keys of its chunks stand for."""
        found = self.scheduler.requests.by_id.get(request.request_id)
        if found is None or found.is_past or not self.is_named:  # else keys are of no model yet
            return
        keys, size = found.keys, self.shape.chunk_tokens
        known, num_known = request.noted
        start = num_known if known is keys else 0
        for number in range(start, min(len(keys.keys), len(request.seeds) // size)):
            seeds = tuple(request.seeds[number * size : (number + 1) * size])
            content = Content(self.shape.groups, seeds)
            is_stored = request.options.store
            self.watch.truth.learn(keys.keys[number], content, keys.mark, is_stored=is_stored)
            request.noted = keys, number + 1

    def computed(self, item: Scheduled) -> None:
        self.watch.computed(self, item)

    def shared(self, request: HostRequest, num_local: int) -> None:
        # No command erases a host's own prefix cache. To a new prompt it is as if it was computed.
        local = request.seeds[:num_local]
        self.watch.truth.computed.update(dict.fromkeys(local, self.loop.now))

    def loaded(self, request: HostRequest, start: int, stop: int) -> None:
        self.watch.loaded(self, request, start, stop)
        search = self.scheduler.requests.by_id[request.request_id].search
        if any(id(slot) in self._condemned for slot in search.pinned):
            raise Wrong("verdict", f"{self.name} loads for {request!r} what it has taken out")

    def is_not_finite(self, seed: int) -> bool:
        return seed in self.watch.truth.not_finite

    def after_step(self) -> None:
        """What holds after every step."""
        pool = self.scheduler.pool
        try:
            check_pool(pool, self.scheduler.holds())
        except AssertionError as error:
            raise Wrong("pool", f"of {self.name}: {error}") from error
        self._check_owners()
        for index, loans in pool.loans._lent.items():
            slot = pool._slots.get(index)
            for loan in loans:
                if slot is not None and slot.key != loan.key and loan.until > self.loop.now:
                    raise Wrong("lent", f"{self.name} assigns slot {index} again while it is lent")
        self._check_ledger()
        for tier in self.parts[0].store.tiers() if self.has_quota else ():
            stat = tier.stat()
            if stat.max_bytes is not None and stat.used_bytes > stat.max_bytes:
                raise Wrong("quota", f"{tier.name} of {self.name}: {stat}")

    def _check_owners(self) -> None:
        """What the role keeps for a request fits what the host has done with it."""
        assert self.host is not None
        for name, request in self.scheduler.requests.by_id.items():
            live = self.host.requests.get(name)
            if live is None:
                raise Wrong("owner", f"{self.name} keeps {name}, which has ended")
            if request.load is not None:
                raise Wrong("owner", f"{self.name} keeps a load of {name} after the plan")
            audit = request.audit
            if not live.has_blocks and audit is not None and audit.is_expected:
                raise Wrong("owner", f"{self.name} awaits an audit of {name}, which has no blocks")
            if live.has_blocks and request.search is not None:
                raise Wrong("owner", f"{self.name} keeps a search of {name}, which has blocks")

    def _check_ledger(self) -> None:
        assert self.host is not None
        if self.host.is_broken or self.host.has_lost_load:
            return  # a look-up that failed may not be counted
        counts, ledger = self.observer, self.host.ledger
        counted = {
            "tokens": (counts["lookup_tokens"], ledger.tokens),
            "local": (counts["local_hit_tokens"], ledger.local),
            "hits": (counts["hit_tokens"], ledger.external),
            "misses": (counts["miss_tokens"], ledger.tokens - ledger.local - ledger.external),
        }
        if wrong := {what: each for what, each in counted.items() if each[0] != each[1]}:
            raise Wrong("ledger", f"of {self.name}, counted and true: {wrong}")

    def _check_rest(self) -> None:
        """What holds once nothing is to be done: no pin is left."""
        assert self.host is not None
        num_pins = 0 if self.has_lost_plan else self.scheduler.pool.num_pins
        if num_pins:
            raise Wrong("pool", f"{self.name} is at rest, and {num_pins} pins are left")
        if not all(kv.null_block_is_untouched() for _, kv in self.host.ranks):
            raise Wrong("null block", f"{self.name} wrote it")
        self._check_memory()

    def _check_memory(self) -> None:
        """Each chunk in memory is what its key stands for; what is counted is there."""
        pool, truth = self.scheduler.pool, self.watch.truth
        for index, slot in pool._slots.items():
            is_whole = slot.held == pool._all_groups and slot.is_idle
            if self._checked.get(index) is slot or not is_whole or slot.is_spare:
                continue
            parts = pool.loans._ranks.record(index)
            if parts is None:
                return
            self._checked[index] = slot
            if pool.find(slot.key) is slot:
                head, *rest = (bytes(part) for part in parts)
                truth.check_record(f"memory of {self.name}", slot.key, b"".join((head, *rest)))
        for store in self.stores():
            if isinstance(store, MemoryStore):
                values = store.values()
                for key, value in values:
                    if self._checked_values.get(key) is not value.content:
                        self._checked_values[key] = value.content
                        truth.check_record(f"{store.url} of {self.name}", key, value.content)
                num_bytes = sum(len(value.content) for _, value in values)
                if store.stat().used_bytes != num_bytes:
                    raise Wrong("quota", f"{store!r} of {self.name} has {num_bytes} bytes")

    def stores(self) -> list[Any]:
        """The stores of its tiers that are up."""
        tiers: Any = self.parts[0].store
        return [tier.up for tier in tiers._tiers if tier.up is not None]

    def check_slots(self) -> None:
        """What holds once everything works and has settled: no slot is in use for anything."""
        if num_taken := self.scheduler.pool.num_taken:
            raise Wrong("pool", f"{self.name} has settled, and {num_taken} slots are in use")

"""The one simulated host: it schedules requests over paged KV that checks itself, as vLLM does:
chunked prefill, a prefix cache of its own, preemption, aborts, and steps whose output comes late.
"""

from __future__ import annotations

import math
import random
from collections import deque
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any, Protocol

from kvferry.contract.driver import StepDriver
from kvferry.contract.fold import WorkerOutputFold
from kvferry.contract.guard_scheduler import GuardedScheduler
from kvferry.contract.handover import STAMP
from kvferry.contract.messages import WorkerOutput
from kvferry.testing.prefixes import extend_seeds
from kvferry.testing.world.device import Device
from kvferry.testing.world.kv import TAINT, RankKV, Right, WrongToken
from kvferry.testing.world.loop import Loop, Wrong
from kvferry.testing.world.memory import HostMemory
from kvferry.testing.world.requests import HostRequest, HostStep, Scheduled
from kvferry.testing.world.shapes import HostShape
from kvferry.types import NULL_BLOCK, ChunkKey

IDLE_SECONDS = 0.005
LONGEST_IDLE_SECONDS = 0.5
IDLE_GROWTH = 2.0
"""Pauses between steps without tokens; they grow while nothing happens."""


class Watch(Protocol):
    """What a world wants to know of its hosts, and knows of them."""

    @property
    def is_named(self) -> bool:
        """Whether the weights have a name by now."""

    def asked(self, request: HostRequest) -> None:
        """A request was looked up, or gets tokens in a step."""

    def computed(self, item: Scheduled) -> None:
        """A step computes right KV of these tokens."""

    def shared(self, request: HostRequest, num_local: int) -> None:
        """A new prompt has its first tokens from the host's own prefix cache."""

    def loaded(self, request: HostRequest, start: int, stop: int) -> None:
        """These tokens of a request come from the connector."""

    def is_not_finite(self, seed: int) -> bool:
        """Whether a record of a token with this seed has NaN."""

    def after_step(self) -> None:
        """A step has ended in which requests began or ended, or which reported something."""


@dataclass(slots=True)
class Ledger:
    """What the host knows of all admissions, to compare with what the connector counts."""

    tokens: int = 0
    local: int = 0
    external: int = 0


class Host:
    """One engine's scheduler and ranks.

    Args:
        drivers: of the worker role of each rank.
        kv: of each rank.

    Attributes:
        longest_wait: seconds for which a look-up may be answered by "ask again", if no other engine
            is waited for.
        num_preemptions: so many running requests are preempted in the next step.
        resets_within: whether the connector is reset once more between the look-ups of the next
            step and its plan, as no host should.
        num_copies: how often kvferry has copied into its blocks. What was right stays so till then.
        off: why the cache is off; empty if it is not.
        is_broken: whether some hook has raised an unforeseen error.
        has_lost_load: whether a request lost a load before its plan. Of such a one the connector is
            asked nothing more, so it may not count what is computed for it then.
        plans_twice: whether the next step is planned twice, as no host should.
        has_lost_plan: whether it was: what the first plan was to save has slots for good.
    """

    def __init__(
        self,
        loop: Loop,
        shape: HostShape,
        role: GuardedScheduler,
        ranks: Sequence[tuple[StepDriver, RankKV]],
        watch: Watch,
        rng: random.Random,
    ) -> None:
        self.loop = loop
        self.shape = shape
        self.role = role
        self.ranks = list(ranks)
        self._groups = ranks[0][1].groups
        self.weights = 0
        kvs = [kv for _, kv in ranks]
        self.memory = HostMemory(shape.num_blocks, shape.block_size, kvs)
        self.requests: dict[str, HostRequest] = {}
        self.waiting: deque[HostRequest] = deque()
        self.running: list[HostRequest] = []
        self.ledger = Ledger()
        self.num_steps = 0
        self._fold = WorkerOutputFold(len(self.ranks))
        self.longest_wait = math.inf
        self.num_copies = 0
        self.device = Device(loop, shape.block_size, watch.is_not_finite, rng)
        self.num_preemptions = 0
        self.resets_within = self.plans_twice = self.has_lost_plan = False
        self.is_broken = self.has_lost_load = False
        self.off = ""
        self._watch = watch
        self._random = rng
        self._finished: set[str] = set()
        self._preempted: set[str] = set()
        self._late: HostStep | None = None  # whose output is still to be learnt
        self._idle = IDLE_SECONDS
        self._is_eventful = False  # whether something began or ended since the last check

    # -- requests -------------------------------------------------------------------------------

    def add(self, request: HostRequest) -> None:
        self._is_eventful = True
        self.requests[request.request_id] = request
        self.memory.lose(request)
        self.waiting.append(request)
        self._idle = IDLE_SECONDS
        self.role.on_new_request(request)

    def abort(self, request: HostRequest) -> None:
        if not request.outcome and request.request_id in self.requests:
            self._end(request, "abort")

    def reset(self, weights: int) -> None:
        """Preempt everything, empty the prefix cache, and have the connector begin an epoch."""
        for request in reversed(self.running):
            self._lose_blocks(request)
            self._preempted.add(request.request_id)
            self.waiting.appendleft(request)
        self.running.clear()
        self._is_eventful = True
        self.memory.reset()
        if weights != self.weights:
            self.weights = weights
            for request in self.requests.values():
                request.seeds.clear()
        self.role.reset()

    def sleep(self, seconds: float, weights: int) -> None:
        """Lose all KV memory for a while, as an engine that sleeps; then go on, perhaps with other
        weights."""
        late, self._late = self._late, None
        if late is not None:
            self._update(late)
        self.reset(weights)
        for driver, _ in self.ranks:
            driver.role.unregister_kv_caches()
        self.loop.sleep(seconds)
        for request in self.requests.values():
            if request.asks_since is not None:
                request.asks_since += seconds  # it asks for nothing while it sleeps
        for driver, kv in self.ranks:
            kv.poison(range(self.shape.num_blocks))
            driver.role.register_kv_caches(kv.tensors)

    @property
    def has_work(self) -> bool:
        is_due = self._finished or self._late is not None
        return bool(self.requests or is_due or self.role.has_work())

    def _end(self, request: HostRequest, outcome: str) -> None:
        if outcome == "done":
            self._check_kv(request)
            self._watch.asked(request)
        self._is_eventful = True
        result = self.role.request_finished(request, request.block_ids)
        self._finished.add(request.request_id)
        del self.requests[request.request_id]
        if request in self.running:
            self.running.remove(request)
        else:
            self.waiting.remove(request)
        self._lose_blocks(request)
        request.outcome, request.params = outcome, result.params
        if request.options.explain and request.admitted and not self.is_broken:
            self._check_explained(request, result.params or {})
        request.on_end()

    def _check_explained(self, request: HostRequest, params: Mapping[str, Any]) -> None:
        if STAMP not in params:
            raise Wrong("explained", f"{request!r} was admitted, and nothing says what it got")
        if request.was_off and request.was_off not in str(params[STAMP]):
            raise Wrong("explained", f"{request!r} met a cache that is off, and gets {params}")

    def _check_kv(self, request: HostRequest) -> None:
        if request.is_spoilt or request.is_tainted:
            return
        right = self._right(request)
        for _, kv in self.ranks:
            found = kv.wrong_tokens(request.block_ids, right, request.num_computed_tokens)
            if wrong := sorted({each.block for each in found}):
                raise Wrong("wrong KV", f"{request!r} ended with wrong KV in blocks {wrong}")

    def _right(self, request: HostRequest) -> Right:
        return request.right.of(request.seeds, self._groups)

    def _lose_blocks(self, request: HostRequest) -> None:
        self.memory.lose(request)
        request.num_computed_tokens = 0
        request.turn += 1
        request.is_spoilt = request.is_tainted = request.is_lost = False
        request.blip = range(0)

    # -- scheduling -----------------------------------------------------------------------------

    def _schedule(self) -> HostStep:
        step = HostStep(frozenset(self._finished), self._preempted)
        self._finished, self._preempted = set(), set()
        for request in [each for each in self.running if each.is_lost]:
            self._preempt(request, step)
        while self.num_preemptions and self.running:
            self.num_preemptions -= 1
            self._preempt(self.running[-1], step)
        self.num_preemptions = 0
        budget = self.shape.max_tokens
        for request in list(self.running):
            if request not in self.running:  # it lost its blocks to one before it
                continue
            missing = len(request.all_token_ids) - request.num_computed_tokens
            num_tokens = min(missing, budget)
            if num_tokens and self._grow(request, num_tokens, step):
                self._add(step, request, num_tokens)
                budget -= num_tokens
        for item in step.scheduled if self.shape.offers_early else ():
            self._commit(item.request, item.stop)
        if not step.preempted_request_ids:
            self._admit_waiting(step, budget)
        if self.resets_within and step.scheduled:
            self.resets_within = False
            self.role.reset()
        step.plan = self.role.build_plan(step)
        for item in step.scheduled:
            self._watch.asked(item.request)
        if self.plans_twice and step.scheduled:
            self.plans_twice, self.has_lost_plan = False, True
            step.plan = self.role.build_plan(step)
        return step

    def _preempt(self, victim: HostRequest, step: HostStep) -> None:
        self._is_eventful = True
        self.running.remove(victim)
        self._lose_blocks(victim)
        step.preempted_request_ids.add(victim.request_id)
        step.scheduled = [item for item in step.scheduled if item.request is not victim]
        self.waiting.appendleft(victim)

    def _add(self, step: HostStep, request: HostRequest, num_tokens: int) -> None:
        start = request.num_computed_tokens
        extend_seeds(request.seeds, request.all_token_ids, self.weights, request.true_keys)
        step.scheduled.append(Scheduled(request, start, num_tokens, request.turn))
        request.num_computed_tokens = start + num_tokens

    def _grow(self, request: HostRequest, num_tokens: int, step: HostStep) -> bool:
        while not self.memory.grow(request, num_tokens):
            victim = self.running[-1]
            self._preempt(victim, step)
            if victim is request:
                return False
        return True

    def _admit_waiting(self, step: HostStep, budget: int) -> None:
        asked: list[HostRequest] = []
        while self.waiting and budget > 0 and len(self.running) < self.shape.max_requests:
            request = self.waiting.popleft()
            keys = self._block_keys(request)
            local = self.memory.find(keys if self.shape.prefix_caching else ())
            num_local = len(local[0]) * self.shape.block_size
            answer = self.role.lookup(request, num_local).num_tokens
            self._watch.asked(request)
            if answer is None:
                self._check_patience(request)
                asked.append(request)
                continue
            request.asks_since = None
            num_computed = num_local + answer
            num_tokens = min(len(request.all_token_ids) - num_computed, budget)
            if not self.memory.take(request, local, num_computed, num_computed + num_tokens):
                self.waiting.appendleft(request)
                break
            self.has_lost_load |= self.role._promises.has_failed(request.request_id)
            if request.extra_keys.cacheable and self._watch.is_named:
                self.ledger.local += num_local  # else all counts as missed
            self._admit(request, num_local, answer)
            self._add(step, request, num_tokens)
            if self.shape.offers_early:
                self._commit(request, request.num_computed_tokens)
            budget -= num_tokens
        for request in self.waiting:
            request.asks_since = None  # the host does not ask for it meanwhile
        self.waiting.extendleft(reversed(asked))

    def _admit(self, request: HostRequest, num_local: int, num_external: int) -> None:
        num_tokens = len(request.all_token_ids)
        self._is_eventful = True
        if not request.admitted and request.extra_keys.cacheable:
            request.was_off = self.off
        if request.admitted is None:
            self._watch.shared(request, num_local)
            request.admitted = num_tokens, num_local, num_external
        self.ledger.tokens += num_tokens
        self.ledger.external += num_external
        if num_external:
            options = request.options
            most = num_external if options.max_load_tokens is None else options.max_load_tokens
            if num_external > most or not options.load:
                raise Wrong("options", f"{request!r} loads {num_external} tokens, with {options}")
            self._watch.loaded(request, num_local, num_local + num_external)
        self.role.update_after_alloc(request, request.block_ids, num_external)
        first = num_local // self.shape.block_size
        request.loaded = range(first, self.memory.num_blocks(num_local + num_external))
        request.num_computed_tokens = num_local + num_external
        self.running.append(request)

    def _check_patience(self, request: HostRequest) -> None:
        if request.asks_since is None:
            request.asks_since = self.loop.now
        waited = self.loop.now - request.asks_since
        if waited > self.longest_wait * (1 if request.handover is None else 6):
            raise Wrong("waits too long", f"{request!r} was to ask again for {waited:.1f} s")

    def _block_keys(self, request: HostRequest) -> list[ChunkKey]:
        """Names of the content of its whole blocks, but for the one with the last token."""
        extend_seeds(request.seeds, request.all_token_ids, self.weights, request.true_keys)
        size, last = self.shape.block_size, len(request.all_token_ids) - 1
        ends = range(size - 1, last // size * size, size)
        return [ChunkKey(request.seeds[end].to_bytes(8)) for end in ends]

    # -- steps ----------------------------------------------------------------------------------

    def step(self) -> None:
        """Plan a step, run it on all ranks, and learn its output or that of the step before."""
        self.num_steps += 1
        step = self._schedule()
        late, self._late = self._late, None
        if late is not None:
            self._update(late)
        step.output = self._execute(step)
        if self.shape.late and step.scheduled:
            self._late = step
        else:
            self._update(step)
        if not step.output.is_empty() or self._is_eventful:
            self._is_eventful = False
            self._watch.after_step()
        if step.scheduled or not step.output.is_empty():
            self._idle = IDLE_SECONDS
        else:
            self.loop.sleep(self._idle * self._random.uniform(0.5, 1.5))
            self._idle = min(LONGEST_IDLE_SECONDS, IDLE_GROWTH * self._idle)

    def _execute(self, step: HostStep) -> WorkerOutput:
        num_tokens = sum(item.num_scheduled_tokens for item in step.scheduled)
        seconds = 0.002 + num_tokens / self.shape.tokens_per_second
        for request in self.device.begin(step):
            self.memory.uncache(self._written(step, request))
        order = list(range(len(self.ranks)))
        self._random.shuffle(order)
        before = self.num_copies
        outputs: list[WorkerOutput] = [WorkerOutput()] * len(order)
        wrong: dict[HostRequest, list[WrongToken]] = {}
        for rank in order:
            driver, kv = self.ranks[rank]
            if step.scheduled:
                with driver.step(step.plan, step.finished_request_ids):
                    self.loop.sleep(seconds / len(order))
                    self._forward(step, kv, wrong)
                outputs[rank] = driver.output
            else:
                outputs[rank] = driver.no_forward(step.plan, step.finished_request_ids)
        for item in step.scheduled if before == self.num_copies else ():
            is_right = item.request not in wrong and not item.request.is_spoilt
            item.request.read = (before, item.turn) if is_right else None
        output = self._fold.fold(outputs)
        self.memory.bad |= output.invalid_block_ids
        for request, tokens in wrong.items():
            silent = {each.block for each in tokens if not self.device.may_show(request, each)}
            if not silent:
                request.is_spoilt = True
                loaded = {each.block for each in tokens}
                self.memory.uncache(self._written(step, request) | loaded)
            elif silent := silent - self.memory.bad:
                raise Wrong(
                    "wrong KV",
                    f"a forward of {request!r} reads wrong KV in blocks {sorted(silent)} of "
                    f"{request.block_ids}, and no load of them was reported as failed",
                )
            else:
                written = self._written(step, request)
                self.memory.bad |= written
                if self.shape.spares_others:
                    request.is_tainted = True
                    self.memory.uncache(written)
        return output

    def _written(self, step: HostStep, request: HostRequest) -> set[int]:
        """The blocks into which a step wrote what it computed for a request."""
        item = next(each for each in step.scheduled if each.request is request)
        first = item.num_computed_tokens // self.shape.block_size
        stop = self.memory.num_blocks(item.stop)
        return {block for table in request.block_ids for block in table[first:stop]} - {NULL_BLOCK}

    def _forward(
        self, step: HostStep, kv: RankKV, wrong: dict[HostRequest, list[WrongToken]]
    ) -> None:
        """Read what each request attends to, and write what it computes: wrong KV from wrong."""
        for item in step.scheduled:
            request, start = item.request, item.num_computed_tokens
            right = self._right(request)
            if request.is_spoilt:
                self.device.compute(kv, item, right, math.nan)
                continue
            found = []
            if request.read != (self.num_copies, request.turn):
                found = kv.wrong_tokens(request.block_ids, right, start)
            if request.blip:
                found = [each for each in found if not (each.is_nan and each.place in request.blip)]
            if found:
                wrong.setdefault(request, []).extend(found)
            else:
                self._watch.computed(item)
            more = TAINT if found else 0.0
            if found and all(self.device.may_show(request, each) for each in found):
                more = math.nan
            self.device.compute(kv, item, right, more)

    def _update(self, step: HostStep) -> None:
        output = step.output
        assert output is not None
        self._spoil(output.invalid_block_ids)
        for item in step.scheduled:
            request = item.request
            if request.turn != item.turn or request not in self.running:
                continue
            self._commit(request, item.stop)
            if item.stop == len(request.all_token_ids):
                made = len(request.all_token_ids) - request.num_prompt_tokens
                more = min(request.max_tokens - made, self.shape.decode_tokens)
                if not more:
                    self._end(request, "done")
                for place in range(more):
                    request.all_token_ids.append((request.seeds[-1] + place) % 97)
        self.role.update_output(output)
        for _ in self.role.take_events():
            pass

    def _commit(self, request: HostRequest, stop: int) -> None:
        """Offer full blocks to the prefix cache, but of a request with NaN or wrong KV."""
        if not (request.is_spoilt or request.is_tainted):
            self.memory.offer(request, self._block_keys(request), stop)

    def _spoil(self, invalid: Set[int]) -> None:
        """Compute again from the first block on whose load failed."""
        if not invalid:
            return
        for request in self.running:
            number = self.memory.num_blocks(request.num_computed_tokens)
            rows = zip(*(table[:number] for table in request.block_ids), strict=True)
            first = next((i for i, row in enumerate(rows) if not invalid.isdisjoint(row)), None)
            is_spared = self.shape.spares_others and first not in request.loaded
            if first is not None and not is_spared:
                request.num_computed_tokens = first * self.shape.block_size
                request.is_lost = self.memory.has_windows
                request.turn += 1
                # What it computed behind, too: in the chain, others' blocks may lie between.
                for table in request.block_ids:
                    self.memory.uncache(table[first:])
        self.memory.uncache(invalid)

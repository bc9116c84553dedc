"""The scheduler role of the shared-storage connector: decides what to load and save, in memory.

Life of a hit: `lookup` finds leading chunks that are held or stored. If all are held, they are
pinned and promised at once. Otherwise the answer is "ask again" and the next plan carries fetches →
every rank reports the chunks that it has read and verified → `lookup` promises them →
`update_after_alloc` records the blocks → the plan carries the load, and the pins end.

Tokens of a request: the engine has `[0, local)`, we load `[local, local + promised)`, and the
engine computes the rest. Whole chunks of computed tokens are saved, unless they are held or stored.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Iterator
from itertools import count, islice
from pathlib import Path
from typing import Any

from msgspec import structs

from kvferry.cache.config import RoleContext
from kvferry.cache.deciding.accounts import Accounts, Announcer, explained, not_cached
from kvferry.cache.deciding.audits import Audits
from kvferry.cache.deciding.erased import Erased
from kvferry.cache.deciding.handovers import Handovers
from kvferry.cache.deciding.hold import Hold
from kvferry.cache.deciding.host_pool import HostPool, Slot
from kvferry.cache.deciding.miss import Miss, refused
from kvferry.cache.deciding.owners import leaves_no_pin
from kvferry.cache.deciding.policy import LoadPolicy, ProducerWaits
from kvferry.cache.deciding.request import Request
from kvferry.cache.deciding.requests import Requests
from kvferry.cache.deciding.saves import Saves
from kvferry.cache.deciding.search import NO_HANDOVER, Search
from kvferry.cache.deciding.searches import Searches
from kvferry.cache.deciding.shared_writes import SharedWrites
from kvferry.cache.deciding.weights_file import WeightsFile
from kvferry.cache.messages import (
    EMPTY_PLAN,
    CacheMeta,
    CachePlan,
    Filled,
    Load,
    RankReport,
    Save,
    SlotRegion,
)
from kvferry.contract.asynchronous import NamedPromises
from kvferry.contract.messages import (
    ASK_AGAIN,
    FREE_NOW,
    FinishResult,
    LookupMiss,
    LookupResult,
    Plan,
    WorkerOutput,
)
from kvferry.contract.scheduler import SchedulerRole
from kvferry.contract.spec import Mode
from kvferry.errors import ContractError
from kvferry.journal import Journal
from kvferry.network import join_host
from kvferry.record.check import ReadFault
from kvferry.record.schema import RecordSchema
from kvferry.types import BlockTable, RequestView, ScheduledRequest, StepView, SupportsJunction

logger = logging.getLogger(__name__)

REPROBE_SECONDS = 60.0
"""If a request has waited for so long, the store is asked again what it has."""

EARLY_PER_STEP = 4
"""Requests of the host's queue that one step looks up, if they wait for another engine."""


def _never_promised(view: RequestView, num_tokens: int) -> ContractError:
    """The engine counts on tokens that no plan will bring: the guard fails them."""
    return ContractError(f"{num_tokens} tokens of {view.request_id!r} were never promised")


class CacheScheduler(SchedulerRole):
    """The scheduler role of an engine; the host calls its hooks. Runs in: scheduler process, one
    thread. No hook but `close` blocks or does I/O.

    Args:
        schema: layout of the records, under any namespace.
        pool: slots, owned by this role from now on.
        shared_writes: writes the records that several ranks hold together.

    Attributes:
        identity: under which namespace it loads and saves, and whether it does.
        pool, requests, policy, saves, audits: parts of the role, open for tests and benchmarks.

    Raises:
        ConfigError: the file of the option `record` cannot be written, or that of
            `weights_version_file` not read.
    """

    def __init__(
        self,
        context: RoleContext,
        schema: RecordSchema,
        pool: HostPool,
        *,
        shared_writes: SharedWrites,
    ) -> None:
        config, spec = context.config, context.spec
        if context.states is not None:
            self.rules = NamedPromises
        self.context = context
        self.pool = pool
        self.policy = LoadPolicy(config.load_timeout_seconds, context.clock)
        journal = None
        if config.record is not None:
            journal = Journal(Path(config.record), schema.chunk_tokens)
        self.identity = context.identity
        self._state = self.identity.state  # as the requests and the pool know it
        namespace = self._state.namespace or schema.namespace
        self.requests = Requests(namespace, schema.chunk_tokens, context.clock)
        self._weights = WeightsFile(config.weights_version_file, context.clock)
        self._ranks = shared_writes.ranks
        self._touches: list[bytes] = []  # for the next plan
        self.audits = Audits(context, pool, self.requests.withdraw, self._ranks)
        unreadable = self.requests.unreadable
        patience = ProducerWaits(config.load_timeout_seconds, context.store.url)
        self._searches = Searches(context, pool, unreadable, self.policy, self.audits, patience)
        self._searches.begin_epoch(namespace)
        self.pool.namespace = namespace
        announcer = (
            Announcer(context.store, schema.chunk_tokens) if spec.host_publishes_events else None
        )
        self.saves = Saves(
            context, pool, self.requests, shared_writes, announcer, self.audits.take_out
        )
        self._handovers = Handovers(context, self.requests, self.saves, patience)
        self._accounts = Accounts(context, schema, journal)
        self._plan_numbers = count(1)
        self._erased = Erased(context.store)
        pool.loans.is_erased = self._erased.covers
        self._has_looked_up = False  # in this step
        self._reads, self._writes = Mode.READ in spec.mode, Mode.WRITE in spec.mode

    def advertise(self, host: str, port: int) -> None:
        """Name the address where peers are served, in answers to prefills for other engines."""
        logger.info("peers are served at %s", join_host(host, port))
        self._handovers.address = (host, port)

    # -- lookup ---------------------------------------------------------------------------------

    @leaves_no_pin
    def expect_no_reports(self) -> None:
        """Load and save nothing from now on: the host turned out to carry no reports from workers
        to the scheduler. Without reports the contents of slots are unknown."""
        self._stop(
            "this host carries no reports from workers to the scheduler: nothing is loaded or "
            "saved; a later version of the host may carry them"
        )

    def _stop(self, why: str) -> None:
        """Load and save nothing from now on."""
        if self.identity.stop(why):
            logger.warning(why)
            self._follow_identity()

    def _follow_identity(self) -> None:
        """Heed what another part of this process made of the cache's state: at the head of each
        hook, and nowhere else."""
        state = self.identity.state
        if state is self._state:
            return
        if state.epoch != self._state.epoch:
            self.requests.begin_epoch(state.namespace)
            self._searches.begin_epoch(state.namespace)
            self.pool.namespace = state.namespace
            self.pool.clear()
            self.saves.begin_epoch()
        self._state = state  # last: after a fault, all of it is done again

    def _refusal(self, view: RequestView) -> Miss | None:
        """Follow a request. Return why it must not be cached; None if it may be."""
        if not self.requests.follow(view):
            return refused(view.extra_keys)
        if self._state.epoch is None:
            return Miss(self._state.miss or LookupMiss.HASHING, self._state.why)
        return None

    def _may_load(self, view: RequestView) -> bool:
        handover = view.handover
        is_asked = self._reads or (handover is not None and handover.source is not None)
        return is_asked and self._state.miss is None and view.options.load

    def _saves(self, view: RequestView, request: Request) -> bool:
        return view.options.store and (self._writes or request.handover.gives)

    def _track(self, view: RequestView) -> Request:
        request = self.requests.track(view)
        if view.handover is not None and request.handover is NO_HANDOVER:
            limit = self._searches.rules.usable(len(request.keys.keys), len(view.all_token_ids) - 1)
            self._handovers.begin(view.handover, request, limit)
        return request

    def _probe(self, request: Request) -> None:
        """Have the store find out what it has of a prompt, unless it has just been asked to."""
        now = self.context.clock()
        if request.probed_at is None or now - request.probed_at > REPROBE_SECONDS:
            request.probed_at = now
            self._searches.probe(request.keys.keys)

    def _search(self, view: RequestView, request: Request) -> Search:
        """The search of a request, begun if there is none."""
        if request.search is None:
            most = view.options.max_load_tokens
            asked_at = request.probed_at or 0.0
            items = view.extra_keys.items if self.context.spec.whole_items else ()
            request.search = self._searches.begin(
                request.keys, request.handover, most, asked_at, items
            )
        return request.search

    @leaves_no_pin
    def on_new_request(self, view: RequestView) -> None:
        self._follow_identity()
        if self._refusal(view) is not None:
            return
        if self._may_load(view):
            request = self._track(view)
            self._probe(request)
            if request.handover.num_chunks:
                request.queue()
        elif view.handover is not None:
            self._searches.probe(self._track(view).keys.keys)  # which chunks the store lacks

    @leaves_no_pin
    def lookup(self, view: RequestView, num_local_tokens: int) -> LookupResult:
        self._follow_identity()
        if not self._has_looked_up:  # before any hit of this step is promised
            self._erased.heed(self.requests, self.pool)
            self._has_looked_up = True
        refusal = self._refusal(view)
        if refusal is not None:
            return LookupResult(0, False, refusal.reason)
        if self._weights.is_open:
            is_unchanged = self._weights.is_unchanged()
            if is_unchanged is None:
                return ASK_AGAIN
            if is_unchanged:
                self.identity.resume_first()
                self._follow_identity()
        request = self._track(view)
        request.is_queued = False
        if not self._may_load(view):
            request.end_search()
            miss = Miss(self._state.miss or LookupMiss.NOT_LOADING, self._state.why)
            return self._searches.refuse(self._search(view, request), num_local_tokens, miss)
        started = time.perf_counter()
        answer = self._look_up(view, request, num_local_tokens)
        self.context.observer.observe("lookup", time.perf_counter() - started)
        return answer

    def _look_up(self, view: RequestView, request: Request, num_local: int) -> LookupResult:
        self._probe(request)
        search = self._search(view, request)
        answer = self._searches.answer(search, len(view.all_token_ids), num_local)
        if search.junction and isinstance(view, SupportsJunction):
            view.keep_state_after(search.junction)
        return answer

    # -- allocation -----------------------------------------------------------------------------

    @leaves_no_pin
    def update_after_alloc(
        self, view: RequestView, block_ids: BlockTable, num_external_tokens: int
    ) -> None:
        self._follow_identity()
        refusal = self._refusal(view)
        if refusal is not None:
            if num_external_tokens > 0:
                raise _never_promised(view, num_external_tokens)
            self.requests.track(view).admit_uncached(not_cached(view, refusal))
            self._accounts.not_cacheable(view, refusal)
            return
        request = self._track(view)
        request.admit()
        search = request.search or self._searches.none()
        load, stop = None, search.num_local
        if num_external_tokens > 0:
            hit = search.hit
            promised = 0 if hit is None else hit.stop - hit.start
            # Nothing can go on from a part of a hit if that has no state at its end.
            is_short = hit is not None and hit.num_parts and num_external_tokens < promised
            if hit is None or num_external_tokens > promised or is_short:
                raise _never_promised(view, num_external_tokens)
            stop = hit.start + num_external_tokens
            blocks = self.context.tables.load_slices(block_ids, hit.start, stop)
            chunks = self._searches.chunks(search, hit.start, stop)
            load = Load(view.request_id, chunks, hit.start, stop, blocks)
            request.promise(load, search.pinned.move())
            request.last_state = stop
        if self._saves(view, request):
            request.save(0)
        limit = self._searches.rules.usable(len(request.keys.keys), len(view.all_token_ids) - 1)
        if (
            request.search is not None or request.answer is None
        ):  # else a session goes on in its blocks
            self._accounts.admitted(view, request, search, stop, limit)
        audit = search.admit()
        if audit is not None:
            audit.load = load if self.context.spec.host_recomputes else None
            request.expect(audit)
        request.search = None

    # -- plan -----------------------------------------------------------------------------------

    def empty_plan(self) -> Plan:
        return EMPTY_PLAN

    def holds(self) -> Iterator[Hold]:
        """All that owns pins."""
        for request in {**dict.fromkeys(self.requests.by_id.values()), **self.requests.at_work}:
            yield from request.holds()
        yield from self.audits.holds()

    @leaves_no_pin
    def build_plan(self, step: StepView) -> Plan:
        try:
            if self.identity.state is not self._state:  # asked twice, as every step comes here
                self._follow_identity()
            self._has_looked_up = False
            self._erased.heed(self.requests, self.pool)
            if step.preempted_request_ids:
                self._preempt(step)
            return self._plan(step)
        except Exception:
            # The guard reports its loads as failed: no later plan may carry them.
            self.requests.planned()
            self._cancel_copies()
            raise

    def _preempt(self, step: StepView) -> None:
        # A host that preempts everything can admit a request again in the same step: the load of a
        # scheduled request was planned after its preemption. So was an async load, whose request
        # does not run till it ends, as only running ones are preempted.
        scheduled = {item.request.request_id for item in step.scheduled}
        for request_id in step.preempted_request_ids:
            request = self.requests.by_id.get(request_id)
            if request is not None:
                request.lose_blocks(is_admitted=request_id in scheduled or request.is_loading)

    def _plan(self, step: StepView) -> Plan:
        running = self._find_running(step)
        self.saves.poll_writes()
        saves = self.saves.plan(running) if self._state.miss is None else ()
        if running:
            saves += self._comparisons(running)
        if saves:
            self.saves.await_reports()
        loads: tuple[Load, ...] = ()
        if self.requests.at_work:
            self._fetch_early()
            loads = tuple(each.load[0] for each in self.requests.at_work if each.load is not None)
        timed = self.policy.begin_step(step.scheduled, loads=bool(loads))
        self.requests.planned()
        audits = self.audits
        touches, pins = self._touches, self.saves.pins.orders
        orders = self.saves.shared_writes.orders
        has_orders = audits.has_unchecked or audits.discards or orders or touches or pins
        if not (loads or saves or has_orders or timed or self.pool.has_work):
            return EMPTY_PLAN
        number, first = next(self._plan_numbers), self.identity.first
        # Last, as no later plan has them: what follows calls nothing that can raise.
        unchecked = self.audits.take_unchecked()
        discards = audits.discards
        fetches, cancels = self.pool.pop_orders()
        plan = CachePlan(
            pool=self.pool.pool_id,
            number=number,
            fetches=fetches,
            cancels=cancels,
            loads=loads,
            saves=saves,
            unchecked=unchecked,
            failures_known=self.saves.failures_known,
            timed=timed,
            namespace=self.requests.namespace,
            first_namespace=first,
            are_apart=self._ranks.are_apart,
            writes=tuple(orders),
            discards=tuple(discards),
            touches=tuple(touches),
            pins=tuple(pins),
        )
        orders.clear()
        discards.clear()
        touches.clear()
        pins.clear()
        return plan

    def _find_running(self, step: StepView) -> list[tuple[ScheduledRequest, Request]]:
        """The requests of a step that may be cached, and what is known of each."""
        found, by_id = [], self.requests.by_id
        for item in step.scheduled:
            view = item.request
            if not view.extra_keys.cacheable:
                self.requests.follow(view)
            elif (request := by_id.get(view.request_id)) is not None:
                if request.uncached is not None:
                    self._admit_late(view)
                found.append((item, request))
        return found

    def _comparisons(self, running: Iterable[tuple[ScheduledRequest, Request]]) -> tuple[Save, ...]:
        """The saves of audited chunks that a step completes."""
        saves = []
        for item, request in running:  # no generator: every step comes here
            audit = request.audit
            if audit is not None and audit.is_expected:
                save = self.audits.plan(item, audit)
                if save is not None:
                    saves.append(save)
        return tuple(saves)

    def _cancel_copies(self) -> None:
        """Take back saves and audits of a plan that could not be built: no rank will report
        them."""
        for slot in self.pool.pop_copies():
            if slot.is_spare:
                self.audits.lost_plan(slot)
            for _ in range(slot.num_filling):
                self._learn_filled(Filled(slot.index, ReadFault.CANCELLED))

    def _admit_late(self, view: RequestView) -> None:
        """Store what a running request computes, as its extra keys became known after it was
        admitted in this epoch."""
        if self.requests.by_id[view.request_id].is_past or self._refusal(view) is not None:
            return
        request = self._track(view)
        request.become_cacheable()
        if self._saves(view, request):
            request.save(0)

    def _fetch_early(self) -> None:
        """Fetch what other engines have computed for requests that wait for a place to run: the
        host does not look these up meanwhile. Each step serves a few of them, by turns. Half of the
        slots are left for requests that run."""
        queued = (request for request in self.requests.at_work if request.is_queued)
        for request in tuple(islice(queued, EARLY_PER_STEP)):
            if 2 * self.pool.num_taken >= self.pool.num_slots:
                return
            view = request.view
            if not self._may_load(view):
                return
            answer = self._look_up(view, self._track(view), 0)
            request.is_queued = False
            if answer.num_tokens is None:
                request.queue()  # ask again, after the others

    @property
    def is_idle(self) -> bool:
        has_work = self.requests.has_work or self.audits.has_unchecked
        return not has_work and self.pool.is_idle

    def has_work(self) -> bool:
        return self.pool.has_work or self.saves.has_work

    # -- reports --------------------------------------------------------------------------------

    @leaves_no_pin
    def update_output(self, output: WorkerOutput) -> None:
        self._follow_identity()
        if isinstance(output.meta, CacheMeta):
            for report in output.meta.reports:
                if report.pool == self.pool.pool_id:
                    self._learn(report)

    @leaves_no_pin
    def learn_regions(self, regions: Iterable[SlotRegion]) -> None:
        """Learn where the slots of ranks are before they report: for hosts that bring it at their
        start, so that the first look-up knows whether ranks are apart."""
        for region in regions:
            why = self._learn_region(region) if region.namespace else ""
            if why:
                self._stop(why)

    def _learn_region(self, region: SlotRegion) -> str:
        were_apart = self._ranks.are_apart
        why = self.pool.loans.learn(region)
        if self._ranks.are_apart and not were_apart:
            self.saves.be_apart()
            self._searches.begin_epoch(self.requests.namespace)  # shards are found from now on
            for request in self.requests.by_id.values():
                if request.probed_at is not None:
                    self._searches.probe(request.keys.keys)
        return why

    def _learn(self, report: RankReport) -> None:
        if report.failures:  # first: requests may compute on blocks that were not filled
            self.saves.learn_failures(report)
        why = "" if report.region is None else self._learn_region(report.region)
        if report.off:
            why = why or f"rank {report.rank}: {report.off}. Nothing is loaded or saved"
        if why:
            self._stop(why)
        if report.timed:
            self.policy.end_step(report.timed)
        missed = {}
        for filled in report.filled:
            slot = self._learn_filled(filled)
            if slot is not None:
                missed[slot.key] = filled
                if filled.missed == ReadFault.ABSENT:
                    self._ranks.lacks(slot.key)
                if self._ranks.are_apart:
                    why = f"rank {report.rank}: {filled.detail or filled.missed}"
                    missed[slot.key] = structs.replace(filled, detail=why)
        if missed:
            searches = (request.search for request in self.requests.by_id.values())
            self._searches.learn_missed(missed, searches)
        for key, filled in missed.items():
            if filled.missed == ReadFault.NOT_FINITE:
                behind = self.requests.behind(key)
                self.audits.take_out(behind, ReadFault.NOT_FINITE, self.requests.namespace)
        self.saves.learn(report)

    def _learn_filled(self, filled: Filled) -> Slot | None:
        """Learn that a rank ended a read or a copy. Return the slot of a chunk that it could not
        read."""
        is_missed = filled.missed is not None
        slot = self.pool.report_filled(filled.slot, filled.seconds, missed=is_missed)
        if slot is None:
            return None
        if slot.is_spare:
            self.audits.learn(slot, filled)
        elif not slot.is_save:
            return slot if is_missed and filled.missed != ReadFault.CANCELLED else None
        elif is_missed:
            self.saves.learn_missed(slot, filled)
        return None

    # -- ends -----------------------------------------------------------------------------------

    @leaves_no_pin
    def request_finished(self, view: RequestView, block_ids: BlockTable) -> FinishResult:
        try:
            self._follow_identity()
            refusal = self._refusal(view)
        finally:  # whatever raises, nothing of it stays
            request = self.requests.by_id.pop(view.request_id, None)
            if request is not None:
                request.give_back()
        self.saves.await_reports()
        if request is None or request.uncached is not None:
            answer = None if request is None else request.uncached
            if refusal is not None:
                answer = not_cached(view, refusal)
            if answer is not None:
                self._accounts.ended(view, None, answer, self.policy.compute_rate)
            return explained(FREE_NOW, view, answer)
        result = self._close(view, request)
        # Its whole prefix counts as used now: else the root, which is the oldest, would be evicted
        # first.
        used = self.saves.with_states(request.keys.keys)
        self.context.store.touch(used)
        if self._ranks.are_apart:
            self._touches += used
        self.pool.touch(used)
        if view.options.pin > 0.0:
            num_chunks = view.num_prompt_tokens // request.keys.chunk_tokens
            pinned = self.saves.with_states(request.keys.keys[:num_chunks])
            self.saves.pins.add(pinned, view.options.pin)
        return explained(result, view, request.answer)

    def _close(self, view: RequestView, request: Request) -> FinishResult:
        """Close the account of a request. Return its result for the host."""
        result = self._handovers.answer(view, request)
        if request.answer is not None and self._accounts.wants_end(view):
            may_save = self._state.miss is None and self._saves(view, request)
            found, why, kind = self.saves.not_stored(view, request, may_save=may_save)
            request.answer = request.answer._replace(
                not_stored=found, not_stored_why=why, not_stored_kind=kind
            )
        self._accounts.ended(view, request, request.answer, self.policy.compute_rate)
        return result

    def take_events(self) -> Iterable[Any]:
        announcer = self.saves.announcer
        return () if announcer is None else announcer.pop_events()

    @leaves_no_pin
    def reset(self) -> bool:
        """Begin another epoch, with new chunk keys, as when the weights changed. Stored records
        stay for other engines, but this one does not read them again. The pool is emptied. Saves
        under way carry the old namespace, so they cannot come back. If the weights turn out to be
        those of the start, the first look-up goes back to the first epoch."""
        self._weights.ask(is_sound=self.identity.state.miss is not LookupMiss.OTHER_MODEL)
        self.identity.reset()
        self._follow_identity()
        return True

    def close(self) -> None:
        self.saves.close()
        self.audits.close()
        self._weights.close()
        self._accounts.close()

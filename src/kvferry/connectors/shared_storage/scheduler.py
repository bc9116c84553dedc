"""The scheduler role of the shared-storage connector: decides what to load and save, in memory.

Life of a hit: `lookup` finds leading chunks in the index → the next plan carries a prefetch and the
answer is "ask again" → every rank reports what it holds verified → `lookup` promises it →
`update_after_alloc` records the blocks → the plan carries the load. What is in memory already, in
this process, is promised at once. With `promise="index"` every hit is, and failed chunks come back
as block ids.

Tokens of a request: `[0, local)` the engine has, `[local, local + promised)` we load, the rest it
computes; of what it computes, whole chunks that the store does not know are saved.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from kvferry.connectors.shared_storage.announce import Announcer
from kvferry.connectors.shared_storage.lookups import Lookups
from kvferry.connectors.shared_storage.messages import (
    EMPTY_PLAN,
    Load,
    Prefetch,
    RankReport,
    SharedStorageMeta,
    SharedStoragePlan,
)
from kvferry.connectors.shared_storage.policy import LoadPolicy
from kvferry.connectors.shared_storage.requests import BrokenKeys, RequestState
from kvferry.connectors.shared_storage.save_planner import SavePlanner
from kvferry.connectors.shared_storage.tables import Tables
from kvferry.connectors.shared_storage.tickets import Tickets
from kvferry.contract.messages import (
    FREE_NOW,
    MISS,
    FinishResult,
    LookupResult,
    Plan,
    WorkerOutput,
)
from kvferry.contract.scheduler import SchedulerRole
from kvferry.errors import ContractError
from kvferry.keys import ChunkKeys
from kvferry.store.base import SupportsProbe
from kvferry.types import BlockTable, ChunkKey, RequestView, StepView

if TYPE_CHECKING:
    from kvferry.connectors.registry import EngineSpec
    from kvferry.connectors.shared_storage.config import SharedStorageConfig
    from kvferry.connectors.shared_storage.reservations import Reservations
    from kvferry.connectors.shared_storage.sessions import SharedWrites
    from kvferry.observe import Observer
    from kvferry.store.base import Store

logger = logging.getLogger(__name__)

PREFILL_TOKENS = 64
"""A step with at least this many tokens says something about the speed of prefill; a decode step
does not."""


SAVES_SECONDS = 5.0
"""An idle host is kept stepping for saves under way, so that their end is heard of, but no longer
than this after the last one: a store that stalls must not keep an engine busy."""


class SharedStorageScheduler(SchedulerRole):
    """Runs in: scheduler process, one thread. Nothing here blocks or does I/O.

    Args:
        spec: the engine.
        config: options.
        namespace: digest that roots the chunk keys.
        store: for `contains`, `probe` and `touch`: memory only. Not closed here.
        num_load_slots: chunks that every rank can hold in staging for loads.
        observer: receives counts.
        new_namespace: makes the digest of another epoch (see `reset`).
        shared_writes: where several ranks write one record, else None.
        in_memory: finds what the only rank keeps, if it is in this process.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        spec: EngineSpec,
        config: SharedStorageConfig,
        namespace: bytes,
        store: Store,
        num_load_slots: int,
        observer: Observer,
        *,
        new_namespace: Callable[[], bytes],
        shared_writes: SharedWrites | None = None,
        in_memory: Callable[[], Reservations | None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._config = config
        self._namespace = namespace
        self._new_namespace = new_namespace
        self._announce_namespace = False
        self._store = store
        self._may_load, self._may_save = spec.loads, spec.saves
        self._announcer = Announcer(store, config.chunk_tokens) if spec.publishes else None
        self._events: list[Any] = []
        self._probe = store.probe if isinstance(store, SupportsProbe) else None
        self._note_stored = store.note_stored if isinstance(store, SupportsProbe) else None
        self._observer = observer
        self._shared_writes = shared_writes
        self._clock = clock
        self._chunk = config.chunk_tokens
        self._tables = Tables(spec)
        self._policy = LoadPolicy(config.load_timeout_seconds)
        self._num_ranks = spec.shard.world_size
        self._tickets = Tickets(self._num_ranks, num_load_slots, clock, in_memory)
        self._requests: dict[str, RequestState] = {}
        self._broken = BrokenKeys(clock)
        self._lookups = Lookups(
            store,
            self._broken,
            self._tickets,
            self._policy,
            observer,
            chunk_tokens=config.chunk_tokens,
            tables=self._tables,
            in_hand=config.promise == "in_hand" and spec.carries_worker_meta,
            clock=clock,
        )
        self._saves = SavePlanner(
            store,
            self._requests,
            self._broken,
            observer,
            chunk_tokens=config.chunk_tokens,
            tables=self._tables,
            save_generated=config.save_generated,
            shared_writes=shared_writes,
        )
        self._failures_known: tuple[int, ...] = ()
        self._hears_workers = True
        if not spec.carries_worker_meta:
            self._hears_workers = False
            self._saves.expect_no_reports()
        self._loads: list[Load] = []
        self._step_started: tuple[float, int] | None = None
        self._await_saves_until = 0.0

    # -- lookup ---------------------------------------------------------------------------------

    def expect_no_reports(self) -> None:
        """The host turned out to carry no messages from workers: promise what the index knows from
        now on, as with `promise="index"`, or nothing where a host could not recover from a failed
        load. What waits for a prefetch is a miss at its deadline."""
        self._hears_workers = False
        self._saves.expect_no_reports()
        if not self._lookups.in_hand:
            return
        self._lookups.in_hand = False
        if self._tables.can_fail_by_block:
            logger.warning(
                "this host carries no messages from workers to the scheduler: hits are promised "
                "from the index from now on; set promise='index'"
            )
        else:
            logger.warning(
                "this host carries no messages from workers to the scheduler, and several block "
                "tables or windows need them: nothing is loaded from now on"
            )

    def on_new_request(self, request: RequestView) -> None:
        if self._probe is not None and request.extra_keys.cacheable and self._may_load:
            self._probe(self._track(request).keys.keys)

    def lookup(self, request: RequestView, num_local_tokens: int) -> LookupResult:
        if not (request.extra_keys.cacheable and self._may_load):
            return MISS
        state = self._track(request)
        return self._lookups.answer(state, len(request.all_token_ids), num_local_tokens)

    # -- allocation and plan --------------------------------------------------------------------

    def update_after_alloc(
        self, request: RequestView, block_ids: BlockTable, num_external_tokens: int
    ) -> None:
        if not request.extra_keys.cacheable and num_external_tokens <= 0:
            return
        state = self._track(request)
        state.gave_up = False
        state.queued_until = None
        self._saves.admitted(request.request_id, state)
        promised, state.promised = state.promised, None
        if num_external_tokens > 0 and promised is None:
            # The engine counts on tokens that nobody will bring: the guard reports them as failed.
            raise ContractError(
                f"{num_external_tokens} tokens of {request.request_id!r} were never promised"
            )
        if promised is None or num_external_tokens <= 0:
            self._observer.count("requests_missed")
            self._lookups.release(state)
            return
        start = promised[0]
        stop = min(promised[1], start + num_external_tokens)
        chunks = self._lookups.chunks_of(state.keys.keys, start, stop)
        blocks = self._tables.load_slices(block_ids, start, stop)
        self._loads.append(Load(request.request_id, state.ticket, chunks, start, stop, blocks))
        if state.ticket is not None:
            # The load itself releases the staging on the workers.
            self._tickets.close(state.ticket, told=True)
            state.ticket = None
        self._observer.count("hit_tokens", stop - start)
        self._observer.count("hits")

    def empty_plan(self) -> Plan:
        return EMPTY_PLAN

    def build_plan(self, step: StepView) -> Plan:
        if self._loads and step.preempted_request_ids:
            # A host that preempts everything can admit a request again in the same step: a load of
            # a scheduled request was planned after the preemption.
            scheduled = {item.request.request_id for item in step.scheduled}
            for request_id in set(step.preempted_request_ids) - scheduled:
                self._forget_loads(request_id)
        # First: a file that is created at once must not be named in the plan that asks the ranks to
        # take its chunk out. They write before the forward and take out after it.
        sessions = self._saves.sessions()
        saves = self._saves.plan(step) if self._may_save else ()
        if saves and self._announcer is not None:
            self._announcer.planned(saves, step, self._requests)
        if saves:
            self._await_saves_until = self._clock() + SAVES_SECONDS
        self._note_step(step)
        prefetches, releases = self._tickets.drain()
        news = saves or sessions or prefetches or releases
        if not (news or self._loads or self._announce_namespace):
            return EMPTY_PLAN
        loads, self._loads = tuple(self._loads), []
        namespace = self._namespace if self._announce_namespace else None
        self._announce_namespace = False
        return SharedStoragePlan(
            prefetches=tuple(Prefetch(t.number, t.chunks, *t.hit) for t in prefetches),
            loads=loads,
            saves=tuple(saves),
            sessions=tuple(sessions),
            releases=tuple(releases),
            failures_known=self._failures_known,
            namespace=namespace,
            has_forward=any(item.num_scheduled_tokens for item in step.scheduled),
        )

    @property
    def is_idle(self) -> bool:
        """See `kvferry.contract.abilities.SupportsIdle`."""
        if self._loads or self._announce_namespace or self._step_started is not None:
            return False
        if self._tickets.has_news or self._tickets.any_open:
            return False
        if self._shared_writes is not None and not self._hears_workers:
            return False
        return not (self._saves.under_way or (self._may_save and self._saves.has_unsaved))

    def _note_step(self, step: StepView) -> None:
        self._step_started = None
        num_tokens = sum(item.num_scheduled_tokens for item in step.scheduled)
        if num_tokens >= PREFILL_TOKENS and not self._loads:
            self._step_started = (self._clock(), num_tokens)

    # -- outputs --------------------------------------------------------------------------------

    def update_output(self, output: WorkerOutput) -> None:
        if self._step_started is not None:
            started, num_tokens = self._step_started
            self._policy.saw_compute(num_tokens, self._clock() - started)
            self._step_started = None
        meta = output.meta
        if isinstance(meta, SharedStorageMeta):
            for report in meta.reports:
                self._learn(report)
        elif not self._hears_workers and output.invalid_block_ids and self._num_ranks == 1:
            # All that such a host tells of a failed load. Of several ranks it does not tell which
            # failed how often: there, saving ends with the first failed load.
            self._failures_known = (sum(self._failures_known) + 1,)
            self._saves.bar_others(())

    def _learn(self, report: RankReport) -> None:
        for news in report.prefetched:
            self._broken.add(news.broken)
            ticket = self._tickets.report(report.rank, news)
            if ticket is not None and ticket.complete:
                self._policy.saw_load(ticket.tokens_in_hand, ticket.seconds)
        if report.broken:
            self._broken.add(report.broken)
            self._saves.offer_again(report.broken)
            self._saves.bar_others(report.failed_requests)
        if report.failures:
            known = self._failures_known or (0,) * self._num_ranks
            at = report.rank
            self._failures_known = (*known[:at], report.failures, *known[at + 1 :])
        for saved in report.saved:
            if saved.stored and self._note_stored is not None and self._shared_writes is None:
                self._note_stored(ChunkKey(saved.key))
            if not saved.stored and self._announcer is not None:
                self._announcer.failed(saved.key)
            self._saves.learn(report.rank, saved)

    # -- ends -----------------------------------------------------------------------------------

    def request_finished(self, request: RequestView, block_ids: BlockTable) -> FinishResult:
        state = self._requests.pop(request.request_id, None)
        self._saves.forget(request.request_id)
        if state is not None:
            self._lookups.release(state)
            # The root of a prefix was stored first and would be evicted first; now it goes last.
            self._store.touch(state.keys.keys)
        self._forget_loads(request.request_id)
        return FREE_NOW

    def take_events(self) -> Iterable[Any]:
        if self._announcer is None:
            return ()
        events, self._events = self._events + self._announcer.take(), []
        return events

    def has_pending_work(self) -> bool:
        return self._tickets.has_news or (
            self._saves.under_way and self._clock() < self._await_saves_until
        )

    def reset(self) -> bool:
        """Another epoch: what is stored stays, for others, and is not read by this engine again.
        Saves under way carry the old namespace, so they cannot come back."""
        self._namespace = self._new_namespace()
        self._announce_namespace = True
        if self._shared_writes is not None:
            self._shared_writes.switch_namespace(self._namespace)
        for request_id, state in self._requests.items():
            self._lookups.release(state)
            self._forget_loads(request_id)
        if self._announcer is not None:
            self._events += self._announcer.forget_all()
        self._requests.clear()
        self._saves.clear()
        self._broken.clear()
        return True

    def close(self) -> None:
        if self._shared_writes is not None:
            self._shared_writes.close()

    def _track(self, request: RequestView) -> RequestState:
        state = self._requests.get(request.request_id)
        if state is None:
            state = RequestState(ChunkKeys(self._namespace, self._chunk, request.extra_keys))
            self._requests[request.request_id] = state
        state.keys.extend(request.all_token_ids)
        return state

    def _forget_loads(self, request_id: str) -> None:
        """Drop loads that no plan has carried yet: their blocks are no longer the request's."""
        for load in [load for load in self._loads if load.request_id == request_id]:
            self._loads.remove(load)
            if load.ticket is not None:
                self._tickets.release(load.ticket)

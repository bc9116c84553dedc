"""Decides which requests compute how many tokens in the next step, and updates them after it.

The embedded engine (`LLM.step`) calls it around each step. It is the host side of the connector
contract: look-ups, allocations, plans, loads that succeed or fail, blocks that a connector still
uses. No tensors and no I/O.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable
from typing import Literal, NamedTuple

from kvferry.contract.messages import ASK_AGAIN, MISS, LookupResult, WorkerOutput
from kvferry.contract.scheduler import SchedulerRole
from kvferry.engine.block_pool import BlockPool, KVCache
from kvferry.engine.config import EngineConfig
from kvferry.engine.request import EngineStep, FinishReason, Hit, Outcome, Request
from kvferry.errors import ContractError
from kvferry.observe import Observer

logger = logging.getLogger(__name__)

MAX_FAILED_LOADS = 3
"""After so many failed loads the connector is not asked about a request again. Otherwise one that
never keeps its promises would keep the request waiting for ever."""


_LentFor = Literal["load", "save"]
"""What the connector still does with lent blocks. The report of its end gives them back."""


class _LentBlocks(NamedTuple):
    """Blocks that no request owns any more but the connector may still read or write.

    An overdue loan does not end, since the connector might still write, but no request waits for it
    any more. One request may have a loan for a load and one for a save.
    """

    block_ids: list[int]
    overdue: float  # from this time of the clock on


class Scheduler:
    """Continuous batching with chunked prefill; preemption by recomputing.

    Requests run first come, first served, and the last to come is the first to be preempted. The
    order of calls: `schedule`, run the step, `update`. `add` and `abort` may come between these.

    A request is in one place, which decides what blocks it owns:
        waiting   none; or, at the head of the queue, the blocks that its async load filled
        loading   the blocks that its async load fills
        running   the blocks of all its computed tokens
        finished  none; blocks that the connector still uses are in `_lent`

    Guarantees: `request_finished` is called once per request. No request gets blocks that a
    connector may still touch. A reported id without a load or save under way (a repeated one, too)
    is counted as `unknown_report` and ignored. No request waits for the connector beyond the
    deadline.

    Not thread-safe.
    """

    def __init__(
        self,
        config: EngineConfig,
        pool: BlockPool,
        role: SchedulerRole,
        *,
        observer: Observer | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Schedule over `pool`. `role` is behind a guard, so its answers are not checked here.
        `clock` returns seconds."""
        self._config = config
        self._kv = KVCache(pool, config.block_size, prefix_caching=config.prefix_caching)
        self._role = role
        self._observer = observer or Observer()
        self._clock = clock
        self._requests: dict[str, Request] = {}
        self._waiting: deque[Request] = deque()
        self._running: dict[str, Request] = {}  # in the order of admission
        self._loading: dict[str, float] = {}  # deadlines of async loads
        self._asking: dict[str, float] = {}  # deadlines of look-ups answered by "ask again"
        self._lent: dict[tuple[str, _LentFor], _LentBlocks] = {}
        self._finished_ids: set[str] = set()  # since the last schedule

    def add(self, request: Request) -> None:
        """Queue a request.

        Raises:
            ContractError: its id is in use, or it can never fit into the pool.
        """
        request_id = request.request_id
        if request_id in self._requests or request_id in {lender for lender, _ in self._lent}:
            raise ContractError(f"request id {request_id!r} is in use; ids are used once")
        needed = self._kv.num_blocks_for(request.max_total_tokens)
        if needed > self.pool.num_usable:
            raise ContractError(
                f"request {request_id!r} may need {needed} blocks, the pool has "
                f"{self.pool.num_usable}; lower max_total_tokens"
            )
        self._requests[request_id] = request
        self._waiting.append(request)
        self._role.on_new_request(request)

    def abort(self, request_id: str) -> bool:
        """End a request in any state. Returns False if no request has this id (any more)."""
        request = self._requests.get(request_id)
        if request is None:
            return False
        self._finish(request, FinishReason.ABORT)
        return True

    @property
    def pool(self) -> BlockPool:
        """The blocks of all requests."""
        return self._kv.pool

    @property
    def requests(self) -> Collection[Request]:
        """All requests that have not ended, in the order in which they were added; read only."""
        return self._requests.values()

    def has_work(self) -> bool:
        """Whether there is a reason to step: requests, ended requests of which the workers do not
        know yet, lent blocks that are not overdue, or work of the connector."""
        return bool(
            self._requests
            or self._finished_ids
            or self._role.has_work()
            or self._awaits_lent_blocks()
        )

    def schedule(self) -> EngineStep:
        """Decide the next step, and let the connector build its plan, even without any tokens."""
        step = EngineStep(self._config.max_batched_tokens, frozenset(self._finished_ids))
        self._finished_ids.clear()
        self._abandon_overdue_loads()
        self._schedule_running(step)
        # No newcomer takes the blocks that a request has just lost.
        if not step.preempted_request_ids:
            self._schedule_waiting(step)
        step.plan = self._role.build_plan(step)
        return step

    def update(
        self, step: EngineStep, output: WorkerOutput, sample: Callable[[Request], int]
    ) -> None:
        """Update requests after a step.

        Args:
            step: from the last `schedule`.
            output: folded report of all workers.
            sample: returns the next token of a request whose last token was in the step. Not called
                for requests that were aborted or whose blocks failed to load.
        """
        # Taken first: blocks that are lent below, when a request ends, are not in this report.
        sent = sorted(
            request_id
            for request_id in output.finished_sending
            if (request_id, "save") in self._lent
        )
        if len(sent) < len(output.finished_sending):
            self._observer.count("unknown_report", len(output.finished_sending) - len(sent))
        self._note_failed_loads(output.failed_recving)
        spoiled = self._spoil(output.invalid_block_ids)
        for entry in step.scheduled:
            request = entry.request
            if request.request_id not in self._running or request.request_id in spoiled:
                continue
            request.num_computed_tokens += entry.num_scheduled_tokens
            self._kv.commit(request)
            if not entry.wants_logits:
                continue
            reason = request.append(sample(request))
            if reason is not None:
                self._finish(request, reason)
        self._role.update_output(output)
        for request_id in sorted(output.finished_recving):
            self._load_ended(request_id)
        for request_id in sent:
            self._take_back(request_id, "save")
        for _ in self._role.take_events():
            pass  # this engine has no subscribers, but events pile up unless they are taken

    # ---- running requests

    def _schedule_running(self, step: EngineStep) -> None:
        for request in list(self._running.values()):
            # The last requests may just have lost their blocks to one before them.
            if step.budget == 0 or request.request_id not in self._running:
                break
            num_tokens = min(request.num_tokens - request.num_computed_tokens, step.budget)
            if not self._make_room(request, request.num_computed_tokens + num_tokens, step):
                break
            step.add(request, num_tokens)

    def _make_room(self, request: Request, num_tokens: int, step: EngineStep) -> bool:
        """Grow a running request's blocks, if need be by preempting the last to come. False if that
        is the request itself, or if it waits for blocks of loads or loans that are about to end."""
        while not self._kv.grow(request, num_tokens):
            loaded = self._loaded()
            # A request that has not run since its load is the cheapest to preempt.
            victim = loaded[-1] if loaded else next(reversed(self._running.values()))
            alone = victim is request and len(self._running) == 1
            if alone and (self._loading or self._awaits_lent_blocks()):
                return False  # blocks are about to come back: keep what is computed
            self._preempt(victim, step)
            if victim is request:
                return False
        return True

    def _loaded(self) -> list[Request]:
        """Waiting requests whose async load has ended."""
        return [request for request in self._waiting if request.block_ids]

    def _preempt(self, request: Request, step: EngineStep) -> None:
        self._observer.count("preempted")
        if self._running.pop(request.request_id, None) is None:
            self._waiting.remove(request)
        self._kv.release(request)
        step.preempted_request_ids.add(request.request_id)
        self._queue_first(request)

    def _queue_first(self, request: Request) -> None:
        """Put a request at the head of the queue, but behind those that hold blocks."""
        self._waiting.insert(0 if request.block_ids else len(self._loaded()), request)

    # ---- waiting requests

    def _schedule_waiting(self, step: EngineStep) -> None:
        skipped: list[Request] = []
        while self._waiting and step.budget > 0:
            if len(self._running) + len(self._loading) >= self._config.max_num_seqs:
                break
            request = self._waiting.popleft()
            if request.block_ids:
                has_room = self._admit_loaded(request, step)
            else:
                hit = self._kv.local_hit(request)
                answer = self._ask(request, len(hit) * self._config.block_size)
                if answer.num_tokens is None:
                    skipped.append(request)
                    continue
                has_room = self._admit(request, hit, answer.num_tokens, answer.is_async, step)
            if not has_room:
                self._waiting.appendleft(request)
                if not self._running and not self._loading:
                    self._unblock(request, step)
                break
        self._waiting.extendleft(reversed(skipped))

    def _admit(
        self, request: Request, hit: list[int], num_external: int, is_async: bool, step: EngineStep
    ) -> bool:
        """Begin a request with its local hit and `num_external` tokens from the connector. False if
        the pool has no room."""
        num_local = len(hit) * self._config.block_size
        num_computed = num_local + num_external
        num_tokens = 0 if is_async else min(request.num_tokens - num_computed, step.budget)
        if not self._kv.admit(request, hit, num_computed + num_tokens):
            return False
        request.num_computed_tokens = num_computed
        if request.hit is None:
            request.hit = Hit(num_local, num_external)
        self._role.update_after_alloc(request, (request.block_ids,), num_external)
        if is_async:
            self._loading[request.request_id] = self._deadline()
        else:
            self._run(request, num_tokens, step)
        return True

    def _ask(self, request: Request, num_local_tokens: int) -> LookupResult:
        """Ask the connector for tokens beyond the local hit. The answer is a miss, without another
        question, once the connector has said "ask again" until the deadline, or loads of the
        request have failed too often."""
        if request.num_failed_loads >= MAX_FAILED_LOADS:
            return MISS
        result = self._role.lookup(request, num_local_tokens)
        if result.num_tokens is not None:
            self._asking.pop(request.request_id, None)
            return result
        if self._clock() < self._asking.setdefault(request.request_id, self._deadline()):
            return ASK_AGAIN
        self._observer.count("lookup_deadline")
        request.num_failed_loads = MAX_FAILED_LOADS
        return MISS

    def _admit_loaded(self, request: Request, step: EngineStep) -> bool:
        num_tokens = min(request.num_tokens - request.num_computed_tokens, step.budget)
        if not self._kv.grow(request, request.num_computed_tokens + num_tokens):
            return False
        # The contract wants this second call after an async load: nothing is left to load.
        self._role.update_after_alloc(request, (request.block_ids,), 0)
        self._run(request, num_tokens, step)
        return True

    def _run(self, request: Request, num_tokens: int, step: EngineStep) -> None:
        self._running[request.request_id] = request
        step.add(request, num_tokens)

    def _unblock(self, request: Request, step: EngineStep) -> None:
        """Make room for the first request of the queue when nothing runs or loads: preempt another
        loaded request. If there is none, wait for lent blocks until they are overdue, then end the
        request with an error."""
        holders = [other for other in self._loaded() if other is not request]
        if holders:
            self._preempt(holders[-1], step)
        elif not self._awaits_lent_blocks():
            logger.error(
                "%r cannot run: %d of %d blocks are lent to a connector that never gave them back",
                request,
                len({each for table in self._lent_tables() for each in table}),
                self.pool.num_usable,
            )
            self._finish(request, FinishReason.ERROR)

    # ---- loads and lent blocks

    def _note_failed_loads(self, failed_recving: Iterable[str]) -> None:
        for request_id in failed_recving:
            if request_id not in self._loading:
                continue  # its request was aborted; `finished_recving` has it, too
            request = self._requests[request_id]
            request.num_failed_loads += 1
            # The next admission finds its local hit again, which is still good.
            request.num_computed_tokens = 0
            request.limit_hit()

    def _spoil(self, invalid_block_ids: frozenset[int]) -> set[str]:
        """Reset requests to the first of their blocks whose load failed. Return their ids."""
        spoiled: set[str] = set()
        if not invalid_block_ids:
            return spoiled
        for request in self._requests.values():
            if self._kv.spoil(request, invalid_block_ids):
                request.limit_hit()
                request.num_failed_loads += 1
                spoiled.add(request.request_id)
        self.pool.uncache(invalid_block_ids)
        self._observer.count("load_failed")
        return spoiled

    def _load_ended(self, request_id: str) -> None:
        if self._loading.pop(request_id, None) is None:
            self._take_back(request_id, "load")
            return
        request = self._requests[request_id]
        if request.num_computed_tokens == 0:
            self._kv.release(request)
            request.hit = None
        else:
            # Even if all tokens were loaded, the last one is computed for its logits.
            request.num_computed_tokens = min(request.num_computed_tokens, request.num_tokens - 1)
            self._kv.commit(request)
        self._queue_first(request)

    def _abandon_overdue_loads(self) -> None:
        """Queue requests with an overdue load again. Lend their blocks: the load may go on."""
        now = self._clock()
        for request_id in [each for each, deadline in self._loading.items() if deadline <= now]:
            request = self._requests[request_id]
            logger.error("the load of %r did not end in time; its prompt is computed", request)
            self._observer.count("load_deadline")
            del self._loading[request_id]
            request.num_failed_loads = MAX_FAILED_LOADS
            request.hit = None
            self._lent[request_id, "load"] = _LentBlocks(self._kv.detach(request), now)
            self._queue_first(request)

    def _take_back(self, request_id: str, reason: _LentFor) -> None:
        loan = self._lent.pop((request_id, reason), None)
        if loan is None:
            self._observer.count("unknown_report")
        else:
            self.pool.free(loan.block_ids)

    def _awaits_lent_blocks(self) -> bool:
        now = self._clock()
        return any(loan.overdue > now for loan in self._lent.values())

    def _lent_tables(self) -> list[list[int]]:
        return [loan.block_ids for loan in self._lent.values()]

    def _deadline(self) -> float:
        """The deadline of what the connector begins now."""
        return self._clock() + self._config.load_deadline_seconds

    # ---- the end

    def _finish(self, request: Request, reason: FinishReason) -> None:
        request_id = request.request_id
        deadline = self._loading.pop(request_id, None)
        if self._running.pop(request_id, None) is None and deadline is None:
            self._waiting.remove(request)
        self._asking.pop(request_id, None)
        del self._requests[request_id]
        self._finished_ids.add(request_id)
        num_blocks = self._kv.num_blocks_for(request.num_computed_tokens)
        result = self._role.request_finished(request, (request.block_ids[:num_blocks],))
        has_answer = reason in (FinishReason.STOP, FinishReason.LENGTH)
        request.outcome = Outcome(reason, result.params if has_answer else None)
        if deadline is not None:
            # Lent even without `delay_free`: the report of the load gives the blocks back.
            self._lent[request_id, "load"] = _LentBlocks(self._kv.detach(request), deadline)
        elif result.delay_free:
            self._lent[request_id, "save"] = _LentBlocks(self._kv.detach(request), self._deadline())
        else:
            self._kv.release(request)

"""A scheduler role behind the guard: see `kvferry.contract.guard`."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from kvferry.contract.faults import Faults, RepairedPlan
from kvferry.contract.messages import (
    ASK_AGAIN,
    FREE_NOW,
    MISS,
    FinishResult,
    LookupResult,
    Plan,
    WorkerOutput,
)
from kvferry.contract.scheduler import SchedulerRole
from kvferry.observe import Observer
from kvferry.types import BlockTable, RequestView, StepView

ASK_AGAIN_SECONDS = 60.0
"""A request told to ask again for this long is told "nothing" from then on. Far beyond any deadline
of a role of ours; it is there for roles that forgot theirs, because no host bounds the retries."""

OVERDUE_SECONDS = 300.0
"""An async load or a delayed free that is not reported for this long is reported by the guard, the
load as failed. A role's own deadlines are far shorter, and by its contract nothing of it touches
the engine's blocks past them. Without a bound, a report lost in a fault held blocks for ever."""


class GuardedScheduler(SchedulerRole):
    """A scheduler role whose faults are misses and whose promises a host can keep.

    Adds to the wrapped role:
    - lookups are corrected to the rules of `SchedulerRole.lookup`;
    - "ask again" ends after `ASK_AGAIN_SECONDS`;
    - promised loads that a fault kept out of the plan are reported as failed (`RepairedPlan`), and
      so is what no worker reports within `OVERDUE_SECONDS`;
    - a request whose load failed is not offered a hit again: a host that recomputes such a request
      from its start asks anew, and would go round for ever.

    Runs in: scheduler. Costs less than a microsecond per hook if nothing is wrong.
    """

    def __init__(
        self,
        role: SchedulerRole,
        observer: Observer | None = None,
        *,
        block_size: int | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Wrap `role`.

        Args:
            role: the scheduler role.
            observer: receives `hook_failed...` and `contract_violation` counts.
            block_size: tokens to which hits are rounded down: the block size, with several groups
                their least common multiple. None: not checked, and a load that is lost fails all
                blocks of its request.
            clock: seconds, for the bounds on waiting.
        """
        self._role = role
        self._faults = Faults(role, observer or Observer())
        self._block_size = block_size
        self._clock = clock
        self._asked: dict[str, float] = {}  # first "ask again" of requests that still wait
        self._promised: dict[str, tuple[int, bool]] = {}  # last hit: local tokens, is it async
        self._planned: dict[str, tuple[frozenset[int], bool]] = {}  # allocated since the last plan
        self._lost: dict[str, tuple[frozenset[int], bool]] = {}  # of those, unknown to the role
        # Async loads under way, and their blocks; none for a request that was aborted meanwhile.
        self._loading: dict[str, frozenset[int]] = {}
        self._barred: set[str] = set()  # a load of theirs failed: no more hits
        self._freed: set[str] = set()  # ended since the last plan, by a fault of the role
        self._suspect = False  # a plan could not be built: loads of later ones are checked
        self._owed: dict[str, float] = {}  # since when a worker's report on the request is due
        try:
            self._empty_plan = role.empty_plan()
        except Exception:
            self._faults.fault("empty_plan", "a plan that cannot be built becomes a bare Plan()")
            self._empty_plan = Plan()

    def on_new_request(self, request: RequestView) -> None:
        try:
            self._role.on_new_request(request)
        except Exception:
            self._faults.fault("on_new_request", "the request goes on")

    def lookup(self, request: RequestView, num_local_tokens: int) -> LookupResult:
        if self._barred and request.request_id in self._barred:
            return MISS
        try:
            count, is_async = self._role.lookup(request, num_local_tokens)
            if count is None:
                return self._ask_again(request.request_id)
            if count == 0 and not is_async:
                return MISS
            answer = self._corrected(request, num_local_tokens, int(count), bool(is_async))
        except Exception:
            self._faults.fault("lookup", "answered as a miss")
            return MISS
        if answer.num_tokens:
            self._promised[request.request_id] = (num_local_tokens, answer.is_async)
        return answer

    def _ask_again(self, request_id: str) -> LookupResult:
        now = self._clock()
        waited = now - self._asked.setdefault(request_id, now)
        if waited < ASK_AGAIN_SECONDS:
            return ASK_AGAIN
        self._faults.violation(
            "ask_again", "%r was told to ask again for %.0f s: now a miss", request_id, waited
        )
        return MISS

    def _corrected(
        self, request: RequestView, num_local_tokens: int, count: int, is_async: bool
    ) -> LookupResult:
        """The largest answer within the rules that promises no more than `count`."""
        num_tokens = len(request.all_token_ids)
        # Sync: the engine must have a token to compute. Async: it steps back by itself.
        limit = (num_tokens if is_async else num_tokens - 1) - num_local_tokens
        legal = max(0, min(count, limit))
        if self._block_size is not None:
            total = num_local_tokens + legal
            legal = max(0, total - total % self._block_size - num_local_tokens)
        if legal != count or (legal == 0 and is_async):
            self._faults.violation(
                "lookup",
                "(%d, %s) for a request of %d tokens, %d local, block size %s: answered (%d, %s)",
                *(count, is_async, num_tokens, num_local_tokens, self._block_size),
                *(legal, is_async and legal > 0),
            )
        return LookupResult(legal, is_async) if legal else MISS

    def update_after_alloc(
        self, request: RequestView, block_ids: BlockTable, num_external_tokens: int
    ) -> None:
        request_id = request.request_id
        self._asked.pop(request_id, None)
        local, is_async = self._promised.pop(request_id, (0, False))
        if num_external_tokens > 0:
            blocks = self._external_blocks(block_ids, local, num_external_tokens)
            self._planned[request_id] = (blocks, is_async)
            if is_async:
                self._loading[request_id] = blocks
                self._owed[request_id] = self._clock()
        try:
            self._role.update_after_alloc(request, block_ids, num_external_tokens)
        except Exception:
            self._faults.fault("update_after_alloc", "the promised load is reported as failed")
            if num_external_tokens > 0:
                self._lost[request_id] = self._planned[request_id]

    def _external_blocks(
        self, block_ids: BlockTable, num_local: int, num_external: int
    ) -> frozenset[int]:
        """The blocks that hold tokens `[num_local, num_local + num_external)`.

        With several groups block sizes differ, and the guard knows only their common multiple: all
        blocks of the request are named then.
        """
        size = self._block_size
        if size is None or len(block_ids) != 1:
            return frozenset(block for group in block_ids for block in group)
        first, last = num_local // size, -(-(num_local + num_external) // size)
        return frozenset(block_ids[0][first:last])

    def build_plan(self, step: StepView) -> Plan:
        try:
            plan = self._role.build_plan(step)
            if not isinstance(plan, Plan):
                raise TypeError(f"build_plan returned {type(plan).__name__}, not a Plan")
        except Exception:
            self._faults.fault("build_plan", "an empty plan; loads promised for it are failed")
            plan = self._empty_plan
            self._lost = self._planned
            self._suspect = True
        planned = self._planned
        if planned:
            self._planned = {}
        overdue = self._overdue() if self._owed else frozenset()
        if self._lost or self._freed or overdue or self._suspect:
            return self._repaired(plan, overdue, planned)
        return plan

    def _overdue(self) -> frozenset[str]:
        """Ended requests whose blocks nobody released in time; loads join those that are lost."""
        limit = self._clock() - OVERDUE_SECONDS
        overdue = [request_id for request_id, since in self._owed.items() if since <= limit]
        for request_id in overdue:
            del self._owed[request_id]
            self._faults.violation(
                "overdue", "no end of a load or free of %r in %.0f s", request_id, OVERDUE_SECONDS
            )
            if request_id in self._loading:
                self._lost[request_id] = (self._loading[request_id], True)
        return frozenset(overdue).difference(self._loading)

    def _repaired(
        self,
        plan: Plan,
        overdue: frozenset[str],
        planned: Mapping[str, tuple[frozenset[int], bool]],
    ) -> RepairedPlan:
        lost, self._lost = self._lost, {}
        freed, self._freed = frozenset(self._freed), set()
        self._barred.update(name for name, (blocks, _) in lost.items() if blocks)
        return RepairedPlan(
            plan=plan,
            lost_block_ids=_blocks_of(lost),
            lost_request_ids=_async_of(lost),
            freed_request_ids=freed,
            overdue_sending=overdue,
            promised_block_ids=_blocks_of(planned) if self._suspect else None,
            promised_request_ids=_async_of(planned) if self._suspect else frozenset(),
        )

    def empty_plan(self) -> Plan:
        return self._empty_plan

    def update_output(self, output: WorkerOutput) -> None:
        self._note_failures(output)
        try:
            self._role.update_output(output)
        except Exception:
            self._faults.fault("update_output", "the role did not learn what the workers did")

    def _note_failures(self, output: WorkerOutput) -> None:
        if not self._owed and not self._loading:
            return
        for request_id, blocks in self._loading.items():
            if blocks & output.invalid_block_ids or (
                blocks and request_id in output.failed_recving
            ):
                self._barred.add(request_id)
        for request_id in output.finished_recving:
            self._loading.pop(request_id, None)
            self._owed.pop(request_id, None)
        for request_id in output.finished_sending:
            self._owed.pop(request_id, None)

    def request_finished(self, request: RequestView, block_ids: BlockTable) -> FinishResult:
        request_id = request.request_id
        self._asked.pop(request_id, None)
        self._promised.pop(request_id, None)
        self._barred.discard(request_id)
        is_loading = request_id in self._loading
        if is_loading:
            self._loading[request_id] = frozenset()
        try:
            result = self._role.request_finished(request, block_ids)
            delay_free, params = result
        except Exception:
            self._faults.fault("request_finished", "its blocks are freed now")
            self._freed.add(request_id)
            return FREE_NOW
        if delay_free and is_loading:
            self._faults.violation(
                "request_finished",
                "delay_free for %r, which still loads: the end of the load frees its blocks",
                request_id,
            )
            return FinishResult(False, params)
        if delay_free:
            self._owed[request_id] = self._clock()
        return result

    def take_events(self) -> Iterable[Any]:
        try:
            # A generator would raise later, outside of the guard.
            return tuple(self._role.take_events())
        except Exception:
            self._faults.fault("take_events", "its events are lost")
            return ()

    def take_stats(self) -> Mapping[str, float] | None:
        try:
            return self._role.take_stats()
        except Exception:
            self._faults.fault("take_stats", "its counters are lost")
            return None

    def has_pending_work(self) -> bool:
        try:
            return self._role.has_pending_work()
        except Exception:
            self._faults.fault("has_pending_work", "the engine does not step for it")
            return False

    def reset(self) -> bool:
        try:
            return self._role.reset()
        except Exception:
            self._faults.fault("reset", "reported as failed: stored KV may be stale")
            return False

    def close(self) -> None:
        try:
            self._role.close()
        except Exception:
            self._faults.fault("close", "something may be left open")


def _blocks_of(loads: Mapping[str, tuple[frozenset[int], bool]]) -> frozenset[int]:
    return frozenset(block for blocks, _ in loads.values() for block in blocks)


def _async_of(loads: Mapping[str, tuple[frozenset[int], bool]]) -> frozenset[str]:
    return frozenset(request_id for request_id, (_, is_async) in loads.items() if is_async)

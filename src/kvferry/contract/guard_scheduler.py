"""The guard at the host boundary, for the scheduler role: a fault of a role becomes a miss, never
a fault of the engine.

`GuardedScheduler` wraps the role and is a role itself. When a hook raises an `Exception`, the guard
counts it (`hook_failed`, `hook_failed_<hook>`), logs it now and then, and gives the answer that is
safe for that hook. `KeyboardInterrupt` and `SystemExit` pass.

If promised tokens will not be loaded, the host must learn of a failed load. If the role faults
between promise and plan, the guard sends a `RepairedPlan`, which the driver of every worker role
(`kvferry.contract.driver`) unpacks.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from kvferry.contract.faults import HookFaults
from kvferry.contract.host_rules import HostRules
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


class GuardedScheduler(SchedulerRole):
    """A scheduler role whose faults are misses and whose promises a host can keep.

    Adds to the wrapped role:
    - lookups are corrected to the rules of `SchedulerRole.lookup`;
    - promised loads that a fault kept out of the plan are reported as failed (`RepairedPlan`);
    - a request that lost a load before its plan, or had an async load fail, gets no further hit:
      a host that recomputes it from its start asks again, and would repeat this for ever.

    Runs in: scheduler. Costs less than a microsecond per hook if nothing is wrong.
    """

    def __init__(
        self,
        role: SchedulerRole,
        observer: Observer | None = None,
        *,
        block_size: int | None = None,
        strict: bool = False,
        checks_host: bool = True,
    ) -> None:
        """Wrap `role`.

        Args:
            observer: receives `hook_failed...` and `contract_violation` counts.
            block_size: tokens to which hits are rounded down. With several groups: the least common
                multiple of their block sizes. None: hits are not rounded, and a load that is lost
                fails all blocks of its request.
            strict: raise ContractError for any broken rule, and what the role raises: for tests.
            checks_host: whether to look at what the host does, too (`HostRules`). False, for a
                host that does not show all of its steps.
        """
        self._role = role
        observer = observer or Observer()
        self._faults = HookFaults(type(role).__name__, observer, strict=strict)
        host_faults = HookFaults("the host", observer, strict=strict)
        self._host = HostRules(host_faults, block_size) if checks_host else None
        self._block_size = block_size
        self._promises = role.rules(block_size)
        self._empty_plan = self._faults.call(
            role.empty_plan, otherwise=Plan(), then="a plan that cannot be built is a bare Plan()"
        )

    def on_new_request(self, request: RequestView) -> None:
        if self._host is not None:
            self._host.on_new_request(request)
        self._faults.run(self._role.on_new_request, request, then="the request goes on")

    def lookup(self, request: RequestView, num_local_tokens: int) -> LookupResult:
        if self._host is not None:
            self._host.lookup(request, num_local_tokens)
        if self._promises.has_failed(request.request_id):
            return MISS
        try:
            answer = self._role.lookup(request, num_local_tokens)
            count, is_async, reason = answer
            if count is None:
                return ASK_AGAIN
            if count == 0 and not is_async:
                return answer
            legal = self._corrected(request, num_local_tokens, count, is_async)
            answer = legal._replace(reason=reason)
        except Exception:
            self._faults.fault("lookup", "answered as a miss")
            return MISS
        if answer.num_tokens:
            self._promises.offer(request.request_id, num_local_tokens, answer.is_async)
            if self._host is not None:
                self._host.promised(request.request_id, answer.num_tokens)
        return answer

    def _corrected(
        self, request: RequestView, num_local_tokens: int, count: int, is_async: bool
    ) -> LookupResult:
        """The largest answer within the rules that promises no more than `count`."""
        if is_async and not self._promises.is_asynchronous:
            self._faults.violation(
                "lookup", "an async load of a role that names no `rules` for it: a miss"
            )
            return MISS
        num_tokens = len(request.all_token_ids)
        # Sync: the engine must have a token to compute. Async: the engine leaves the last one out.
        limit = (num_tokens if is_async else num_tokens - 1) - num_local_tokens
        legal = max(0, min(count, limit))
        if self._block_size is not None:
            total = num_local_tokens + legal
            legal = max(0, total - total % self._block_size - num_local_tokens)
        if legal != count or (legal == 0 and is_async):
            self._faults.violation(
                "lookup",
                f"({count}, {is_async}) for a request of {num_tokens} tokens, {num_local_tokens} "
                f"local, block size {self._block_size}: {legal} answered",
            )
        return LookupResult(legal, is_async) if legal else MISS

    def update_after_alloc(
        self, request: RequestView, block_ids: BlockTable, num_external_tokens: int
    ) -> None:
        request_id = request.request_id
        if self._host is not None:
            self._host.update_after_alloc(request, block_ids, num_external_tokens)
        self._promises.allocate(request_id, block_ids, num_external_tokens)
        try:
            self._role.update_after_alloc(request, block_ids, num_external_tokens)
        except Exception:
            self._faults.fault("update_after_alloc", "the promised load is reported as failed")
            self._promises.lose(request_id)

    def build_plan(self, step: StepView) -> Plan:
        seen = step if self._host is None else self._host.build_plan(step)
        if seen is None:
            return self._promises.repeat(self._empty_plan)
        try:
            plan = self._role.build_plan(seen)
        except Exception:
            self._faults.fault("build_plan", "an empty plan; loads promised for it are failed")
            plan = self._empty_plan
            self._promises.lose_plan()
        return self._promises.settle(plan, step)

    def empty_plan(self) -> Plan:
        return self._empty_plan

    @property
    def is_idle(self) -> bool:
        try:
            return self._promises.is_idle and self._role.is_idle
        except Exception:
            self._faults.fault("is_idle", "the role is called in every step")
            return False

    def update_output(self, output: WorkerOutput) -> None:
        if self._host is not None:
            self._host.update_output(output)
        self._promises.learn(output)
        then = "the role did not learn what the workers did"
        self._faults.run(self._role.update_output, output, then=then)

    def request_finished(self, request: RequestView, block_ids: BlockTable) -> FinishResult:
        request_id = request.request_id
        if self._host is not None:
            self._host.request_finished(request)
        is_loading = self._promises.end(request_id)
        try:
            result = self._role.request_finished(request, block_ids)
            delay_free, params = result
        except Exception:
            self._faults.fault("request_finished", "its blocks are freed now")
            self._promises.free_now(request_id)
            return FREE_NOW
        if not delay_free:
            return result
        if is_loading or not self._promises.is_asynchronous:
            why = (
                "still loads: the end of the load frees its blocks"
                if is_loading
                else "is of a role that names no `rules` for it"
            )
            self._faults.violation(
                "request_finished", f"delay_free for {request_id!r}, which {why}"
            )
            return FinishResult(False, params)
        return result

    def take_events(self) -> Iterable[Any]:
        try:
            # A generator would raise later, outside of the guard.
            return tuple(self._role.take_events())
        except Exception:
            self._faults.fault("take_events", "its events are lost")
            return ()

    def take_stats(self) -> Mapping[str, float] | None:
        hook = self._role.take_stats
        return self._faults.call(hook, otherwise=None, then="its counters are lost")

    def has_work(self) -> bool:
        hook = self._role.has_work
        return self._faults.call(hook, otherwise=False, then="the engine does not step for it")

    def reset(self) -> bool:
        then = "reported as failed: stored KV may be stale"
        return self._faults.call(self._role.reset, otherwise=False, then=then)

    def close(self) -> None:
        self._faults.run(self._role.close, then="something may be left open")

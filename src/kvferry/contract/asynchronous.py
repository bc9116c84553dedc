"""Rules for async loads, which span steps, and delayed frees, which keep a request's blocks after
its end.

Connectors written for vLLM use both. kvferry's cache has async loads for models with recurrent
states. A role with either of them names these classes as its `rules`, on both halves. Each extends
a class of `kvferry.contract.promises` by the rules for request ids.

A host may crash, or hold blocks for ever, where a role breaks one of these rules:
- A request with a promised async load must be in `finished_recving` exactly once, even if it was
  aborted. For a request aborted during its load, that report frees the blocks, so its
  `request_finished` must return `delay_free=False`.
- A request that ended with `delay_free` must be in `finished_sending` exactly once, after its end.

A report that never comes holds its blocks for ever: only the role knows whether it still writes to
them or reads them. So a role needs deadlines of its own.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import msgspec

from kvferry.contract.faults import HookFaults
from kvferry.contract.messages import Plan, RepairedPlan, WorkerOutput
from kvferry.contract.promises import Promises, Reports
from kvferry.types import BlockTable, StepView

REMEMBERED_REQUESTS = 65_536
"""How many ended requests are remembered, reported or not. Nothing but this limit removes them.
A `finished_sending` of a forgotten id is held back until a request with the same id ends."""


class AsyncRepairedPlan(RepairedPlan, frozen=True, kw_only=True):
    """A repaired plan with what the worker role may not know of requests.

    Attributes:
        lost_request_ids: requests that wait for an async load which may never have been planned.
        promised_request_ids: the async loads that fill `promised_block_ids`.
        freed_request_ids: ended requests whose blocks were freed because `request_finished` raised.
            A delayed free reported for one of them kills the host.
    """

    lost_request_ids: frozenset[str] = frozenset()
    promised_request_ids: frozenset[str] = frozenset()
    freed_request_ids: frozenset[str] = frozenset()


class AsyncPromises(Promises):
    """Promises with async loads under way. Runs in: scheduler."""

    is_asynchronous = True

    def __init__(self, block_size: int | None) -> None:
        super().__init__(block_size)
        # Blocks of each async load under way; an empty set if its request was aborted.
        self._loading: dict[str, frozenset[int]] = {}
        # Requests freed since the last plan because `request_finished` raised.
        self._freed: set[str] = set()

    def allocate(
        self, request_id: str, block_ids: BlockTable, num_external_tokens: int
    ) -> frozenset[int]:
        promise = self._of.get(request_id)
        _, is_async = promise.offer or (0, False) if promise is not None else (0, False)
        blocks = super().allocate(request_id, block_ids, num_external_tokens)
        if is_async and num_external_tokens > 0:
            self._loading[request_id] = blocks
        return blocks

    def end(self, request_id: str) -> bool:
        super().end(request_id)
        if request_id not in self._loading:
            return False
        self._loading[request_id] = frozenset()
        return True

    def free_now(self, request_id: str) -> None:
        self._freed.add(request_id)

    def learn(self, output: WorkerOutput) -> None:
        for request_id, blocks in self._loading.items():
            if blocks and (
                request_id in output.failed_recving or blocks & output.invalid_block_ids
            ):
                self._of[request_id].is_blocked = True
        for request_id in output.finished_recving:
            self._loading.pop(request_id, None)

    @property
    def is_idle(self) -> bool:
        return super().is_idle and not (self._loading or self._freed)

    def settle(self, plan: Plan, step: StepView) -> Plan:
        due = [(name, each) for name, each in self._due if name in self._loading]
        lost = frozenset(name for name, each in due if each.lost is not None)
        promised = frozenset(name for name, each in due if each.planned is not None)
        freed, self._freed = frozenset(self._freed), set()
        repaired = super().settle(plan, step)
        if not isinstance(repaired, RepairedPlan):
            if not freed:
                return plan
            repaired = RepairedPlan(plan=plan)
        return AsyncRepairedPlan(
            plan=repaired.plan,
            lost_block_ids=repaired.lost_block_ids,
            promised_block_ids=repaired.promised_block_ids,
            lost_request_ids=lost,
            promised_request_ids=frozenset() if repaired.promised_block_ids is None else promised,
            freed_request_ids=freed,
        )

    def _dropped(
        self, plan: Plan, step: StepView, planned: Mapping[str, frozenset[int]]
    ) -> Collection[str]:
        """A foreign connector's plan is opaque, and an aborted load may be under way in it."""
        return ()


class NamedPromises(AsyncPromises):
    """Promises of a role all of whose loads are async and named by the plan that carries them. The
    host is told of failed requests and of no blocks: with several block tables, it cannot tell of
    which one a block is. Runs in: scheduler."""

    def settle(self, plan: Plan, step: StepView) -> Plan:
        started = plan.started_loads() or frozenset()
        for name, each in self._due:
            if name in self._loading and name not in started:
                each.lose()  # else the host would wait for its end for ever
        settled = super().settle(plan, step)
        if not isinstance(settled, RepairedPlan):
            return settled
        promised = None if settled.promised_block_ids is None else frozenset[int]()
        return msgspec.structs.replace(
            settled, lost_block_ids=frozenset(), promised_block_ids=promised
        )


class AsyncReports(Reports):
    """Passes on the request ids that the host expects, each once. Reports the ends of loads that
    the role will not report. Runs in: worker."""

    is_asynchronous = True

    def __init__(self, faults: HookFaults) -> None:
        super().__init__(faults)
        self._announced = True  # False: this worker cannot name the async loads of a plan
        self._loading: set[str] = set()  # async loads planned and not yet reported
        self._lost: set[str] = set()  # those that failed and may not have started: due
        self._failed: set[str] = set()  # failed ones that may still write: due when they end
        self._freed: set[str] = set()  # their blocks are free, and the role may not know it
        self._early: set[str] = set()  # finished_sending that came before the end of the request
        self._ended: dict[str, bool] = {}  # ended requests; True: nothing is to be reported

    @property
    def is_idle(self) -> bool:
        return super().is_idle and not (self._lost or self._early)

    def begin(self, plan: Plan) -> bool:
        """Note the async loads that a plan starts, too. If the worker cannot name them, only one
        rule is left for loads: a request that ended is reported at most once."""
        if not isinstance(plan, RepairedPlan):
            self._loading |= self._started(plan)
            return True
        lost = promised = frozenset[str]()
        if isinstance(plan, AsyncRepairedPlan):
            self._freed |= plan.freed_request_ids
            lost, promised = plan.lost_request_ids, plan.promised_request_ids
        is_sound = super().begin(plan)
        # The role may still start some lost loads and write to their blocks until it reports their
        # end, so they fail only then.
        started = self._started(plan.plan) if is_sound else frozenset()
        if not is_sound:
            lost |= promised
        self._loading |= started | lost
        self._lost |= lost - started
        self._failed |= lost & started
        return is_sound

    def _is_promised(self, plan: RepairedPlan, promised: frozenset[int]) -> bool:
        known = plan.promised_request_ids if isinstance(plan, AsyncRepairedPlan) else frozenset()
        return self._started(plan.plan) <= known and super()._is_promised(plan, promised)

    def _started(self, plan: Plan) -> frozenset[str]:
        named = plan.started_loads()
        if named is None:
            self._announced = False
        return named or frozenset()

    def fail(self, plan: Plan) -> None:
        super().fail(plan)
        self._lost |= self._started(plan)

    def admit(
        self, output: object, finished_request_ids: Collection[str], plan: Plan
    ) -> WorkerOutput:
        ended = self._ended
        for request_id in finished_request_ids:
            # A host may reuse an id; the new request may be reported again.
            ended.pop(request_id, None)
            ended[request_id] = request_id in self._freed
            self._freed.discard(request_id)
        while len(ended) > REMEMBERED_REQUESTS:
            del ended[next(iter(ended))]
        return super().admit(output, finished_request_ids, plan)

    def _requests(self, output: WorkerOutput) -> dict[str, Any]:
        recving = self._recving(output.finished_recving | self._lost)
        for request_id in output.failed_recving - recving:
            self._faults.violation(
                "failed_recving", f"{request_id!r} in failed_recving but not in finished_recving"
            )
            if request_id in self._loading or not self._announced:
                self._failed.add(request_id)
        failed = (output.failed_recving | self._failed | self._lost) & recving
        self._failed -= failed
        self._lost.clear()
        return {
            "finished_recving": recving,
            "finished_sending": self._sending(output.finished_sending),
            "failed_recving": failed,
        }

    def _recving(self, reported: frozenset[str]) -> frozenset[str]:
        """Return the ids whose planned load is now over. Drop others as violations."""
        if self._announced:
            admitted = reported & self._loading
        else:
            admitted = frozenset(name for name in reported if not self._ended.get(name))
        for request_id in reported - admitted:
            self._faults.violation(
                "finished_recving",
                f"{request_id!r} in finished_recving, but no async load of it is under way: it was "
                "reported before, or its plan did not announce it",
            )
        self._loading -= admitted
        for request_id in admitted & self._ended.keys():
            self._ended[request_id] = True  # an aborted load: the host now forgets the request
        return admitted

    def _sending(self, reported: frozenset[str]) -> frozenset[str]:
        """Return the ids whose blocks may be freed now. Hold a report that came before the end of
        its request until that end."""
        early, self._early = self._early, set()
        admitted = set()
        for request_id in reported | early:
            last_report_given = self._ended.get(request_id)
            if request_id in self._loading:
                # The end of the load frees the blocks; a second report for the id kills the host.
                self._faults.violation(
                    "sending_while_loading",
                    f"{request_id!r} in finished_sending while its load is under way: "
                    "request_finished must return delay_free=False for it",
                )
            elif last_report_given is None:
                self._early.add(request_id)
                if request_id not in early:
                    self._faults.violation(
                        "sending_early",
                        f"{request_id!r} in finished_sending before the host said that it ended: "
                        "held back until then",
                    )
            elif last_report_given:
                self._faults.violation("finished_sending", f"{request_id!r} was reported before")
            else:
                self._ended[request_id] = True
                admitted.add(request_id)
        return frozenset(admitted)

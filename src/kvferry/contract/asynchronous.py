"""Rules for async loads, which span steps, and delayed frees, which keep a request's blocks after
its end.

Connectors written for vLLM use both. Roles that use neither (kvferry's cache, for one) declare
`is_asynchronous = False`. For all other roles, the guards and the lifecycle use the classes below.
Each extends a class of `contract.rules` by the rules for request ids.

A host may crash, or hold blocks for ever, where a role breaks one of these rules:
- A request with a promised async load must be in `finished_recving` exactly once, even if it was
  aborted. For a request aborted during its load, that report frees the blocks, so its
  `request_finished` must return `delay_free=False`.
- A request that ended with `delay_free` must be in `finished_sending` exactly once, after its end.
- Both reports must come within `OVERDUE_SECONDS`. After that the guard reports for the role.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import msgspec

from kvferry.contract.messages import Plan, RepairedPlan, WorkerOutput
from kvferry.contract.rules import HookFaults, OwedReports, Promises, ReportRules
from kvferry.contract.worker import WorkerRole
from kvferry.observe import Observer
from kvferry.types import BlockTable

OVERDUE_SECONDS = 300.0
"""An async load or delayed free that a role has not reported for so long is reported by the guard,
the load as failed. A role must have shorter deadlines, and not touch the engine's blocks after them
(`WorkerRole.start_load`). Without a bound, a report lost in a fault would hold blocks for ever."""

REMEMBERED_REQUESTS = 65_536
"""How many ended requests are remembered, reported or not. Nothing but this limit removes them.
A `finished_sending` of a forgotten id is held back until a request with the same id ends."""


class AsyncPromises(Promises):
    """Promises with async loads under way and reports that workers owe. Runs in: scheduler."""

    def __init__(
        self, block_size: int | None, clock: Callable[[], float], faults: HookFaults
    ) -> None:
        super().__init__(block_size)
        self._clock = clock
        self._faults = faults
        # Blocks of each async load under way; an empty set if its request was aborted.
        self._loading: dict[str, frozenset[int]] = {}
        # Requests freed since the last plan because `request_finished` raised.
        self._freed: set[str] = set()
        self._owed: dict[str, float] = {}  # when the wait for a worker's report on a request began

    def allocate(
        self, request_id: str, block_ids: BlockTable, num_external_tokens: int
    ) -> frozenset[int]:
        is_async = self._offered.get(request_id, (0, False))[1]
        blocks = super().allocate(request_id, block_ids, num_external_tokens)
        if is_async and num_external_tokens > 0:
            self._loading[request_id] = blocks
            self._owed[request_id] = self._clock()
        return blocks

    def end(self, request_id: str) -> bool:
        super().end(request_id)
        if request_id not in self._loading:
            return False
        self._loading[request_id] = frozenset()
        return True

    def delay_free(self, request_id: str) -> None:
        self._owed[request_id] = self._clock()

    def free_now(self, request_id: str) -> None:
        self._freed.add(request_id)

    def learn(self, output: WorkerOutput) -> None:
        for request_id, blocks in self._loading.items():
            if blocks and (
                request_id in output.failed_recving or blocks & output.invalid_block_ids
            ):
                self._hits_blocked.add(request_id)
        for request_id in output.finished_recving:
            self._loading.pop(request_id, None)
            self._owed.pop(request_id, None)
        for request_id in output.finished_sending:
            self._owed.pop(request_id, None)

    @property
    def is_settled(self) -> bool:
        return super().is_settled and not (self._loading or self._freed or self._owed)

    def settle(self, plan: Plan) -> Plan:
        overdue = self._overdue() if self._owed else frozenset()
        lost = frozenset(self._lost.keys() & self._loading.keys())
        promised = frozenset(self._planned.keys() & self._loading.keys())
        freed, self._freed = frozenset(self._freed), set()
        repaired = super().settle(plan)
        if not isinstance(repaired, RepairedPlan):
            if not (freed or overdue):
                return plan
            repaired = RepairedPlan(plan=plan)
        return msgspec.structs.replace(
            repaired,
            lost_request_ids=lost,
            promised_request_ids=frozenset() if repaired.promised_block_ids is None else promised,
            freed_request_ids=freed,
            overdue_sending=overdue,
        )

    def _overdue(self) -> frozenset[str]:
        """Return ended requests whose delayed free is overdue. Add overdue loads to `_lost`."""
        limit = self._clock() - OVERDUE_SECONDS
        overdue = [request_id for request_id, since in self._owed.items() if since <= limit]
        for request_id in overdue:
            del self._owed[request_id]
            self._faults.violation(
                "overdue",
                f"{request_id!r}: no report of its load or its blocks in {OVERDUE_SECONDS:.0f} s",
            )
            if request_id in self._loading:
                self._lost[request_id] = self._loading[request_id]
        return frozenset(overdue).difference(self._loading)


class AsyncOwedReports(OwedReports):
    """Owed reports that include the ends of async loads and the delayed frees. Runs in: worker.

    Attributes:
        lost: async loads that may not have started or are overdue. Reported as failed at once.
        failed: lost loads that the role started nevertheless. Reported as failed when the role
            reports their end.
        freed: requests whose blocks are free already. The role's report of them is dropped, if it
            ever comes.
        overdue: delayed frees that the role did not report in time. Reported at once.
    """

    def __init__(self, role: WorkerRole, faults: HookFaults) -> None:
        super().__init__()
        self._role = role
        self._faults = faults
        self.lost: set[str] = set()
        self.failed: set[str] = set()
        self.freed: dict[str, None] = {}  # as a set in order
        self.overdue: frozenset[str] = frozenset()

    def __bool__(self) -> bool:
        return bool(self.invalid or self.lost or self.failed or self.freed or self.overdue)

    def planned_recving(self, plan: Plan) -> frozenset[str] | None:
        if not isinstance(plan, RepairedPlan):
            try:
                return self._role.planned_recving(plan)
            except Exception:
                then = "async loads of this plan may go unreported"
                self._faults.fault("planned_recving", then)
                return frozenset()
        if plan.promised_block_ids is not None:
            # Such a plan is run or refused as a whole. In both cases exactly these are reported.
            return plan.lost_request_ids | plan.promised_request_ids
        recving = self.planned_recving(plan.plan)
        return None if recving is None else recving | plan.lost_request_ids

    def repair(self, plan: RepairedPlan) -> None:
        super().repair(plan)
        self.freed |= dict.fromkeys(plan.freed_request_ids)
        _forget_oldest(self.freed)
        self.overdue |= plan.overdue_sending
        # The role may still start some lost loads and write to their blocks until it reports their
        # end, so they fail only then.
        started = self.planned_recving(plan.plan) or frozenset()
        self.lost |= plan.lost_request_ids - started
        self.failed |= plan.lost_request_ids & started

    def refuse(self, plan: RepairedPlan) -> None:
        super().refuse(plan)
        self.lost |= plan.lost_request_ids | plan.promised_request_ids

    def give_up(self, plan: Plan) -> None:
        self.lost |= self.planned_recving(plan) or frozenset()

    def add_to(self, output: WorkerOutput) -> WorkerOutput:
        recving = output.finished_recving | self.lost
        failed = output.failed_recving | self.lost | (self.failed & recving)
        # An overdue id may be the second life of a freed one.
        sending = output.finished_sending.difference(self.freed) | self.overdue
        added = msgspec.structs.replace(
            super().add_to(output),
            finished_sending=sending,
            finished_recving=recving,
            failed_recving=failed,
        )
        for request_id in output.finished_sending:
            self.freed.pop(request_id, None)
        self.overdue = frozenset()
        self.failed -= failed
        self.lost.clear()
        return added


def _forget_oldest(requests: dict[str, Any]) -> None:
    while len(requests) > REMEMBERED_REQUESTS:
        del requests[next(iter(requests))]


class AsyncReportRules(ReportRules):
    """Passes on the request ids that the host expects, each once. Runs in: worker."""

    def __init__(self, worker: WorkerRole, observer: Observer, *, strict: bool = False) -> None:
        super().__init__(worker, observer, strict=strict)
        self._announced = True  # False: this worker cannot name the async loads of a plan
        self._loading: set[str] = set()  # async loads planned and not yet reported
        self._failed: set[str] = set()  # reported failed before their load ended
        self._early: set[str] = set()  # finished_sending that came before the end of the request
        self._ended: dict[str, bool] = {}  # ended requests; True: the final report was passed on

    @property
    def holds_reports(self) -> bool:
        return bool(self._early)

    def begin(self, plan: Plan) -> None:
        """Note the async loads that a plan starts. If the worker cannot name them, only one rule is
        left for loads: a request that ended is reported at most once."""
        recving = self._worker.planned_recving(plan)
        if recving is None:
            self._announced = False
        else:
            self._loading.update(recving)

    def admit(
        self, output: object, finished_request_ids: Collection[str], plan: Plan
    ) -> WorkerOutput:
        if finished_request_ids:
            self._note_ended(finished_request_ids)
        return super().admit(output, finished_request_ids, plan)

    def _note_ended(self, finished_request_ids: Collection[str]) -> None:
        ended = self._ended
        for request_id in finished_request_ids:
            # A host may reuse an id; the new request may be reported again.
            ended.pop(request_id, None)
            ended[request_id] = False
        _forget_oldest(ended)

    def _requests(self, output: WorkerOutput) -> dict[str, frozenset[str]]:
        recving = self._recving(output.finished_recving)
        return {
            "finished_recving": recving,
            "finished_sending": self._sending(output.finished_sending),
            "failed_recving": self._failed_recving(output.failed_recving, recving),
        }

    def _recving(self, reported: frozenset[str]) -> frozenset[str]:
        """Return the ids whose planned load is now over. Drop others as violations."""
        if not reported:
            return reported
        if self._announced:
            admitted = reported & self._loading
        else:
            admitted = frozenset(name for name in reported if not self._ended.get(name))
        for request_id in reported - admitted:
            self._violation(
                "finished_recving",
                f"{request_id!r} in finished_recving, but no async load of it is under way: it was "
                "reported before, or planned_recving did not announce it",
            )
        self._loading -= admitted
        for request_id in admitted & self._ended.keys():
            self._ended[request_id] = True  # an aborted load: the host now forgets the request
        return admitted

    def _sending(self, reported: frozenset[str]) -> frozenset[str]:
        """Return the ids whose blocks may be freed now. Hold a report that came before the end of
        its request until that end."""
        if not reported and not self._early:
            return reported
        admitted = set()
        for request_id in reported | self._early:
            was_early = request_id in self._early
            self._early.discard(request_id)
            last_report_given = self._ended.get(request_id)
            if request_id in self._loading:
                # The end of the load frees the blocks; a second report for the id kills the host.
                self._violation(
                    "sending_while_loading",
                    f"{request_id!r} in finished_sending while its load is under way: "
                    "request_finished must return delay_free=False for it",
                )
            elif last_report_given is None:
                if not was_early:
                    self._violation(
                        "sending_early",
                        f"{request_id!r} in finished_sending before the host said that it ended: "
                        "held back until then",
                    )
                self._early.add(request_id)
            elif last_report_given:
                self._violation("finished_sending", f"{request_id!r} was reported before")
            else:
                self._ended[request_id] = True
                admitted.add(request_id)
        return frozenset(admitted)

    def _failed_recving(self, reported: frozenset[str], recving: frozenset[str]) -> frozenset[str]:
        """Return the failed loads among `recving`. A failure reported before its load's end is a
        violation; it is kept until that end."""
        if not reported and not self._failed:
            return reported
        for request_id in reported - recving:
            self._violation(
                "failed_recving", f"{request_id!r} in failed_recving but not in finished_recving"
            )
            if request_id in self._loading or not self._announced:
                self._failed.add(request_id)
        admitted = (reported | self._failed) & recving
        self._failed -= admitted
        return admitted

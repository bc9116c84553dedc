"""Async loads and delayed frees: loads that span steps, and blocks that outlive their request.

Connectors written for vLLM use both. Roles that use neither, as those of kvferry's cache, declare
`is_asynchronous = False`. For all others the guards and the lifecycle take the classes of this
module; each adds the rules for request ids to the class that it extends.

A host may crash, or hold blocks for ever, where a role breaks one of these rules:
- A request whose async load was promised is in `finished_recving` exactly once, also if it was
  aborted meanwhile. That report frees the blocks of a request that was aborted while it loads, so
  `request_finished` must then return `delay_free=False`.
- A request that ended with `delay_free` is in `finished_sending` exactly once, after its end.
- Both come within `OVERDUE_SECONDS`; the guard makes reports that do not.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

import msgspec

from kvferry.contract.messages import Plan, RepairedPlan, WorkerOutput
from kvferry.contract.rules import HookFaults, OwedReports, Promises, ReportRules
from kvferry.contract.worker import WorkerRole
from kvferry.observe import Observer
from kvferry.types import BlockTable

OVERDUE_SECONDS = 300.0
"""The guard reports an async load or a delayed free that was not reported for so long, the load as
failed. A role's own deadlines are far shorter, and it does not touch the engine's blocks past them
(`WorkerRole.start_load`). Without a bound, a report lost in a fault would hold blocks for ever."""

REMEMBERED_REQUESTS = 65_536
"""Ended requests remembered at a time. Most are never reported, and an id may come again any time,
so the memory is bounded. An id that 65,536 others overtook counts as not ended."""


class AsyncPromises(Promises):
    """Adds the loads under way and the reports that workers still owe. Runs in: scheduler."""

    def __init__(
        self, block_size: int | None, clock: Callable[[], float], faults: HookFaults
    ) -> None:
        super().__init__(block_size)
        self._clock = clock
        self._faults = faults
        # Async loads under way, and their blocks; none for a request that was aborted meanwhile.
        self._loading: dict[str, frozenset[int]] = {}
        self._freed: set[str] = set()  # since the last plan, as `request_finished` raised
        self._owed: dict[str, float] = {}  # since when a worker's report on the request is due

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
        """Ended requests whose blocks were not released in time; loads join those that are lost."""
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
    """Adds the ends of async loads and the delayed frees. Runs in: worker.

    Attributes:
        lost: async loads that did not start, or whose end is overdue: reported as failed at once.
        failed: async loads that the role ends itself: reported as failed when it does.
        freed: requests whose blocks were freed: the role's report of them is dropped.
        overdue: delayed frees that the role has not reported in time: reported in its place.
    """

    def __init__(self, role: WorkerRole, faults: HookFaults) -> None:
        super().__init__()
        self._role = role
        self._faults = faults
        self.lost: set[str] = set()
        self.failed: set[str] = set()
        self.freed: set[str] = set()
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
            # Done or refused as a whole: either way these are reported, and no others.
            return plan.lost_request_ids | plan.promised_request_ids
        recving = self.planned_recving(plan.plan)
        return None if recving is None else recving | plan.lost_request_ids

    def repair(self, plan: RepairedPlan) -> None:
        super().repair(plan)
        self.freed |= plan.freed_request_ids
        self.overdue = plan.overdue_sending
        # The role reports the end of loads that it starts nevertheless; until then it may write.
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
        added = msgspec.structs.replace(
            super().add_to(output),
            finished_sending=(output.finished_sending | self.overdue) - self.freed,
            finished_recving=recving,
            failed_recving=failed,
        )
        self.freed -= output.finished_sending
        self.overdue = frozenset()
        self.failed -= failed
        self.lost.clear()
        return added


class AsyncReportRules(ReportRules):
    """Passes on the request ids that the host expects, each once. Runs in: worker."""

    def __init__(self, worker: WorkerRole, observer: Observer, *, strict: bool = False) -> None:
        super().__init__(worker, observer, strict=strict)
        self._announced = True  # False: this worker cannot know which async loads a plan starts
        self._loading: set[str] = set()  # async loads planned and not yet reported
        self._failed: set[str] = set()  # reported failed before their load ended
        self._early: set[str] = set()  # finished_sending that came before the end of the request
        self._ended: dict[str, bool] = {}  # True: the last report was passed on

    @property
    def holds_reports(self) -> bool:
        return bool(self._early)

    def begin(self, plan: Plan) -> None:
        """Note the async loads that a plan starts. If the worker cannot know them, the only rule
        for loads is that a request that ended is reported once at most."""
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
            # A host may use an id again: its new life may be reported again.
            ended.pop(request_id, None)
            ended[request_id] = False
        while len(ended) > REMEMBERED_REQUESTS:
            del ended[next(iter(ended))]

    def _requests(self, output: WorkerOutput) -> dict[str, frozenset[str]]:
        recving = self._recving(output.finished_recving)
        return {
            "finished_recving": recving,
            "finished_sending": self._sending(output.finished_sending),
            "failed_recving": self._failed_recving(output.failed_recving, recving),
        }

    def _recving(self, reported: frozenset[str]) -> frozenset[str]:
        """The ids whose planned load is now over."""
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
        """The ids whose delayed free may happen now; those that came early wait for the end."""
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
        """Failures among `recving`; one that came before the end of its load is kept until then."""
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

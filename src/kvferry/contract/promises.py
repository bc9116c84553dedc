"""What the guard of a scheduler role and the driver of a worker role check and remember: promises
and reports.

A host trusts a scheduler role's promises and a worker's reports, and a wrong one can kill it. A
promise that the role does not keep becomes a failed load in a `RepairedPlan`. A report that breaks
a rule of `WorkerOutput` is removed, counted as `contract_violation` and logged now and then. A
report of a *failure* is never weakened: a malformed one becomes a larger failure, because a failed
load that the host takes for a good one is silently wrong output.

The rules here are for loads that end in their step. Roles with async loads or delayed frees name
others (`SchedulerRole.rules`, `WorkerRole.rules`); those of V1 connectors extend these.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from kvferry.contract.faults import HookFaults
from kvferry.contract.messages import EMPTY_OUTPUT, Plan, RepairedPlan, WorkerOutput
from kvferry.types import NULL_BLOCK, BlockTable, StepView

_NO_BLOCKS: frozenset[int] = frozenset()


@dataclass(slots=True)
class _Promise:
    """What one live request was promised."""

    offer: tuple[int, bool] | None = None  # by the last hit: local tokens, is it async
    planned: frozenset[int] | None = None  # blocks of the load that the host counts on, since
    lost: frozenset[int] | None = None  # the last plan; those to be failed: unknown to the role
    is_blocked: bool = False  # a load was lost or failed: it gets no further hit

    def lose(self) -> None:
        if self.planned is not None:
            self.lost = self.planned


class Promises:
    """What the scheduler role's guard remembers between lookup and plan. Pure bookkeeping, no I/O.
    Methods without a body are for roles with async loads or delayed frees. Runs in: scheduler.

    Attributes:
        is_asynchronous: whether async loads and delayed frees are allowed.
    """

    is_asynchronous = False

    def __init__(self, block_size: int | None) -> None:
        self._block_size = block_size
        self._of: dict[str, _Promise] = {}
        self._due: list[tuple[str, _Promise]] = []  # those with a load since the last plan
        self._suspect = False  # from the first plan on that could not be built: loads are checked
        self._last_filled = _NO_BLOCKS  # by loads of the last plan

    def has_failed(self, request_id: str) -> bool:
        """Whether a load of this request was lost before its plan, or an async load of it failed.
        The request gets no further hit: a host that restarts it asks again, and the same answer
        would fail in the same way for ever."""
        promise = self._of.get(request_id)
        return promise is not None and promise.is_blocked

    def offer(self, request_id: str, num_local_tokens: int, is_async: bool) -> None:
        """A lookup answered with a hit. The host need not take it."""
        self._of.setdefault(request_id, _Promise()).offer = num_local_tokens, is_async

    def allocate(
        self, request_id: str, block_ids: BlockTable, num_external_tokens: int
    ) -> frozenset[int]:
        """The host takes the last offer, or declines it with a count of 0. Returns the blocks that
        the load will fill."""
        promise = self._of.setdefault(request_id, _Promise())
        (local, _), promise.offer = promise.offer or (0, False), None
        if num_external_tokens <= 0:
            return frozenset()
        if promise.planned is None and promise.lost is None:
            self._due.append((request_id, promise))
        promise.planned = self._external_blocks(block_ids, local, num_external_tokens)
        return promise.planned

    def _external_blocks(
        self, block_ids: BlockTable, num_local: int, num_external: int
    ) -> frozenset[int]:
        """The blocks that hold tokens `[num_local, num_local + num_external)`.

        With several tables, block sizes may differ and the guard knows only their common multiple,
        so all blocks of the request count. The null block, which requests share, never does.
        """
        size = self._block_size
        if size is None or len(block_ids) != 1:
            return frozenset(block for table in block_ids for block in table) - {NULL_BLOCK}
        first, last = num_local // size, -(-(num_local + num_external) // size)
        return frozenset(block_ids[0][first:last]) - {NULL_BLOCK}

    def lose(self, request_id: str) -> None:
        """Fail this request's load, if any, in the next plan: the role may not know of it."""
        if request_id in self._of:
            self._of[request_id].lose()

    def lose_plan(self) -> None:
        """Fail all loads of a plan that the role could not build. Check those of all later plans,
        since it is not known whether the role has dropped these loads or will still plan them."""
        for _, promise in self._due:
            promise.lose()
        self._suspect = True

    def end(self, request_id: str) -> bool:
        """Forget an ended request. True if an async load of it is under way: then the end of the
        load is the request's last report."""
        promise = self._of.pop(request_id, None)
        if promise is not None:
            promise.planned = None
        return False

    def free_now(self, request_id: str) -> None:
        """The host frees the blocks of an ended request, and the role may not know that."""

    def learn(self, output: WorkerOutput) -> None:
        """Take the reports of the workers."""

    @property
    def is_idle(self) -> bool:
        """Whether nothing promised still needs a plan or a report, so that the host may skip the
        role's steps. Never again True once a plan could not be built."""
        return not (self._due or self._suspect)

    def repeat(self, empty: Plan) -> Plan:
        """The plan for a step that has one already. The host may have sent the first, or lost it:
        so nothing is done twice, and all that the first was to load counts as failed."""
        return RepairedPlan(plan=empty, lost_block_ids=self._last_filled)

    def settle(self, plan: Plan, step: StepView) -> Plan:
        """The plan that the workers of this step get: `plan` itself if nothing needs repair."""
        if not (self._due or self._suspect):
            self._last_filled = _NO_BLOCKS
            return plan
        due, self._due = self._due, []
        planned = {name: each.planned for name, each in due if each.planned is not None}
        self._last_filled = promised = frozenset().union(*planned.values())
        if planned:
            for name in self._dropped(plan, step, planned):
                self._of[name].lose()
        lost = [each for _, each in due if each.lost is not None]
        lost_blocks = frozenset().union(*(each.lost or () for each in lost))
        for each in lost:
            each.is_blocked |= bool(each.lost)
        for _, each in due:
            each.planned = each.lost = None
        if not (lost or self._suspect):
            return plan
        return RepairedPlan(
            plan=plan,
            lost_block_ids=lost_blocks,
            promised_block_ids=promised if self._suspect else None,
        )

    def _dropped(
        self, plan: Plan, step: StepView, planned: Mapping[str, frozenset[int]]
    ) -> Collection[str]:
        """Return the requests of whose promises a plan has no load, as after a `reset` of the role.
        One that lost its blocks counts on no load, unless it was admitted again since."""
        filled = plan.filled_blocks()
        dropped = {name for name, blocks in planned.items() if blocks and blocks.isdisjoint(filled)}
        if dropped and step.preempted_request_ids:
            scheduled = {item.request.request_id for item in step.scheduled}
            dropped -= set(step.preempted_request_ids) - scheduled
        return dropped


class Reports:
    """The way of one worker role's reports to the host. Removes what the contract forbids, and adds
    what the role does not know of or failed to say. A role with these rules may report no request.
    Runs in: worker.

    Attributes:
        is_asynchronous: whether reports of requests are allowed.
    """

    is_asynchronous = False

    def __init__(self, faults: HookFaults) -> None:
        self._faults = faults
        self._invalid: set[int] = set()  # blocks that a failed load left unfilled, to be reported

    @property
    def is_idle(self) -> bool:
        """Whether nothing waits to be reported, so that the host may skip steps."""
        return not self._invalid

    @property
    def has_failed(self) -> bool:
        """Whether loads failed of which the role may not know."""
        return bool(self._invalid)

    def begin(self, plan: Plan) -> bool:
        """Note what a plan promises to the host. False for a plan that the worker must not get: it
        fills blocks without a promise, which may belong to other requests. Then everything that was
        promised for it fails."""
        if not isinstance(plan, RepairedPlan):
            return True
        self._invalid |= plan.lost_block_ids
        promised = plan.promised_block_ids
        if promised is None or self._is_promised(plan, promised):
            return True
        self._invalid |= promised
        self._faults.violation(
            "stale_load", "it loads blocks that only a plan which failed was to fill: refused"
        )
        return False

    def _is_promised(self, plan: RepairedPlan, promised: frozenset[int]) -> bool:
        return plan.plan.filled_blocks() <= promised

    def fail_blocks(self, plan: Plan) -> None:
        """Every block that `plan` fills counts as failed."""
        self._invalid |= plan.filled_blocks()

    def fail(self, plan: Plan) -> None:
        """Every load of `plan` counts as failed: the role failed to begin the plan or its loads."""
        self.fail_blocks(plan)

    def admit(
        self, output: object, finished_request_ids: Collection[str], plan: Plan
    ) -> WorkerOutput:
        """Return what the host may see of `output`, with all that is due; `EMPTY_OUTPUT` itself if
        that is nothing.

        Args:
            output: what `collect` returned.
            finished_request_ids: what `collect` was given.
            plan: plan of this step. If the output is malformed, every block that the plan fills is
                reported as failed.
        """
        if output is EMPTY_OUTPUT and self.is_idle:
            return EMPTY_OUTPUT
        if not isinstance(output, WorkerOutput) or not _holds_sets(output):
            # Any load of this step may have failed, so all of them count as failed.
            self.fail_blocks(plan)
            known = getattr(output, "invalid_block_ids", ())
            text = f"collect returned {output!r:.200}: not a WorkerOutput of sets"
            is_set = isinstance(known, frozenset | set)
            output = WorkerOutput(invalid_block_ids=frozenset(known if is_set else ()))
            self._faults.violation("type", text)
        changes = self._requests(output)
        if output.invalid_block_ids or self._invalid:
            self._check_blocks(output.invalid_block_ids, plan)
            changes["invalid_block_ids"] = frozenset(self._invalid)
            self._invalid.clear()
        if changes:
            output = msgspec.structs.replace(output, **changes)
        return EMPTY_OUTPUT if output.is_empty() else output

    def _requests(self, output: WorkerOutput) -> dict[str, Any]:
        """The fields of requests in which the host gets something else than `output` has."""
        found = [name for name in _REQUEST_FIELDS if getattr(output, name)]
        for name in found:
            self._faults.violation(
                name, f"{name} is set: a role that reports requests names its `rules`"
            )
        return dict.fromkeys(found, frozenset())

    def _check_blocks(self, reported: Collection[int], plan: Plan) -> None:
        """Add the failed blocks to those that are due, as plain integers."""
        blocks = {operator.index(each) for each in reported if hasattr(each, "__index__")}
        sound = {block for block in blocks if block >= 0}
        self._invalid |= sound
        if len(sound) < len(reported):
            # Some block failed, and it is not known which: every block of the plan is suspect.
            self.fail_blocks(plan)
            self._faults.violation(
                "invalid_block_ids",
                f"{sorted(map(repr, reported))[:8]} in invalid_block_ids: ids are integers >= 0",
            )


_REQUEST_FIELDS = ("finished_sending", "finished_recving", "failed_recving")


def _holds_sets(output: WorkerOutput) -> bool:
    names = (*_REQUEST_FIELDS, "invalid_block_ids")
    return all(isinstance(getattr(output, name), frozenset | set) for name in names)

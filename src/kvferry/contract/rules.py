"""What the guards, the lifecycle and the fold check and remember: faults, promises, reports.

A host trusts a scheduler role's promises and a worker's reports, and a wrong one can kill it. A
promise that the role does not keep becomes a failed load in a `RepairedPlan`. A report that breaks
a rule of `WorkerOutput` is removed, counted as `contract_violation` and logged now and then. A
report of a *failure* is never weakened: a malformed one becomes a larger failure, because a failed
load that the host takes for a good one is silently wrong output.

This module has the rules for loads that end in their step. `contract.asynchronous` extends
`Promises`, `ReportRules` and `OwedReports` by the rules for async loads and delayed frees.

A `GuardedScheduler` uses `Promises`, a `GuardedWorker` `OwedReports`, a `StepLifecycle`
`ReportRules`. `HookFaults` counts for all of them, for the fold, and for SGLang's storage.
"""

from __future__ import annotations

import logging
import operator
from collections.abc import Callable, Collection
from typing import TypeVar

import msgspec

from kvferry.contract.messages import EMPTY_OUTPUT, Plan, RepairedPlan, WorkerOutput
from kvferry.contract.worker import WorkerRole
from kvferry.errors import ContractError
from kvferry.observe import Observer
from kvferry.types import NULL_BLOCK, BlockTable

logger = logging.getLogger(__name__)

T = TypeVar("T")


class HookFaults:
    """Counts the faults of one role, or of other code that must not fail its host; logs the 1st,
    10th, 100th, ... of each kind."""

    def __init__(self, role: str, observer: Observer) -> None:
        self._role = role
        self._observer = observer
        self._seen: dict[str, int] = {}

    def call(self, hook: Callable[..., T], *args: object, otherwise: T, then: str) -> T:
        """Call `hook`. If it raises, log what happens `then`, and return `otherwise`."""
        try:
            return hook(*args)
        except Exception:
            self.fault(getattr(hook, "__name__", "unnamed"), then)
            return otherwise

    def fault(self, hook: str, consequence: str) -> None:
        """A hook raised. Called in an `except` block: the log line carries the traceback."""
        self._observer.count("hook_failed")
        self._observer.count(f"hook_failed_{hook}")
        if number := self._note(hook):
            logger.exception(  # noqa: LOG004 - every caller is an exception handler
                "%s.%s raised (%d so far): %s", self._role, hook, number, consequence
            )

    def violation(self, rule: str, message: str) -> None:
        """The role answered something that the contract forbids."""
        self._observer.count("contract_violation")
        if number := self._note(rule):
            logger.warning(
                "%s breaks its contract (%s, %d so far): %s", self._role, rule, number, message
            )

    def _note(self, name: str) -> int:
        """Count `name`. Return how often it happened if this time is worth a log line, else 0."""
        number = self._seen[name] = self._seen.get(name, 0) + 1
        return number if number == 10 ** (len(str(number)) - 1) else 0


class Promises:
    """What the scheduler role's guard remembers between lookup and plan. Pure bookkeeping, no I/O.
    Methods without a body are for async roles. Runs in: scheduler."""

    def __init__(self, block_size: int | None) -> None:
        self._block_size = block_size
        self._offered: dict[str, tuple[int, bool]] = {}  # last hit: local tokens, is it async
        # Blocks of promised loads, by request: the host counts on them.
        self._planned: dict[str, frozenset[int]] = {}  # allocated since the last plan
        self._lost: dict[str, frozenset[int]] = {}  # to be failed: unknown to the role, or overdue
        self._hits_blocked: set[str] = set()  # requests with a load that was lost or failed
        self._suspect = False  # from the first plan on that could not be built: loads are checked

    def has_failed(self, request_id: str) -> bool:
        """Whether a load of this request was lost before its plan, or an async load of it failed.
        The request gets no further hit: a host that restarts it asks again, and the same answer
        would fail in the same way for ever."""
        return request_id in self._hits_blocked

    def offer(self, request_id: str, num_local_tokens: int, is_async: bool) -> None:
        """A lookup answered with a hit. The host need not take it."""
        self._offered[request_id] = (num_local_tokens, is_async)

    def allocate(
        self, request_id: str, block_ids: BlockTable, num_external_tokens: int
    ) -> frozenset[int]:
        """The host takes the last offer, or declines it with a count of 0. Returns the blocks that
        the load will fill."""
        local, _ = self._offered.pop(request_id, (0, False))
        if num_external_tokens <= 0:
            return frozenset()
        blocks = self._external_blocks(block_ids, local, num_external_tokens)
        self._planned[request_id] = blocks
        return blocks

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
        if request_id in self._planned:
            self._lost[request_id] = self._planned[request_id]

    def lose_plan(self) -> None:
        """Fail all loads of a plan that the role could not build. Check those of all later plans,
        since it is not known whether the role has dropped these loads or will still plan them."""
        self._lost.update(self._planned)
        self._suspect = True

    def end(self, request_id: str) -> bool:
        """Forget an ended request. True if an async load of it is under way: then the end of the
        load is the request's last report."""
        self._offered.pop(request_id, None)
        self._hits_blocked.discard(request_id)
        return False

    def delay_free(self, request_id: str) -> None:
        """The host holds the blocks of an ended request until a worker reports it as sent."""

    def free_now(self, request_id: str) -> None:
        """The host frees the blocks of an ended request, and the role may not know that."""

    def learn(self, output: WorkerOutput) -> None:
        """Take the reports of the workers."""

    @property
    def is_settled(self) -> bool:
        """Whether nothing promised still needs a plan or a report, so that the host may skip the
        role's steps. Never again True once a plan could not be built."""
        return not (self._planned or self._lost or self._suspect)

    def settle(self, plan: Plan) -> Plan:
        """The plan that the workers of this step get: `plan` itself if nothing needs repair."""
        planned, self._planned = self._planned, {}
        if not (self._lost or self._suspect):
            return plan
        lost, self._lost = self._lost, {}
        self._hits_blocked.update(request_id for request_id, blocks in lost.items() if blocks)
        return RepairedPlan(
            plan=plan,
            lost_block_ids=frozenset().union(*lost.values()),
            promised_block_ids=frozenset().union(*planned.values()) if self._suspect else None,
        )


class ReportRules:
    """A filter that removes what the contract forbids from one worker's outputs; with `strict` it
    also raises. A sync role may report no request id. Methods that do nothing are for async roles.
    """

    def __init__(self, worker: WorkerRole, observer: Observer, *, strict: bool = False) -> None:
        self._worker = worker
        self._faults = HookFaults("connector", observer)
        self._strict = strict

    @property
    def holds_reports(self) -> bool:
        """Whether a report that came too early waits to be passed on."""
        return False

    def begin(self, plan: Plan) -> None:
        """The worker began a step with `plan`."""

    def admit(
        self, output: object, finished_request_ids: Collection[str], plan: Plan
    ) -> WorkerOutput:
        """Return the part of `output` that the host may see; `EMPTY_OUTPUT` itself if it is empty.

        Args:
            output: what `collect` returned.
            finished_request_ids: what `collect` was given.
            plan: plan of this step. If the output is malformed, every block that the plan fills is
                reported as failed.

        Raises:
            ContractError: strict, and a rule was broken.
        """
        if output is EMPTY_OUTPUT and not self.holds_reports:
            return EMPTY_OUTPUT
        if not isinstance(output, WorkerOutput) or not _holds_sets(output):
            self._violation("type", f"collect returned {output!r:.200}: not a WorkerOutput of sets")
            # Any load of this step may have failed, so all of them count as failed.
            known = getattr(output, "invalid_block_ids", ())
            known = frozenset(known) if isinstance(known, frozenset | set) else frozenset()
            output = WorkerOutput(invalid_block_ids=known | self._worker.planned_blocks(plan))
        admitted = msgspec.structs.replace(
            output,
            **self._requests(output),
            invalid_block_ids=self._blocks(output.invalid_block_ids, plan),
        )
        return EMPTY_OUTPUT if admitted.is_empty() else admitted

    def _requests(self, output: WorkerOutput) -> dict[str, frozenset[str]]:
        """The requests in `output` that the host may see, by field."""
        for name in _REQUEST_FIELDS:
            if getattr(output, name):
                self._violation(
                    name, f"{name} is set: a role that reports requests declares is_asynchronous"
                )
        return dict.fromkeys(_REQUEST_FIELDS, frozenset())

    def _blocks(self, reported: frozenset[int], plan: Plan) -> frozenset[int]:
        blocks = {operator.index(each) for each in reported if hasattr(each, "__index__")}
        sound = frozenset(block for block in blocks if block >= 0)
        if len(sound) == len(reported):
            return sound
        self._violation(
            "invalid_block_ids",
            f"{sorted(map(repr, reported))[:8]} in invalid_block_ids: ids are integers >= 0",
        )
        # Some block failed, and it is not known which: every block of the plan is suspect.
        return sound | self._worker.planned_blocks(plan)

    def _violation(self, rule: str, message: str) -> None:
        self._faults.violation(rule, message)
        if self._strict:
            raise ContractError(message)


_REQUEST_FIELDS = ("finished_sending", "finished_recving", "failed_recving")


def _holds_sets(output: WorkerOutput) -> bool:
    names = (*_REQUEST_FIELDS, "invalid_block_ids")
    return all(isinstance(getattr(output, name), frozenset | set) for name in names)


class OwedReports:
    """What a worker role's guard adds to its reports. Methods without a body are for async roles.

    Attributes:
        invalid: blocks that a failed load left unfilled.
    """

    def __init__(self) -> None:
        self.invalid: set[int] = set()

    def __bool__(self) -> bool:
        return bool(self.invalid)

    def planned_recving(self, plan: Plan) -> frozenset[str] | None:
        """`WorkerRole.planned_recving` of any plan, also of a `RepairedPlan`; None if the role
        cannot know."""
        return frozenset()

    def repair(self, plan: RepairedPlan) -> None:
        """Note the promises that the role may not know of as failed."""
        self.invalid |= plan.lost_block_ids

    def refuse(self, plan: RepairedPlan) -> None:
        """Note everything promised for this plan as failed, as the role does not get the plan."""
        self.invalid |= plan.promised_block_ids or frozenset()

    def give_up(self, plan: Plan) -> None:
        """Note this plan's async loads as failed, as the role failed to begin it or its loads."""

    def add_to(self, output: WorkerOutput) -> WorkerOutput:
        """Return the role's report with all that is owed, which is then no longer owed."""
        invalid = output.invalid_block_ids | self.invalid
        added = msgspec.structs.replace(output, invalid_block_ids=invalid)
        self.invalid.clear()  # not before: a malformed report raises
        return added

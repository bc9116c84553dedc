"""The promises of a scheduler role to a host, and the reports that workers still owe.

The guard's memory between lookup and report. A promise that the role does not keep becomes a failed
load or a freed request in a `RepairedPlan`. Runs in: scheduler.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

from kvferry.contract.faults import FaultLog, RepairedPlan
from kvferry.contract.messages import Plan, WorkerOutput
from kvferry.types import NULL_BLOCK, BlockTable

OVERDUE_SECONDS = 300.0
"""The guard reports an async load or a delayed free that was not reported for so long, the load as
failed. A role's own deadlines are far shorter, and by its contract it does not touch the engine's
blocks past them. Without a bound, a report lost in a fault would hold blocks for ever."""


class PromisedLoad(NamedTuple):
    """Blocks that the host takes for loaded, or will."""

    blocks: frozenset[int]
    is_async: bool


class Promises:
    """Bookkeeping only: every method is O(1) or in the number of loads under way."""

    def __init__(
        self, block_size: int | None, clock: Callable[[], float], faults: FaultLog
    ) -> None:
        self._block_size = block_size
        self._clock = clock
        self._faults = faults
        self._offered: dict[str, tuple[int, bool]] = {}  # last hit: local tokens, is it async
        self._planned: dict[str, PromisedLoad] = {}  # allocated since the last plan
        self._lost: dict[str, PromisedLoad] = {}  # of those, unknown to the role
        # Async loads under way, and their blocks; none for a request that was aborted meanwhile.
        self._loading: dict[str, frozenset[int]] = {}
        self._barred: set[str] = set()  # a load of theirs failed: no more hits
        self._freed: set[str] = set()  # ended since the last plan, by a fault of the role
        self._suspect = False  # a plan could not be built: loads of later ones are checked
        self._owed: dict[str, float] = {}  # since when a worker's report on the request is due

    def is_barred(self, request_id: str) -> bool:
        """Whether a load of this request failed: a host that computes such a request from its start
        asks again, and with the same answer repeats this for ever."""
        return request_id in self._barred

    def offer(self, request_id: str, num_local_tokens: int, is_async: bool) -> None:
        """A lookup answered with a hit. The host may not come back to it."""
        self._offered[request_id] = (num_local_tokens, is_async)

    def allocate(self, request_id: str, block_ids: BlockTable, num_external_tokens: int) -> None:
        """The host accepts the last offer, or none if the count is 0."""
        local, is_async = self._offered.pop(request_id, (0, False))
        if num_external_tokens <= 0:
            return
        blocks = self._external_blocks(block_ids, local, num_external_tokens)
        self._planned[request_id] = PromisedLoad(blocks, is_async)
        if is_async:
            self._loading[request_id] = blocks
            self._owed[request_id] = self._clock()

    def _external_blocks(
        self, block_ids: BlockTable, num_local: int, num_external: int
    ) -> frozenset[int]:
        """The blocks that hold tokens `[num_local, num_local + num_external)`.

        With several tables block sizes differ, and the guard knows only their common multiple: all
        blocks of the request are named then. Never the null block, which requests share.
        """
        size = self._block_size
        if size is None or len(block_ids) != 1:
            return frozenset(block for table in block_ids for block in table) - {NULL_BLOCK}
        first, last = num_local // size, -(-(num_local + num_external) // size)
        return frozenset(block_ids[0][first:last]) - {NULL_BLOCK}

    def lose(self, request_id: str) -> None:
        """The role may not know of this request's load, if one is due in the next plan."""
        if request_id in self._planned:
            self._lost[request_id] = self._planned[request_id]

    def lose_plan(self) -> None:
        """The role could not build the plan: none of its loads is known to be in it."""
        self._lost.update(self._planned)
        self._suspect = True

    def end(self, request_id: str) -> bool:
        """A request ended. True if it still loads: then the end of the load is its last report."""
        self._offered.pop(request_id, None)
        self._barred.discard(request_id)
        if request_id not in self._loading:
            return False
        self._loading[request_id] = frozenset()
        return True

    def delay_free(self, request_id: str) -> None:
        """The host holds the blocks of an ended request until a worker reports it as sent."""
        self._owed[request_id] = self._clock()

    def free_now(self, request_id: str) -> None:
        """The host frees the blocks of an ended request, and the role may not know that."""
        self._freed.add(request_id)

    def learn(self, output: WorkerOutput) -> None:
        """Take the reports of the workers."""
        if not self._owed and not self._loading:
            return
        for request_id, blocks in self._loading.items():
            if blocks and (
                request_id in output.failed_recving or blocks & output.invalid_block_ids
            ):
                self._barred.add(request_id)
        for request_id in output.finished_recving:
            self._loading.pop(request_id, None)
            self._owed.pop(request_id, None)
        for request_id in output.finished_sending:
            self._owed.pop(request_id, None)

    @property
    def are_kept(self) -> bool:
        """Whether no plan and no report is needed for what was promised so far."""
        return not (
            self._planned
            or self._lost
            or self._loading
            or self._freed
            or self._suspect
            or self._owed
        )

    def settle(self, plan: Plan) -> Plan:
        """The plan that the workers of this step get: `plan` itself if nothing went wrong."""
        planned = self._planned
        if planned:
            self._planned = {}
        overdue = self._overdue() if self._owed else frozenset()
        if self._lost or self._freed or overdue or self._suspect:
            return self._repaired(plan, overdue, planned)
        return plan

    def _overdue(self) -> frozenset[str]:
        """Ended requests whose blocks were not released in time; loads join those that are lost."""
        limit = self._clock() - OVERDUE_SECONDS
        overdue = [request_id for request_id, since in self._owed.items() if since <= limit]
        for request_id in overdue:
            del self._owed[request_id]
            self._faults.violation(
                "overdue", f"no end of a load or free of {request_id!r} in {OVERDUE_SECONDS:.0f} s"
            )
            if request_id in self._loading:
                self._lost[request_id] = PromisedLoad(self._loading[request_id], is_async=True)
        return frozenset(overdue).difference(self._loading)

    def _repaired(
        self, plan: Plan, overdue: frozenset[str], planned: Mapping[str, PromisedLoad]
    ) -> RepairedPlan:
        lost, self._lost = self._lost, {}
        freed, self._freed = frozenset(self._freed), set()
        self._barred.update(request_id for request_id, load in lost.items() if load.blocks)
        return RepairedPlan(
            plan=plan,
            lost_block_ids=_blocks_of(lost),
            lost_request_ids=_async_of(lost),
            freed_request_ids=freed,
            overdue_sending=overdue,
            promised_block_ids=_blocks_of(planned) if self._suspect else None,
            promised_request_ids=_async_of(planned) if self._suspect else frozenset(),
        )


def _blocks_of(loads: Mapping[str, PromisedLoad]) -> frozenset[int]:
    return frozenset(block for load in loads.values() for block in load.blocks)


def _async_of(loads: Mapping[str, PromisedLoad]) -> frozenset[str]:
    return frozenset(request_id for request_id, load in loads.items() if load.is_async)

"""Filters a worker's reports: a host trusts them, and a wrong one can kill it.

The rules are those of `WorkerOutput`. An id that breaks a rule is removed, counted as
`contract_violation` and logged now and then; `strict` raises as well. A report of a *failure* is
never weakened: a malformed one becomes a larger failure, because a failed load that the host takes
for a good one is silently wrong output.

Runs in: worker.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Iterable

import msgspec

from kvferry.contract.faults import FaultLog
from kvferry.contract.messages import EMPTY_OUTPUT, WorkerOutput
from kvferry.errors import ContractError
from kvferry.observe import Observer

REMEMBERED_REQUESTS = 65_536
"""Ended requests remembered at a time. Most are never reported, and an id may come again any time,
so the memory is bounded. An id that 65,536 others overtook counts as not ended."""


class ReportRules:
    """Removes from a worker's outputs what the contract forbids. One per worker; not shared."""

    def __init__(self, observer: Observer, *, strict: bool = False) -> None:
        self._faults = FaultLog("connector", observer)
        self._strict = strict
        self._announced = True  # False: this worker cannot know which async loads a plan starts
        self._loading: set[str] = set()  # async loads planned and not yet reported
        self._failed: set[str] = set()  # of those, reported failed before they ended
        self._early: set[str] = set()  # finished_sending that came before the end of the request
        self._ended: dict[str, bool] = {}  # True: the last report was passed on

    @property
    def holds_reports(self) -> bool:
        """Whether something that came early waits to be passed on."""
        return bool(self._early)

    def begin(self, recving: Collection[str] | None) -> None:
        """Note the async loads that a plan starts; None: the worker cannot know. The only rule
        for loads is then that a request is reported once after its end."""
        if recving is None:
            self._announced = False
        else:
            self._loading.update(recving)

    def admit(
        self,
        output: object,
        finished_request_ids: Collection[str],
        planned_blocks: Callable[[], Iterable[int]],
    ) -> WorkerOutput:
        """The part of `output` that the host may see; `EMPTY_OUTPUT` itself if nothing is left.

        Args:
            output: what `collect` returned.
            finished_request_ids: what `collect` was given.
            planned_blocks: the blocks of this step's plan; called only if block ids are malformed.

        Raises:
            ContractError: strict, and a rule was broken.
        """
        if finished_request_ids:
            self._note_ended(finished_request_ids)
        if output is EMPTY_OUTPUT and not self._early:
            return EMPTY_OUTPUT
        if not isinstance(output, WorkerOutput) or not _holds_sets(output):
            self._violation("type", f"collect returned {output!r:.200}: not a WorkerOutput of sets")
            # Any load of this step may have failed: none of them is trusted.
            output = WorkerOutput(invalid_block_ids=frozenset(planned_blocks()))
        recving = self._recving(output.finished_recving)
        admitted = msgspec.structs.replace(
            output,
            finished_recving=recving,
            finished_sending=self._sending(output.finished_sending),
            failed_recving=self._failed_recving(output.failed_recving, recving),
            invalid_block_ids=self._blocks(output.invalid_block_ids, planned_blocks),
        )
        return EMPTY_OUTPUT if admitted.is_empty() else admitted

    def _note_ended(self, finished_request_ids: Collection[str]) -> None:
        ended = self._ended
        for request_id in finished_request_ids:
            # A host may use an id again: its new life may be reported again.
            ended.pop(request_id, None)
            ended[request_id] = False
        while len(ended) > REMEMBERED_REQUESTS:
            del ended[next(iter(ended))]

    def _recving(self, reported: frozenset[str]) -> frozenset[str]:
        """The ids whose planned load is now over: a host dies of any other."""
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
                self._violation(
                    "finished_sending", f"{request_id!r} was reported before: each id is once"
                )
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

    def _blocks(
        self, reported: frozenset[int], planned_blocks: Callable[[], Iterable[int]]
    ) -> frozenset[int]:
        try:
            blocks = frozenset(map(operator.index, reported))
        except TypeError:
            blocks = frozenset({-1})
        if min(blocks, default=0) >= 0:
            return blocks
        self._violation(
            "invalid_block_ids",
            f"{sorted(map(repr, reported))[:8]} in invalid_block_ids: ids are integers >= 0",
        )
        # Some block failed, and it is not known which: every block of the plan is suspect.
        sound = {block for block in reported if isinstance(block, int) and block >= 0}
        return frozenset(sound).union(planned_blocks())

    def _violation(self, rule: str, message: str) -> None:
        self._faults.violation(rule, message)
        if self._strict:
            raise ContractError(message)


def _holds_sets(output: WorkerOutput) -> bool:
    names = ("finished_sending", "finished_recving", "failed_recving", "invalid_block_ids")
    return all(isinstance(getattr(output, name), frozenset | set) for name in names)

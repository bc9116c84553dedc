"""Folds the reports of all ranks after a step into one report for the scheduler.

A rank is known by its position in the list of outputs. Ranks finish their part of a transfer in
different steps; the scheduler gets one report, when the last rank has finished. Unlike vLLM's
aggregator, the fold counts a rank that repeats itself once, loses no report when the output of
another rank is missing, and leaves the ranks' outputs unchanged.

Runs in: the process that collects the outputs; one thread. Pure bookkeeping, no I/O.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from kvferry.contract.faults import HookFaults
from kvferry.contract.messages import EMPTY_OUTPUT, WorkerMeta, WorkerOutput
from kvferry.errors import ConfigError, ContractError
from kvferry.observe import Observer


class _RankReports:
    """For each id that is not yet released, the ranks that have reported it."""

    def __init__(self) -> None:
        self._ranks: dict[str, int] = {}  # id -> set of ranks, one bit each

    def __len__(self) -> int:
        return len(self._ranks)

    def add(self, rank: int, request_ids: Collection[str]) -> None:
        for request_id in request_ids:
            self._ranks[request_id] = self._ranks.get(request_id, 0) | 1 << rank

    def release(self, expected: int) -> frozenset[str]:
        """Forget and return the ids that `expected` ranks have reported."""
        released = {name for name, ranks in self._ranks.items() if ranks.bit_count() >= expected}
        for request_id in released:
            del self._ranks[request_id]
        return frozenset(released)


class WorkerOutputFold:
    """Folds the outputs of all ranks, step by step. One per engine.

    - `finished_sending`, `finished_recving`: an id appears once, in the step in which the last of
      the expected ranks has reported it. A rank that repeats an id before that counts once. A later
      report belongs to the next transfer under the same id.
    - `failed_recving`: a failure on any rank is kept, and comes in the step that releases the id.
    - `invalid_block_ids`: those of this step, of any rank.
    - `stats` add up by name; `events` are joined; `meta` is folded by its own `aggregate`. If one
      of these cannot be folded, it is dropped for this step, logged and counted; the ids above are
      kept.

    Attributes:
        expected_reports: number of ranks that report each id. A new value takes effect at the next
            `fold`, also for ids that some ranks have reported already.
    """

    def __init__(self, expected_reports: int, *, observer: Observer | None = None) -> None:
        """Begin with no report.

        Args:
            expected_reports: number of ranks that report each id, at least 1.
            observer: receives `hook_failed` where stats, events or meta could not be folded.

        Raises:
            ConfigError: a count that is not at least 1.
        """
        self._sending = _RankReports()
        self._recving = _RankReports()
        self._failed: set[str] = set()
        self._faults = HookFaults(type(self).__name__, observer or Observer())
        if expected_reports < 1:
            raise ConfigError(
                f"{expected_reports} reports expected per request: at least one rank must report, "
                "or nothing is ever released"
            )
        self.expected_reports = expected_reports

    def __repr__(self) -> str:
        return (
            f"<{type(self).__name__} expected_reports={self.expected_reports} "
            f"sending={len(self._sending)} recving={len(self._recving)} failed={len(self._failed)}>"
        )

    def fold(self, outputs: Sequence[WorkerOutput | None]) -> WorkerOutput:
        """Fold one step's outputs. Returns `EMPTY_OUTPUT` itself if there is nothing to report.

        Args:
            outputs: one per rank, in rank order, the same ranks in every step; None for a rank
                that has no output in this step.
        """
        present = [output for output in outputs if output is not None and not output.is_empty()]
        for rank, output in enumerate(outputs):
            if output is not None:
                self._sending.add(rank, output.finished_sending)
                self._recving.add(rank, output.finished_recving)
                self._failed |= output.failed_recving
        recving = self._recving.release(self.expected_reports)
        failed = recving & self._failed
        self._failed -= failed
        folded = WorkerOutput(
            finished_sending=self._sending.release(self.expected_reports),
            finished_recving=recving,
            failed_recving=failed,
            invalid_block_ids=frozenset().union(*(output.invalid_block_ids for output in present)),
            stats=self._payload("stats", present, _add_stats),
            events=self._payload("events", present, _join_events_of_ranks),
            meta=self._payload("meta", present, _fold_meta),
        )
        return EMPTY_OUTPUT if folded.is_empty() else folded

    def append(self, first: WorkerOutput, second: WorkerOutput) -> WorkerOutput:
        """Join folded outputs of two successive steps, where the host did not take the first."""
        if first.is_empty() or second.is_empty():
            return second if first.is_empty() else first
        both = [first, second]
        return WorkerOutput(
            finished_sending=first.finished_sending | second.finished_sending,
            finished_recving=first.finished_recving | second.finished_recving,
            failed_recving=first.failed_recving | second.failed_recving,
            invalid_block_ids=first.invalid_block_ids | second.invalid_block_ids,
            stats=self._payload("stats", both, _add_stats),
            events=self._payload("events", both, _join_events),
            meta=self._payload("meta", both, _fold_meta),
        )

    def _payload(
        self, kind: str, outputs: Sequence[WorkerOutput], join: Callable[[Any, Any], Any]
    ) -> Any:  # noqa: ANN401 - the connector's
        """Join the `kind` of all outputs. None if no output has it, or if `join` raises. `join`
        makes a new value and changes neither argument."""
        values = [value for output in outputs if (value := getattr(output, kind)) is not None]
        if not values:
            return None
        result = values[0]
        try:
            for value in values[1:]:
                result = join(result, value)
        except Exception:
            # A fault of the connector's code or data must not reach the engine.
            self._faults.fault(f"fold_{kind}", f"the {kind} of this step are dropped")
            return None
        return result


def _require_same_type(first: object, second: object) -> None:
    if not isinstance(first, type(second)):
        raise ContractError(
            f"ranks report a {type(first).__name__} and a {type(second).__name__}: one connector "
            "reports one type"
        )


def _add_stats(first: Any, second: Any) -> Any:  # noqa: ANN401 - the connector's
    """Add counters by name. An object with `aggregate` is copied first, as it may change itself."""
    if isinstance(first, Mapping) and isinstance(second, Mapping):
        return {name: first.get(name, 0) + second.get(name, 0) for name in {**first, **second}}
    _require_same_type(first, second)
    return copy.deepcopy(first).aggregate(second)


def _join_events(first: Any, second: Any) -> Any:  # noqa: ANN401 - the connector's
    """Join two sequences of events, or two containers like vLLM's, which have `add_events`."""
    if isinstance(first, Sequence) and isinstance(second, Sequence):
        return (*first, *second)
    _require_same_type(first, second)
    joined = copy.deepcopy(first)
    joined.add_events(second.get_all_events())
    return joined


def _join_events_of_ranks(first: Any, second: Any) -> Any:  # noqa: ANN401 - the connector's
    """Join the events of two ranks. A container counts its workers, since it passes on only what
    all of them saw."""
    joined = _join_events(first, second)
    if not isinstance(joined, Sequence):
        joined.increment_workers(1)
    return joined


def _fold_meta(first: Any, second: Any) -> Any:  # noqa: ANN401 - the connector's
    """Fold two metas. A foreign meta is copied first; a `WorkerMeta` never changes itself."""
    return (first if isinstance(first, WorkerMeta) else copy.deepcopy(first)).aggregate(second)

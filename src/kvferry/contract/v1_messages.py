"""Our plan, output, messages and counters in the wrappings that hosts of the one-class shape carry.

A wrapping adds nothing: what went in comes out on the other side of the process line.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from kvferry.contract.messages import EMPTY_OUTPUT, Plan, WorkerMeta, WorkerOutput
from kvferry.contract.v1 import (
    KVConnectorMetadata,
    KVConnectorOutput,
    KVConnectorStats,
    KVConnectorWorkerMetadata,
)
from kvferry.errors import ContractError


@dataclass(frozen=True)
class PlanMetadata(KVConnectorMetadata):
    """A plan of ours on its way to the workers.

    Attributes:
        plan: what they are to do.
        has_tokens: whether the step computes anything.
        is_quiet: the plan is the role's empty one, and the step ends no request: an idle worker
            need not look at it.
    """

    plan: Plan
    has_tokens: bool
    is_quiet: bool = False


@dataclass(frozen=True)
class CarriedMeta(KVConnectorWorkerMetadata):
    """A worker's message on its way to the scheduler role."""

    meta: WorkerMeta

    def aggregate(self, other: KVConnectorWorkerMetadata) -> CarriedMeta:
        if not isinstance(other, CarriedMeta):
            raise ContractError(f"cannot fold {type(other).__name__} into CarriedMeta")
        return CarriedMeta(self.meta.aggregate(other.meta))


class CounterStats(KVConnectorStats):
    """Counters by name; folding adds them up."""

    def reset(self) -> None:
        self.data = {}

    def aggregate(self, other: KVConnectorStats) -> CounterStats:
        for name, amount in other.data.items():
            self.data[name] = self.data.get(name, 0) + amount
        return self

    def reduce(self) -> dict[str, int | float]:
        return dict(self.data)


def from_v1_output(output: KVConnectorOutput) -> WorkerOutput:
    """A V1 output as a value of ours; `EMPTY_OUTPUT` itself if it says nothing.

    What a foreign connector put into stats and worker metadata stays as it is.
    """
    if output.is_empty():
        return EMPTY_OUTPUT
    stats, meta = output.kv_connector_stats, output.kv_connector_worker_meta
    return WorkerOutput(
        finished_sending=frozenset(output.finished_sending or ()),
        finished_recving=frozenset(output.finished_recving or ()),
        failed_recving=frozenset(output.failed_recving or ()),
        invalid_block_ids=frozenset(output.invalid_block_ids or ()),
        stats=stats.data if isinstance(stats, CounterStats) else stats,
        events=output.kv_cache_events,
        meta=meta.meta if isinstance(meta, CarriedMeta) else meta,
    )


def to_v1_output(output: WorkerOutput) -> KVConnectorOutput:
    """The inverse of `from_v1_output`. As hosts expect it, no ids of ended work are None."""
    stats, meta = output.stats, output.meta
    return KVConnectorOutput(
        finished_sending=set(output.finished_sending) or None,
        finished_recving=set(output.finished_recving) or None,
        failed_recving=set(output.failed_recving),
        invalid_block_ids=set(output.invalid_block_ids),
        kv_connector_stats=CounterStats(dict(stats)) if isinstance(stats, Mapping) else stats,
        kv_cache_events=output.events,
        kv_connector_worker_meta=CarriedMeta(meta) if isinstance(meta, WorkerMeta) else meta,
    )

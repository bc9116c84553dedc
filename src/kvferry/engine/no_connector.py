"""The connector of an engine that has none: nothing is found, nothing is kept."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch

from kvferry.contract.messages import EMPTY_OUTPUT, MISS, LookupResult, Plan, WorkerOutput
from kvferry.contract.scheduler import SchedulerRole
from kvferry.contract.worker import WorkerRole
from kvferry.types import BlockTable, RequestView, StepView

_NOTHING = Plan()


class NoScheduler(SchedulerRole):
    """Answers every look-up with a miss."""

    def lookup(self, request: RequestView, num_local_tokens: int) -> LookupResult:
        return MISS

    def update_after_alloc(
        self, request: RequestView, block_ids: BlockTable, num_external_tokens: int
    ) -> None:
        pass

    def build_plan(self, step: StepView) -> Plan:
        return _NOTHING

    def update_output(self, output: WorkerOutput) -> None:
        pass


class NoWorker(WorkerRole):
    """Moves nothing."""

    def register_kv_caches(self, kv_caches: Mapping[str, torch.Tensor]) -> None:
        pass

    def begin_step(self, plan: Plan) -> None:
        pass

    def start_load(self) -> None:
        pass

    def save(self) -> None:
        pass

    def collect(self, finished_request_ids: Collection[str]) -> WorkerOutput:
        return EMPTY_OUTPUT

    def end_step(self) -> None:
        pass

    def close(self) -> None:
        pass

"""The embedded engine's scheduler around a V1 connector that was written for `kvferry.v1`."""

from __future__ import annotations

import inspect
from copy import deepcopy
from typing import Any

from kvferry.contract.fold import WorkerOutputFold
from kvferry.engine.block_pool import BlockPool
from kvferry.engine.config import EngineConfig
from kvferry.engine.request import EngineStep, Request
from kvferry.engine.scheduler import Scheduler
from kvferry.testing.connector.content import Ask, Part
from kvferry.testing.connector.host import CaseEnd, KitHost
from kvferry.types import ExtraKeys
from kvferry.v1.driven import V1SchedulerRole, v1_config
from kvferry.v1.types import KVConnectorRole


class _PreemptingScheduler(Scheduler):
    """The engine's scheduler, which can be made to preempt."""

    preempts = False

    def _schedule_running(self, step: EngineStep) -> None:
        if self.preempts:
            for request in reversed(list(self._running.values())):
                self._preempt(request, step)
            self.pool.reset()
            self.preempts = False
        super()._schedule_running(step)


class OwnHost(KitHost):
    """See the module. Serves text and salts, on one group of layers.

    A class attribute `written_for` of the connector names its release, see `kvferry.v1.Release`.
    """

    def _build(self, connector: type[Any], options: dict[str, Any]) -> None:
        setup = self.setup
        if setup.in_flight > 1 or setup.runner > 1 or not setup.attention_metadata:
            raise CaseEnd("not run", "the embedded engine has no such steps")
        if len(setup.groups) > 1:
            raise CaseEnd("not run", "the embedded engine has one block table")
        config = v1_config(
            block_size=setup.block_size, options=options, model=setup.directory, dtype=setup.dtype
        )
        config.parallel_config.tensor_parallel_size = setup.ranks
        config.parallel_config.world_size = setup.ranks
        takes_groups = "kv_cache_config" in inspect.signature(connector).parameters
        groups = {"kv_cache_config": None} if takes_groups else {}
        self.scheduler_half = connector(config, KVConnectorRole.SCHEDULER, **groups)
        for rank in range(setup.ranks):
            of_rank = deepcopy(config)
            of_rank.parallel_config.rank = rank
            self.worker_halves.append(connector(of_rank, KVConnectorRole.WORKER, **groups))
        self._pool = BlockPool(setup.num_blocks)
        self._scheduler = _PreemptingScheduler(
            EngineConfig(block_size=setup.block_size, max_batched_tokens=setup.budget),
            self._pool,
            V1SchedulerRole(self.scheduler_half),
        )
        self._fold = WorkerOutputFold(setup.ranks)
        self._requests: dict[str, Request] = {}

    def is_busy(self) -> bool:
        return self._scheduler.has_work()

    def free_blocks(self) -> set[int]:
        return set(self._pool._free)

    def forget(self) -> None:
        self._pool.reset()

    def _preempt(self) -> None:
        self._scheduler.preempts = True

    def _add(self, ask: Ask) -> None:
        if ask.adapter or ask.items or ask.embeds is not None or ask.grows:
            raise CaseEnd("not run", "the embedded engine serves plain text alone")
        most = len(ask.tokens) + ask.max_tokens
        request = Request(ask.name, list(ask.tokens), max_total_tokens=most)
        request.extra_keys = ExtraKeys(cache_salt=ask.salt)
        self._requests[ask.name] = request
        self._scheduler.add(request)

    def _abort(self, name: str) -> None:
        self._scheduler.abort(name)

    def _step(self) -> bool:
        step = self._scheduler.schedule()
        parts = []
        for entry in step.scheduled:
            row, start = self.rows[entry.request.request_id], entry.num_computed_tokens
            row.update(entry.request.all_token_ids)
            row.tables = (list(entry.request.block_ids),)
            parts.append(Part(row, start, start + entry.num_scheduled_tokens))
        output = self._fold.fold(self.step_ranks(parts, step.plan, step.finished_request_ids))
        self.end_step(parts, output.finished_recving, None)
        self._scheduler.update(step, output, self._sample)
        for name, request in self._requests.items():
            if request.outcome is not None:
                row = self.rows[name]
                row.reason = row.reason or str(request.outcome.reason)
                row.said = list(request.all_token_ids[request.num_prompt_tokens :])
        return bool(parts)

    def _sample(self, request: Request) -> int:
        row = self.rows[request.request_id]
        return row.next_token(len(row.tokens))

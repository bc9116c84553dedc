"""The embedded engine's scheduler around a V1 connector that was written for `kvferry.v1`."""

from __future__ import annotations

import inspect
import pickle
from copy import deepcopy
from functools import partial
from typing import Any

from kvferry.contract.driver import StepDriver
from kvferry.contract.fold import WorkerOutputFold
from kvferry.engine.block_pool import BlockPool
from kvferry.engine.config import EngineConfig
from kvferry.engine.request import EngineStep, Request
from kvferry.engine.scheduler import Scheduler
from kvferry.testing.connector.content import ComputedPart
from kvferry.testing.connector.host import (
    Ask,
    KitHost,
    LookupWatch,
    NotHereError,
    RefusedError,
    Setup,
    describe,
)
from kvferry.types import ExtraKeys
from kvferry.v1.driven import Release, V1SchedulerRole, V1WorkerRole, v1_config
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

    def __init__(self, connector: type[Any], options: dict[str, Any], setup: Setup) -> None:
        """Build both halves.

        Raises:
            NotHereError: the embedded engine does not do what `setup` asks for.
            RefusedError: the class raised.
        """
        if setup.in_flight > 1 or setup.runner > 1 or not setup.attention_metadata:
            raise NotHereError("the embedded engine has no such steps")
        if len(setup.shape().groups) > 1:
            raise NotHereError("the embedded engine has one block table")
        piecewise = connector.requires_piecewise_for_cudagraph(options)
        super().__init__(setup, has_hooks=piecewise or setup.hooks)
        release: Release = getattr(connector, "written_for", "0.32")
        try:
            self.scheduler_half, *self.worker_halves = self._halves(connector, options)
            self._workers = [V1WorkerRole(half, release=release) for half in self.worker_halves]
            for worker, memory in zip(self._workers, self.memories, strict=True):
                worker.register_kv_caches(dict(memory.tensors))
        except Exception as error:
            raise RefusedError(describe(error)) from error
        self.watch = LookupWatch(self.scheduler_half, self)
        self._pool = BlockPool(setup.num_blocks)
        config = EngineConfig(block_size=setup.block_size, max_batched_tokens=setup.budget)
        self._scheduler = _PreemptingScheduler(
            config, self._pool, V1SchedulerRole(self.scheduler_half)
        )
        self._drivers = [StepDriver(worker, strict=True) for worker in self._workers]
        self._fold = WorkerOutputFold(setup.ranks)
        self._requests: dict[str, Request] = {}

    def _halves(self, connector: type[Any], options: dict[str, Any]) -> list[Any]:
        setup = self.setup
        config = v1_config(block_size=setup.block_size, options=options, model=setup.directory)
        config.model_config.dtype = setup.dtype
        config.parallel_config.tensor_parallel_size = setup.ranks
        config.parallel_config.world_size = setup.ranks
        takes_groups = "kv_cache_config" in inspect.signature(connector).parameters
        groups = {"kv_cache_config": None} if takes_groups else {}
        halves = [connector(config, KVConnectorRole.SCHEDULER, **groups)]
        for rank in range(setup.ranks):
            of_rank = deepcopy(config)
            of_rank.parallel_config.rank = rank
            halves.append(connector(of_rank, KVConnectorRole.WORKER, **groups))
        return halves

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
            raise NotHereError("the embedded engine serves plain text alone")
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
            parts.append(ComputedPart(row, start, start + entry.num_scheduled_tokens))
        found: list[str] = []
        for worker, driver, memory in zip(self._workers, self._drivers, self.memories, strict=True):
            memory.mark(self.marked)
            with driver.step(pickle.loads(pickle.dumps(step.plan)), step.finished_request_ids):
                save = partial(worker.save_layer, attn_metadata=None)
                found += self.forward(memory, parts, worker.wait_for_layer_load, save)
        output = self._fold.fold([driver.output for driver in self._drivers])
        self.judge(found, set(output.invalid_block_ids))
        self.end_step(output.finished_recving | {part.row.name for part in parts}, None)
        self._scheduler.update(step, output, self._sample)
        for name, request in self._requests.items():
            if request.outcome is not None:
                answer = self.answers[name]
                answer.reason = answer.reason or str(request.outcome.reason)
                answer.tokens = list(request.all_token_ids[request.num_prompt_tokens :])
        return bool(parts)

    def _sample(self, request: Request) -> int:
        row = self.rows[request.request_id]
        return row.next_token(len(row.tokens))

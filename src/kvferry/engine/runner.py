"""Runs a scheduled step on the model, with the connector's worker role around it."""

from __future__ import annotations

from collections.abc import Collection
from itertools import accumulate
from typing import Protocol

import torch

from kvferry.contract.messages import Plan, WorkerOutput
from kvferry.contract.worker import WorkerRole
from kvferry.engine.config import EngineConfig
from kvferry.engine.kv_pool import PoolSpec, allocate_pool
from kvferry.engine.model import PagedModel
from kvferry.engine.paged_attention import PagedAttention
from kvferry.engine.request import Batch, Step
from kvferry.observe import Observer
from kvferry.runner import lifecycle


class StepPlan(Protocol):
    """What the connector's worker role is told of a step."""

    @property
    def plan(self) -> Plan: ...
    @property
    def finished_request_ids(self) -> Collection[str]: ...


class ModelRunner:
    """One rank: its part of the model, its KV pool and its worker role.

    The pool is one tensor, with the heads that this rank holds; attention and connector see one
    `[num_blocks, num_kv_heads, block_size, content]` view per layer.
    """

    def __init__(
        self,
        model: PagedModel,
        worker: WorkerRole,
        engine: EngineConfig,
        *,
        num_blocks: int,
        observer: Observer | None = None,
    ) -> None:
        """Allocate the pool and register it with `worker`.

        Raises:
            ConfigError: there is not enough memory for the pool.
            LayoutError: the worker cannot serve this layout.
        """
        geometry = model.geometry
        pool = PoolSpec(
            layer_names=geometry.layer_names,
            num_blocks=num_blocks,
            block_size=engine.block_size,
            num_kv_heads=model.num_kv_heads,
            head_size=geometry.content_size,
            dtype=geometry.torch_dtype,
        )
        self._model = model
        kv_caches = allocate_pool(pool, engine.kv_layout, model.device)
        self._lifecycle = lifecycle.StepLifecycle(worker, observer=observer)
        self._attention = PagedAttention(kv_caches, model.codec, self._lifecycle.layerwise)
        worker.register_kv_caches(dict(kv_caches))

    def around(self, step: StepPlan) -> lifecycle.Step:
        """The connector's part of a step that has tokens: `with runner.around(step) as ...:` the
        forward. Its `output` is there afterwards, also if the forward raised."""
        return self._lifecycle.step(step.plan, step.finished_request_ids)

    def idle(self, step: StepPlan) -> WorkerOutput:
        """Run a step without tokens."""
        return self._lifecycle.no_forward(step.plan, step.finished_request_ids)

    def forward(self, step: Step) -> dict[str, torch.Tensor]:
        """Compute the tokens of a step.

        Returns:
            Request id to logits (`[vocab]` float32), for every request whose last token is in the
            step. Those of a request whose load fails in this step are wrong.
        """
        rows = self.run(step.batch())
        wanted = [entry.request.request_id for entry in step.scheduled if entry.wants_logits]
        return dict(zip(wanted, rows, strict=True))

    def run(self, batch: Batch) -> torch.Tensor:
        """Compute a batch: logits (`[vocab]` float32) of the last token of each entry that wants
        them, in order."""
        positions = self._attention.begin_step(batch)
        token_ids = [token_id for entry in batch for token_id in entry.token_ids]
        ends = accumulate(len(entry.token_ids) for entry in batch)
        wanted = [end - 1 for end, entry in zip(ends, batch, strict=True) if entry.wants_logits]
        return self._model.forward(torch.tensor(token_ids), positions, self._attention, wanted)

"""Runs a scheduled step on the model, with the connector's worker role around it."""

from __future__ import annotations

from collections.abc import Collection
from typing import Protocol

import torch

from kvferry.contract.messages import Plan, WorkerOutput
from kvferry.contract.worker import WorkerRole
from kvferry.engine.config import EngineConfig
from kvferry.engine.kv_pool import PoolSpec, allocate_pool
from kvferry.engine.model import PagedModel
from kvferry.engine.paged_attention import GatherBuffer, PagedStep, Span
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
        self._block_size = engine.block_size
        self._layers = allocate_pool(pool, engine.kv_layout, model.device)
        self._buffer = GatherBuffer()
        self._lifecycle = lifecycle.StepLifecycle(worker, observer=observer)
        worker.register_kv_caches(dict(self._layers))

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
        token_ids: list[int] = []
        positions: list[torch.Tensor] = []
        block_ids: list[torch.Tensor] = []
        spans: list[Span] = []
        wanted: list[int] = []
        device = self._model.device
        for entry in batch:
            first, start = entry.num_computed_tokens, len(token_ids)
            token_ids += entry.token_ids
            table = torch.tensor(entry.block_ids, dtype=torch.int64)
            at = torch.arange(first, first + len(entry.token_ids))
            spans.append(Span(start, len(token_ids), first, table.to(device)))
            positions.append(at)
            block_ids.append(table[at // self._block_size])
            if entry.wants_logits:
                wanted.append(len(token_ids) - 1)
        position = torch.cat(positions)
        slots = (torch.cat(block_ids).to(device), (position % self._block_size).to(device))
        context = PagedStep(
            *(self._layers, spans, slots, self._buffer, self._model.codec),
            self._lifecycle.layerwise,
        )
        return self._model.forward(torch.tensor(token_ids), position, context, wanted)

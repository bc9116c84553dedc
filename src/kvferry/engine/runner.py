"""Runs a scheduled step on the model, with the connector's worker role around it."""

from __future__ import annotations

import torch

from kvferry.contract.messages import WorkerOutput
from kvferry.contract.worker import WorkerRole
from kvferry.engine.model import PagedModel
from kvferry.engine.paged_attention import GatherBuffer, PagedStep, Span
from kvferry.engine.step import Step
from kvferry.errors import ConfigError
from kvferry.observe import Observer
from kvferry.runner import lifecycle


class ModelRunner:
    """One worker: the model, its KV pool and the worker role.

    The pool is one tensor `[num_layers, num_blocks, num_kv_heads, block_size, 2 * head_dim]`, K
    before V in the last axis; the connector sees one `[num_blocks, num_kv_heads, block_size, 2 *
    head_dim]` view per layer.
    """

    def __init__(
        self,
        model: PagedModel,
        worker: WorkerRole,
        *,
        num_blocks: int,
        block_size: int,
        observer: Observer | None = None,
    ) -> None:
        """Allocate the pool and register it with `worker`.

        Raises:
            ConfigError: there is not enough memory for the pool.
            LayoutError: the worker cannot serve this layout.
        """
        geometry = model.geometry
        shape = (
            *(geometry.num_layers, num_blocks, geometry.num_kv_heads, block_size),
            2 * geometry.head_dim,
        )
        try:
            pool = torch.zeros(shape, dtype=geometry.torch_dtype, device=model.device)
        except RuntimeError as error:
            num_bytes = num_blocks * geometry.block_bytes(block_size)
            raise ConfigError(
                f"no memory for a KV pool of {num_bytes} bytes on {model.device}; "
                "set kv_cache_bytes or num_blocks lower"
            ) from error
        self._model = model
        self._block_size = block_size
        self._layers = list(zip(geometry.layer_names, pool, strict=True))
        self._buffer = GatherBuffer()
        self._lifecycle = lifecycle.StepLifecycle(worker, observer=observer)
        worker.register_kv_caches(dict(self._layers))

    def around(self, step: Step) -> lifecycle.Step:
        """The connector's part of a step that has tokens: `with runner.around(step) as ...:` the
        forward. Its `output` is there afterwards, also if the forward raised."""
        return self._lifecycle.step(step.plan, step.finished_request_ids)

    def idle(self, step: Step) -> WorkerOutput:
        """Run a step without tokens."""
        return self._lifecycle.no_forward(step.plan, step.finished_request_ids)

    def forward(self, step: Step) -> dict[str, torch.Tensor]:
        """Compute the tokens of a step.

        Returns:
            Request id to logits (`[vocab]` float32), for every request whose last token is in the
            step. Those of a request whose load fails in this step are wrong.
        """
        token_ids: list[int] = []
        positions: list[torch.Tensor] = []
        block_ids: list[torch.Tensor] = []
        spans: list[Span] = []
        wanted: dict[str, int] = {}
        for entry in step.scheduled:
            first = entry.num_computed_tokens
            stop = first + entry.num_scheduled_tokens
            table = torch.tensor(entry.request.block_ids, dtype=torch.int64)
            at = torch.arange(first, stop)
            spans.append(
                Span(
                    len(token_ids),
                    len(token_ids) + entry.num_scheduled_tokens,
                    first,
                    table.to(self._model.device),
                )
            )
            token_ids += entry.request.all_token_ids[first:stop]
            positions.append(at)
            block_ids.append(table[at // self._block_size])
            if entry.wants_logits:
                wanted[entry.request.request_id] = len(token_ids) - 1
        position = torch.cat(positions)
        slots = (
            torch.cat(block_ids).to(self._model.device),
            (position % self._block_size).to(self._model.device),
        )
        context = PagedStep(self._layers, spans, slots, self._buffer, self._lifecycle.layerwise)
        rows = self._model.forward(torch.tensor(token_ids), position, context, [*wanted.values()])
        return dict(zip(wanted, rows, strict=True))

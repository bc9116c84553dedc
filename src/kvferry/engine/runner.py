"""Runs a scheduled step on one rank: the model, with the connector's worker role around it."""

from __future__ import annotations

from itertools import accumulate

import torch

from kvferry.contract.driver import StepDriver
from kvferry.contract.messages import WorkerOutput
from kvferry.engine.config import EngineConfig
from kvferry.engine.kv_pool import allocate_pool
from kvferry.engine.model import PagedModel
from kvferry.engine.paged_attention import PagedAttention
from kvferry.engine.request import RunStep


class ModelRunner:
    """One rank: its part of the model, its KV pool and its worker role.

    The pool is one tensor with the kv heads of this rank. Attention and connector see one view
    `[num_blocks, num_kv_heads, block_size, content]` of it per layer.
    """

    def __init__(
        self,
        model: PagedModel,
        driver: StepDriver,
        engine: EngineConfig,
        *,
        num_blocks: int,
    ) -> None:
        """Allocate the pool and register it with the worker role of `driver`.

        Raises:
            ConfigError: there is not enough memory for the pool.
            LayoutError: the worker cannot serve this layout.
        """
        geometry = model.geometry
        self.model = model
        kv_caches = allocate_pool(
            geometry.layer_names,
            (num_blocks, model.num_kv_heads, engine.block_size, geometry.content_size),
            geometry.torch_dtype,
            kv_layout=engine.kv_layout,
            device=model.device,
        )
        self._driver = driver
        self._attention = PagedAttention(kv_caches, model.codec, driver.layerwise)
        driver.role.register_kv_caches(dict(kv_caches))

    @property
    def output(self) -> WorkerOutput:
        """The worker's report on the last step, also if its forward raised."""
        return self._driver.output

    def run(self, step: RunStep) -> torch.Tensor:
        """Run a step: load, compute its tokens if it has any, save.

        Returns:
            `[num_logits, vocab]` float32: logits of the last token of each entry that wants them,
            in order. If a request's load fails in this step, its logits are wrong. Empty if the
            step has no tokens.
        """
        if not step.batch:
            self._driver.no_forward(step.plan, step.finished_request_ids)
            return torch.empty(0)
        with self._driver.step(step.plan, step.finished_request_ids):
            positions = self._attention.begin_step(step.batch)
            token_ids = [token_id for entry in step.batch for token_id in entry.token_ids]
            ends = accumulate(len(entry.token_ids) for entry in step.batch)
            wanted = [
                end - 1 for end, entry in zip(ends, step.batch, strict=True) if entry.wants_logits
            ]
            return self.model.forward(torch.tensor(token_ids), positions, self._attention, wanted)

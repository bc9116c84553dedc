"""SGLang's own weight updater of one rank, with a linear layer in place of a model."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from examples.cpu.sglang_tiers import Engine


class Layer(torch.nn.Linear):
    def load_weights(self, named: list[tuple[str, torch.Tensor]]) -> None:
        with torch.no_grad():
            for name, value in named:
                self.get_parameter(name).copy_(value)


class Updates:
    """Updates of the weights in buckets, as a trainer sends them to a scheduler whose cache is that
    of `one`."""

    def __init__(self, one: Engine) -> None:
        from sglang.srt.managers.scheduler_components import weight_updater as of_scheduler
        from sglang.srt.model_executor.model_runner_components.weight_updater import WeightUpdater
        from sglang.srt.model_loader import loader

        # To look for quantised layers, it imports kernels that need a GPU.
        loader._modules_with_quant_method = lambda _model: []
        self.layer = Layer(2, 2)
        runner = object.__new__(WeightUpdater)
        for name, value in (
            ("get_model", lambda: self.layer),
            ("device", "cpu"),
            ("custom_weight_loaders", {}),
        ):
            object.__setattr__(runner, name, value)  # it is frozen
        runners = [("target", SimpleNamespace(weight_updater=runner))]
        self._one = one
        self._updater = object.__new__(of_scheduler.SchedulerWeightUpdaterManager)
        self._updater.tp_worker = SimpleNamespace(
            weight_update_runners=lambda: runners, deserialize_own_rank=lambda named: named
        )
        self._updater.draft_worker = self._updater.metrics_collector = None
        self._updater.scheduler = SimpleNamespace(record_weight_version_change=lambda **_: None)
        self._updater.tp_cpu_group = dist.group.WORLD
        self._updater.flush_cache = self.flush
        self._updater._session = None

    def flush(self, **_options: Any) -> bool:
        """What of the scheduler's `flush_cache` concerns HiCache."""
        self._one.controller.reset()
        self._one.controller.mem_pool_host.clear()
        self._one.allocator.clear()
        return True

    def update(self, *, flush_cache: bool, buckets: int = 2) -> None:
        from sglang.srt.managers import io_struct

        self._end(self._updater.begin_weight_update(io_struct.BeginWeightUpdateReqInput()))
        for number in range(buckets):
            named = [("weight", torch.full((2, 2), 1.0 + number))]
            request = io_struct.UpdateWeightsFromTensorReqInput(
                serialized_named_tensors=named, flush_cache=flush_cache
            )
            self._end(self._updater.update_weights_from_tensor(request))
        self._end(self._updater.end_weight_update(io_struct.EndWeightUpdateReqInput()))
        assert torch.equal(self.layer.weight, torch.full((2, 2), float(buckets)))

    def _end(self, ended: Any) -> None:
        assert ended.success, ended.message

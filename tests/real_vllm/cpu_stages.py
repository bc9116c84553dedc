"""Lets vLLM's CPU runner run a pipeline stage behind the first, as its GPU runner does.

`GPUModelRunner` makes the tensors into which a stage receives the hidden states in a dummy run,
which the CPU runner leaves out (seen with 0.32). Workers that import this module, for the option
`worker_extension_cls`, make them when they are first needed. All else is as it was.
"""

from __future__ import annotations

from typing import Any

from vllm.v1.worker.gpu_model_runner import GPUModelRunner

_gather = GPUModelRunner.sync_and_gather_intermediate_tensors


def _with_tensors(runner: Any, *args: Any, **kwargs: Any) -> Any:
    if runner.intermediate_tensors is None:
        runner.intermediate_tensors = runner.model.make_empty_intermediate_tensors(
            batch_size=runner.max_num_tokens, dtype=runner.model_config.dtype, device=runner.device
        )
    return _gather(runner, *args, **kwargs)


GPUModelRunner.sync_and_gather_intermediate_tensors = _with_tensors


class Stages:
    """An extension of workers that adds nothing."""

"""Time inside our hooks on a decode step of one request, without a hit and with nothing to save.

The host calls both roles as an engine does in each step: the scheduler role builds the plan and
takes the output, and the worker role runs its step. Both run behind the guard, the wrapper that
catches their errors. All of that is timed. No model runs. `bench vllm` measures the same step
through the one-class façade, inside vLLM.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence

from benchmarks import Options
from benchmarks.host import HostRequest, RolesHost, group_of, kv_tensors, opened_roles
from benchmarks.report import Row

BLOCK_SIZE = 16
PROMPT_TOKENS = 2048
EXTRA_BLOCKS = 60
"""Blocks for the tokens that are decoded."""


def run(options: Options) -> Sequence[Row]:
    """Return one row with the median microseconds per step over all rounds."""
    steps, rounds = (500, 1) if options.quick else (5000, 3)
    group = group_of(BLOCK_SIZE)
    blocks = range(1, PROMPT_TOKENS // BLOCK_SIZE + EXTRA_BLOCKS)
    tensors = kv_tensors("HND", group, group.num_kv_heads, blocks.stop)
    layers = {str(index): layer for index, layer in enumerate(tensors)}
    found = []
    for number in range(rounds):
        connector = {"store": f"file://{options.directory}/{number}"}
        with opened_roles(group, connector, layers) as roles:
            found.append(decode(RolesHost(roles, BLOCK_SIZE), blocks, steps))
    return [{"layers": group.num_layers, "us_per_step": statistics.median(found)}]


def decode(host: RolesHost, blocks: Sequence[int], steps: int) -> float:
    """Prefill one prompt, let its saves end, then time decode steps. Return the median in us."""
    request = HostRequest("r", list(range(PROMPT_TOKENS)), PROMPT_TOKENS)
    host.scheduler.on_new_request(request)
    host.scheduler.lookup(request, 0)
    host.forward(request, blocks, 0)
    request.num_scheduled_tokens = 1
    deadline = time.monotonic() + 1.0
    while time.monotonic() < deadline or host.scheduler.has_work():
        host.step([request])
        time.sleep(0.001)
    times = []
    for _ in range(steps):
        if len(request.all_token_ids) < len(blocks) * BLOCK_SIZE:
            request.all_token_ids.append(7)
            request.num_computed_tokens += 1
        started = time.perf_counter_ns()
        host.step([request])
        times.append(time.perf_counter_ns() - started)
    return statistics.median(times) / 1e3

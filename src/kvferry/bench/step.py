"""Time inside our hooks on a decode step: no hit, nothing to save, one request.

Everything a host calls in such a step: the scheduler role's plan and output, the worker role's step
in the lifecycle, both behind the guard, as the embedded engine runs them. The model is left out.
`bench vllm` measures the same step through the one-class façade, inside vLLM.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Sequence

import torch

from kvferry.bench import BenchOptions, Row
from kvferry.bench.host import RolesHost, opened_roles
from kvferry.testing.host_tables import HostRequest
from kvferry.types import KVGroup

BLOCK_SIZE = 16
PROMPT_TOKENS = 2048
EXTRA_BLOCKS = 60
"""For the tokens that are decoded."""


def run(options: BenchOptions) -> Sequence[Row]:
    """Rows for 8 and 32 layers; medians of rounds in which they take turns."""
    steps, rounds = (500, 1) if options.quick else (5000, 3)
    layers = (8, 32)
    runs = [[measure(options, num_layers, steps) for num_layers in layers] for _ in range(rounds)]
    return [
        {"layers": num_layers, "us_per_step": statistics.median(same)}
        for num_layers, same in zip(layers, zip(*runs, strict=True), strict=True)
    ]


def measure(options: BenchOptions, num_layers: int, steps: int) -> float:
    """Median microseconds of a step."""
    group = KVGroup(
        num_layers=num_layers,
        num_kv_heads=8,
        content_size=128,
        dtype="bfloat16",
        block_size=BLOCK_SIZE,
    )
    num_blocks = PROMPT_TOKENS // BLOCK_SIZE + EXTRA_BLOCKS
    layers = {
        f"layers.{index}": torch.zeros(num_blocks, 8, BLOCK_SIZE, 128, dtype=torch.bfloat16)
        for index in range(num_layers)
    }
    with (
        tempfile.TemporaryDirectory(dir=options.directory) as directory,
        opened_roles(group, {"store": f"file://{directory}/store"}, layers) as roles,
    ):
        return decode(RolesHost(roles, layers, BLOCK_SIZE), range(1, num_blocks), steps)


def decode(host: RolesHost, blocks: Sequence[int], steps: int) -> float:
    """Prefill one prompt, let its saves end, then time decode steps; median microseconds."""
    request = HostRequest("r", list(range(PROMPT_TOKENS)), PROMPT_TOKENS, block_ids=(list(blocks),))
    host.scheduler.on_new_request(request)
    host.scheduler.lookup(request, 0)
    host.scheduler.update_after_alloc(request, request.block_ids, 0)
    request.num_scheduled_tokens = PROMPT_TOKENS
    host.step([request])
    request.num_computed_tokens, request.num_scheduled_tokens = PROMPT_TOKENS, 1
    deadline = time.monotonic() + 1.0
    while time.monotonic() < deadline:
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

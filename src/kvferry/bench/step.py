"""Time inside our hooks on a decode step: no hit, nothing to save, one request.

Everything a host calls in such a step: the scheduler role's plan and output, the worker role's step
in the lifecycle, both behind the guard, as the embedded engine runs them. The model is left out.
`facade_us_per_step` is the same step through the one-class façade as vLLM 0.32 calls it, with a
hook before and after each layer; it includes building the host's own step objects.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import torch

from kvferry.bench import BenchOptions, Row
from kvferry.bench.host import RolesHost, opened_roles
from kvferry.contract.spec import Roles
from kvferry.testing.host_tables import HostRequest
from kvferry.types import KVGroup
from kvferry.v1.facade import RolesAsV1
from kvferry.v1.types import KVConnectorRole

BLOCK_SIZE = 16
PROMPT_TOKENS = 2048
EMPTY: frozenset[str] = frozenset()


def run(options: BenchOptions) -> Sequence[Row]:
    """Rows for 8 and 32 layers; medians of rounds in which they take turns."""
    steps, rounds = (500, 1) if options.quick else (5000, 3)
    runs = [[measure(options, layers, steps) for layers in (8, 32)] for _ in range(rounds)]
    return [
        {name: statistics.median(values[name] for values in same) for name in same[0]}
        for same in zip(*runs, strict=True)
    ]


def measure(options: BenchOptions, num_layers: int, steps: int) -> dict[str, float]:
    """One row: median microseconds of a step, through the roles and through the façade."""
    group = KVGroup(
        num_layers=num_layers,
        num_kv_heads=8,
        content_size=128,
        dtype="bfloat16",
        block_size=BLOCK_SIZE,
    )
    num_blocks = PROMPT_TOKENS // BLOCK_SIZE + 64
    layers = {
        f"layers.{index}": torch.zeros(num_blocks, 8, BLOCK_SIZE, 128, dtype=torch.bfloat16)
        for index in range(num_layers)
    }
    result: dict[str, float] = {"layers": num_layers}
    for name, median_us in (("us_per_step", roles_us), ("facade_us_per_step", facade_us)):
        with (
            tempfile.TemporaryDirectory(dir=options.directory) as directory,
            opened_roles(group, {"store": f"file://{directory}/store"}, layers) as roles,
        ):
            result[name] = median_us(roles, layers, steps)
    return result


def roles_us(roles: Roles, layers: Mapping[str, torch.Tensor], steps: int) -> float:
    """Median microseconds of a step as the embedded engine calls the roles."""
    host = RolesHost(roles, layers, BLOCK_SIZE)

    def admit(request: HostRequest) -> None:
        host.scheduler.on_new_request(request)
        host.scheduler.lookup(request, 0)
        host.scheduler.update_after_alloc(request, request.block_ids, 0)

    return decode(admit, lambda request: host.step([request]), steps)


def facade_us(roles: Roles, layers: Mapping[str, torch.Tensor], steps: int) -> float:
    """Median microseconds of a step through the façade."""
    host = FacadeHost(roles, layers)
    return decode(host.admit, host.step, steps)


def decode(
    admit: Callable[[HostRequest], None], step: Callable[[HostRequest], object], steps: int
) -> float:
    """Prefill one prompt, let its saves end, then time decode steps; median microseconds."""
    blocks = list(range(1, PROMPT_TOKENS // BLOCK_SIZE + 60))
    request = HostRequest("r", list(range(PROMPT_TOKENS)), PROMPT_TOKENS, block_ids=(blocks,))
    admit(request)
    request.num_scheduled_tokens = PROMPT_TOKENS
    step(request)
    request.num_computed_tokens, request.num_scheduled_tokens = PROMPT_TOKENS, 1
    deadline = time.monotonic() + 1.0
    while time.monotonic() < deadline:
        step(request)
        time.sleep(0.001)
    times = []
    for _ in range(steps):
        if len(request.all_token_ids) < PROMPT_TOKENS + 900:
            request.all_token_ids.append(7)
            request.num_computed_tokens += 1
        started = time.perf_counter_ns()
        step(request)
        times.append(time.perf_counter_ns() - started)
    return statistics.median(times) / 1e3


class FacadeHost:
    """Calls the one-class façade as vLLM 0.32 does, with two hooks per layer."""

    def __init__(self, roles: Roles, layers: Mapping[str, torch.Tensor]) -> None:
        config: Any = SimpleNamespace(
            kv_transfer_config=SimpleNamespace(kv_connector_extra_config={}),
            cache_config=SimpleNamespace(block_size=BLOCK_SIZE, cache_dtype="auto"),
        )
        self._scheduler = RolesAsV1(config, KVConnectorRole.SCHEDULER, scheduler=roles.scheduler)
        self._worker = RolesAsV1(config, KVConnectorRole.WORKER, worker=roles.worker)
        self._layers = list(layers.items())
        self._view: Any = None
        self._is_new = True

    def admit(self, request: HostRequest) -> None:
        self._view = SimpleNamespace(
            request_id=request.request_id,
            prompt_token_ids=request.all_token_ids[:PROMPT_TOKENS],
            all_token_ids=request.all_token_ids,
            num_tokens=PROMPT_TOKENS,
            num_prompt_tokens=PROMPT_TOKENS,
            num_computed_tokens=0,
        )
        self._scheduler.get_num_new_matched_tokens(self._view, 0)
        table: Any = SimpleNamespace(get_block_ids=lambda: request.block_ids)
        self._scheduler.update_state_after_alloc(self._view, table, 0)

    def step(self, request: HostRequest) -> None:
        output = self._output(request)
        scheduler, worker = self._scheduler, self._worker
        metadata = scheduler.build_connector_meta(output)
        worker.handle_preemptions(metadata)
        worker.bind_connector_metadata(metadata)
        for name, tensor in self._layers:
            worker.wait_for_layer_load(name)
            worker.save_kv_layer(name, tensor, None)
        worker.start_load_kv(_NO_CONTEXT)
        worker.wait_for_save()
        results = worker.get_transfer_results(set())
        worker.get_block_ids_with_load_errors()
        worker.get_kv_connector_stats()
        worker.get_kv_connector_kv_cache_events()
        results.kv_connector_worker_meta = worker.build_connector_worker_meta()
        worker.clear_connector_metadata()
        scheduler.update_connector_output(results)
        scheduler.get_kv_connector_stats()
        scheduler.take_events()

    def _output(self, request: HostRequest) -> Any:  # noqa: ANN401 - a host's object
        num_scheduled = request.num_scheduled_tokens
        new: list[Any] = []
        cached: tuple[list[Any], list[Any], list[int]] = ([], [], [])
        if self._is_new:
            self._is_new = False
            new = [
                SimpleNamespace(
                    req_id="r",
                    prompt_token_ids=self._view.prompt_token_ids,
                    block_ids=request.block_ids,
                    num_computed_tokens=0,
                )
            ]
        else:
            cached = (["r"], [None], [request.num_computed_tokens])
        return SimpleNamespace(
            scheduled_new_reqs=new,
            scheduled_cached_reqs=SimpleNamespace(
                req_ids=cached[0],
                new_block_ids=cached[1],
                num_computed_tokens=cached[2],
                resumed_req_ids=EMPTY,
            ),
            num_scheduled_tokens={"r": num_scheduled},
            total_num_scheduled_tokens=num_scheduled,
            finished_req_ids=EMPTY,
            preempted_req_ids=EMPTY,
        )


_NO_CONTEXT: Any = SimpleNamespace(attn_metadata=None, no_compile_layers={})

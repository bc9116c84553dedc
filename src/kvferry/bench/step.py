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
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch

from kvferry.bench.registry import BenchOptions, Row
from kvferry.connectors.registry import create_roles
from kvferry.contract.guard import GuardedScheduler, GuardedWorker
from kvferry.contract.spec import EngineSpec, Roles
from kvferry.keys import ModelIdentity
from kvferry.observe import Counters, Observer
from kvferry.runner.lifecycle import StepLifecycle
from kvferry.topology import tensor_parallel_shard
from kvferry.types import NO_EXTRA_KEYS, ExtraKeys, KVGroup
from kvferry.v1.base import KVConnectorRole
from kvferry.v1.facade import RolesAsV1

BLOCK_SIZE = 16
PROMPT_TOKENS = 2048
EMPTY: frozenset[str] = frozenset()


@dataclass
class Request:
    """A request in decode, as `RequestView` and `ScheduledRequest` want it."""

    request_id: str
    all_token_ids: list[int]
    num_prompt_tokens: int
    block_ids: tuple[list[int], ...]
    num_computed_tokens: int
    num_scheduled_tokens: int = 1
    extra_keys: ExtraKeys = NO_EXTRA_KEYS

    @property
    def request(self) -> Request:
        return self


@dataclass
class Step:
    """A step as `StepView` wants it."""

    scheduled: list[Request]
    preempted_request_ids: frozenset[str] = EMPTY
    finished_request_ids: frozenset[str] = EMPTY


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
    spec = EngineSpec(
        identity=ModelIdentity(weights=bytes(32), config={"model_type": "bench"}),
        groups=(group,),
        shard=tensor_parallel_shard((group,), 0, 1),
        layer_names=None,
    )
    num_blocks = PROMPT_TOKENS // BLOCK_SIZE + 64
    layers = {
        f"layers.{index}": torch.zeros(num_blocks, 8, BLOCK_SIZE, 128, dtype=torch.bfloat16)
        for index in range(num_layers)
    }
    result: dict[str, float] = {}
    for name, host_class in (("us_per_step", RolesHost), ("facade_us_per_step", FacadeHost)):
        with tempfile.TemporaryDirectory(dir=options.directory) as directory:
            store = f"file://{directory}/store"
            roles = create_roles("shared_storage", spec, {"store": store}, Counters())
            roles.worker.register_kv_caches(layers)
            host = host_class(roles, list(layers.items()))
            result[name] = host.median_us(steps)
            roles.scheduler.close()
            roles.worker.close()
            roles.close_last()
    return {"layers": num_layers, **result}


def decode(admit: Callable[[Request], None], step: Callable[[Request], None], steps: int) -> float:
    """Prefill one prompt, let its saves end, then time decode steps; median microseconds."""
    blocks = list(range(1, PROMPT_TOKENS // BLOCK_SIZE + 60))
    request = Request("r", list(range(PROMPT_TOKENS)), PROMPT_TOKENS, (blocks,), 0)
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


class RolesHost:
    """Calls the roles as the embedded engine does."""

    def __init__(self, roles: Roles, layers: list[tuple[str, torch.Tensor]]) -> None:
        self._scheduler = GuardedScheduler(roles.scheduler, Observer(), block_size=BLOCK_SIZE)
        self._lifecycle = StepLifecycle(GuardedWorker(roles.worker, Observer()))
        self._layers = layers

    def median_us(self, steps: int) -> float:
        return decode(self.admit, self.step, steps)

    def admit(self, request: Request) -> None:
        self._scheduler.on_new_request(request)
        self._scheduler.lookup(request, 0)
        self._scheduler.update_after_alloc(request, request.block_ids, 0)

    def step(self, request: Request) -> None:
        plan = self._scheduler.build_plan(Step([request]))
        with self._lifecycle.step(plan, EMPTY) as step:
            hooks = self._lifecycle.layerwise
            if hooks is not None:
                for name, tensor in self._layers:
                    hooks.wait_for_layer_load(name)
                    hooks.save_layer(name, tensor, None)
        self._scheduler.update_output(step.output)
        self._scheduler.take_events()


class FacadeHost:
    """Calls the one-class façade as vLLM 0.32 does, with two hooks per layer."""

    def __init__(self, roles: Roles, layers: list[tuple[str, torch.Tensor]]) -> None:
        config = SimpleNamespace(
            kv_transfer_config=SimpleNamespace(kv_connector_extra_config={}),
            cache_config=SimpleNamespace(block_size=BLOCK_SIZE, cache_dtype="auto"),
        )
        self._scheduler = RolesAsV1(config, KVConnectorRole.SCHEDULER, scheduler=roles.scheduler)
        self._worker = RolesAsV1(config, KVConnectorRole.WORKER, worker=roles.worker)
        self._layers = layers
        self._is_new = True

    def median_us(self, steps: int) -> float:
        return decode(self.admit, self.step, steps)

    def admit(self, request: Request) -> None:
        view = self._view(request)
        self._scheduler.get_num_new_matched_tokens(view, 0)
        table = SimpleNamespace(get_block_ids=lambda: request.block_ids)
        self._scheduler.update_state_after_alloc(view, table, 0)

    def step(self, request: Request) -> None:
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

    def _view(self, request: Request) -> Any:  # noqa: ANN401 - a host's object
        if not hasattr(self, "_request"):
            self._request = SimpleNamespace(
                request_id=request.request_id,
                prompt_token_ids=request.all_token_ids[:PROMPT_TOKENS],
                all_token_ids=request.all_token_ids,
                num_tokens=PROMPT_TOKENS,
                num_prompt_tokens=PROMPT_TOKENS,
                num_computed_tokens=0,
            )
        return self._request

    def _output(self, request: Request) -> Any:  # noqa: ANN401 - a host's object
        num_scheduled = request.num_scheduled_tokens
        new: list[Any] = []
        cached: tuple[list[Any], list[Any], list[int]] = ([], [], [])
        if self._is_new:
            self._is_new = False
            new = [
                SimpleNamespace(
                    req_id="r",
                    prompt_token_ids=self._request.prompt_token_ids,
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


_NO_CONTEXT = SimpleNamespace(attn_metadata=None, no_compile_layers={})

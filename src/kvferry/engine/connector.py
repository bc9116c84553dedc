"""Opens the cache of the embedded engine on each rank: its two roles, which do nothing without a
store. Also describes the engine to the cache (`engine_spec`)."""

from __future__ import annotations

import math
import secrets
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from kvferry.cache.build import PrefixCache
from kvferry.contract.messages import EMPTY_OUTPUT, MISS, LookupResult, Plan, WorkerOutput
from kvferry.contract.scheduler import SchedulerRole
from kvferry.contract.spec import EngineSpec, Roles
from kvferry.contract.worker import WorkerRole
from kvferry.engine.config import EngineConfig
from kvferry.engine.model_config import ModelConfig, ModelGeometry, is_library_class
from kvferry.errors import ConfigError
from kvferry.identity import Loads, ModelFiles, RunningModel, model_identity
from kvferry.layout.shards import tensor_parallel_shard
from kvferry.observe import Observer
from kvferry.types import BlockTable, KVGroup, RequestView, StepView, TablePart


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheArguments:
    """The arguments with which every rank opens the cache; `spec` describes rank 0."""

    spec: EngineSpec
    options: Mapping[str, Any]


def cache_arguments(
    store: str | Sequence[str] | None,
    options: Mapping[str, Any] | None,
    model: ModelConfig,
    engine: EngineConfig,
) -> CacheArguments | None:
    """Return the arguments for a store; None without one.

    Raises:
        ConfigError: there are options but no store.
    """
    if store is None:
        if options:
            raise ConfigError("connector_options are given without a store")
        return None
    spec = replace(engine_spec(model, engine), engine_id=secrets.token_hex(16))
    return CacheArguments(spec=spec, options={"store": store, **(options or {})})


def open_roles(arguments: CacheArguments | None, observer: Observer, rank: int = 0) -> Roles:
    """Open the cache on one rank; only on rank 0 does the scheduler role do something.

    Raises:
        ConfigError: an option is unknown, or the store cannot be used.
    """
    if arguments is None:
        return Roles(NoScheduler(), NoWorker())
    spec = arguments.spec
    shard = tensor_parallel_shard(spec.groups, rank, spec.shard.world_size)
    schedules = rank == 0
    cache = PrefixCache(
        replace(spec, shard=shard), arguments.options, observer, has_scheduler=schedules
    )
    scheduler = cache.scheduler() if schedules else NoScheduler()
    return Roles(scheduler, cache.worker(), cache.close, cache.wait_ready)


def engine_spec(
    model: ModelConfig,
    engine: EngineConfig,
    *,
    weights_version: str | None = None,
) -> EngineSpec:
    """Describe, for the cache, rank 0 of an engine that runs `model` with the options of `engine`.
    `weights_version` names the weights where they have no digest.

    Raises:
        ConfigError: the weights have no digest, or the model's class is not of Transformers and no
            `weights_version` is given.
        TopologyError: the kv heads cannot be divided among the ranks.
    """
    geometry, model_class = model.geometry, model.model_class()
    if weights_version is None and not is_library_class(model_class):
        raise ConfigError(
            f"{model_class.__module__}.{model_class.__name__} computes the model in "
            f"{model.model_dir}; only classes of Transformers have an identity, so run it without "
            "a store"
        )
    groups = kv_groups(geometry, engine.block_size)
    return EngineSpec(
        identity=model_identity(_running_model(model), weights_version),
        groups=groups,
        shard=tensor_parallel_shard(groups, 0, engine.tensor_parallel_size),
        tables=tuple(
            _table_part(geometry, index, group, engine.block_size)
            for index, group in enumerate(groups)
        ),
        step_tokens=engine.max_batched_tokens,
        host_recomputes=True,
    )


def _running_model(model: ModelConfig) -> RunningModel:
    """Return what this engine runs: a model as its directory has it, with no option that changes
    its KV but the dtype."""
    return RunningModel(
        files=ModelFiles(
            name=str(model.model_dir),
            weights="",
            revision=None,
            cache_dir=None,
            is_on_hugging_face=False,  # it is a directory
            load_format="auto",
            loads=Loads.BY_NAME,
        ),
        read_since=math.inf,
        dtype=model.geometry.dtype,
        running={},
        written={},
        classes=(),  # `engine_spec` refuses others than those of Transformers
        max_length=0,
        runs_code=False,
        code_map=None,
        code_revision=None,
        config_path=None,
        quantization=None,
        quantization_options=None,
        is_quantized_in_files=False,
        quantization_file=None,
        heeds_model_opt=False,
        loader_options=None,
        kv_dtype="auto",
        kv_layers_left_out=(),
        scales_by_requests=False,
        latents_of=None,
        lora={},
        queries={},
        kernels={},
        platform_options=None,
        variables={},
    )


def _table_part(geometry: ModelGeometry, index: int, group: KVGroup, block_size: int) -> TablePart:
    """Describe the layers of one group in the engine's only block table. The table has no window,
    because the engine keeps the KV of every token in every layer."""
    layers = [layer for layer, each in enumerate(geometry.windows) if each == group.window]
    return TablePart(
        table=0,
        group=index,
        layers=tuple(range(len(layers))),
        layer_names=tuple(geometry.layer_names[layer] for layer in layers),
        block_size=block_size,
    )


def kv_groups(geometry: ModelGeometry, block_size: int) -> tuple[KVGroup, ...]:
    """Return the KV groups of a model: one for all layers of the same window."""
    return tuple(
        KVGroup(
            num_layers=geometry.windows.count(window),
            num_kv_heads=geometry.num_kv_heads,
            content_size=geometry.content_size,
            dtype=geometry.dtype,
            block_size=block_size,
            window=window,
        )
        for window in dict.fromkeys(geometry.windows)
    )


class NoScheduler(SchedulerRole):
    """Answers every look-up with a miss."""

    def lookup(self, request: RequestView, num_local_tokens: int) -> LookupResult:
        return MISS

    def update_after_alloc(
        self, request: RequestView, block_ids: BlockTable, num_external_tokens: int
    ) -> None:
        pass

    def build_plan(self, step: StepView) -> Plan:
        return Plan()

    def update_output(self, output: WorkerOutput) -> None:
        pass


class NoWorker(WorkerRole):
    """Moves nothing."""

    def register_kv_caches(self, kv_caches: Mapping[str, torch.Tensor]) -> None:
        pass

    def begin_step(self, plan: Plan) -> None:
        pass

    def start_load(self) -> None:
        pass

    def save(self) -> None:
        pass

    def collect(self, finished_request_ids: Collection[str]) -> WorkerOutput:
        return EMPTY_OUTPUT

    def end_step(self) -> None:
        pass

    def close(self) -> None:
        pass

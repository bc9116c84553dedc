"""The engine's connector: how it is chosen and made, and the one of an engine without a store."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch

from kvferry.contract.messages import EMPTY_OUTPUT, MISS, LookupResult, Plan, WorkerOutput
from kvferry.contract.scheduler import SchedulerRole
from kvferry.contract.spec import EngineSpec
from kvferry.contract.worker import WorkerRole
from kvferry.engine.config import EngineConfig
from kvferry.engine.model_config import ModelConfig, ModelGeometry
from kvferry.errors import ConfigError
from kvferry.keys import ModelIdentity, weights_digest
from kvferry.topology import tensor_parallel_shard
from kvferry.types import BlockTable, KVGroup, RequestView, StepView, TablePart

_NOTHING = Plan()


class NoScheduler(SchedulerRole):
    """Answers every look-up with a miss."""

    def lookup(self, request: RequestView, num_local_tokens: int) -> LookupResult:
        return MISS

    def update_after_alloc(
        self, request: RequestView, block_ids: BlockTable, num_external_tokens: int
    ) -> None:
        pass

    def build_plan(self, step: StepView) -> Plan:
        return _NOTHING

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


DEFAULT_KV_BYTES = 1 << 30


def engine_spec(model: ModelConfig, engine: EngineConfig, rank: int = 0) -> EngineSpec:
    """What a connector must know of a rank of an engine that runs `model` with these options.

    Layers of one window are a group. All are in one block table without a window: the engine keeps
    the KV of every token in every layer, whatever part of it a layer looks at.

    Raises:
        TopologyError: kv heads that cannot be divided among the ranks.
    """
    geometry = model.geometry
    groups, parts = [], []
    for index, window in enumerate(dict.fromkeys(geometry.windows)):
        layers = [layer for layer, each in enumerate(geometry.windows) if each == window]
        groups.append(
            KVGroup(
                num_layers=len(layers),
                num_kv_heads=geometry.num_kv_heads,
                content_size=geometry.content_size,
                dtype=geometry.dtype,
                block_size=engine.block_size,
                window=window,
            )
        )
        parts.append(
            TablePart(
                table=0,
                group=index,
                layers=tuple(range(len(layers))),
                layer_names=tuple(geometry.layer_names[layer] for layer in layers),
                block_size=engine.block_size,
            )
        )
    return EngineSpec(
        identity=ModelIdentity(
            weights=weights_digest(model.model_dir),
            config=model.effective_config(),
            name=str(model.model_dir),
        ),
        groups=tuple(groups),
        shard=tensor_parallel_shard(groups, rank, engine.tensor_parallel_size),
        tables=tuple(parts),
    )


def num_blocks_for(engine: EngineConfig, geometry: ModelGeometry) -> int:
    """Blocks of the KV pool, the null block included.

    Raises:
        ConfigError: `kv_cache_bytes` is too little for any request.
    """
    if engine.num_blocks is not None:
        return engine.num_blocks
    block_bytes = geometry.block_bytes(engine.block_size)
    if engine.kv_cache_bytes is not None:
        num_blocks = engine.kv_cache_bytes // block_bytes
        if num_blocks < 2:
            raise ConfigError(
                f"kv_cache_bytes is {engine.kv_cache_bytes}; two blocks of this model are "
                f"{2 * block_bytes} bytes"
            )
        return num_blocks
    enough = 1 + engine.max_num_seqs * -(-geometry.context_length // engine.block_size)
    return max(2, min(enough, DEFAULT_KV_BYTES // block_bytes))

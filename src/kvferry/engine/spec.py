"""What an engine tells its connector about itself, and how large its KV pool is."""

from __future__ import annotations

from kvferry.connectors.registry import EngineSpec
from kvferry.engine.config import EngineConfig
from kvferry.engine.model import ModelConfig, ModelGeometry
from kvferry.errors import ConfigError
from kvferry.keys import ModelIdentity, weights_digest
from kvferry.types import GroupShard, KVGroup, RankShard

DEFAULT_KV_BYTES = 1 << 30


def engine_spec(model: ModelConfig, engine: EngineConfig) -> EngineSpec:
    """What a connector must know of an engine that runs `model` with these options.

    One group for all layers, without a window: the engine keeps the KV of every token in every
    layer, whatever part of it a layer looks at.
    """
    geometry = model.geometry
    group = KVGroup(
        num_layers=geometry.num_layers,
        num_kv_heads=geometry.num_kv_heads,
        content_size=2 * geometry.head_dim,
        dtype=geometry.dtype,
        block_size=engine.block_size,
    )
    whole = GroupShard(layers=(0, geometry.num_layers), heads=(0, geometry.num_kv_heads))
    return EngineSpec(
        identity=ModelIdentity(
            weights=weights_digest(model.model_dir), config=model.effective_config()
        ),
        groups=(group,),
        shard=RankShard(rank=0, world_size=1, groups=(whole,)),
        layer_names=(geometry.layer_names,),
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

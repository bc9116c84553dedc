"""Which rank holds which kv heads."""

from __future__ import annotations

from collections.abc import Sequence

from kvferry.errors import TopologyError
from kvferry.types import GroupShard, KVGroup, RankShard


def tensor_parallel_shard(groups: Sequence[KVGroup], rank: int, world_size: int) -> RankShard:
    """What a tensor-parallel rank holds: its share of the heads, or one replicated head.

    Of the ranks that replicate a head, the first one writes.

    Args:
        groups: KV groups of the whole model.
        rank: in [0, world_size).
        world_size: tensor-parallel size.

    Raises:
        TopologyError: heads and ranks of which neither is a multiple of the other.
    """
    shards = []
    replicas = 1
    for group in groups:
        heads = group.num_kv_heads
        if heads % world_size and world_size % heads:
            raise TopologyError(
                f"{heads} kv heads cannot be split over tensor_parallel_size={world_size}"
            )
        share = max(1, heads // world_size)
        first = rank * heads // world_size
        replicas = max(replicas, world_size // heads)
        shards.append(GroupShard(layers=(0, group.num_layers), heads=(first, first + share)))
    return RankShard(
        rank=rank, world_size=world_size, groups=tuple(shards), writes=rank % replicas == 0
    )

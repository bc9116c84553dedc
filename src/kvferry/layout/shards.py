"""Which rank holds which kv heads. Connectors ask this to describe a rank of their host."""

from __future__ import annotations

import math
from collections.abc import Sequence

from kvferry.errors import TopologyError
from kvferry.types import GroupShard, KVGroup, RankShard


def heads_of_rank(num_kv_heads: int, tp_rank: int, tp_size: int) -> tuple[int, int]:
    """Return the kv heads `[start, stop)` of a tensor-parallel rank: its share, or, with more ranks
    than heads, one replicated head.

    Raises:
        TopologyError: neither number, of heads or of ranks, is a multiple of the other.
    """
    if num_kv_heads % tp_size and tp_size % num_kv_heads:
        raise TopologyError(
            f"{num_kv_heads} kv heads cannot be split over tensor_parallel_size={tp_size}"
        )
    start = tp_rank * num_kv_heads // tp_size
    return start, start + max(1, num_kv_heads // tp_size)


def tensor_parallel_shard(groups: Sequence[KVGroup], rank: int, world_size: int) -> RankShard:
    """Return what a tensor-parallel rank holds of a model: all layers, and the heads that
    `heads_of_rank` returns. Of the ranks that replicate a head, the first writes it."""
    return pipeline_shard(groups, rank, world_size, [[(0, group.num_layers) for group in groups]])


def pipeline_shard(
    groups: Sequence[KVGroup],
    rank: int,
    world_size: int,
    stages: Sequence[Sequence[tuple[int, int]]],
) -> RankShard:
    """Return what a rank holds where the stages of a pipeline divide the layers, and the ranks of a
    stage the heads, as `tensor_parallel_shard`.

    Args:
        rank: counts the ranks of the first stage first.
        world_size: of all stages together.
        stages: by stage and group, the layers `[start, stop)`; equal numbers if there are none.
    """
    tp_size = world_size // len(stages)
    stage, tp_rank = divmod(rank, tp_size)
    replicas = [max(1, tp_size // group.num_kv_heads) for group in groups]
    shards = [
        GroupShard(
            layers=layers,
            heads=heads_of_rank(group.num_kv_heads, tp_rank, tp_size),
            writes=tp_rank % number == 0,
        )
        for group, layers, number in zip(groups, stages[stage], replicas, strict=True)
    ]
    return RankShard(
        rank=rank, world_size=world_size, groups=tuple(shards), num_replicas=math.gcd(*replicas)
    )

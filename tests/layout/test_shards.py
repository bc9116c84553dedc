"""Tensor-parallel shards of groups."""

from __future__ import annotations

import pytest

from kvferry.errors import TopologyError
from kvferry.layout.shards import tensor_parallel_shard
from kvferry.types import KVGroup


def make_group(num_kv_heads):
    return KVGroup(
        num_layers=3, num_kv_heads=num_kv_heads, content_size=8, dtype="float32", block_size=16
    )


@pytest.mark.parametrize(
    ("heads", "world", "shares", "writers"),
    [
        (8, 2, [(0, 4), (4, 8)], [0, 1]),
        (4, 4, [(0, 1), (1, 2), (2, 3), (3, 4)], [0, 1, 2, 3]),
        (2, 4, [(0, 1), (0, 1), (1, 2), (1, 2)], [0, 2]),
        (1, 3, [(0, 1)] * 3, [0]),
    ],
)
def test_shares_and_the_one_writer_of_each(heads, world, shares, writers):
    ranks = [tensor_parallel_shard([make_group(heads)], rank, world) for rank in range(world)]
    assert [rank.groups[0].heads for rank in ranks] == shares
    assert [rank.groups[0].layers for rank in ranks] == [(0, 3)] * world
    assert [rank.rank for rank in ranks if rank.groups[0].writes] == writers


@pytest.mark.parametrize(("heads", "world"), [(3, 2), (2, 3), (6, 4)])
def test_heads_that_do_not_divide_are_named(heads, world):
    with pytest.raises(TopologyError, match=f"{heads} kv heads .*tensor_parallel_size={world}"):
        tensor_parallel_shard([make_group(heads)], 0, world)

"""Block ids are checked once, where a copy is planned: against every part that it touches."""

from __future__ import annotations

import pytest
import torch

from kvferry.blocks.paged import PagedTables
from kvferry.blocks.rows import RankRows
from kvferry.blocks.tables import BlockSlice
from kvferry.contract.spec import EngineSpec
from kvferry.errors import LayoutError
from kvferry.keys import ModelIdentity
from kvferry.layout.shards import tensor_parallel_shard
from kvferry.record.schema import RecordSchema
from kvferry.types import KVGroup, TablePart


@pytest.mark.parametrize("num_blocks", [(6, 9), (9, 6), (9, 9)])
def test_an_id_that_one_part_of_a_table_lacks_is_refused(num_blocks):
    group = KVGroup(num_layers=1, num_kv_heads=1, content_size=4, dtype="float32", block_size=4)
    groups = (group, group)
    spec = EngineSpec(
        identity=ModelIdentity(weights=b"w" * 32, config={}),
        groups=groups,
        shard=tensor_parallel_shard(groups, 0, 1),
        tables=tuple(
            TablePart(table=0, group=at, layers=(0,), layer_names=(name,), block_size=4)
            for at, name in enumerate("ab")
        ),
    )
    schema = RecordSchema.for_groups(namespace=bytes(32), chunk_tokens=8, groups=groups)
    paged = PagedTables(spec, RankRows(groups, spec.shard, schema))
    paged.register(
        {name: torch.zeros(count, 1, 4, 4) for name, count in zip("ab", num_blocks, strict=True)}
    )
    for last in range(-1, 11):
        blocks = (BlockSlice(0, (1, last)),)
        if 1 <= last < min(num_blocks):
            assert paged.chunk_runs(blocks, 0)[0]
        else:
            with pytest.raises(LayoutError, match="null block" if last == 0 else "is outside"):
                paged.chunk_runs(blocks, 0)

"""What an engine says about its block tables, and which of it is refused."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvferry.contract.spec import EngineSpec
from kvferry.errors import ConfigError
from kvferry.keys import ModelIdentity
from kvferry.layout.shards import tensor_parallel_shard
from kvferry.types import KVGroup, TablePart


def group(num_layers: int = 4, window: int | None = None) -> KVGroup:
    return KVGroup(
        num_layers=num_layers,
        num_kv_heads=1,
        content_size=2,
        dtype="float32",
        block_size=4,
        window=window,
    )


def part(table: int, group: int, layers: tuple[int, ...], **fields) -> TablePart:
    names = tuple(f"{group}.{layer}" for layer in layers)
    fields = {"layer_names": names, "block_size": 4} | fields
    return TablePart(table=table, group=group, layers=layers, **fields)


def spec(groups: tuple[KVGroup, ...], tables: tuple[TablePart, ...] | None, **fields) -> EngineSpec:
    return EngineSpec(
        identity=ModelIdentity(weights=bytes(32), config={}),
        groups=groups,
        shard=tensor_parallel_shard(groups, 0, 1),
        tables=tables,
        **fields,
    )


def test_without_tables_each_group_has_one_of_its_own():
    groups = (group(num_layers=2), group(num_layers=1, window=8))
    assert spec(groups, None).table_parts == (
        part(0, 0, (0, 1), layer_names=None),
        part(1, 1, (0,), layer_names=None, window=8),
    )


def test_layers_may_be_spread_and_tables_shared():
    tables = (part(0, 0, (0, 2)), part(0, 1, (0,)), part(3, 0, (1, 3), block_size=8))
    assert spec((group(), group(num_layers=1)), tables).table_parts == tables


@pytest.mark.parametrize(
    ("tables", "message"),
    [
        pytest.param((part(0, 0, (0, 1, 2)),), "must be in one table", id="layer missing"),
        pytest.param(
            (part(0, 0, (0, 1, 2, 3)), part(1, 0, (3,))), "must be in one table", id="layer twice"
        ),
        pytest.param(
            (part(0, 0, (0, 1)), part(0, 0, (2, 3), block_size=8)),
            "two block sizes",
            id="table with two block sizes",
        ),
        pytest.param(
            (part(0, 0, (0, 1)), part(0, 0, (2, 3), window=16)),
            "two block sizes, windows and chunks",
            id="table with two windows",
        ),
        pytest.param((part(0, 0, (0, 1, 2, 3), window=7),), "attends to 8", id="window too small"),
        pytest.param((part(0, 1, (0, 1, 2, 3)),), "no part of 1 KV groups", id="unknown group"),
        pytest.param((part(-1, 0, (0, 1, 2, 3)),), "no part", id="negative table"),
        pytest.param((part(0, 0, (0, 1, 2, 3), block_size=0),), "no part", id="empty blocks"),
        pytest.param(
            (part(0, 0, (0, 1, 2, 3), layer_names=("a",)),), "names 1 layers", id="names missing"
        ),
    ],
)
def test_tables_that_cannot_be_are_refused_in_one_line(tables, message: str):
    with pytest.raises(ConfigError, match=message) as refused:
        spec((group(window=8),), tables)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("chunk", [None, 32])
def test_a_table_may_keep_all_tokens_or_the_chunks_of_its_group_and_no_others(chunk: int | None):
    groups = (replace(group(), chunk=chunk),)
    spec(groups, (part(0, 0, (0, 1, 2, 3)),))
    with pytest.raises(ConfigError, match=f"attends in chunks of {chunk}"):
        spec(groups, (part(0, 0, (0, 1, 2, 3), chunk=64),))
    assert [each.chunk for each in spec(groups, None).table_parts] == [chunk]


def test_a_window_on_a_table_of_full_attention_is_refused():
    with pytest.raises(ConfigError, match="attends to all"):
        spec((group(),), (part(0, 0, (0, 1, 2, 3), window=64),))


def test_a_record_has_all_that_a_hit_needs_of_a_table():
    groups = (replace(group(window=8), tail=8),)
    spec(groups, (part(0, 0, (0, 1, 2, 3), window=8),))
    for window, needs in ((10, "12 tokens of table 0"), (None, "all tokens of table 0")):
        with pytest.raises(ConfigError, match=f"needs {needs}, a record has the last 8"):
            spec(groups, (part(0, 0, (0, 1, 2, 3), window=window),))

"""Arithmetic of block tables and windows, against what it means token by token."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.blocks.paged import layer_spans
from kvferry.blocks.tables import Table, Tables
from kvferry.contract.spec import EngineSpec
from kvferry.errors import ContractError
from kvferry.keys import ModelIdentity
from kvferry.layout.shards import tensor_parallel_shard
from kvferry.types import KVGroup
from tests.host_tables import HostTable, parts_of_tables


@st.composite
def specs(draw) -> EngineSpec:
    """One table per group, each with its own block size and window or attention chunk, or none."""
    windows = draw(st.lists(st.none() | st.integers(1, 30), min_size=1, max_size=3))
    chunks = [draw(st.none() | st.integers(1, 30)) if w is None else None for w in windows]
    groups = tuple(
        KVGroup(
            num_layers=1,
            num_kv_heads=1,
            content_size=2,
            dtype="float32",
            block_size=1,
            window=window,
            chunk=chunk,
        )
        for window, chunk in zip(windows, chunks, strict=True)
    )
    tables = tuple(
        HostTable(
            block_size=draw(st.integers(1, 6)),
            window=None
            if window is None or draw(st.booleans())
            else window + draw(st.sampled_from((0, 2))),
            chunk=None if draw(st.booleans()) else chunks[index],
            layers=((index, (0,)),),
        )
        for index, window in enumerate(windows)
    )
    return EngineSpec(
        identity=ModelIdentity(weights=bytes(32), config={}),
        groups=groups,
        shard=tensor_parallel_shard(groups, 0, 1),
        tables=parts_of_tables(tables),
    )


@given(spec=specs(), blocks=st.integers(0, 8), more=st.integers(1, 8))
def test_a_table_is_filled_from_its_first_kept_block_on(spec: EngineSpec, blocks: int, more: int):
    tables = Tables(spec)
    start, stop = blocks * tables.block_size, (blocks + more) * tables.block_size
    for part, table in zip(spec.table_parts, tables.tables, strict=True):
        first = table.fill_start(start, stop)
        kept = range(start, stop)
        if part.window is not None:
            # vLLM drops the blocks of which no token is in the window of the next one.
            dropped = max(0, stop - part.window + 1) // part.block_size
            kept = range(max(start, dropped * part.block_size), stop)
        if part.chunk is not None:
            # vLLM drops the blocks of which no token is in the chunk of the next one.
            dropped = stop // part.chunk * part.chunk // part.block_size
            kept = range(max(start, dropped * part.block_size), stop)
        assert list(range(first, stop)) == list(kept)
        window = spec.groups[part.group].window
        if window is not None:
            assert set(range(max(start, stop - window + 1), stop)) <= set(kept)
        chunk = spec.groups[part.group].chunk
        if chunk is not None:
            attended = {token for token in range(start, stop) if token // chunk == stop // chunk}
            assert attended <= set(kept)


@given(
    spec=specs(),
    chunk=st.integers(1, 9),
    blocks=st.integers(0, 8),
    more=st.integers(1, 8),
)
def test_a_hit_needs_of_each_chunk_the_groups_of_which_a_table_keeps_tokens(
    spec: EngineSpec, chunk: int, blocks: int, more: int
):
    tables = Tables(spec)
    start, stop = blocks * tables.block_size, (blocks + more) * tables.block_size
    kept = {  # tokens that some table keeps, by group
        part.group: range(table.fill_start(start, stop), stop)
        for part, table in zip(spec.table_parts, tables.tables, strict=True)
    }
    for first in range(start // chunk * chunk, stop, chunk):
        tokens = range(max(first, start), min(first + chunk, stop))
        expected = {group for group, held in kept.items() if set(held) & set(tokens)}
        found = tables.groups_of(first + chunk, start, stop)
        assert expected <= found
        if first + chunk <= stop or not tables.drops_blocks:
            assert found == expected
    firsts = [held.start for held in kept.values()]
    assert tables.first_needed(start, stop) == min(firsts)


@given(layers=st.lists(st.integers(0, 12), unique=True, max_size=9))
def test_runs_of_layers_name_each_layer_once(layers: list[int]):
    found = []
    for span, first in layer_spans(layers):
        named = list(range(13))[span]
        assert layers[first : first + len(named)] == named
        found += named
    assert found == layers


def test_consecutive_layers_are_one_run():
    assert list(layer_spans((1, 2, 3, 7))) == [(slice(1, 4), 0), (slice(7, 8), 3)]


@given(
    num_tokens=st.integers(1, 12),
    limit=st.integers(1, 30),
    in_chunks=st.booleans(),
    block_size=st.sampled_from((1, 2, 3, 4)),
)
def test_a_table_keeps_chunks_whole_if_no_step_can_begin_where_it_has_dropped_a_part(
    num_tokens: int, limit: int, in_chunks: bool, block_size: int
):
    named = {"chunk" if in_chunks else "window": limit}
    table = Table(index=0, block_size=block_size, **({"window": None} | named))
    host = HostTable(block_size=block_size, **named)
    dropped = [
        first
        for first in range(0, 200, num_tokens)
        # The step that completes the chunk begins at any token of it.
        if any(host.num_dropped(t) * block_size > first for t in range(first, first + num_tokens))
    ]
    assert not (table.keeps_whole(num_tokens) and dropped)


def test_a_group_is_needed_from_the_first_token_that_any_of_its_tables_keeps():
    window = KVGroup(
        num_layers=2, num_kv_heads=1, content_size=2, dtype="float32", block_size=1, window=6
    )
    for sizes in ((2, 8), (8, 2)):
        tables = [
            HostTable(block_size=n, window=6, layers=((0, (i,)),)) for i, n in enumerate(sizes)
        ]
        spec = EngineSpec(
            identity=ModelIdentity(weights=bytes(32), config={}),
            groups=(window,),
            shard=tensor_parallel_shard((window,), 0, 1),
            tables=parts_of_tables(tables),
        )
        # Of [11, 16) in blocks of 2 and of 8.
        assert {table.fill_start(0, 16) for table in Tables(spec).tables} == {10, 8}
        assert Tables(spec).first_needed(0, 16) == 8
        assert Tables(spec).groups_of(10, 0, 16) == {0}
        assert Tables(spec).groups_of(8, 0, 16) == frozenset()


def test_a_table_that_the_spec_does_not_mention_is_no_load():
    """Where a host says nothing of tables, one more means that it lays out its layers otherwise."""
    group = KVGroup(num_layers=1, num_kv_heads=1, content_size=2, dtype="float32", block_size=4)
    spec = EngineSpec(
        identity=ModelIdentity(weights=bytes(32), config={}),
        groups=(group,),
        shard=tensor_parallel_shard((group,), 0, 1),
    )
    with pytest.raises(ContractError, match="2 block tables, the host announced 1"):
        Tables(spec).load_slices(([1, 2], [9]), 0, 8)

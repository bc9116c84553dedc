"""Several block tables, sliding windows and attention chunks: any host reads what any other stored.

The simulated host drops blocks as vLLM does and checks, after every request, that all KV the next
token attends to is there and that every block it keeps is right.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import Any, NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry.store.memory import MemoryStore
from kvferry.testing.stores import read_value
from kvferry.testing.wrappers import WrapperStore
from kvferry.types import KVGroup
from tests.cache.keeping import wait_for, wait_indexed
from tests.cache.windowed import group, opened, split, stored, wait_stored
from tests.host_tables import HostTable, table_per_group

# -- any host reads what any other stored ---------------------------------------------------------


class Case(NamedTuple):
    groups: tuple[KVGroup, ...]
    chunk: int
    writer: tuple[HostTable, ...]
    reader: tuple[HostTable, ...]
    num_tokens: int
    num_local_blocks: int
    budget: int
    read_budget: int


SIZES = st.sampled_from((1, 2, 3, 4, 6, 8))


@st.composite
def host_tables(draw, groups: tuple[KVGroup, ...]) -> tuple[HostTable, ...]:
    """Tables of a host: groups whole or split, kept in full or by window, one that is not ours."""
    tables = list(
        split(
            groups,
            draw(st.integers(1, 3)),
            draw(st.lists(SIZES, min_size=1, max_size=3)),
            keeps_all=draw(st.booleans()),
        )
    )
    if draw(st.booleans()):
        tables.insert(draw(st.integers(0, len(tables))), HostTable(block_size=5))
    return tuple(tables)


@st.composite
def cases(draw) -> Case:
    sizes = st.none() | st.sampled_from((1, 2, 3, 5, 8, 9, 17, 40))
    kinds = draw(st.lists(st.tuples(sizes, st.booleans()), min_size=1, max_size=3))
    groups = tuple(
        group(draw(st.integers(1, 4)), **{"chunk" if in_chunks else "window": size})
        for size, in_chunks in kinds
    )
    return Case(
        groups=groups,
        chunk=draw(st.integers(1, 12)),
        writer=draw(host_tables(groups)),
        reader=draw(host_tables(groups)),
        num_tokens=draw(st.integers(1, 70)),
        num_local_blocks=draw(st.integers(0, 2)),
        budget=draw(st.sampled_from((1000, 30, 17, 8, 5))),
        read_budget=draw(st.sampled_from((1000, 9, 3))),
    )


def num_saved(case: Case) -> int:
    """Leading chunks that the writer still holds whole when their last token is computed."""
    for index in range(case.num_tokens // case.chunk):
        start, last = index * case.chunk, (index + 1) * case.chunk - 1
        computed = last // case.budget * case.budget
        if any(t.num_dropped(computed) * t.block_size > start for t in case.writer if t.layers):
            return index
    return case.num_tokens // case.chunk


@given(case=cases())
@settings(deadline=None, max_examples=30)
def test_any_host_reads_what_any_other_stored(case: Case):
    store = MemoryStore("windows")
    prompt = list(range(100, 100 + case.num_tokens))
    with opened(case.groups, store, tables=case.writer, chunk_tokens=case.chunk) as writer:
        namespace = writer.parts[0].schema.namespace
        writer.run("writer", prompt, budget=case.budget)
        writer.settle()
    with opened(case.groups, store, tables=case.reader, chunk_tokens=case.chunk) as reader:
        assert reader.parts[0].schema.namespace == namespace
        block = reader.block_size
        stop = min(num_saved(case) * case.chunk, case.num_tokens - 1) // block * block
        local = min(case.num_local_blocks * block, (case.num_tokens - 1) // block * block)
        request = reader.run(
            "reader", [*prompt], num_local_tokens=local, budget=case.read_budget, generate=[1] * 9
        )
        assert request.num_external_tokens == max(0, stop - local)
        assert reader.observer["load_failed_chunks"] == 0
        reader.settle()
        # What it stored itself is as good as what it read.
        again = reader.run("again", [*prompt, 7, 8, 9], budget=case.read_budget)
        assert again.num_external_tokens >= max(0, stop - block + 1) // block * block
        reader.pool.clear()
        from_store = reader.run("from the store", [*prompt, 7, 8, 9], budget=case.read_budget)
        assert from_store.num_external_tokens >= again.num_external_tokens


WINDOWS = [
    pytest.param((None, 6), id="mixed"),
    pytest.param((6,), id="all window"),
    pytest.param((None, 1), id="window of one"),
    pytest.param((20, None, 5), id="two windows"),
]


@pytest.mark.parametrize("windows", WINDOWS)
@pytest.mark.parametrize(("writers", "readers"), [(1, 2), (1, 4), (2, 1), (4, 2), (2, 2)])
def test_ranks_of_any_number_read_windows(
    tmp_path, windows: tuple[int | None, ...], writers: int, readers: int
):
    groups = [
        group(3, window, heads=heads) for window, heads in zip(windows, (2, 1, 4), strict=False)
    ]
    url, prompt = f"file://{tmp_path}/store", list(range(43))
    tables = split(groups, 2, (4, 8))
    with opened(groups, url, world_size=writers) as writer:
        writer.run("writer", prompt, generate=[5] * 3)
        wait_stored(writer, 5)
    with opened(groups, url, world_size=readers, tables=tables) as reader:
        wait_indexed(reader)
        assert reader.run("reader", prompt, budget=3).num_external_tokens == 40
        assert reader.observer["load_failed_chunks"] == 0


@pytest.mark.parametrize("block_sizes", [(2, 8), (8, 2)])
def test_tables_of_one_group_may_keep_windows_of_different_length(block_sizes: tuple[int, int]):
    """In blocks of 8 a window reaches further back than in blocks of 2: to other chunks."""
    groups, prompt, store = (group(2, 6),), list(range(43)), MemoryStore("windows")
    for name, expected in (("writer", 0), ("reader", 40)):
        with opened(groups, store, tables=split(groups, 2, block_sizes), chunk_tokens=2) as host:
            assert host.run(name, prompt).num_external_tokens == expected
            host.settle()
            assert host.observer["load_failed_chunks"] == 0


def test_tables_leave_no_mark_on_records():
    """One table per component, split tables and back: the same names, the same bytes."""
    groups = (group(4, None), group(5, 6))
    shapes = [
        table_per_group(groups),
        split(groups, 2, (2, 8)),
        split(groups, 1, (4,), keeps_all=True),
        # A table may hold layers of several groups.
        (HostTable(block_size=4, layers=((0, (0, 1, 2, 3)), (1, (0, 1, 2, 3, 4)))),),
    ]
    stores = []
    for tables in shapes:
        store = MemoryStore("records")
        with opened(groups, store, tables=tables) as host:
            host.run("writer", list(range(41)))
            host.settle()
        stores.append({entry.key: content(store, entry.key) for entry in store.catalogue().scan()})
    assert len(stores[0]) == 5
    assert all(records == stores[0] for records in stores)


def content(store: MemoryStore, key: bytes) -> bytes:
    found = read_value(store, key)
    assert found is not None
    return found


# -- only what is needed --------------------------------------------------------------------------


class ReadCounter(WrapperStore):
    """Remembers which keys were opened, and how many bytes were read."""

    def __init__(self, store: MemoryStore) -> None:
        super().__init__(store)
        self.opened: list[bytes] = []
        self.num_bytes = 0

    def read(self, key: Any, *args: Any) -> Any:
        self.opened.append(key)
        size = super().read(key, *args)
        if size is not None:
            self.num_bytes += sum(len(buffer) for _, buffer in args[0])
        return size


def test_a_model_of_windows_reads_the_last_chunks_only():
    prompt = list(range(81))
    store, keys = stored([group(2, 12)], prompt)
    counter = ReadCounter(store)
    with opened([group(2, 12)], counter) as host:
        assert host.run("reader", prompt).num_external_tokens == 80
    # Tokens 69 to 79, from block 68 on.
    assert sorted(counter.opened, key=keys.index) == keys[8:10]


def test_windowed_rows_are_read_in_the_last_chunks_only():
    prompt, groups = list(range(81)), [group(1, None), group(3, 12)]
    store, keys = stored(groups, prompt)
    counter = ReadCounter(store)
    with opened(groups, counter) as host:
        assert host.run("reader", prompt).num_external_tokens == 80
        schema = host.parts[0].schema
    full, windowed = (component.num_bytes for component in schema.components)
    assert counter.num_bytes == 10 * (schema.head_bytes + full) + 2 * windowed
    assert sorted(counter.opened, key=keys.index) == keys


def test_a_host_that_keeps_all_tokens_reads_all_of_them():
    """It may offer any of its blocks to other requests."""
    prompt, groups = list(range(81)), [group(1, None), group(3, 12)]
    store, _keys = stored(groups, prompt)
    counter = ReadCounter(store)
    with opened(groups, counter, tables=split(groups, 1, (4,), keeps_all=True)) as host:
        assert host.run("reader", prompt).num_external_tokens == 80
        schema = host.parts[0].schema
    assert counter.num_bytes == 10 * schema.record_bytes


def test_a_hit_that_needs_no_kv_at_all_is_promised_without_a_read():
    """A window of one token: the next token attends to itself only."""
    groups, prompt = [group(2, 1)], list(range(41))
    store, _keys = stored(groups, prompt)
    counter = ReadCounter(store)
    with opened(groups, counter) as host:
        request = host.add("reader", prompt)
        assert host.scheduler.lookup(request, 0).num_tokens == 40
        host.admit(request)
        host.prefill(request)
    assert counter.opened == []


# -- partly held ----------------------------------------------------------------------------------


def test_a_later_hit_fetches_the_groups_that_it_lacks_into_the_same_slots():
    prompt, groups = list(range(81)), [group(1, None), group(3, 12)]
    store, keys = stored(groups, prompt)
    counter = ReadCounter(store)
    with opened(groups, counter) as host:
        assert host.run("long", prompt).num_external_tokens == 80
        before = {key: host.pool.find(key) for key in keys}
        held = [sorted(slot.held) for slot in before.values()]
        assert held == [[0]] * 8 + [[0, 1]] * 2
        counter.opened, counter.num_bytes = [], 0
        # A hit of 40 tokens needs the windows of chunks 3 and 4; their other group is held.
        assert host.run("short", prompt[:41]).num_external_tokens == 40
        schema = host.parts[0].schema
        windowed = schema.components[1].num_bytes
        assert counter.num_bytes == 2 * (schema.head_bytes + windowed)
        assert sorted(counter.opened, key=keys.index) == keys[3:5]
        assert {key: host.pool.find(key) for key in keys} == before
        assert [sorted(before[key].held) for key in keys[2:6]] == [[0], [0, 1], [0, 1], [0]]
        counter.opened = []
        for name, length in (("long again", 81), ("short again", 41)):
            request = host.add(name, prompt[:length])
            assert host.scheduler.lookup(request, 0).num_tokens == length - 1
            host.admit(request)
            host.complete(request)
        assert counter.opened == []


def test_groups_that_cannot_be_fetched_leave_the_groups_that_are_held():
    prompt, groups = list(range(81)), [group(1, None), group(3, 12)]
    store, keys = stored(groups, prompt)
    lost = LosesRecords(store)
    with opened(groups, lost) as host:
        assert host.run("long", prompt).num_external_tokens == 80
        lost.keys = {keys[3]}
        request = host.add("short", prompt[:41])
        assert host.admit(request) == 24
        assert host.pool.find(keys[3]).held == {0}
        host.complete(request)
        host.settle()
        # Computed again, and saved again as a whole.
        assert host.pool.find(keys[3]).held == {0, 1}
        assert host.observer["load_failed_chunks"] == 0


class LosesRecords(WrapperStore):
    """Does not open some records that it seems to have."""

    keys: Collection[bytes] = ()

    def read(self, key: Any, *args: Any) -> Any:
        return None if key in self.keys else super().read(key, *args)


# -- saves ----------------------------------------------------------------------------------------


def test_a_chunk_that_left_the_window_is_not_saved_and_is_no_error():
    groups = (group(1, None), group(1, 5))
    store = ReadCounter(MemoryStore("saves"))
    with opened(groups, store, chunk_tokens=16) as host:
        host.run("small steps", list(range(48)), budget=4)
        host.settle()
        assert host.observer["save_out_of_window"] == 3
        assert store.stat().num_records == 0
        host.run("one step", list(range(48)))
        host.settle()
        assert host.observer["put_stored"] == 3
        assert host.run("held", list(range(49))).num_external_tokens == 48
        assert store.opened == []
        host.pool.clear()
        assert host.run("reader", list(range(49))).num_external_tokens == 48
        assert len(store.opened) == 3


@pytest.mark.parametrize(("chunk", "warned"), [(5, False), (6, True)])
def test_chunks_larger_than_a_window_are_warned_of(caplog, chunk: int, warned: bool):
    with opened((group(1, None), group(1, 5)), MemoryStore("x"), chunk_tokens=chunk):
        assert ("set it to at most 5" in caplog.text) == warned


@given(
    window=st.integers(1, 20),
    block_size=st.sampled_from((1, 3, 4)),
    data=st.data(),
    budget=st.integers(1, 30),
)
@settings(deadline=None, max_examples=15)
def test_a_chunk_that_fits_into_the_window_is_saved_whatever_the_steps(
    window: int, block_size: int, data: st.DataObject, budget: int
):
    groups = (group(1, None), group(1, window))
    chunk = data.draw(st.integers(1, window))
    with opened(
        groups, MemoryStore("x"), tables=split(groups, 1, (block_size,)), chunk_tokens=chunk
    ) as host:
        host.run("writer", list(range(50)), budget=budget)
        host.settle()
        assert host.observer["put_stored"] == 50 // chunk
        again = host.run("again", [*range(50), *range(40)], budget=budget)
        assert again.num_external_tokens == 50 // chunk * chunk // block_size * block_size
        host.settle()
        assert host.observer["put_stored"] == 90 // chunk
        assert host.observer["save_out_of_window"] == 0


@given(
    window=st.integers(1, 8),
    block_size=st.sampled_from((1, 2, 4)),
    budget=st.integers(1, 30),
    local=st.integers(0, 2),
)
@settings(deadline=None, max_examples=15)
def test_of_a_tail_every_chunk_is_saved_whatever_the_steps_and_hits_end_with_chunks(
    window: int, block_size: int, budget: int, local: int
):
    full, short = group(1, None, block_size=4), group(2, window)
    tail = max(1, -(-(window - 1) // block_size) * block_size)
    groups, tables = (full, replace(short, tail=tail)), split((full, short), 1, (4, block_size))
    with opened(groups, MemoryStore("x"), tables=tables, chunk_tokens=16) as host:
        host.run("writer", list(range(70)), budget=budget)
        host.settle()
        assert host.observer["put_stored"] == 4
        for length, end in ((70, 64), (61, 48), (64, 48)):  # the last token is computed
            host.pool.clear()  # each byte of a hit comes from the store
            tokens, before = list(range(length)), 4 * local
            hit = host.run(f"{length}", tokens, num_local_tokens=before, budget=budget)
            assert hit.num_external_tokens == end - before
        assert host.observer["save_out_of_window"] == 0


def test_a_record_has_the_tail_of_a_group_alone():
    whole = (group(1, None), group(1, 5))
    sizes = {}
    for groups in (whole, (whole[0], replace(whole[1], tail=4))):
        with opened(groups, MemoryStore("x"), chunk_tokens=16) as host:
            sizes[groups] = host.parts[0].schema.payload_bytes
    assert list(sizes.values()) == [(16 + 16) * 16, (16 + 4) * 16]


# -- layers on several ranks -----------------------------------------------------------------------


@pytest.mark.parametrize("cuts", [(1, 2), (2, 0), (0, 3)])
def test_stages_of_a_pipeline_write_and_read_one_record(tmp_path, cuts: tuple[int, int]):
    """Also where a stage has no layer of a table."""
    groups, prompt = (group(2, None), group(3, 6)), list(range(43))
    tables = split(groups, 2, (4, 8))
    stages = [
        [(0, cut) for cut in cuts],
        [(cut, each.num_layers) for cut, each in zip(cuts, groups, strict=True)],
    ]
    with opened(groups, f"file://{tmp_path}/whole") as whole:
        whole.run("writer", prompt)
        whole.settle()
    url = f"file://{tmp_path}/store"
    with opened(groups, url, tables=tables, world_size=2, stages=stages) as host:
        host.run("writer", prompt)
        wait_stored(host, 5)
        for part in host.parts:
            assert part.store.wait_indexed(60)
            part.store.probe(host.scheduler.requests.track(host.add("probe", prompt)).keys.keys)
        wait_for(lambda: all(part.store.stat().num_records == 5 for part in host.parts))
        assert host.run("held", prompt).num_external_tokens == 40
        host.forget_memory()
        assert host.run("reader", prompt).num_external_tokens == 40
        assert host.observer["hit_tokens/file"] == 40
    records, expected = (
        {path.name: path.read_bytes() for path in (tmp_path / name).rglob("*.safetensors")}
        for name in ("store", "whole")
    )
    assert len(records) == 5
    assert records == expected

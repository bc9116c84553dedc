"""States as records: whole layers in parts as large as chunks, written and read by any ranks."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from kvferry.blocks.rows import RankRows
from kvferry.blocks.states import PagedStates
from kvferry.errors import ConfigError, LayoutError
from kvferry.keys import state_keys
from kvferry.layout.shards import tensor_parallel_shard
from kvferry.layout.states import components_of
from kvferry.observe import Counters
from kvferry.record.check import ReadFault
from kvferry.record.schema import RecordSchema
from kvferry.record.state_parts import StatePart, smallest_payload, state_parts
from kvferry.store.base import PutResult
from kvferry.store.memory import MemoryStore
from kvferry.store.recordio import RecordRead, put_record, read_record, value_check
from kvferry.types import ChunkKey, KVGroup, StateKind, TablePart
from tests.state_models import MODELS, Place, StateModel

KEY = ChunkKey(b"k" * 32)
TOKENS = 256
BLOCKS = {3: 2, 5: 4}
"""By block table, the block with the state."""
GARBAGE = 0x5A
GROUP = KVGroup(num_layers=2, num_kv_heads=8, content_size=4, dtype="bfloat16", block_size=16)
"""Of the layers with KV."""

MIXED = (("Mamba-2 with one group, copied on each rank (Granite 4)", 5),
         ("short convolution (LFM2)", 3))  # fmt: skip
ONE_KIND = [((name, 5),) for name in MODELS]


class Engine:
    """The ranks of an engine: pages by kind and layer, in two block tables of each kind."""

    def __init__(
        self, models: Sequence[tuple[str, int]], tp: int, chunk: RecordSchema, *, dim_first: bool
    ) -> None:
        self.models = [(MODELS[name], number) for name, number in models]
        self.tp, self.dim_first = tp, dim_first
        kinds = [
            StateKind(
                num_layers=number,
                components=components_of(model.kind, model.arrays(tp, dim_first=dim_first)),
            )
            for model, number in self.models
        ]
        self.parts = state_parts(chunk, [kind.groups for kind in kinds])
        tables = [
            TablePart(
                table=table,
                group=kind,
                layers=tuple(range(first, number, 2)),
                layer_names=tuple(f"{kind}.{layer}" for layer in range(first, number, 2)),
                block_size=64,
            )
            for kind, (_, number) in enumerate(self.models)
            for first, table in enumerate(BLOCKS)
        ]
        self.rows = [
            [
                RankRows(part.groups, tensor_parallel_shard(part.groups, rank, tp), part.schema)
                for part in self.parts
            ]
            for rank in range(tp)
        ]
        self.caches = [self._pages() for _ in range(tp)]
        self.paged = []
        for rows, caches in zip(self.rows, self.caches, strict=True):
            self.paged.append(PagedStates(kinds, tables, list(zip(self.parts, rows, strict=True))))
            self.paged[-1].register(caches)

    def _pages(self) -> dict[str, torch.Tensor]:
        found = {}
        for kind, (model, number) in enumerate(self.models):
            size = -(-model.page_bytes(self.tp) // 8) * 8 + 32
            memory = torch.full((6, number, size), GARBAGE, dtype=torch.uint8).view(torch.int8)
            for layer in range(number):
                pages = memory[:, layer, : model.page_bytes(self.tp)]
                found[f"{kind}.{layer}"] = pages.view(6, 1, 1, -1)
        return found

    def page(self, rank: int, kind: int, layer: int) -> torch.Tensor:
        block = list(BLOCKS.values())[layer % 2]
        return self.caches[rank][f"{kind}.{layer}"][block]

    def compute(self, seed: int) -> None:
        for page, model, place in self._places(seed):
            model.write(page, place)

    def num_wrong(self, seed: int) -> int:
        return sum(model.num_wrong(page, place) for page, model, place in self._places(seed))

    def _places(self, seed: int) -> list[tuple[torch.Tensor, StateModel, Place]]:
        return [
            (
                self.page(rank, kind, layer),
                model,
                Place(layer, seed + kind, self.tp, rank, self.dim_first),
            )
            for rank in range(self.tp)
            for kind, (model, number) in enumerate(self.models)
            for layer in range(number)
        ]

    def store(self, store: MemoryStore) -> None:
        """Every rank copies its rows; the leaves and rows of all are joined, as of chunks."""
        for number, (part, key) in enumerate(
            zip(self.parts, state_keys(KEY, len(self.parts)), strict=True)
        ):
            schema = part.schema
            image, table = bytearray(schema.record_bytes), bytearray(16 * schema.num_leaves)
            for rank in range(self.tp):
                rows = self.rows[rank][number]
                slot = memoryview(bytearray(b"\xee" * rows.slot_bytes))
                self.paged[rank].gather(number, slot, BLOCKS)
                digests, at = rows.leaves(slot, {}).digests, 0
                for run, start, stop in rows.spans():
                    offset = schema.offset_of(run)
                    image[offset : offset + stop - start] = slot[start:stop]
                    where = schema.leaf_slice(run)
                    size = where.stop - where.start
                    table[where], at = digests[at : at + size], at + size
            put = put_record(store, schema, key, TOKENS, bytes(table), memoryview(image))
            assert put.result is PutResult.STORED

    def read(self, store: MemoryStore, first_token: int = TOKENS) -> list[ReadFault | None]:
        found = []
        for number, (part, key) in enumerate(
            zip(self.parts, state_keys(KEY, len(self.parts)), strict=True)
        ):
            for rank in range(self.tp):
                rows = self.rows[rank][number]
                slot = memoryview(bytearray(rows.slot_bytes))
                read = RecordRead(
                    key=key,
                    first_token=first_token,
                    head=rows.head_of(slot),
                    rows=rows.rows_of(slot, rows.all_groups),
                )
                found.append(read_record(store, part.schema, read, Counters()))
                if found[-1] is None:
                    self.paged[rank].scatter(number, slot, BLOCKS)
        return found


def chunks_of(models: Sequence[tuple[str, int]], layers: float = 2.3) -> RecordSchema:
    """Chunks with room for the states of about two layers."""
    kinds = [
        [each.group(1) for each in components_of(model.kind, model.arrays(1, dim_first=False))]
        for model, _ in ((MODELS[name], number) for name, number in models)
    ]
    wanted = int(smallest_payload(kinds) * layers)
    return RecordSchema.for_groups(
        namespace=b"n" * 32, chunk_tokens=-(-wanted // 128), groups=(GROUP,)
    )


@pytest.mark.parametrize("readers", [1, 2, 4, 8])
@pytest.mark.parametrize("writers", [1, 2, 8])
@pytest.mark.parametrize("models", [*ONE_KIND, MIXED], ids=str)
def test_ranks_of_any_number_read_what_ranks_of_any_other_stored(models, writers, readers):
    chunk, store = chunks_of(models), MemoryStore("states")
    first = Engine(models, writers, chunk, dim_first=False)
    second = Engine(models, readers, chunk, dim_first=True)
    assert [part.schema.components for part in first.parts] == [
        part.schema.components for part in second.parts
    ]
    first.compute(seed=3)
    first.store(store)
    check = value_check(chunk, *(part.schema for part in first.parts))
    for key in state_keys(KEY, len(first.parts)):
        value = memoryview(bytearray(chunk.record_bytes))
        assert store.read(key, [(0, value)]) == chunk.record_bytes
        assert check.why_wrong(key, value, len(value)) is None
        assert b"\xee" * 16 not in bytes(value), "what a slot held before"
    assert set(second.read(store)) == {None}
    assert second.num_wrong(seed=3) == 0


def test_parts_hold_each_layer_of_each_kind_once_and_are_as_large_as_chunks():
    chunk = chunks_of(MIXED)
    parts = Engine(MIXED, 1, chunk, dim_first=False).parts
    for kind, (_, number) in enumerate(MIXED):
        held = [layer for part in parts if part.kind == kind for layer in range(*part.layers)]
        assert held == list(range(number))
    assert len(parts) == 4
    for part in parts:
        assert part.schema.record_bytes == chunk.record_bytes
        assert part.schema.is_of_state
        assert not chunk.is_of_state


@pytest.mark.parametrize("layers", [1.0001, 1.3, 1.9, 2.0, 3.7, 40.0])
def test_records_of_any_size_are_filled_exactly(layers: float):
    for models in (*ONE_KIND, MIXED):
        chunk = chunks_of(models, layers)
        try:
            parts = Engine(models, 1, chunk, dim_first=False).parts
        except ConfigError:
            assert layers < 2  # the header of many components is longer than that of a chunk
            continue
        assert {part.schema.record_bytes for part in parts} == {chunk.record_bytes}


def test_a_layer_that_is_larger_than_a_record_is_refused_in_one_line():
    with pytest.raises(ConfigError, match="use a larger chunk_tokens") as refused:
        Engine(MIXED, 1, chunks_of(MIXED, 0.5), dim_first=False)
    assert "\n" not in str(refused.value)


def test_a_state_of_other_tokens_or_damaged_or_with_a_part_missing_is_a_miss():
    chunk, store = chunks_of(MIXED), MemoryStore("states")
    engine = Engine(MIXED, 2, chunk, dim_first=False)
    engine.compute(seed=1)
    engine.store(store)
    # What is wrong is taken out: the second rank finds nothing.
    wrong = [ReadFault.OTHER_RECORD, ReadFault.ABSENT]
    assert engine.read(store, first_token=128) == wrong * len(engine.parts)
    first, second, *others = state_keys(KEY, len(engine.parts))
    engine.store(store := MemoryStore("states"))
    store.discard(second, "for the test")
    image = memoryview(bytearray(chunk.record_bytes))
    assert store.read(first, [(0, image)]) == len(image)
    image[engine.parts[0].schema.head_bytes] ^= 1  # in the rows of the first rank
    store.discard(first, "for the test")
    assert store.put(first, [image]).result is PutResult.STORED
    assert engine.read(store) == [
        *(ReadFault.BAD_CHECKSUM, ReadFault.ABSENT),
        *(ReadFault.ABSENT, ReadFault.ABSENT),
        *[None, None] * len(others),
    ]


WRONG_BLOCKS = {
    "the null block": {3: 2, 5: 0},
    "no block": {3: 2},
    "a block that the engine does not have": {3: 2, 5: 6},
}


@pytest.mark.parametrize("why", WRONG_BLOCKS)
def test_without_a_block_for_each_table_nothing_is_copied(why: str):
    chunk = chunks_of(MIXED)
    engine = Engine(MIXED, 1, chunk, dim_first=False)
    engine.compute(seed=1)
    slot = memoryview(bytearray(engine.rows[0][0].slot_bytes))
    for copy in (engine.paged[0].gather, engine.paged[0].scatter):
        with pytest.raises(LayoutError):
            copy(0, slot, WRONG_BLOCKS[why])
    assert not any(slot)
    assert engine.num_wrong(seed=1) == 0


def test_pages_that_lack_a_layer_are_refused_and_released_ones_are_not_used():
    chunk = chunks_of(MIXED)
    engine = Engine(MIXED, 1, chunk, dim_first=False)
    lacking = {name: each for name, each in engine.caches[0].items() if name != "0.2"}
    with pytest.raises(LayoutError, match=r"0\.2"):
        engine.paged[0].register(lacking)
    engine.paged[0].unregister()
    with pytest.raises(LayoutError, match="released"):
        engine.paged[0].check(BLOCKS)


def test_a_part_names_what_it_holds():
    part = Engine(MIXED, 1, chunks_of(MIXED), dim_first=False).parts[0]
    assert isinstance(part, StatePart)
    assert [each.name for each in part.schema.components][: part.num_states] == [
        f"state.{number}" for number in range(4)
    ]
    assert {group.dtype for group in part.groups[part.num_states :]} == {"uint8"}

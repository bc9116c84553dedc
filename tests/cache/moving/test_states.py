"""The worker moves parts of states: out of pages into records, and back into pages elsewhere."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.host import HostStep
from kvferry.blocks.tables import BlockSlice
from kvferry.cache.build import PrefixCache
from kvferry.cache.messages import CachePlan, Fetch, Load, Save, SlotChunk
from kvferry.contract.messages import WorkerOutput
from kvferry.contract.spec import EngineSpec, StateSpec
from kvferry.errors import ConfigError
from kvferry.keys import ModelIdentity, state_keys
from kvferry.layout.shards import tensor_parallel_shard
from kvferry.layout.states import components_of
from kvferry.observe import Counters
from kvferry.record.check import ReadFault, parse_head
from kvferry.store.base import PutResult
from kvferry.store.memory import MemoryStore
from kvferry.testing.stores.hooks import wait_until
from kvferry.types import ChunkKey, KVGroup, StateKind, TablePart
from tests.state_models import MODELS, Place

KIND = "Mamba-2"
LAYERS, BLOCK, NUM_BLOCKS = 5, 64, 8
KEY = ChunkKey(b"k" * 32)
GROUP = KVGroup(num_layers=2, num_kv_heads=4, content_size=8, dtype="float32", block_size=BLOCK)
SAVED, LOADED = {1: 2, 2: 5}, {1: 6, 2: 1}
"""By block table, the block of a state."""


def described(kind: str = KIND, block: int = BLOCK, tp: int = 1) -> StateSpec:
    model = MODELS[kind]
    components = components_of(model.kind, model.arrays(tp, dim_first=False))
    return StateSpec(
        kinds=(StateKind(num_layers=LAYERS, components=components),),
        tables=tuple(
            TablePart(
                table=table,
                group=0,
                layers=tuple(range(first, LAYERS, 2)),
                layer_names=tuple(f"state.{layer}" for layer in range(first, LAYERS, 2)),
                block_size=block,
            )
            for first, table in enumerate(SAVED)
        ),
    )


def spec_of(states: StateSpec | None, rank: int = 0, tp: int = 1) -> EngineSpec:
    return EngineSpec(
        identity=ModelIdentity(weights=b"w" * 32, config={"model_type": "hybrid"}),
        groups=(GROUP,),
        shard=tensor_parallel_shard((GROUP,), rank, tp),
        tables=(
            TablePart(
                table=0, group=0, layers=(0, 1), layer_names=("kv.0", "kv.1"), block_size=BLOCK
            ),
        ),
        states=states,
    )


class Engine:
    """One worker and its memory: KV in table 0, states in tables 1 and 2."""

    def __init__(
        self,
        store: MemoryStore | list[str],
        kind: str = KIND,
        rank: int = 0,
        tp: int = 1,
        **options: Any,
    ) -> None:
        self.model, self.rank, self.tp = MODELS[kind], rank, tp
        self.observer = Counters()
        is_given = isinstance(store, MemoryStore)
        options = {"memory_bytes": 1 << 22, "audit": "off"} | options
        options["store"] = store.url if is_given else store
        self.cache = PrefixCache(
            spec_of(described(kind, tp=tp), rank, tp),
            options,
            self.observer,
            store=store if is_given else None,
        )
        self._ends = self.cache.identity.close if is_given else self.cache.close
        self.worker = self.cache.worker()
        size = self.model.page_bytes(tp)
        memory = torch.full((LAYERS, NUM_BLOCKS, size + 8), 0x5A, dtype=torch.uint8)
        self.pages = [
            memory[layer, :, :size].view(torch.int8).view(NUM_BLOCKS, 1, 1, size)
            for layer in range(LAYERS)
        ]
        kv = torch.zeros(2, NUM_BLOCKS, GROUP.num_kv_heads // tp, BLOCK, GROUP.content_size)
        caches = {f"kv.{layer}": kv[layer] for layer in range(2)}
        caches |= {f"state.{layer}": page for layer, page in enumerate(self.pages)}
        self.worker.register_kv_caches(caches)
        self.parts = self.cache._parts
        self.filled, self.saved, self.invalid = [], [], set()
        self.failed: set[str] = set()
        self.received: set[str] = set()
        self.not_received: set[str] = set()
        self.outputs: list[WorkerOutput] = []
        self.number = 0

    def chunks(self) -> tuple[SlotChunk, ...]:
        """The parts of the state after one block, each in a slot."""
        keys = state_keys(KEY, len(self.parts))
        return tuple(
            SlotChunk(slot=number + 1, key=key, first_token=BLOCK, part=number)
            for number, key in enumerate(keys)
        )

    def step(self, *, pool_id: int = 7, **plan: Any) -> None:
        self.number += 1
        first = self.cache.identity.first
        carried = CachePlan(
            pool=pool_id, number=self.number, namespace=first, first_namespace=first, **plan
        )
        self.worker.begin_step(carried)
        self.worker.start_load()
        self.worker.save()
        self._collect()

    def collect(self) -> list[WorkerOutput]:
        """The reports since the last call."""
        self._collect()
        outputs, self.outputs = self.outputs, []
        return outputs

    def _collect(self) -> None:
        output = self.worker.collect(())
        self.worker.end_step()
        self.outputs.append(output)
        self.invalid |= output.invalid_block_ids
        self.received |= output.finished_recving
        self.not_received |= output.failed_recving
        for report in output.meta.reports if output.meta is not None else ():
            self.filled += report.filled
            self.saved += report.saved
            self.failed |= report.failed_requests

    def settle(self, *, filled: int, saved: int = 0) -> None:
        def has_ended() -> bool:
            self._collect()
            return len(self.filled) >= filled and len(self.saved) >= saved

        wait_until(has_ended, "saves and fetches end")

    def compute(self, blocks: dict[int, int], seed: int) -> None:
        for layer, page in enumerate(self.pages):
            self.model.write(page[blocks[1 + layer % 2]], self.place(layer, seed))

    def place(self, layer: int, seed: int) -> Place:
        return Place(layer, seed, self.tp, self.rank)

    def num_wrong(self, blocks: dict[int, int], seed: int) -> int:
        return sum(
            self.model.num_wrong(page[blocks[1 + layer % 2]], self.place(layer, seed))
            for layer, page in enumerate(self.pages)
        )

    def close(self) -> None:
        self.worker.close()
        self._ends()


def slices(blocks: dict[int, int]) -> tuple[BlockSlice, ...]:
    return tuple(BlockSlice(0, (blocks[table],) if table in blocks else ()) for table in range(3))


def saves(engine: Engine, blocks: dict[int, int] = SAVED) -> tuple[Save, ...]:
    return tuple(Save(chunk, slices(blocks)) for chunk in engine.chunks())


def load(engine: Engine, blocks: dict[int, int] = LOADED) -> Load:
    return Load("r", engine.chunks(), 0, BLOCK, slices(blocks))


def stored(kind: str = KIND) -> MemoryStore:
    store = MemoryStore("states")
    engine = Engine(store, kind)
    engine.compute(SAVED, seed=3)
    engine.step(saves=saves(engine))
    engine.settle(filled=len(engine.parts), saved=len(engine.parts))
    assert [each.missed for each in engine.filled] == [None] * len(engine.parts)
    engine.close()
    return store


def fetched(engine: Engine, chunks: Sequence[SlotChunk] | None = None) -> None:
    chunks = engine.chunks() if chunks is None else chunks
    engine.step(fetches=tuple(Fetch(chunk, (0,)) for chunk in chunks))
    engine.settle(filled=len(chunks))


@pytest.mark.parametrize("kind", MODELS)
def test_a_state_that_one_engine_saved_is_loaded_by_another_into_other_blocks(kind: str):
    engine = Engine(stored(kind), kind)
    fetched(engine)
    assert [each.missed for each in engine.filled] == [None] * len(engine.parts)
    engine.step(loads=(load(engine),))
    assert engine.num_wrong(LOADED, seed=3) == 0
    assert (engine.invalid, engine.failed, engine.not_received) == (set(), set(), set())
    assert engine.received == {"r"}
    engine.close()


def test_parts_are_under_the_models_namespace_and_a_farther_tier_takes_them_for_sound(tmp_path):
    engine = Engine([f"file://{tmp_path}/near", f"file://{tmp_path}/far"])
    assert engine.cache.wait_ready(10)
    engine.compute(SAVED, seed=3)
    engine.step(saves=saves(engine))
    engine.settle(filled=len(engine.parts), saved=len(engine.parts))
    assert {each.result for each in engine.saved} == {PutResult.STORED}
    sizes = {part.schema.record_bytes for part in engine.parts}

    def num_copied() -> int:
        found = (tmp_path / "far" / "records").rglob("*")  # what is being written goes away
        return sum(path.is_file() and path.stat().st_size in sizes for path in found)

    wait_until(lambda: num_copied() == len(engine.parts), "parts are copied")
    namespace = engine.cache.identity.first
    for chunk, part in zip(engine.chunks(), engine.parts, strict=True):
        value = memoryview(bytearray(part.schema.record_bytes))
        store = engine.cache.store.in_namespace(namespace)
        assert store.read(chunk.key, [(0, value)]) == len(value)
        assert parse_head(value, len(value)).schema.namespace == namespace
    engine.close()


def test_a_state_is_loaded_from_the_slots_into_which_it_was_saved():
    engine = Engine(MemoryStore("states"))
    engine.compute(SAVED, seed=4)
    engine.step(saves=saves(engine))
    engine.compute(SAVED, seed=5)  # the host writes on in these pages
    engine.settle(filled=len(engine.parts))
    engine.step(loads=(load(engine),))
    assert engine.num_wrong(LOADED, seed=4) == 0
    engine.close()


def test_a_part_that_is_missing_or_of_another_model_is_a_miss():
    engine = Engine(store := stored())
    first, *_ = engine.chunks()
    store.discard(first.key, "for the test")
    fetched(engine)
    assert sorted(str(each.missed) for each in engine.filled) == sorted(
        [str(ReadFault.ABSENT), *["None"] * (len(engine.parts) - 1)]
    )
    engine.close()
    other = Engine(stored(), "Mamba-2 in one dtype")
    fetched(other)
    assert None not in {each.missed for each in other.filled}
    other.close()


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("tp", [2, 4])
def test_a_state_that_several_ranks_saved_is_read_by_one_and_lent_whole(
    kind: str, tp: int, tmp_path: Path
):
    url = f"file://{tmp_path}/store"
    ranks = [Engine([url], kind, rank, tp) for rank in range(tp)]
    cache = ranks[0].cache
    role = cache.scheduler()
    found = [
        role.pool.save(each.key, each.first_token, part=each.part) for each in ranks[0].chunks()
    ]
    slots = [slot for slot in found if slot is not None]
    assert [slot.part for slot in slots] == list(range(len(ranks[0].parts)))
    for slot in slots:
        role.saves.shared_writes.begin(slot, cache.identity.first)
    chunks = [SlotChunk(slot.index, slot.key, BLOCK, part=slot.part) for slot in slots]
    for rank in ranks:
        rank.compute(SAVED, seed=3)
        rank.step(pool_id=role.pool.pool_id, saves=[Save(each, slices(SAVED)) for each in chunks])

    def are_stored() -> bool:
        for rank in ranks:
            for output in rank.collect():
                role.update_output(output)
        role.build_plan(HostStep([], set(), set()))
        return not role.pool.is_writing

    wait_until(are_stored, "all parts are written")
    lent = [role.pool.loans.lend(slot.key, 60) for slot in slots]
    assert cache.store.stat().num_records == len(slots)
    for slot, loan in zip(slots, lent, strict=True):
        value = memoryview(bytearray(ranks[0].parts[slot.part].schema.record_bytes))
        assert cache.store.read(slot.key, [(0, value)]) == len(value)
        assert b"".join(loan.buffers) == value.tobytes()
    role.close()
    for rank in ranks:
        rank.close()
    alone = Engine([url], kind)
    assert alone.cache.wait_ready(10)
    fetched(alone)
    alone.step(loads=(load(alone),))
    assert alone.num_wrong(LOADED, seed=3) == 0
    alone.close()


LOST: dict[str, dict[int, int]] = {
    "the null block": {1: 6, 2: 0},
    "a table without a block": {1: 6},
    "a block that the engine does not have": {1: 6, 2: NUM_BLOCKS},
}


@pytest.mark.parametrize("why", LOST)
def test_a_load_without_a_block_for_each_table_fails_whole(why: str):
    engine = Engine(stored())
    fetched(engine)
    engine.compute(LOADED, seed=9)
    engine.step(loads=(load(engine, LOST[why]),))
    assert engine.num_wrong(LOADED, seed=9) == 0, "something was written"
    assert engine.failed == engine.received == engine.not_received == {"r"}
    assert engine.invalid == set(), "with several tables, this would end vLLM"
    engine.close()


def test_a_load_from_slots_that_hold_something_else_fails_whole():
    engine = Engine(stored())
    fetched(engine, engine.chunks()[1:])
    engine.compute(LOADED, seed=9)
    engine.step(loads=(load(engine),))
    assert engine.failed == engine.received == engine.not_received == {"r"}
    assert engine.invalid == set(), "with several tables, this would end vLLM"
    engine.close()


@pytest.mark.parametrize("why", LOST)
def test_a_save_without_a_block_for_each_table_stores_nothing(why: str):
    store = MemoryStore("states")
    engine = Engine(store)
    engine.step(saves=saves(engine, LOST[why]))
    engine.settle(filled=len(engine.parts))
    assert {each.missed for each in engine.filled} == {ReadFault.IO_ERROR}
    assert store.stat().num_records == 0
    engine.close()


def test_states_that_are_not_finite_are_not_stored():
    store = MemoryStore("states")
    engine = Engine(store)
    engine.compute(SAVED, seed=3)
    engine.pages[0][SAVED[1]].view(torch.uint8)[..., -2:] = 0x7F  # a state, in float32
    engine.pages[0][SAVED[1]].view(torch.uint8)[..., -1:] = 0x7F
    engine.pages[0][SAVED[1]].view(torch.uint8)[..., -2:-1] = 0xC0
    engine.step(saves=saves(engine))
    engine.settle(filled=len(engine.parts), saved=len(engine.parts) - 1)
    assert store.stat().num_records == len(engine.parts) - 1
    engine.close()


def test_chunks_divide_the_tokens_between_two_states():
    store = MemoryStore("states")
    engine = Engine(store)
    assert engine.cache.context.chunk_tokens in (16, 32, 64)
    engine.close()
    with pytest.raises(ConfigError, match="chunk_tokens=48 does not divide the 64 tokens") as said:
        Engine(store, chunk_tokens=48)
    assert "\n" not in str(said.value)
    with pytest.raises(ConfigError, match="use a larger chunk_tokens"):
        Engine(store, chunk_tokens=1)
    small = replace(GROUP, num_layers=1, num_kv_heads=1, content_size=1)
    spec = replace(
        spec_of(described()),
        groups=(small,),
        shard=tensor_parallel_shard((small,), 0, 1),
        tables=(TablePart(table=0, group=0, layers=(0,), layer_names=("kv",), block_size=64),),
    )
    with pytest.raises(ConfigError, match=r"no chunk that divides the 64 tokens.*--block-size of"):
        PrefixCache(spec, {"store": store.url}, Counters(), store=store)


def test_the_namespace_has_the_form_of_states_and_a_model_without_has_its_old_name():
    store = MemoryStore("states")
    names = [
        PrefixCache(
            spec_of(states), {"store": store.url, "chunk_tokens": 64}, Counters(), store=store
        ).identity.first
        for states in (None, described(), described("gated delta net (Qwen3-Next)"))
    ]
    assert len(set(names)) == 3


WRONG_TABLES = {
    "two block sizes": lambda tables: (tables[0], replace(tables[1], block_size=32)),
    "a layer missing": lambda tables: tables[:1],
    "a layer twice": lambda tables: (*tables, replace(tables[0], table=3)),
}


@pytest.mark.parametrize("why", WRONG_TABLES)
def test_tables_that_do_not_hold_every_layer_once_are_refused(why: str):
    states = described()
    with pytest.raises(ConfigError, match="each must be in one table"):
        replace(states, tables=WRONG_TABLES[why](states.tables))

"""Builds a simulated host (`tests.simulated_host`) with the shared-storage connector."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from inspect import signature
from itertools import zip_longest
from typing import Any

from kvferry.blocks.copies import DeviceSetup
from kvferry.cache.build import PrefixCache
from kvferry.cache.deciding.host_pool import HostPool
from kvferry.contract.spec import DraftSpec, EngineSpec, Mode, StateSpec
from kvferry.keys import ModelIdentity
from kvferry.layout.shards import pipeline_shard
from kvferry.layout.states import components_of
from kvferry.observe import Counters, Observer
from kvferry.store.base import Store
from kvferry.types import KVGroup, StateKind, TablePart
from tests.cache.pools import check_pool, held_keys
from tests.host_tables import HostTable, parts_of_tables, table_per_group
from tests.simulated_host import SimulatedHost
from tests.state_models import StateModel

STATE_LAYERS = ((0, 2, 4), (1, 3))
"""The layers with recurrent states of the two tables that a model with such layers has."""


def make_groups(
    *, num_layers: int = 2, num_kv_heads: int = 2, head_dim: int = 4, block_size: int = 4
) -> tuple[KVGroup, ...]:
    """Return one small full-attention group."""
    return (
        KVGroup(
            num_layers=num_layers,
            num_kv_heads=num_kv_heads,
            content_size=2 * head_dim,
            dtype="float32",
            block_size=block_size,
        ),
    )


class CacheHost(SimulatedHost):
    """A simulated host with the connector's parts, one per rank, and what they share, as
    attributes."""

    parts: list[PrefixCache]
    pool: HostPool
    observer: Any

    def forget_memory(self) -> None:
        """Drop all chunks from memory, so that the next hit reads the store."""
        self.pool.clear()

    def forget_unpinned(self) -> None:
        """Drop the chunks that no request counts on."""
        for key in held_keys(self.pool):
            self.pool.drop(key)

    def stop(self) -> None:
        """Close every role, and the stores."""
        self.close()
        for part in self.parts:
            part.close()


def make_shared_storage_host(
    options: Mapping[str, Any],
    *,
    groups: tuple[KVGroup, ...] | None = None,
    world_size: int = 1,
    stages: Sequence[Sequence[tuple[int, int]]] = (),
    tables: Sequence[HostTable] | None = None,
    num_blocks: int = 64,
    weights: bytes = b"w" * 32,
    config: Mapping[str, Any] | None = None,
    observer: Observer | None = None,
    carries_worker_meta: bool = True,
    recomputes: bool = False,
    stores: Sequence[Store] = (),
    multi_process: bool = False,
    data_parallel_index: int = 0,
    mode: Mode = Mode.BOTH,
    clock: Callable[[], float] = time.monotonic,
    draw: Callable[[], float] = lambda: 0.5,
    setup: DeviceSetup | None = None,
    engine_id: str | None = None,
    ranks_per_machine: int | None = None,
    whole_items: bool = False,
    drafts: Callable[[int], DraftSpec] | None = None,
    states: StateModel | None = None,
    in_flight: int = 1,
) -> CacheHost:
    """Return a host with the shared-storage connector. `stages` are those of `pipeline_shard`,
    `drafts` describes the draft layers of a rank; `states` add layers with recurrent states, in two
    tables. Nothing is audited unless the options say so; `draw` then chooses the audited chunk,
    mostly the last."""
    groups = groups or make_groups()
    tables = tables or table_per_group(groups)
    if states is not None:
        size = groups[0].block_size
        tables = (*tables, *(HostTable(block_size=size, states=each) for each in STATE_LAYERS))
    stages = stages or [[(0, group.num_layers) for group in groups]]
    shards = [pipeline_shard(groups, rank, world_size, stages) for rank in range(world_size)]
    per_machine = ranks_per_machine or world_size
    specs = [
        EngineSpec(
            identity=ModelIdentity(weights=weights, config=config or {"model_type": "simulated"}),
            groups=groups,
            shard=shard,
            host_recomputes=recomputes,
            multi_process=multi_process,
            data_parallel_index=data_parallel_index,
            mode=mode,
            engine_id=engine_id,
            first_local_rank=shard.rank // per_machine * per_machine,
            whole_items=whole_items,
            tables=parts_of_tables(tables, shard),
            drafts=None if drafts is None else drafts(shard.rank),
            states=None if states is None else state_spec(states, tables, world_size),
        )
        for shard in shards
    ]
    observer = observer or Counters()
    parts = [
        PrefixCache(spec, {"audit": "off", **options}, observer, store=store)
        for spec, store in zip_longest(specs, stores)
    ]
    for part in parts:
        part.context = replace(part.context, clock=clock)
    scheduler = parts[0].scheduler(draw=draw)
    if not carries_worker_meta:
        scheduler.expect_no_reports()
    host = CacheHost(
        scheduler,
        [(spec, part.worker(setup)) for spec, part in zip(specs, parts, strict=True)],
        num_blocks=num_blocks,
        tables=tables,
        check=lambda: check_pool(scheduler.pool, scheduler.holds()),
        states=states,
        in_flight=in_flight,
    )
    host.parts, host.pool, host.observer = parts, scheduler.pool, observer
    return host


OF_HOSTS = frozenset(signature(make_shared_storage_host).parameters)
"""Keywords of a host; its others are options of the connector."""


def state_spec(model: StateModel, tables: Sequence[HostTable], world_size: int) -> StateSpec:
    components = components_of(model.kind, model.arrays(world_size, dim_first=False))
    return StateSpec(
        kinds=(StateKind(num_layers=sum(map(len, STATE_LAYERS)), components=components),),
        tables=tuple(
            TablePart(
                table=index,
                group=0,
                layers=table.states,
                layer_names=tuple(f"state.{layer}" for layer in table.states),
                block_size=table.block_size,
            )
            for index, table in enumerate(tables)
            if table.states
        ),
    )

"""The description of an engine, from which a connector is built, and the connector's two roles."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import Flag, auto

from kvferry.contract.scheduler import SchedulerRole
from kvferry.contract.worker import WorkerRole
from kvferry.errors import ConfigError
from kvferry.keys import ModelIdentity
from kvferry.types import KVGroup, RankShard, StateKind, TablePart


class Mode(Flag):
    """What an engine does with the cache unless a request asks for more. No request gets more of an
    engine that is `OFF`."""

    OFF = 0
    READ = auto()
    WRITE = auto()
    BOTH = READ | WRITE


@dataclass(frozen=True, slots=True, kw_only=True)
class StateSpec:
    """The recurrent states of a model, and where they stand in an engine.

    Attributes:
        kinds: the layers by the form of their states.
        tables: block tables of recurrent layers; `TablePart.group` is the index of a kind. A state
            after `n` tokens, a multiple of their block size, is one block of each. A host may move
            it: which block, it says in the step that fills it.

    Raises:
        ConfigError: the tables do not have one block size, or not every layer once.
    """

    kinds: tuple[StateKind, ...]
    tables: tuple[TablePart, ...]

    def __post_init__(self) -> None:
        sizes = {part.block_size for part in self.tables}
        layers = [(part.group, layer) for part in self.tables for layer in part.layers]
        expected = [(index, at) for index, kind in enumerate(self.kinds) for at in kind.layers]
        if len(sizes) != 1 or sorted(layers) != expected:
            raise ConfigError(
                f"tables with blocks of {sorted(sizes)} tokens hold {len(layers)} recurrent layers "
                f"of {len(expected)}: each must be in one table, and all blocks of one size"
            )

    @property
    def block_size(self) -> int:
        """Tokens between two states."""
        return self.tables[0].block_size

    @property
    def groups(self) -> tuple[tuple[KVGroup, ...], ...]:
        """The groups of the states of each kind of layers."""
        return tuple(kind.groups for kind in self.kinds)


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftSpec:
    """The draft layers of an engine: what they keep is stored beside chunks, and may lack.

    Attributes:
        drafter: digest of all that decides their KV besides the tokens and the model.
        groups: their KV, in tables that keep every block.
        shard: what this rank holds of the groups.
        tables: where the layers stand: in tables that hold layers of the model, too.
    """

    drafter: bytes
    groups: tuple[KVGroup, ...]
    shard: RankShard
    tables: tuple[TablePart, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSpec:
    """What a connector must know of the engine that it serves.

    Attributes:
        identity: what of the model decides KV bytes, besides tokens and geometry.
        groups: KV groups of the whole model. They decide the layout of a record and thus who can
            read it, so every host of a model must name the same groups.
        shard: the layers and heads of this rank; for a scheduler role, those of rank 0 (it reads
            `world_size` only).
        kv_layout: axes of the layer tensors, one of `kvferry.layout.spec.LAYOUTS`.
        multi_process: True if scheduler and worker roles are in different processes, so that
            several processes must be able to open the store. Several ranks always require that.
        data_parallel_index: position of this engine among those that a host starts with one
            configuration, from 0. It is added to the ports of the option `serve`, except to port 0.
        mode: whether it loads, saves, or both; a producer only writes, a consumer only reads.
        step_tokens: most tokens that the host computes in one step; None if it does not say.
        host_recomputes: True if the host recomputes a request from blocks that are reported as
            failed in a later step than that of their load. If the report comes in the step that
            completes the prompt, it does so before it samples the first token.
        host_publishes_events: True if the host publishes the events of `SchedulerRole.take_events`.
        chunk_multiple: chunks are so many tokens or a multiple, because the host has blocks that
            can only be stored whole.
        whole_items: True if the tokens of a multimodal item attend to each other in both
            directions: KV of a part of it is right only if one step computed the whole.
        engine_id: names this engine, in all its processes. Ranks that hold the same kv heads then
            share host memory; None: each has its own.
        first_local_rank: the first rank of this rank's machine, which has all up to this one.
        tables: how the host divides the layers over block tables. A scheduler role reads table,
            group, block size, window and chunk only, and needs a part for every table and group
            that some rank uses. The host may have further tables. None: one table per group, in
            order, with the group's block size, window and chunk; a single group then consists of
            every layer that the host registers.
        states: of a model with recurrent layers beside those with KV; None: it has none. With
            states no ranks count as replicas.
        drafts: of an engine that stores the KV of draft layers, too; None: it has none, or leaves
            them out.

    Raises:
        ConfigError: `tables` do not hold every layer of this rank once, or contradict each other or
            the groups.
    """

    identity: ModelIdentity
    groups: tuple[KVGroup, ...]
    shard: RankShard
    kv_layout: str = "BHNC"
    multi_process: bool = False
    data_parallel_index: int = 0
    mode: Mode = Mode.BOTH
    step_tokens: int | None = None
    host_recomputes: bool = False
    host_publishes_events: bool = False
    chunk_multiple: int = 1
    whole_items: bool = False
    engine_id: str | None = None
    first_local_rank: int = 0
    tables: tuple[TablePart, ...] | None = None
    states: StateSpec | None = None
    drafts: DraftSpec | None = None

    def __post_init__(self) -> None:
        if self.tables is not None:
            self._check_tables(self.tables)
        if self.states is not None and self.shard.num_replicas > 1:
            # Ranks with the same kv heads have other heads of the states, and so other records.
            object.__setattr__(self, "shard", replace(self.shard, num_replicas=1))

    @property
    def of_drafts(self) -> EngineSpec | None:
        """The same engine as if its draft layers were the model; None without any."""
        if self.drafts is None:
            return None
        of = self.drafts
        return replace(
            self, groups=of.groups, shard=of.shard, tables=of.tables, states=None, drafts=None
        )

    @property
    def table_parts(self) -> tuple[TablePart, ...]:
        """`tables`; if that is None, one part per group."""
        if self.tables is not None:
            return self.tables
        return tuple(
            TablePart(
                table=index,
                group=index,
                layers=tuple(range(shard.layers[1] - shard.layers[0])),
                layer_names=None,
                block_size=group.block_size,
                window=group.window,
                chunk=group.chunk,
            )
            for index, (group, shard) in enumerate(zip(self.groups, self.shard.groups, strict=True))
        )

    def _check_part(self, part: TablePart) -> None:
        if not 0 <= part.group < len(self.groups) or part.table < 0 or part.block_size < 1:
            raise ConfigError(f"{part} is no part of {len(self.groups)} KV groups")
        if part.layer_names is not None and len(part.layer_names) != len(part.layers):
            raise ConfigError(
                f"table {part.table} names {len(part.layer_names)} layers of KV group "
                f"{part.group} and has {len(part.layers)}"
            )
        window = self.groups[part.group].window
        if part.window is not None and (window is None or part.window < window):
            raise ConfigError(
                f"table {part.table} keeps {part.window} tokens, KV group {part.group} attends to "
                f"{'all' if window is None else window}"
            )
        tail, needed = self.groups[part.group].tail, part.window_in_blocks
        if tail is not None and (needed is None or tail < needed):
            raise ConfigError(
                f"a hit needs {'all' if needed is None else needed} tokens of table {part.table}, "
                f"a record has the last {tail} of KV group {part.group}"
            )
        chunk = self.groups[part.group].chunk
        if part.chunk not in (None, chunk):
            raise ConfigError(
                f"table {part.table} keeps chunks of {part.chunk} tokens, KV group {part.group} "
                f"attends in chunks of {chunk}"
            )

    def _check_tables(self, parts: tuple[TablePart, ...]) -> None:
        kinds: dict[int, tuple[int | None, ...]] = {}
        layers: list[list[int]] = [[] for _ in self.groups]
        for part in parts:
            self._check_part(part)
            kind = (part.block_size, part.window, part.chunk, self.groups[part.group].tail)
            if kinds.setdefault(part.table, kind) != kind:
                raise ConfigError(
                    f"table {part.table} has two block sizes, windows and chunks: "
                    f"{kinds[part.table]} and {kind}"
                )
            layers[part.group] += part.layers
        for index, (held, shard) in enumerate(zip(layers, self.shard.groups, strict=True)):
            expected = list(range(shard.layers[1] - shard.layers[0]))
            if sorted(held) != expected:
                raise ConfigError(
                    f"the tables hold layers {sorted(held)} of KV group {index}; this rank has "
                    f"{len(expected)} of them, each must be in one table"
                )


@dataclass(frozen=True, slots=True)
class Roles:
    """Both halves of a connector for an engine whose scheduler and only worker share a process."""

    scheduler: SchedulerRole
    worker: WorkerRole
    close_last: Callable[[], None] = lambda: None
    """Called once after both roles are closed: releases what they share."""
    wait_ready: Callable[[float], bool] = lambda _timeout: True
    """Called at the start of an engine. Blocks until look-ups can find everything stored, for at
    most so many seconds; True if they can. Earlier look-ups work, but may miss."""

"""The connectors by name, and what an engine says about itself to build one.

The only way from engines, adapters and the command line to a connector: they name it and hand over
an `EngineSpec`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, fields
from typing import Any, Protocol

from kvferry.contract.scheduler import SchedulerRole
from kvferry.contract.worker import WorkerRole
from kvferry.errors import ConfigError
from kvferry.keys import ModelIdentity
from kvferry.observe import Observer
from kvferry.store.base import Store
from kvferry.types import KVGroup, RankShard, TablePart


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSpec:
    """What a connector must know of the engine it serves.

    Attributes:
        identity: what decides KV bytes besides tokens and geometry.
        groups: KV groups of the whole model. They decide what a record looks like and who can read
            it, so every host of a model must name the same ones.
        shard: what this rank holds; for a scheduler role, that of rank 0 (only its `world_size` is
            read).
        layer_names: names of the layers of each group that this rank holds, in order; None for a
            single group that consists of every layer the host registers.
        kv_layout: axes of the layer tensors, one of `kvferry.layout.ops.LAYOUTS`.
        carries_worker_meta: True if the host brings `WorkerOutput.meta` to the scheduler role, so
            that hits can be verified before they are promised.
        multi_process: True if scheduler and worker roles live in different processes, so that the
            store must be one that several can open. Several ranks always may.
        loads: False for an engine that only stores (a producer).
        saves: False for an engine that only reads (a consumer).
        publishes: True if the host passes on what `SchedulerRole.take_events` says (the events of
            `kvferry.contract.events`).
        tables: how the host spreads the layers over block tables; `layer_names` is then not read. A
            scheduler role reads table, group, block size and window only, and needs a part for
            every table and group that some rank uses. Tables that no part names may exist. None:
            one table per group, in order, of the group's block size and window.

    Raises:
        ConfigError: tables that do not hold every layer of this rank once, or that contradict each
            other or the groups.
    """

    identity: ModelIdentity
    groups: tuple[KVGroup, ...]
    shard: RankShard
    layer_names: tuple[tuple[str, ...], ...] | None = None
    kv_layout: str = "BHNC"
    carries_worker_meta: bool = True
    multi_process: bool = False
    loads: bool = True
    saves: bool = True
    publishes: bool = False
    tables: tuple[TablePart, ...] | None = None

    def __post_init__(self) -> None:
        for part in self.tables or ():
            self._check_part(part)
        if self.tables is not None:
            self._check_tables(self.tables)

    @property
    def table_parts(self) -> tuple[TablePart, ...]:
        """`tables`, or what stands for it if there are none."""
        if self.tables is not None:
            return self.tables
        names = self.layer_names or (None,) * len(self.groups)
        return tuple(
            TablePart(
                table=index,
                group=index,
                layers=tuple(range(shard.layers[1] - shard.layers[0])),
                layer_names=names[index],
                block_size=group.block_size,
                window=group.window,
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

    def _check_tables(self, parts: tuple[TablePart, ...]) -> None:
        kinds: dict[int, tuple[int, int | None]] = {}
        layers: list[list[int]] = [[] for _ in self.groups]
        for part in parts:
            kind = (part.block_size, part.window)
            if kinds.setdefault(part.table, kind) != kind:
                raise ConfigError(
                    f"table {part.table} has two block sizes and windows: {kinds[part.table]} and "
                    f"{kind}"
                )
            layers[part.group] += part.layers
        for index, (held, shard) in enumerate(zip(layers, self.shard.groups, strict=True)):
            expected = list(range(shard.layers[1] - shard.layers[0]))
            if sorted(held) != expected:
                raise ConfigError(
                    f"the tables hold layers {sorted(held)} of KV group {index}; this rank has "
                    f"{len(expected)} of them, each must be in one table"
                )


def _nothing() -> None:
    """Roles that share nothing."""


def _ready(timeout: float) -> bool:
    """Roles with nothing to wait for."""
    return True


@dataclass(frozen=True, slots=True)
class Roles:
    """Both halves of a connector for an engine whose scheduler and only worker share a process."""

    scheduler: SchedulerRole
    worker: WorkerRole
    close_last: Callable[[], None] = _nothing
    """Called once after both roles are closed: releases what they share."""
    wait_ready: Callable[[float], bool] = _ready
    """Blocks for at most so many seconds until everything stored can be found; True if it can. For
    an engine that starts; look-ups work before, and may miss."""


@dataclass(frozen=True, slots=True)
class RankWorker:
    """The worker role of one rank, for a process that has no scheduler role."""

    worker: WorkerRole
    close_last: Callable[[], None] = _nothing
    """Called once after the role is closed."""


class ConnectorParts(Protocol):
    """One half of a connector for hosts that build each on its own, and what there is to say of it.

    `scheduler` or `worker` is called, once; `close` after that role is closed.
    """

    @property
    def store(self) -> Store: ...
    @property
    def namespace(self) -> bytes: ...
    @property
    def record_bytes(self) -> int: ...
    @property
    def block_multiple(self) -> int:
        """What promised hits are a multiple of, in tokens."""

    def scheduler(self) -> SchedulerRole: ...
    def worker(self) -> WorkerRole: ...
    def wait_ready(self, timeout: float) -> bool:
        """See `Roles.wait_ready`."""

    def close(self) -> None: ...


def open_parts(
    name: str,
    spec: EngineSpec,
    options: Mapping[str, Any],
    observer: Observer,
    *,
    where: str,
    schedules: bool,
    engine: str,
) -> ConnectorParts:
    """Open what connector `name` needs in this process; the caller takes one role from it.

    Args:
        name: "shared_storage".
        spec: the engine, and the rank for a worker role.
        options: the connector's own options; unknown keys are refused.
        observer: receives its counts.
        where: what the options belong to, the start of messages about them.
        schedules: whether the scheduler role is taken.
        engine: a name that no other engine of this process has: by it the two roles find each other
            if both are here.

    Raises:
        ConfigError: unknown name or option, or a store that cannot be used.
    """
    if name == "shared_storage":
        from kvferry.connectors.shared_storage.build import Parts

        return Parts(spec, options, observer, where=where, schedules=schedules, engine=engine)
    raise ConfigError(f"unknown connector {name!r}; known: shared_storage")


def create_roles(
    name: str,
    spec: EngineSpec,
    options: Mapping[str, Any],
    observer: Observer,
) -> Roles:
    """Build the connector `name`.

    Args:
        name: "shared_storage".
        spec: the engine.
        options: the connector's own options; unknown keys are refused.
        observer: receives its counts.

    Raises:
        ConfigError: unknown name or option, or a store that cannot be used.
    """
    if name == "shared_storage":
        from kvferry.connectors.shared_storage.build import create

        return create(spec, options, observer)
    raise ConfigError(f"unknown connector {name!r}; known: shared_storage")


def create_worker(
    name: str,
    spec: EngineSpec,
    options: Mapping[str, Any],
    observer: Observer,
) -> RankWorker:
    """Build the worker role of connector `name` for the rank that `spec.shard` says.

    Arguments and errors as for `create_roles`.
    """
    if name == "shared_storage":
        from kvferry.connectors.shared_storage.build import create_worker as create

        return create(spec, options, observer)
    raise ConfigError(f"unknown connector {name!r}; known: shared_storage")


def default_options(name: str) -> dict[str, Any]:
    """The options of connector `name` that have a default, with it.

    Raises:
        ConfigError: unknown name.
    """
    if name == "shared_storage":
        from kvferry.connectors.shared_storage.config import SharedStorageConfig

        return {
            option.name: option.default
            for option in fields(SharedStorageConfig)
            if option.default is not MISSING
        }
    raise ConfigError(f"unknown connector {name!r}; known: shared_storage")

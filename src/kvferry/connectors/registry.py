"""The connectors by name, and what an engine says about itself to build one.

The only way from engines, adapters and the command line to a connector: they name it and hand over
an `EngineSpec`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, fields
from typing import Any

from kvferry.contract.scheduler import SchedulerRole
from kvferry.contract.worker import WorkerRole
from kvferry.errors import ConfigError
from kvferry.keys import ModelIdentity
from kvferry.observe import Observer
from kvferry.types import KVGroup, RankShard


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSpec:
    """What a connector must know of the engine it serves.

    Attributes:
        identity: what decides KV bytes besides tokens and geometry.
        groups: KV groups of the whole model.
        shard: what this rank holds; for a scheduler role, that of rank 0 (only its `world_size` is
            read).
        layer_names: names of the layers of each group that this rank holds, in order; None for a
            single group that consists of every layer the host registers.
        kv_layout: axes of the layer tensors, one of `kvferry.layout.ops.LAYOUTS`.
        carries_worker_meta: True if the host brings `WorkerOutput.meta` to the scheduler role, so
            that hits can be verified before they are promised.
    """

    identity: ModelIdentity
    groups: tuple[KVGroup, ...]
    shard: RankShard
    layer_names: tuple[tuple[str, ...], ...] | None
    kv_layout: str = "BHNC"
    carries_worker_meta: bool = True


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

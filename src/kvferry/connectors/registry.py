"""The connectors by name: the only way to one from engines, adapters and the command line."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, fields
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

from kvferry.connectors.shared_storage.config import SharedStorageConfig
from kvferry.contract.spec import EngineSpec, RankWorker, Roles
from kvferry.errors import ConfigError
from kvferry.observe import Observer

if TYPE_CHECKING:
    from kvferry.connectors.shared_storage.build import Parts

CONNECTORS: Final = MappingProxyType({"shared_storage": SharedStorageConfig})
"""By name, the dataclass of a connector's options; read only."""


def open_parts(
    name: str,
    spec: EngineSpec,
    options: Mapping[str, Any],
    observer: Observer,
    *,
    schedules: bool,
    where: str | None = None,
) -> Parts:
    """Open what connector `name` needs in this process, for hosts that build the roles apart.

    Args:
        name: a key of `CONNECTORS`.
        spec: the engine, and the rank for a worker role.
        options: the connector's own options; unknown keys are refused.
        observer: receives its counts.
        schedules: whether the scheduler role will be asked for.
        where: what the options belong to, the start of messages about them; None: the connector.

    Raises:
        ConfigError: unknown name or option, or a store that cannot be used.
    """
    _config_of(name)
    # It needs torch, which the names and options above do not.
    from kvferry.connectors.shared_storage.build import Parts

    return Parts(spec, options, observer, where=where or f"{name} options", schedules=schedules)


def create_roles(
    name: str, spec: EngineSpec, options: Mapping[str, Any], observer: Observer
) -> Roles:
    """Both roles of connector `name`, for an engine whose scheduler and only worker share a
    process; arguments and errors as for `open_parts`."""
    parts = open_parts(name, spec, options, observer, schedules=True)
    return Roles(parts.scheduler(), parts.worker(), parts.close, parts.wait_ready)


def create_worker(
    name: str, spec: EngineSpec, options: Mapping[str, Any], observer: Observer
) -> RankWorker:
    """The worker role of connector `name` for the rank that `spec.shard` says, in a process of its
    own; arguments and errors as for `open_parts`."""
    parts = open_parts(name, spec, options, observer, schedules=False)
    return RankWorker(parts.worker(), parts.close)


def default_options(name: str) -> dict[str, Any]:
    """The options of connector `name` that have a default, with it.

    Raises:
        ConfigError: unknown name.
    """
    return {
        option.name: option.default
        for option in fields(_config_of(name))
        if option.default is not MISSING
    }


def _config_of(name: str) -> type[SharedStorageConfig]:
    if name not in CONNECTORS:
        raise ConfigError(f"unknown connector {name!r}; known: {', '.join(sorted(CONNECTORS))}")
    return CONNECTORS[name]

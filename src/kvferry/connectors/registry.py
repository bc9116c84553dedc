"""The connectors by name.

The only way from engines, adapters and the command line to a connector: they name it and hand over
an `EngineSpec`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import MISSING, fields
from types import MappingProxyType
from typing import Any, Final, NamedTuple, Protocol

from kvferry.connectors.shared_storage.config import SharedStorageConfig
from kvferry.contract.scheduler import SchedulerRole
from kvferry.contract.spec import EngineSpec, RankWorker, Roles
from kvferry.contract.worker import WorkerRole
from kvferry.errors import ConfigError
from kvferry.observe import Observer
from kvferry.store.base import Store


class ConnectorParts(Protocol):
    """One half of a connector, for hosts that build the halves apart.

    The host calls `scheduler` or `worker` once, and `close` after it closed that role.
    """

    @property
    def store(self) -> Store: ...
    @property
    def namespace(self) -> bytes: ...
    @property
    def record_bytes(self) -> int: ...
    @property
    def block_multiple(self) -> int:
        """In tokens; every hit is a multiple of it."""

    def scheduler(self) -> SchedulerRole: ...
    def worker(self) -> WorkerRole: ...
    def wait_ready(self, timeout: float) -> bool:
        """See `Roles.wait_ready`."""

    def close(self) -> None: ...


class _Factories(NamedTuple):
    """The constructors of one connector."""

    open_parts: Callable[..., ConnectorParts]
    """Called like `open_parts`, without the name."""
    create_roles: Callable[[EngineSpec, Mapping[str, Any], Observer], Roles]
    create_worker: Callable[[EngineSpec, Mapping[str, Any], Observer], RankWorker]


class _Connector(NamedTuple):
    config: type[Any]
    """The dataclass of its options."""
    factories: Callable[[], _Factories]
    """Imports the connector, which may need torch."""


def _shared_storage() -> _Factories:
    from kvferry.connectors.shared_storage import build

    return _Factories(build.Parts, build.create, build.create_worker)


CONNECTORS: Final[Mapping[str, _Connector]] = MappingProxyType(
    {"shared_storage": _Connector(SharedStorageConfig, _shared_storage)}
)
"""Every connector by name; read only."""


def open_parts(
    name: str,
    spec: EngineSpec,
    options: Mapping[str, Any],
    observer: Observer,
    *,
    where: str,
    schedules: bool,
) -> ConnectorParts:
    """Open what connector `name` needs in this process; the caller takes one role from it.

    Args:
        name: a key of `CONNECTORS`.
        spec: the engine, and the rank for a worker role.
        options: the connector's own options; unknown keys are refused.
        observer: receives its counts.
        where: what the options belong to, the start of messages about them.
        schedules: whether the scheduler role is taken.

    Raises:
        ConfigError: unknown name or option, or a store that cannot be used.
    """
    return (
        _connector(name)
        .factories()
        .open_parts(spec, options, observer, where=where, schedules=schedules)
    )


def create_roles(
    name: str, spec: EngineSpec, options: Mapping[str, Any], observer: Observer
) -> Roles:
    """Build both roles of connector `name`; arguments and errors as for `open_parts`."""
    return _connector(name).factories().create_roles(spec, options, observer)


def create_worker(
    name: str, spec: EngineSpec, options: Mapping[str, Any], observer: Observer
) -> RankWorker:
    """Build the worker role of connector `name` for the rank that `spec.shard` says.

    Arguments and errors as for `open_parts`.
    """
    return _connector(name).factories().create_worker(spec, options, observer)


def default_options(name: str) -> dict[str, Any]:
    """The options of connector `name` that have a default, with it.

    Raises:
        ConfigError: unknown name.
    """
    return {
        option.name: option.default
        for option in fields(_connector(name).config)
        if option.default is not MISSING
    }


def _connector(name: str) -> _Connector:
    if name not in CONNECTORS:
        raise ConfigError(f"unknown connector {name!r}; known: {', '.join(sorted(CONNECTORS))}")
    return CONNECTORS[name]

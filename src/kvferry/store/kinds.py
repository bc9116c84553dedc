"""Which kinds of stores there are: kvferry's own, and those that installed packages bring.

A package names a scheme and its `StoreKind` in the entry points of group `kvferry.stores`. Engines
and commands then open URLs of that scheme like any other (docs/store-authors.md).
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from functools import cache
from importlib.metadata import EntryPoint, entry_points

from kvferry.errors import ConfigError
from kvferry.store.kind import StoreKind

GROUP = "kvferry.stores"

MODULES: Mapping[str, str] = {
    "file": "kvferry.store.file",
    "memory": "kvferry.store.memory",
    **dict.fromkeys(("valkey", "valkeys", "redis", "rediss"), "kvferry.store.servers.valkey"),
    **dict.fromkeys(("s3", "gs", "az"), "kvferry.store.servers.objects"),
    "mooncake": "kvferry.store.servers.mooncake",
    "peer": "kvferry.store.servers.peer",
}
"""The module of each scheme of kvferry's own, which has a `StoreKind` named `KIND`. Loaded when a
URL names it."""


def schemes() -> list[str]:
    """The schemes of all kinds, kvferry's own first."""
    return [*MODULES, *sorted(_installed().keys() - MODULES.keys())]


def find_kind(scheme: str) -> StoreKind | None:
    """Return the kind of a scheme; None if there is none.

    Raises:
        ConfigError: an installed package names the scheme, and its kind cannot be used.
    """
    if scheme in MODULES:
        kind: StoreKind = importlib.import_module(MODULES[scheme]).KIND
        return kind
    named = _installed().get(scheme, ())
    if not named:
        return None
    if len(named) > 1:
        raise ConfigError(
            f"several packages bring a store for {scheme}://: "
            f"{', '.join(map(_shown, named))}; uninstall all but one"
        )
    return _load(named[0])


def kind_of(scheme: str) -> StoreKind:
    """Return the kind of a scheme, one of `schemes`. Raises as `find_kind`."""
    kind = find_kind(scheme)
    assert kind is not None, "a parsed URL has a scheme that is known"
    return kind


def is_peer(url: str) -> bool:
    """Whether a store's URL is one of peers (see `StoreKind`). A store that no kind opened has a
    URL of its own, which is none."""
    kind = find_kind(url.partition(":")[0])
    return kind is not None and kind.is_peer


def is_private(url: str) -> bool:
    """As `is_peer`, of stores in this process's memory."""
    kind = find_kind(url.partition(":")[0])
    return kind is not None and kind.is_private


def ends_with_process(url: str) -> bool:
    """Whether the store of a URL ends with a process, this one or that of a peer."""
    return is_private(url) or is_peer(url)


def _load(point: EntryPoint) -> StoreKind:
    try:
        found = point.load()
    except Exception as error:  # whatever a module raises that somebody else wrote
        raise ConfigError(
            f"{_shown(point)} cannot be loaded: {type(error).__name__}: "
            f"{' '.join(str(error).split())}"
        ) from error
    if not isinstance(found, StoreKind):
        raise ConfigError(
            f"{_shown(point)} is of type {type(found).__name__}, not a StoreKind; name it as "
            "module:KIND"
        )
    return found


def _shown(point: EntryPoint) -> str:
    package = "a package" if point.dist is None else f"{point.dist.name} {point.dist.version}"
    return f"{point.value} of {package}"


@cache
def _installed() -> Mapping[str, tuple[EntryPoint, ...]]:
    """The entry points of installed packages, by scheme. They stay what they were when a process
    asked first, as other imports do."""
    found: dict[str, tuple[EntryPoint, ...]] = {}
    for point in entry_points(group=GROUP):
        known = found.get(point.name, ())
        if all(point.value != each.value for each in known):  # found twice on the path
            found[point.name] = (*known, point)
    return found

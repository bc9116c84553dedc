"""`kv_connector_extra_config`: options of the shared-storage connector, and a store by default."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvferry.errors import ConfigError

KIND = "shared_storage"
"""The connector behind the plug-in."""

WHERE = "kv_connector_extra_config"

DEFAULT_MAX_BYTES = "10GiB"
"""Quota of the store that is used if none is named."""

_ALIAS = "shared_storage_path"
"""What configurations of vLLM's ExampleConnector (once SharedStorageConnector) call the store."""


def connector_options(extra: object) -> dict[str, Any]:
    """Options of the shared-storage connector from `kv_connector_extra_config`. Their types and
    names are checked where the connector is built.

    Raises:
        ConfigError: not an object.
    """
    if extra is not None and not isinstance(extra, Mapping):
        raise ConfigError(f"{WHERE} is a {type(extra).__name__}, not an object")
    options = dict(extra or {})
    path = options.pop(_ALIAS, None)
    if "store" not in options:
        options["store"] = _default_store() if path is None else f"file://{Path(path).absolute()}"
    return options


def _default_store() -> str:
    """In this user's cache directory: nobody else can write there."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    try:
        root = Path(base) if os.path.isabs(base) else Path.home() / ".cache"
    except RuntimeError as error:
        raise ConfigError(
            "no store is named and there is no home directory for one; set "
            '"store": "file:///absolute/directory?max_bytes=100GiB"'
        ) from error
    return f"file://{root / 'kvferry' / 'kv'}?max_bytes={DEFAULT_MAX_BYTES}"

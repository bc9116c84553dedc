"""Where the names of 0.1's import paths are now. For one release, the old path is an ImportError
that names the new one."""

from __future__ import annotations

from collections.abc import Callable
from types import MappingProxyType
from typing import Final, NoReturn

NEW_HOME: Final = "kvferry.v1"
"""The only import path of names that vLLM's documents name."""

MOVED_MODULES: Final = MappingProxyType(
    {
        "kvferry.aggregation": "kvferry.v1 (WorkerOutputFold to kvferry.contract.fold)",
        "kvferry.connectors": "kvferry.cache (SharedStorageConnector and its like to kvferry.v1)",
        "kvferry.contract.v1": NEW_HOME,
        "kvferry.runner": "kvferry.v1 (StepLifecycle to kvferry.contract.lifecycle)",
        "kvferry.topology": "kvferry.v1 (tensor_parallel_shard to kvferry.layout.shards)",
    }
)
"""Modules that are gone, by full name; each raises `moved` of its own name."""

MOVED_NAMES: Final = MappingProxyType(
    {
        "kvferry": ("KVConnectorBase_V1", "SharedStorageConnector"),
        "kvferry.contract": ("yield_req_data",),
        "kvferry.layout": (
            "copy_kv_blocks",
            "get_current_attn_backend",
            "get_kv_connector_cache_layout",
            "kv_postprocess_blksize_and_layout_on_receive",
            "kv_postprocess_blksize_on_receive",
            "kv_postprocess_layout_on_receive",
            "yield_req_data",
        ),
    }
)
"""Names that packages no longer have, by package; all are in `NEW_HOME`."""


def moved(module: str) -> ImportError:
    """The error of importing `module`, one of `MOVED_MODULES`."""
    return ImportError(f"{module} is gone: its names moved to {MOVED_MODULES[module]}")


def moved_names(package: str) -> Callable[[str], NoReturn]:
    """The module `__getattr__` of `package`, one of `MOVED_NAMES`."""

    def missing(name: str) -> NoReturn:
        if name in MOVED_NAMES[package]:
            raise ImportError(f"{package}.{name} moved: import it from {NEW_HOME}")
        raise AttributeError(f"module {package!r} has no attribute {name!r}")

    return missing

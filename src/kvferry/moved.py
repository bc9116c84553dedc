"""New places of what 0.1 exported. For one release, the import of an old path raises an ImportError
that names the new one. `kvferry` and the packages in `MOVED_NAMES` install these hooks."""

from __future__ import annotations

from collections.abc import Callable
from types import MappingProxyType
from typing import Final, NoReturn

NEW_HOME: Final = "kvferry.v1"
"""The only import path of the names that vLLM's documents use."""

MOVED_MODULES: Final = MappingProxyType(
    {
        "kvferry.aggregation": "kvferry.v1 (WorkerOutputFold to kvferry.contract.fold)",
        "kvferry.connectors": "kvferry.cache (SharedStorageConnector and its like to kvferry.v1)",
        "kvferry.contract.faults": "kvferry.contract.rules",
        "kvferry.contract.promises": "kvferry.contract.rules and kvferry.contract.asynchronous",
        "kvferry.contract.reports": "kvferry.contract.rules and kvferry.contract.asynchronous",
        "kvferry.contract.v1": NEW_HOME,
        "kvferry.keys.weights": "kvferry.identity.weights",
        "kvferry.layout.blocks": NEW_HOME,
        "kvferry.layout.host": NEW_HOME,
        "kvferry.layout.postprocess": NEW_HOME,
        "kvferry.runner": "kvferry.v1 (StepLifecycle to kvferry.contract.lifecycle)",
        "kvferry.store.breaker": "kvferry.store.tiers",
        "kvferry.layout.numpy_copies": "kvferry.layout.ops",
        "kvferry.store.checking": "kvferry.store.maintenance",
        "kvferry.store.known_keys": "kvferry.store.file.index",
        "kvferry.store.late": "kvferry.store.tiers",
        "kvferry.store.mooncake": "kvferry.store.servers.mooncake",
        "kvferry.store.objects": "kvferry.store.servers.objects",
        "kvferry.store.part_files": "kvferry.cache.memory",
        "kvferry.store.remote": "kvferry.store.servers.remote",
        "kvferry.store.server_keys": "kvferry.store.servers.server_keys",
        "kvferry.store.tier": "kvferry.store.tiers",
        "kvferry.store.tiered": "kvferry.store.tiers",
        "kvferry.store.valkey": "kvferry.store.servers.valkey",
        "kvferry.topology": "kvferry.v1 (tensor_parallel_shard to kvferry.layout.shards)",
    }
)
"""New place of each module that is gone, by its old full name."""

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
"""Names that moved to `NEW_HOME`, by the package that no longer has them."""


class MovedModules:
    """The last finder in `sys.meta_path`, asked only for modules that no other finder has. It
    replaces a stub file for each module that is gone."""

    @staticmethod
    def find_spec(name: str, _path: object = None, _target: object = None) -> None:
        """Raise ImportError if `name` is in `MOVED_MODULES`; else find nothing."""
        if name in MOVED_MODULES:
            raise ImportError(
                f"{name} is gone: its names moved to {MOVED_MODULES[name]}", name=name
            )


def moved_names(package: str) -> Callable[[str], NoReturn]:
    """Return a module `__getattr__` for `package`, a key of `MOVED_NAMES`. It always raises."""

    def missing(name: str) -> NoReturn:
        if name in MOVED_NAMES[package]:
            raise ImportError(f"{package}.{name} moved: import it from {NEW_HOME}")
        raise AttributeError(f"module {package!r} has no attribute {name!r}")

    return missing

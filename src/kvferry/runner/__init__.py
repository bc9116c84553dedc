"""Drives a connector's worker through the steps of a model runner, and allocates KV memory.

The names below are those of vLLM's model-runner mixin. They are imported on first use, because
driving a step needs no torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvferry.runner.kv_allocation import allocate_uniform_kv_caches, use_uniform_kv_cache
    from kvferry.runner.mixin import KVConnectorModelRunnerMixin

__all__ = ["KVConnectorModelRunnerMixin", "allocate_uniform_kv_caches", "use_uniform_kv_cache"]

_MODULES = {
    "KVConnectorModelRunnerMixin": "kvferry.runner.mixin",
    "allocate_uniform_kv_caches": "kvferry.runner.kv_allocation",
    "use_uniform_kv_cache": "kvferry.runner.kv_allocation",
}


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module 'kvferry.runner' has no attribute {name!r}")
    value: object = getattr(importlib.import_module(_MODULES[name]), name)
    globals()[name] = value  # the next use does not come here
    return value

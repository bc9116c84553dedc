"""The public names of kvferry, a KV cache that is either right or a miss.

All names but the errors load on first use, so `import kvferry` is quick and loads no torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from kvferry.errors import (
    ConfigError,
    ContractError,
    Fault,
    FaultKind,
    KVError,
    LayoutError,
    RankError,
    StoreError,
    StorePlaceError,
    TopologyError,
    TransferError,
)

if TYPE_CHECKING:
    from kvferry.engine import LLM, SamplingParams
    from kvferry.keys import ChunkKeys
    from kvferry.store.base import Store
    from kvferry.store.url import open_store

    __version__: str

__all__ = [
    "LLM",
    "ChunkKeys",
    "ConfigError",
    "ContractError",
    "Fault",
    "FaultKind",
    "KVError",
    "LayoutError",
    "RankError",
    "SamplingParams",
    "Store",
    "StoreError",
    "StorePlaceError",
    "TopologyError",
    "TransferError",
    "__version__",
    "open_store",
]

_MODULES = {
    "LLM": "kvferry.engine",
    "ChunkKeys": "kvferry.keys",
    "SamplingParams": "kvferry.engine",
    "Store": "kvferry.store.base",
    "open_store": "kvferry.store.url",
}


def __getattr__(name: str) -> object:
    if name == "__version__":
        # Read on demand, because that takes longer than the rest of this module.
        return importlib.import_module("importlib.metadata").version("kvferry")
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value: object = getattr(importlib.import_module(_MODULES[name]), name)
    globals()[name] = value  # later uses do not come here
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})

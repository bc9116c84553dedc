"""Prefix reuse through a store: keys → index → host pool → blocks, and back.

Read in this order: `messages`, `host_pool`, `lookup`, `save_plan`, `audits`,
`scheduler`, `slot_io`, `worker`, `build`. The names of vLLM's connector of this name are in `v1`
and exported here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvferry.connectors.shared_storage.v1 import (
        ReqMeta,
        SharedStorageConnector,
        SharedStorageConnectorMetadata,
        align_to_block_size,
    )

__all__ = [
    "ReqMeta",
    "SharedStorageConnector",
    "SharedStorageConnectorMetadata",
    "align_to_block_size",
]


def __getattr__(name: str) -> Any:  # noqa: ANN401 - PEP 562
    """Import `v1`, which needs torch, only when one of its names is asked for."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from kvferry.connectors.shared_storage import v1

    return getattr(v1, name)

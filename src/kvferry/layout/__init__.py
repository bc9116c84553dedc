"""Where a token's KV lies: named layouts, runs of blocks, and the copies between them and rows.

The names below are those of vLLM's connector utilities. They load on first use: what of this
package only computes stays free of torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvferry.layout.blocks import copy_kv_blocks
    from kvferry.layout.host import (
        get_current_attn_backend,
        get_kv_connector_cache_layout,
        yield_req_data,
    )
    from kvferry.layout.postprocess import (
        kv_postprocess_blksize_and_layout_on_receive,
        kv_postprocess_blksize_on_receive,
        kv_postprocess_layout_on_receive,
    )

__all__ = [
    "copy_kv_blocks",
    "get_current_attn_backend",
    "get_kv_connector_cache_layout",
    "kv_postprocess_blksize_and_layout_on_receive",
    "kv_postprocess_blksize_on_receive",
    "kv_postprocess_layout_on_receive",
    "yield_req_data",
]

_MODULES = {
    "copy_kv_blocks": "kvferry.layout.blocks",
    "get_current_attn_backend": "kvferry.layout.host",
    "get_kv_connector_cache_layout": "kvferry.layout.host",
    "kv_postprocess_blksize_and_layout_on_receive": "kvferry.layout.postprocess",
    "kv_postprocess_blksize_on_receive": "kvferry.layout.postprocess",
    "kv_postprocess_layout_on_receive": "kvferry.layout.postprocess",
    "yield_req_data": "kvferry.layout.host",
}


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module 'kvferry.layout' has no attribute {name!r}")
    value: object = getattr(importlib.import_module(_MODULES[name]), name)
    globals()[name] = value  # the next use does not come here
    return value

"""The names of vLLM's V1 connectors. A connector written for vLLM runs in our engine through these
names, and ours runs in any host of V1 connectors.

Most files follow vLLM's: `base` has the connector class, with the types around it in `types`;
`mixin` the model-runner mixin, with uniform KV caches in `kv_allocation`; `utilities` and
`block_copies` the connector utilities; `shared_storage` the connector of that name. Of our own,
`facade` presents our roles as a V1 class, with the host's requests and steps translated by `host`;
`running_model` has the identity of the host's model; `driven` runs a V1 class as our roles.

No package that this one builds on imports these names. Names that need torch load on first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from kvferry.v1.base import KVConnectorBase_V1
from kvferry.v1.driven import Release, V1SchedulerRole, V1WorkerRole, v1_config, v1_roles
from kvferry.v1.facade import RolesAsV1
from kvferry.v1.types import (
    AttentionMetadata,
    CachedRequestData,
    CopyBlocksOp,
    ForwardContext,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorOutput,
    KVConnectorRole,
    KVConnectorStats,
    KVConnectorWorkerMetadata,
    MLACommonMetadata,
    NewRequestData,
    SchedulerOutput,
    SupportsHMA,
    V1Blocks,
    V1Config,
    V1Request,
    supports_hma,
)
from kvferry.v1.utilities import (
    EngineId,
    KVOutputAggregator,
    TpKVTopology,
    get_current_attn_backend,
    get_kv_connector_cache_layout,
    yield_req_data,
)

if TYPE_CHECKING:
    from kvferry.v1.block_copies import (
        copy_kv_blocks,
        kv_postprocess_blksize_and_layout_on_receive,
        kv_postprocess_blksize_on_receive,
        kv_postprocess_layout_on_receive,
    )
    from kvferry.v1.kv_allocation import allocate_uniform_kv_caches, use_uniform_kv_cache
    from kvferry.v1.mixin import KVConnectorModelRunnerMixin
    from kvferry.v1.shared_storage import (
        ReqMeta,
        SharedStorageConnector,
        SharedStorageConnectorMetadata,
        align_to_block_size,
    )

__all__ = [
    "AttentionMetadata",
    "CachedRequestData",
    "CopyBlocksOp",
    "EngineId",
    "ForwardContext",
    "KVConnectorBase_V1",
    "KVConnectorHandshakeMetadata",
    "KVConnectorMetadata",
    "KVConnectorModelRunnerMixin",
    "KVConnectorOutput",
    "KVConnectorRole",
    "KVConnectorStats",
    "KVConnectorWorkerMetadata",
    "KVOutputAggregator",
    "MLACommonMetadata",
    "NewRequestData",
    "Release",
    "ReqMeta",
    "RolesAsV1",
    "SchedulerOutput",
    "SharedStorageConnector",
    "SharedStorageConnectorMetadata",
    "SupportsHMA",
    "TpKVTopology",
    "V1Blocks",
    "V1Config",
    "V1Request",
    "V1SchedulerRole",
    "V1WorkerRole",
    "align_to_block_size",
    "allocate_uniform_kv_caches",
    "copy_kv_blocks",
    "get_current_attn_backend",
    "get_kv_connector_cache_layout",
    "kv_postprocess_blksize_and_layout_on_receive",
    "kv_postprocess_blksize_on_receive",
    "kv_postprocess_layout_on_receive",
    "supports_hma",
    "use_uniform_kv_cache",
    "v1_config",
    "v1_roles",
    "yield_req_data",
]

_MODULES = {
    "KVConnectorModelRunnerMixin": "kvferry.v1.mixin",
    "ReqMeta": "kvferry.v1.shared_storage",
    "SharedStorageConnector": "kvferry.v1.shared_storage",
    "SharedStorageConnectorMetadata": "kvferry.v1.shared_storage",
    "align_to_block_size": "kvferry.v1.shared_storage",
    "allocate_uniform_kv_caches": "kvferry.v1.kv_allocation",
    "copy_kv_blocks": "kvferry.v1.block_copies",
    "kv_postprocess_blksize_and_layout_on_receive": "kvferry.v1.block_copies",
    "kv_postprocess_blksize_on_receive": "kvferry.v1.block_copies",
    "kv_postprocess_layout_on_receive": "kvferry.v1.block_copies",
    "use_uniform_kv_cache": "kvferry.v1.kv_allocation",
}


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module 'kvferry.v1' has no attribute {name!r}")
    value: object = getattr(importlib.import_module(_MODULES[name]), name)
    globals()[name] = value  # the next use does not come here
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})

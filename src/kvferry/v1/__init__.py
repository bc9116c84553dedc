"""vLLM's one-class connector: connectors written for it run here, and ours run in its hosts.

`base` has the class and the types around it, under vLLM's names. `facade` shows one of our roles as
such a class; `host` reads the host's requests and steps for it. `driven` is the other direction:
our engine drives a connector of that class.
"""

from __future__ import annotations

from kvferry.v1.base import (
    CarriedMeta,
    CopyBlocksOp,
    CounterStats,
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorOutput,
    KVConnectorRole,
    KVConnectorStats,
    KVConnectorWorkerMetadata,
    PlanMetadata,
    SupportsHMA,
    V1Blocks,
    V1CacheConfig,
    V1CachedRequests,
    V1Config,
    V1ForwardContext,
    V1ModelConfig,
    V1NewRequest,
    V1ParallelConfig,
    V1Request,
    V1SchedulerOutput,
    V1TransferConfig,
    supports_hma,
)
from kvferry.v1.driven import (
    AttentionMetadata,
    CachedRequestData,
    ForwardContext,
    MLACommonMetadata,
    NewRequestData,
    Release,
    SchedulerOutput,
    V1SchedulerRole,
    V1WorkerRole,
    v1_config,
    v1_roles,
)
from kvferry.v1.facade import (
    OneRole,
    RolesAsV1,
)

__all__ = [
    "AttentionMetadata",
    "CachedRequestData",
    "CarriedMeta",
    "CopyBlocksOp",
    "CounterStats",
    "ForwardContext",
    "KVConnectorBase_V1",
    "KVConnectorHandshakeMetadata",
    "KVConnectorMetadata",
    "KVConnectorOutput",
    "KVConnectorRole",
    "KVConnectorStats",
    "KVConnectorWorkerMetadata",
    "MLACommonMetadata",
    "NewRequestData",
    "OneRole",
    "PlanMetadata",
    "Release",
    "RolesAsV1",
    "SchedulerOutput",
    "SupportsHMA",
    "V1Blocks",
    "V1CacheConfig",
    "V1CachedRequests",
    "V1Config",
    "V1ForwardContext",
    "V1ModelConfig",
    "V1NewRequest",
    "V1ParallelConfig",
    "V1Request",
    "V1SchedulerOutput",
    "V1SchedulerRole",
    "V1TransferConfig",
    "V1WorkerRole",
    "supports_hma",
    "v1_config",
    "v1_roles",
]

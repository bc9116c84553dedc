"""vLLM's one-class connector: connectors written for it run here, and ours run in its hosts.

`base` has the class and `types` the types around it, under vLLM's names. `facade` shows one of our
roles as such a class; `host` reads the host's requests and steps for it. `driven` is the other
direction: our engine drives a connector of that class.
"""

from __future__ import annotations

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

__all__ = [
    "AttentionMetadata",
    "CachedRequestData",
    "CopyBlocksOp",
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
    "Release",
    "RolesAsV1",
    "SchedulerOutput",
    "SupportsHMA",
    "V1Blocks",
    "V1Config",
    "V1Request",
    "V1SchedulerRole",
    "V1WorkerRole",
    "supports_hma",
    "v1_config",
    "v1_roles",
]

"""Makes keys of token ids and a model's identity. Keys are equal wherever the KV bytes are."""

from kvferry.keys.chain import (
    KEY_VERSION,
    MARK_BYTES,
    ChunkKeys,
    ShardKeys,
    salt_mark,
    state_key,
    state_keys,
)
from kvferry.keys.encoding import JsonValue
from kvferry.keys.namespace import (
    HOST_FIELDS,
    UNREAD,
    ModelIdentity,
    Namespace,
    relevant_config,
)
from kvferry.keys.opaque import opaque_key, opaque_namespace

__all__ = [
    "HOST_FIELDS",
    "KEY_VERSION",
    "MARK_BYTES",
    "UNREAD",
    "ChunkKeys",
    "JsonValue",
    "ModelIdentity",
    "Namespace",
    "ShardKeys",
    "opaque_key",
    "opaque_namespace",
    "relevant_config",
    "salt_mark",
    "state_key",
    "state_keys",
]

"""Content identity: token ids and model to keys that are equal wherever the KV bytes are."""

from kvferry.keys.chain import KEY_VERSION, ChunkKeys
from kvferry.keys.encoding import JsonValue
from kvferry.keys.namespace import ModelIdentity, Namespace, relevant_config
from kvferry.keys.weights import effective_config, newest_change, weights_digest, weights_state

__all__ = [
    "KEY_VERSION",
    "ChunkKeys",
    "JsonValue",
    "ModelIdentity",
    "Namespace",
    "effective_config",
    "newest_change",
    "relevant_config",
    "weights_digest",
    "weights_state",
]

"""Content identity: token ids and model to keys that are equal wherever the KV bytes are."""

from kvferry.keys.chain import KEY_VERSION, ChunkKeys
from kvferry.keys.encoding import JsonValue
from kvferry.keys.namespace import ModelIdentity, Namespace, relevant_config
from kvferry.keys.weights import effective_config, weights_digest

__all__ = [
    "KEY_VERSION",
    "ChunkKeys",
    "JsonValue",
    "ModelIdentity",
    "Namespace",
    "effective_config",
    "relevant_config",
    "weights_digest",
]

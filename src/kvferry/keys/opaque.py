"""Keys and namespaces of opaque records: rows that a host hands over under a hash of its own.

Hosts' adapters use it. A host's hash stands for tokens that are not known here, and only the host
knows the layout of its rows. So the namespace describes all that gives hashes and rows their
meaning. It differs from every namespace of tokens: neither kind finds the other's records.
"""

from __future__ import annotations

from collections.abc import Mapping

from blake3 import blake3

from kvferry.errors import ConfigError
from kvferry.keys.chain import KEY_VERSION
from kvferry.keys.encoding import JsonValue
from kvferry.keys.namespace import OPAQUE, ModelIdentity, Namespace
from kvferry.types import FORMAT_VERSION, ChunkKey

ROW_TAG = b"kvferry.row.v1.\0"
"""16 bytes that neither chunk keys nor namespaces begin with."""


def opaque_namespace(
    identity: ModelIdentity,
    host: Mapping[str, JsonValue],
    *,
    row_bytes: int,
    chunk_tokens: int,
    tenant: str = "",
) -> Namespace:
    """Make the namespace of a host's rows.

    Args:
        identity: identity of the model.
        host: everything else that gives the host's hashes and the bytes of its rows their meaning:
            name and release, hash algorithm and seed, chunking, groups, layout, dtype, ranks.
        row_bytes: size of every row in bytes.
        chunk_tokens: number of tokens that a row of the host's first group stands for.
        tenant: tenant whose records are kept apart.

    Raises:
        ConfigError: sizes below 1, or a value without a canonical encoding.
    """
    if row_bytes < 1 or chunk_tokens < 1:
        raise ConfigError(f"a row has {row_bytes} bytes of {chunk_tokens} tokens; both are above 0")
    return Namespace.described(
        {
            "kind": OPAQUE,
            "format_version": FORMAT_VERSION,
            "key_version": KEY_VERSION,
            "weights": identity.weights.hex(),
            "weights_by_name": False,
            "weights_version": identity.weights_version,
            "config": identity.config,
            "host": host,
            "row_bytes": row_bytes,
            "chunk_tokens": chunk_tokens,
            "tenant": tenant,
        },
        identity.name,
    )


def opaque_key(namespace: bytes, host_key: bytes) -> ChunkKey:
    """Return the key of the row that a host calls `host_key`, which may be any bytes."""
    return ChunkKey(blake3(b"".join((ROW_TAG, namespace, host_key))).digest())

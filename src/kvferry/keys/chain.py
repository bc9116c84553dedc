"""Hashes token ids to chunk keys: a chain of BLAKE3, in which each key stands for its whole prefix.

    key_i = BLAKE3(tag | parent_i | num_tokens u32 | token ids u32... | extra keys)
    parent_0 = namespace digest        parent_i = key_(i-1)

The same ids give the same keys in every process, Python and platform (golden vectors in
`tests/keys/golden.json`, exact bytes in `docs/format.md`).
"""

from __future__ import annotations

import operator
import sys
from array import array
from collections.abc import Sequence
from typing import Any, SupportsIndex

from blake3 import blake3

from kvferry.errors import ConfigError, ContractError
from kvferry.keys.encoding import JsonValue, canonical
from kvferry.types import NO_EXTRA_KEYS, ChunkKey, ExtraKeys, ShardRows

KEY_VERSION = 1
CHUNK_TAG = b"kvferry.chunk.1\0"
"""16 bytes that no namespace encoding starts with, so no chunk key equals a namespace's digest."""


STATE_TAG = b"kvferry.state.1\0"
"""16 bytes that neither a namespace encoding nor the hash of a chunk starts with."""


def state_keys(chunk: ChunkKey, num_parts: int) -> list[ChunkKey]:
    """Return the keys of the parts of the state behind a chunk: what a model keeps, besides the KV
    of chunks, after the tokens that end with it."""
    return [state_key(chunk, part) for part in range(num_parts)]


def state_key(chunk: ChunkKey, part: int) -> ChunkKey:
    """Return the key of one part, by its number; see `state_keys`."""
    return ChunkKey(blake3(b"".join((STATE_TAG, chunk, part.to_bytes(4, "little")))).digest())


SHARD_TAG = b"kvferry.shard.1\0"
"""16 bytes that begin neither a namespace encoding nor the hash of a chunk or a state."""


DRAFT_TAG = b"kvferry.draft.1\0"
"""16 bytes that begin none of the others."""


class ShardKeys:
    """Makes the keys of the records that have a shard's rows alone. They are named by what they
    hold, so ranks that hold the same write one record.

    Args:
        shard: the rows of each component; of nothing: all rows, whose record is the whole one.
        drafter: digest of the drafter, if the rows are those of its layers (`record.drafts`).
    """

    def __init__(self, shard: Sequence[ShardRows], drafter: bytes = b"") -> None:
        ranges: list[JsonValue] = [[*rows.layers, *rows.heads] for rows in shard]
        self._tag = DRAFT_TAG if drafter else SHARD_TAG
        self._suffix = drafter + canonical(ranges) if ranges else b""

    def of(self, key: ChunkKey) -> ChunkKey:
        """Return the key, given that of the whole record."""
        if not self._suffix:
            return key
        return ChunkKey(blake3(b"".join((self._tag, key, self._suffix))).digest())


SALT_TAG = "kvferry.salt.1"
MARK_BYTES = 16


def salt_mark(namespace: bytes, salt: str | None) -> bytes:
    """Return the mark of a cache salt in a namespace, which records carry so that they are found by
    their salt; empty without a salt. It is a keyed hash, so it shows nothing of the salt without a
    guess of it, and differs by namespace."""
    if salt is None:
        return b""
    key = blake3(namespace, derive_key_context=SALT_TAG).digest()
    return blake3(salt.encode("utf-8", "surrogatepass"), key=key).digest(length=MARK_BYTES)


class ChunkKeys:
    """The keys of the whole chunks of one token sequence, such as a request. Each chunk is hashed
    once, and the keys grow as tokens arrive.

    Not thread-safe: it belongs to the thread that owns the request.

    Args:
        namespace: digest of everything that decides KV bytes besides tokens and extra keys.
        chunk_tokens: number of tokens per chunk.
        extra_keys: whatever else decides the bytes. Salt, LoRA and embeddings digest enter *every*
            chunk, so that no key relies on its parent for isolation. A multimodal item enters each
            chunk that it overlaps, with its offset from the start of that chunk. If not
            `cacheable`, `keys` stays empty.

    Attributes:
        mark: `salt_mark` of the salt, for the records of these keys.

    Raises:
        ConfigError: a namespace that is not 32 bytes, or `chunk_tokens` below 1.
        ContractError: a multimodal item with a negative offset or without tokens.
    """

    __slots__ = ("_cacheable", "_extra", "_namespace", "chunk_tokens", "keys", "mark")

    def __init__(
        self, namespace: bytes, chunk_tokens: int, extra_keys: ExtraKeys = NO_EXTRA_KEYS
    ) -> None:
        if len(namespace) != 32:
            raise ConfigError(f"a namespace digest has 32 bytes, not {len(namespace)}")
        if chunk_tokens < 1:
            raise ConfigError(f"chunk_tokens must be at least 1, not {chunk_tokens}")
        self.chunk_tokens = chunk_tokens
        self.keys: list[ChunkKey] = []
        self.mark = salt_mark(namespace, extra_keys.cache_salt)
        self._namespace = namespace
        self._cacheable = extra_keys.cacheable
        self._extra = _ExtraEncoder(extra_keys, chunk_tokens)

    def extend(self, token_ids: Sequence[int]) -> None:
        """Hash the whole chunks of `token_ids` that are not hashed yet.

        Args:
            token_ids: *all* ids of the request so far, prompt first. Ids that are hashed must not
                change, which is not checked; ids after the last whole chunk may.

        Raises:
            ContractError: fewer ids than were hashed already, or an id that is no unsigned 32-bit
                integer. The keys are then as before.
        """
        size = self.chunk_tokens
        first, stop = len(self.keys), len(token_ids) // size
        if stop < first:
            raise ContractError(
                f"{first * size} tokens are hashed but the request now has {len(token_ids)}: "
                "token ids may only grow; give the changed request a new ChunkKeys"
            )
        if stop == first or not self._cacheable:
            return
        packed = _pack(token_ids[first * size : stop * size], first * size)
        self.keys.extend(self._hash(packed, first))

    def _hash(self, packed: bytes, first: int) -> list[ChunkKey]:
        size = self.chunk_tokens
        count = size.to_bytes(4, "little")
        parent = self.keys[-1] if self.keys else self._namespace
        keys = []
        index = first
        extra_of = self._extra.encode
        for at in range(0, len(packed), 4 * size):
            parent = blake3(
                b"".join((CHUNK_TAG, parent, count, packed[at : at + 4 * size], extra_of(index)))
            ).digest()
            keys.append(ChunkKey(parent))
            index += 1
        return keys


class _ExtraEncoder:
    """Encodes the extra keys of each chunk: empty without any, else a canonical mapping."""

    __slots__ = ("_chunk_tokens", "_common", "_encoded", "_items")

    def __init__(self, extra: ExtraKeys, chunk_tokens: int) -> None:
        common: dict[str, JsonValue] = {}
        if extra.cache_salt is not None:
            common["salt"] = extra.cache_salt
        if extra.lora is not None:
            common["lora"] = extra.lora
        if extra.embeds_digest is not None:
            common["embeds"] = extra.embeds_digest.hex()
        for item in extra.items:
            if item.offset < 0 or item.length < 1:
                raise ContractError(
                    f"multimodal item {item.digest!r} has offset {item.offset} and length "
                    f"{item.length}; it must start at 0 or later and hold a token"
                )
        self._common = common
        self._encoded = canonical(common) if common else b""
        self._items = tuple(sorted(extra.items, key=lambda i: (i.offset, i.length, i.digest)))
        self._chunk_tokens = chunk_tokens

    def encode(self, chunk: int) -> bytes:
        if not self._items:
            return self._encoded
        start = chunk * self._chunk_tokens
        touching: list[JsonValue] = [
            [item.digest, item.offset - start, item.length]
            for item in self._items
            if item.offset < start + self._chunk_tokens and item.offset + item.length > start
        ]
        return canonical({**self._common, "items": touching}) if touching else self._encoded


def _pack(token_ids: Sequence[int], first: int) -> bytes:
    """Pack token ids as little-endian u32. `first` is the first one's position, for messages."""
    # For arrays of NumPy and PyTorch, one call is faster than iterating over boxed items.
    ids: Any = token_ids.tolist() if hasattr(token_ids, "tolist") else token_ids
    if not isinstance(ids, list):
        # A list also of bytes: array("I", b"...") would read them as packed machine words.
        ids = list(ids)
    try:
        packed = array("I", ids)
    except (TypeError, OverflowError) as error:
        bad = next((i for i, token in enumerate(ids) if not _is_token_id(token)), 0)
        raise ContractError(
            f"token {first + bad} is {ids[bad]!r}; token ids are integers from 0 to 2**32 - 1"
        ) from error
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


def _is_token_id(token: SupportsIndex) -> bool:
    try:
        return 0 <= operator.index(token) < 2**32
    except TypeError:
        return False

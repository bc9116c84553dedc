"""What becomes and ceases to be available, for hosts that publish it (cache-aware routers)."""

from __future__ import annotations

from dataclasses import dataclass

from kvferry.types import ExtraKeys


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkStored:
    """A chunk can be read by every engine that shares the store.

    Attributes:
        key: its identity.
        parent: that of the chunk before it in the prompt; None for the first.
        token_ids: its tokens.
        extra_keys: what else decides its content.
    """

    key: bytes
    parent: bytes | None
    token_ids: tuple[int, ...]
    extra_keys: ExtraKeys


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunksRemoved:
    """Chunks that were announced are gone."""

    keys: tuple[bytes, ...]
    """In no particular order."""

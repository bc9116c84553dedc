"""Computes a cache of unknown origin again before `StoredKV.save` stores it.

A cache does not show what it was computed from: another prompt, other positions, another model or
an edit leave tensors of the same shapes. Computing the given tokens again shows it.
"""

# ruff: noqa: ANN401 - caches share no typed surface.

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from kvferry.adapters.transformers.arguments import Prompt
from kvferry.adapters.transformers.cache_copies import cache_of, gather
from kvferry.adapters.transformers.host_model import HostModel
from kvferry.blocks.audit import compare
from kvferry.blocks.rows import RankRows
from kvferry.errors import ConfigError
from kvferry.observe import Observer
from kvferry.types import ChunkKey

logger = logging.getLogger(__name__)

_TOKENS_AT_ONCE = 512
"""Tokens per forward. Each gets logits, which take more memory than its KV."""


class CachedChunk(NamedTuple):
    """A chunk in a cache."""

    row: int
    prompt: Prompt
    first_token: int
    """Position in the prompt, without its padding."""


Image = tuple[ChunkKey, int, memoryview]
"""Key, first token and image (the bytes in memory, head still empty) of a record."""


class Recomputer:
    """Computes chunks of a cache again, and refuses a cache whose KV differs."""

    def __init__(self, model: HostModel, rows: RankRows, observer: Observer) -> None:
        self._model = model
        self._rows = rows
        self._observer = observer
        self._has_told = False

    def images(
        self,
        cache: Any,
        chunks: Mapping[ChunkKey, CachedChunk],
        stored: Sequence[memoryview],
        deadline: float,
    ) -> Iterator[Image]:
        """Yield chunks of one row as the model computes them now, not those of the cache: the
        comparison tolerates rounding, and so small edits, which must not be stored. Yield none if
        the model fails, and only those that were computed before the deadline.

        Args:
            stored: images of the row's first chunks, to compute the others on top of.

        Raises:
            ConfigError: the cache has other KV.
        """
        self._tell()
        size = self._rows.schema.chunk_tokens
        row, prompt, last = list(chunks.values())[-1]
        for images in (stored, ()) if stored else ((),):  # what is stored may be wrong
            own = self._computed(prompt.token_ids[: last + size], images, deadline)
            if own is None:
                return
            num_computed = own.get_seq_length()
            done = {key: at for key, at in chunks.items() if at.first_token + size <= num_computed}
            difference = self._difference(cache, own, done.values())
            if difference is None:
                break
        else:
            behind = f" behind {prompt.num_padding} hidden tokens in front" * (
                prompt.num_padding > 0
            )
            raise ConfigError(
                f"row {row} of the cache is not what the model computes for these tokens{behind} "
                f"({difference}): it was computed for another prompt or with other positions, "
                "edited, or by another model; save it with the attention_mask that was used, or "
                "pass a new cache of kv.load(input_ids) to generate() and save that"
            )
        for key, chunk in done.items():
            token = chunk.first_token
            yield key, token, gather(self._rows, own, self._model, 0, token)

    def _tell(self) -> None:
        if not self._has_told:
            self._has_told = True
            logger.info(
                "a cache is computed again before it is stored: it is not known what it was "
                "computed from (save_recomputed_tokens)"
            )

    def _computed(
        self, token_ids: list[int], stored: Sequence[memoryview], deadline: float
    ) -> Any | None:
        """Compute a cache of these tokens, as far as time allows; None if the model fails."""
        cache = cache_of(token_ids, stored, self._rows, self._model)
        first = len(stored) * self._rows.schema.chunk_tokens
        for start in range(first, len(token_ids), _TOKENS_AT_ONCE):
            if time.monotonic() >= deadline:
                self._observer.count("save_deadline")
                break
            tokens = token_ids[start : start + _TOKENS_AT_ONCE]
            if not self._model.compute(tokens, cache, self._observer):
                return None
            self._observer.count("save_recomputed_tokens", len(tokens))
        return cache

    def _difference(self, cache: Any, own: Any, chunks: Iterable[CachedChunk]) -> str | None:
        """Say where a cache differs from what was computed by more than rounding; None: nowhere."""
        for row, prompt, token in chunks:
            computed = gather(self._rows, own, self._model, 0, token)
            found = gather(self._rows, cache, self._model, row, prompt.num_padding + token)
            difference = compare(self._rows, computed, found, self._model.tolerances)
            if difference.excess > 1:
                return difference.describe(self._rows)
        return None

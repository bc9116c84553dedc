"""Computes what is not stored of prompts, on top of what is.

Where KV is plain, that is one forward. The cache of a tree is computed in pieces that end where
its states are stored, and its laws are checked after each piece.
"""

# ruff: noqa: ANN401 - the caches of Transformers share no typed surface.

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from kvferry.adapters.transformers.cache_tree import CacheTree
from kvferry.adapters.transformers.host_model import HostModel
from kvferry.adapters.transformers.items import Items, is_types
from kvferry.types import ChunkKey


class Computed(NamedTuple):
    """A cache of the first tokens of prompts."""

    cache: Any
    states: dict[ChunkKey, tuple[int, bytes]]
    """States that were met, by the key of the chunk before each, with the tokens before it."""
    fault: str | None = None
    """Which leaf does not obey its law, and how."""
    num_tokens: int = 0
    witness: list[torch.Tensor] | None = None
    """Rows that `num_tokens` had, and that must stay while tokens are generated."""


def prefill_alone(
    host: HostModel, input_ids: torch.Tensor, mask: torch.Tensor, given: Mapping[str, Any]
) -> Any:
    """Return a new cache of all tokens but the last of prompts with images, videos or sounds.

    Args:
        given: what describes these, as it reaches the model.
    """
    num_tokens = input_ids.shape[1] - 1
    along = {
        **{name: value for name, value in given.items() if is_types(name)},
        **host.positions(input_ids, mask, given),
    }
    inputs = {**given, **{name: value[..., :num_tokens] for name, value in along.items()}}
    return host.run(input_ids[:, :-1], None, 0, mask=mask[:, :-1], inputs=inputs)[0]


class TreePrefill:
    """Prefill for a tree of leaves.

    Probes saw a few chunks only, and a leaf may obey its law no longer than that. So the first
    prefill that is longer than any before it stops where that one ended: the rows before that must
    still be the same at its end.
    """

    def __init__(self, host: HostModel, tree: CacheTree, probed_tokens: int) -> None:
        self._host = host
        self._tree = tree
        self._seen_tokens = probed_tokens

    def compute(
        self, cache: Any, rows: Sequence[Sequence[int]], mask: torch.Tensor, num_cached: int,
        keys: Sequence[ChunkKey], items: Items,
    ) -> Computed:  # fmt: skip
        """Append the tokens behind the first `num_cached` to a cache.

        Args:
            cache: of `num_cached` tokens.
            rows: token ids to be in the cache.
            mask: `[rows, tokens]`.
            keys: of the chunks of the first row; states are kept behind these only.
            items: of the only row, placed; none for several rows. No piece ends in one.
        """
        ids, tree, at = torch.tensor(rows), self._tree, num_cached
        states: dict[ChunkKey, tuple[int, bytes]] = {}
        fault = None
        limit = len(rows[0])
        kept = self._kept(limit, len(keys), items)
        stops = {*kept, limit, items.aligned_cut(self._seen_tokens, tree.chunk_tokens)}
        for stop in sorted(each for each in stops if num_cached < each <= limit):
            is_first_so_long = stop > self._seen_tokens
            witness = self._witness(cache, at) if is_first_so_long else None
            inputs = items.inputs(at, stop)
            cache, _ = self._host.run(
                ids[:, at:stop], cache, at, mask=mask[:, :stop], inputs=inputs
            )
            fault = fault or tree.broken(cache, stop)
            if witness is not None:
                fault = fault or tree.changed(cache, at, witness)
            if stop in kept and tree.states and fault is None:
                states[keys[stop // tree.chunk_tokens - 1]] = stop, tree.state(cache)
            at = stop
        if fault is None:
            self._seen_tokens = max(self._seen_tokens, at)
        return Computed(cache, states, fault, at, self._witness(cache, at))

    def is_kept(self, computed: Computed, num_copies: int) -> str | None:
        """Return which leaf has changed rows since; None if none has."""
        if computed.witness is None:
            return None
        return self._tree.changed(computed.cache, computed.num_tokens, computed.witness, num_copies)

    def _witness(self, cache: Any, num_tokens: int) -> list[torch.Tensor] | None:
        if num_tokens < self._tree.chunk_tokens:
            return None
        return self._tree.witness(cache, num_tokens)

    def _kept(self, limit: int, num_chunks: int, items: Items) -> set[int]:
        """Return after how many tokens the cache is to be kept: where every prompt may, and behind
        the last chunk of this one that ends in no item."""
        if not self._tree.stops_at_chunks:
            return set()
        every, size = self._tree.snapshot_tokens, self._tree.chunk_tokens
        last = items.aligned_cut(min(limit // size, num_chunks) * size, size)
        return {last, *(at for at in range(every, last, every) if items.cut(at) == at)} - {0}

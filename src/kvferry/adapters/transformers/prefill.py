"""Computes what is not stored of prompts, on top of what is.

Where KV is plain, that is one forward. The cache of a tree is computed in pieces that end where
its states are stored, and its laws are checked after each piece.
"""

# ruff: noqa: ANN401 - the caches of Transformers share no typed surface.

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from kvferry.adapters.transformers.arguments import Prompts
from kvferry.adapters.transformers.cache_tree import CacheTree
from kvferry.adapters.transformers.host_model import HostModel
from kvferry.adapters.transformers.items import Items, is_types
from kvferry.adapters.transformers.loading import Hit
from kvferry.errors import ConfigError
from kvferry.types import ChunkKey


class Computed(NamedTuple):
    """A cache of the first tokens of prompts."""

    cache: Any
    states: dict[ChunkKey, tuple[int, bytes]]
    """States that were met, by the key of the chunk before each, with the tokens before it."""
    fault: str | None = None
    """Which leaf does not obey its law, and how."""
    num_tokens: int = 0
    """Of each row, padding included."""
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
        self, hits: Sequence[Hit], prompts: Prompts, limit: int, keys: Sequence[Sequence[ChunkKey]]
    ) -> Computed:
        """Return one cache of the first `limit` tokens of all rows.

        Args:
            hits: what is stored of the rows.
            keys: of the chunks of each row; states are kept behind these only.
        """
        parts = []
        states: dict[ChunkKey, tuple[int, bytes]] = {}
        fault = None
        for hit in hits:
            done = self._appended(hit, prompts, limit, keys)
            parts.append(hit.part._replace(cache=done.cache))
            states.update(done.states)
            fault = fault or done.fault
        cache = parts[0].cache
        if len(parts) > 1 or parts[0].num_padding:
            try:
                cache = self._tree.stack(parts, limit)
            except ConfigError as error:
                rows, mask = torch.tensor(prompts.rows)[:, :limit], prompts.mask[:, :limit]
                cache, _ = self._host.run(rows, self._host.new_cache(), 0, mask=mask)
                fault = fault or str(error)
        return Computed(cache, states, fault, limit, self._witness(cache, limit))

    def _appended(
        self, hit: Hit, prompts: Prompts, limit: int, keys: Sequence[Sequence[ChunkKey]]
    ) -> Computed:
        """Append the tokens that are not stored to the cache of some rows."""
        tree, size, items = self._tree, self._tree.chunk_tokens, prompts.items
        cache, places, num_padding = hit.part
        ids = torch.tensor([prompts.rows[place][num_padding:limit] for place in places])
        mask = prompts.mask[list(places), num_padding:limit]
        limit, at = limit - num_padding, hit.num_tokens
        kept = {place: self._kept(limit, len(keys[place]), items) for place in places if keys}
        states: dict[ChunkKey, tuple[int, bytes]] = {}
        fault = None
        stops = {limit, items.aligned_cut(self._seen_tokens, size)}.union(*kept.values())
        for stop in sorted(each for each in stops if at < each <= limit):
            is_first_so_long = stop > self._seen_tokens
            witness = self._witness(cache, at) if is_first_so_long else None
            inputs = items.inputs(at, stop)
            cache, _ = self._host.run(
                ids[:, at:stop], cache, at, mask=mask[:, :stop], inputs=inputs
            )
            fault = fault or tree.broken(cache, stop)
            if witness is not None:
                fault = fault or tree.changed(cache, at, witness)
            if tree.states and fault is None:
                for row, place in enumerate(places):
                    if stop in kept.get(place, ()):
                        chunk = keys[place][stop // size - 1]
                        states[chunk] = stop, tree.state(cache, row)
            at = stop
        if fault is None:
            self._seen_tokens = max(self._seen_tokens, at)
        return Computed(cache, states, fault, at)

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

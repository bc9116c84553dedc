"""What `StoredKV.load(explain=True)` says of each row, in the form of an engine's answers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from kvferry.contract.handover import write_explanation
from kvferry.contract.messages import LookupMiss
from kvferry.store.base import Store
from kvferry.types import ChunkKey

if TYPE_CHECKING:
    from kvferry.adapters.transformers.loaded_cache import LoadedCache


def explained_rows(
    cache: LoadedCache,
    chains: Sequence[Sequence[ChunkKey]],
    limit: int,
    store: Store,
    chunk_tokens: int,
    off: LookupMiss | None,
) -> list[dict[str, Any]]:
    """Return, for each row, what was hit and why the rest was not.

    Args:
        cache: the cache as loaded.
        chains: the chunk keys of each row.
        limit: tokens of a row that `load` may load at most, padding included.
        off: why the store was not searched; None if it was.
    """
    found = []
    for prompt, keys in zip(cache.prompts, chains, strict=True):
        hit = max(0, cache.num_loaded - prompt.num_padding)
        hits: Counter[str] = Counter()
        for number in range(-(-hit // chunk_tokens)):
            first = number * chunk_tokens
            hits[store.tier_of(keys[number])] += min(hit, first + chunk_tokens) - first
        num_tokens = cache.num_prompt_tokens - prompt.num_padding
        whole = min(len(keys) * chunk_tokens, max(0, num_tokens - 1))
        misses, why = {}, ""
        if whole > hit:
            reason = off
            if reason is None:
                is_limited = cache.num_loaded >= limit
                reason, why = _why(store, keys[hit // chunk_tokens], cache, is_limited=is_limited)
            misses[str(reason)] = whole - hit
        misses[str(LookupMiss.PARTIAL)] = num_tokens - max(whole, hit)
        explanation = write_explanation(num_local=0, hits=hits, misses=misses, why=why)
        found.append(explanation)
    return found


def _why(
    store: Store, key: ChunkKey, cache: LoadedCache, *, is_limited: bool
) -> tuple[LookupMiss, str]:
    """Return why the first missing chunk was not loaded: a reason, and words if there are any."""
    if is_limited:
        return LookupMiss.NOT_LOADING, "load was asked for no more"
    if not store.contains(key):
        return LookupMiss.ABSENT, ""
    if len(cache.prompts) > 1:
        return LookupMiss.NOT_LOADING, "another row of the batch ends here"
    return LookupMiss.UNREADABLE, ""

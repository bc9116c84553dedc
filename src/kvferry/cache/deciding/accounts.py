"""Counts every token of an admitted prompt once: held by the engine, hit by tier, or missed by
reason. Sends an event for each hit, miss, fetch and write."""

from __future__ import annotations

from collections import Counter

from kvferry.cache.config import Context
from kvferry.cache.deciding.host_pool import Slot
from kvferry.cache.deciding.requests import RequestState, Search
from kvferry.contract.messages import LookupMiss
from kvferry.observe import Event
from kvferry.types import ChunkKey, RequestView

MEMORY = "memory"
"""The tier of chunks that the host pool held when a request asked for them."""


class Accounts:
    """Calls the observer; keeps nothing. Runs in: scheduler thread.

    `lookup_tokens = local_hit_tokens + hit_tokens_<tier> + miss_tokens_<reason>`, summed over all
    tiers and reasons; `hit_tokens` is the sum over the tiers.
    """

    def __init__(self, context: Context) -> None:
        self._observer = context.observer
        self._chunk = context.config.chunk_tokens
        self._tier_of = context.tier_of

    def admitted(
        self, request: RequestView, state: RequestState, search: Search, stop: int, limit: int
    ) -> None:
        """A request was admitted.

        Args:
            search: as its last look-up left it.
            stop: where its hit ends, local hit included.
            limit: where the longest hit would end that its whole chunks and blocks allow.
        """
        num_tokens = len(request.all_token_ids)
        local = min(search.num_local, num_tokens)
        self._observer.count("lookup_tokens", num_tokens)
        self._observer.count("local_hit_tokens", local)
        if stop > local:
            self._observer.count("hits")
            self._observer.count("hit_tokens", stop - local)
            for tier, tokens in self._by_tier(state, search, local, stop).items():
                self._observer.count(f"hit_tokens_{tier}", tokens)
                request_id = request.request_id
                self._observer.event(
                    Event(name="hit", request=request_id, tier=tier, num_tokens=tokens)
                )
        else:
            self._observer.count("requests_missed")
        limit = min(max(stop, limit), num_tokens)
        if state.audited is not None:
            audited = min(limit, state.audited.record.first_token + self._chunk)
            self._missed(request, LookupMiss.AUDIT, audited - stop)
            stop = audited
        why = ""
        if search.miss is LookupMiss.SLOWER and search.worth is not None:
            _, load, compute = search.worth
            why = f"expected {load:.3f} s to load, {compute:.3f} s to compute"
        self._missed(request, search.miss or LookupMiss.ABSENT, limit - stop, why)
        self._missed(request, LookupMiss.PARTIAL, num_tokens - limit)

    def not_cacheable(self, request: RequestView) -> None:
        """A request was admitted that must not be cached."""
        self._observer.count("lookup_tokens", len(request.all_token_ids))
        self._missed(request, LookupMiss.NOT_CACHEABLE, len(request.all_token_ids))

    def _by_tier(self, state: RequestState, search: Search, start: int, stop: int) -> Counter[str]:
        tiers: Counter[str] = Counter()
        for index in range(start // self._chunk, -(-stop // self._chunk)):
            tier = search.fetched.get(state.keys.keys[index], MEMORY)
            first = index * self._chunk
            tiers[tier] += min(stop, first + self._chunk) - max(start, first)
        return tiers

    def _missed(
        self, request: RequestView, reason: LookupMiss, num_tokens: int, detail: str = ""
    ) -> None:
        if num_tokens > 0:
            self._observer.count(f"miss_tokens_{reason}", num_tokens)
            request_id = request.request_id
            self._observer.event(
                Event(
                    name="miss",
                    request=request_id,
                    reason=reason,
                    num_tokens=num_tokens,
                    detail=detail,
                )
            )

    def ended(self, name: str, slot: Slot, reason: str | None, seconds: float) -> None:
        """A fetch or a write of a chunk ended: event `name`, with its result or reason."""
        self._observer.event(
            Event(
                name=name,
                key=slot.key,
                tier=self._tier_of(ChunkKey(slot.key)),
                reason=reason,
                num_tokens=self._chunk,
                seconds=seconds,
            )
        )

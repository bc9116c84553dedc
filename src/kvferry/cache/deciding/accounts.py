"""Counts every token of an admitted prompt once: held by the engine, hit by tier, or missed by
reason. Tells the journal the same of each request."""

from __future__ import annotations

from collections import Counter

from kvferry.cache.config import Context
from kvferry.cache.deciding.requests import RequestState, Search
from kvferry.contract.messages import LookupMiss
from kvferry.journal import Answer, Journal
from kvferry.types import RequestView

MEMORY = "memory"
"""The tier of chunks that the host pool held when a request asked for them."""


class Accounts:
    """Calls the observer and the journal; keeps nothing. Runs in: scheduler thread.

    `lookup_tokens = local_hit_tokens + hit_tokens_<tier> + miss_tokens_<reason>`, summed over all
    tiers and reasons; `hit_tokens` is the sum over the tiers.

    Args:
        journal: receives each request once, when it is admitted first or has ended; None: no
            journal. Closed with this.
    """

    def __init__(self, context: Context, journal: Journal | None = None) -> None:
        self._observer = context.observer
        self._chunk = context.config.chunk_tokens
        self._journal = journal

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
        hits = self._by_tier(state, search, local, stop) if stop > local else Counter()
        limit = min(max(stop, limit), num_tokens)
        misses: Counter[str] = Counter()
        if state.audit is not None:
            audited = min(limit, state.audit.record.first_token + self._chunk)
            misses[LookupMiss.AUDIT] += audited - stop
            stop = audited
        misses[search.miss or LookupMiss.ABSENT] += limit - stop
        misses[LookupMiss.PARTIAL] += num_tokens - limit
        misses = +misses  # those above zero, as for hits
        self._count(num_tokens, local, hits, misses)
        why = ""
        if search.miss is LookupMiss.SLOWER and search.worth is not None:
            _, load, compute = search.worth
            why = f"expected {load:.3f} s to load, {compute:.3f} s to compute"
        self._note(request, state, Answer(local, hits, misses, why))

    def _count(self, num_tokens: int, local: int, hits: Counter[str], misses: Counter[str]) -> None:
        self._observer.count("lookup_tokens", num_tokens)
        self._observer.count("local_hit_tokens", local)
        if hits:
            self._observer.count("hits")
            self._observer.count("hit_tokens", hits.total())
        else:
            self._observer.count("requests_missed")
        for tier, tokens in hits.items():
            self._observer.count(f"hit_tokens_{tier}", tokens)
        for reason, tokens in misses.items():
            self._observer.count(f"miss_tokens_{reason}", tokens)

    def not_cacheable(self, request: RequestView) -> None:
        """A request was admitted that must not be cached."""
        num_tokens = len(request.all_token_ids)
        self._observer.count("lookup_tokens", num_tokens)
        if num_tokens:
            self._observer.count(f"miss_tokens_{LookupMiss.NOT_CACHEABLE}", num_tokens)

    def ended(self, request: RequestView, state: RequestState) -> None:
        """A request ended, admitted or not."""
        self._note(request, state, None)

    def close(self) -> None:
        """Write what the journal has. Idempotent."""
        if self._journal is not None:
            self._journal.close()

    def _note(self, request: RequestView, state: RequestState, answer: Answer | None) -> None:
        if self._journal is not None and state.arrived_at is not None:
            arrived_at, state.arrived_at = state.arrived_at, None
            num_tokens, keys = len(request.all_token_ids), state.keys.keys
            self._journal.add(arrived_at, request.request_id, num_tokens, keys, answer)

    def _by_tier(self, state: RequestState, search: Search, start: int, stop: int) -> Counter[str]:
        tiers: Counter[str] = Counter()
        for index in range(start // self._chunk, -(-stop // self._chunk)):
            tier = search.fetched.get(state.keys.keys[index], MEMORY)
            first = index * self._chunk
            tiers[tier] += min(stop, first + self._chunk) - max(start, first)
        return tiers

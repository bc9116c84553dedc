"""How much of a prompt can be brought: from the index to a prefetch to a promise.

A hit of tokens `[start, stop)` is worth nothing without what the next token attends to, so what is
fetched depends on where it ends: all chunks of groups with full attention, the last ones of groups
with a window (`tables`). If less came than was asked for, the shorter hit may need windows that
nobody fetched; then it is asked for anew, within the first deadline. Likewise if the host has less
of the prompt itself than when it asked.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from kvferry.connectors.shared_storage.messages import ChunkRef
from kvferry.contract.messages import ASK_AGAIN, MISS, LookupResult

if TYPE_CHECKING:
    from kvferry.connectors.shared_storage.policy import LoadPolicy
    from kvferry.connectors.shared_storage.requests import BrokenKeys, RequestState
    from kvferry.connectors.shared_storage.tables import Tables
    from kvferry.connectors.shared_storage.tickets import Tickets
    from kvferry.observe import Observer
    from kvferry.store.base import Store
    from kvferry.types import ChunkKey


class Lookups:
    """Runs in: scheduler thread; memory only.

    Args:
        store: asked what is known to be stored.
        broken: chunks not to offer although the store may seem to have them.
        tickets: prefetches under way.
        policy: whether loading is worth it, and for how long.
        observer: receives counts.
        chunk_tokens: tokens per chunk.
        tables: block tables of the host.
        in_hand: promise what all ranks hold verified; else what the index knows.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        store: Store,
        broken: BrokenKeys,
        tickets: Tickets,
        policy: LoadPolicy,
        observer: Observer,
        *,
        chunk_tokens: int,
        tables: Tables,
        in_hand: bool,
        clock: Callable[[], float],
    ) -> None:
        self._store = store
        self._broken = broken
        self._tickets = tickets
        self._policy = policy
        self._observer = observer
        self._chunk = chunk_tokens
        self._tables = tables
        self.in_hand = in_hand
        self._clock = clock

    def answer(self, state: RequestState, num_tokens: int, num_local_tokens: int) -> LookupResult:
        """Answer for a request of `num_tokens` of which the engine has the first ones itself."""
        if state.ticket is not None:
            return self._answer_ticket(state, num_tokens, num_local_tokens)
        if state.gave_up:
            return MISS
        keys = state.keys.keys
        stop = self._usable(self._known_until(keys, num_local_tokens // self._chunk), num_tokens)
        if stop <= num_local_tokens:
            return MISS
        if not self.in_hand:
            # Where a host could not recover from a failed load, nothing unverified is promised.
            may_fail = self._tables.can_fail_by_block
            return self._promise(state, num_local_tokens, stop) if may_fail else MISS
        wait = self._policy.wait_seconds(stop - num_local_tokens)
        chunks = self.chunks_of(keys, num_local_tokens, stop)
        if self._tickets.room(len(chunks)) == len(chunks):
            hit = (num_local_tokens, stop)
            state.ticket = self._tickets.open_in_memory(chunks, hit, self._clock() + wait)
            if state.ticket is not None:
                return self._promise(state, *hit)
        if not self._policy.worth_loading(stop - num_local_tokens):
            self._observer.count("hits_recomputed")
            state.gave_up = True
            return MISS
        if self._tickets.room(len(chunks)) < len(chunks) and self._tickets.any_open:
            # Others will have copied their hits out in a moment.
            now = self._clock()
            if state.queued_until is None:
                state.queued_until = now + wait
            if now < state.queued_until:
                return ASK_AGAIN
        return self._fetch(state, num_tokens, (num_local_tokens, stop), self._clock() + wait)

    def chunks_of(self, keys: list[ChunkKey], start: int, stop: int) -> tuple[ChunkRef, ...]:
        """The chunks that a hit of `[start, stop)` needs something of: not the last known one if
        rounding to whole blocks makes it useless, not the first ones if they are out of every
        window. The last one that is left is always looked at."""
        last = -(-stop // self._chunk)
        first = min(self._tables.first_needed(start, stop) // self._chunk, last - 1)
        return tuple(ChunkRef(keys[i], i * self._chunk) for i in range(first, last))

    def _fetch(
        self, state: RequestState, num_tokens: int, hit: tuple[int, int], deadline: float
    ) -> LookupResult:
        """Open a prefetch of a hit, or of as much of it as there is room for."""
        start, stop = hit
        while stop > start:
            chunks = self.chunks_of(state.keys.keys, start, stop)
            room = self._tickets.room(len(chunks))
            if room == len(chunks):
                state.ticket = self._tickets.open(chunks, (start, stop), deadline)
                return ASK_AGAIN
            shorter = self._usable(chunks[0].first_token // self._chunk + room, num_tokens)
            stop = min(shorter, stop - self._tables.block_size)
        self._observer.count("hits_without_staging")
        state.gave_up = True
        return MISS

    def _answer_ticket(
        self, state: RequestState, num_tokens: int, num_local_tokens: int
    ) -> LookupResult:
        """Answer from a prefetch: ask again until it ended, then promise what is in hand."""
        ticket = self._tickets.get(state.ticket)
        if ticket is None:
            state.ticket = None
            return MISS
        now = self._clock()
        if not ticket.complete and now < ticket.deadline:
            return ASK_AGAIN
        if not ticket.complete:
            state.gave_up = True
            self._observer.count("miss_deadline")
            self._policy.saw_slow_load(ticket.hit[1] - ticket.hit[0], now - ticket.opened)
        first = ticket.chunks[0].first_token // self._chunk
        # Chunks before the first one are known, and not needed by this hit.
        stop = min(self._usable(first + ticket.num_in_hand, num_tokens), ticket.hit[1])
        hit = (num_local_tokens, stop)
        if stop > num_local_tokens and self._tables.is_covered(hit, ticket.hit, self._chunk):
            return self._promise(state, num_local_tokens, stop)
        self.release(state)
        if now >= ticket.deadline:
            return MISS
        # What was asked for and did not come is known to be broken by now. And the host may have
        # evicted tokens that it had when asked: these were not asked for, nor looked up.
        known = self._known_until(state.keys.keys, num_local_tokens // self._chunk)
        stop = min(stop, self._usable(known, num_tokens))
        if stop <= num_local_tokens:
            return MISS
        return self._fetch(state, num_tokens, (num_local_tokens, stop), ticket.deadline)

    def _promise(self, state: RequestState, start: int, stop: int) -> LookupResult:
        state.promised = (start, stop)
        return LookupResult(stop - start, False)

    def _known_until(self, keys: list[ChunkKey], first: int) -> int:
        """Number of the first chunk from `first` on that is not known to be stored."""
        contains = self._store.contains
        for index in range(first, len(keys)):
            if not contains(keys[index]) or keys[index] in self._broken:
                return index
        return len(keys)

    def _usable(self, num_chunks: int, num_tokens: int) -> int:
        """Tokens of a hit of `num_chunks` leading chunks: whole blocks, never the last token."""
        block = self._tables.block_size
        return max(0, min(num_chunks * self._chunk, num_tokens - 1)) // block * block

    def release(self, state: RequestState) -> None:
        """Drop the prefetch of a request, if it has one."""
        if state.ticket is not None:
            self._tickets.close(state.ticket, told=False)
            state.ticket = None

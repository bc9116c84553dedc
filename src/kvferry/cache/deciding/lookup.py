"""Look-ups: how many tokens of a prompt the connector can bring. The scheduler role asks for them.

A hit of tokens `[start, stop)` must bring everything that the next token attends to. Groups with
full attention need all chunks of the hit, groups with a window only the last ones, so the end of a
hit decides which chunks it needs (`kvferry.blocks.tables`).

A look-up takes the longest hit whose chunks are all held or stored. If all are held, the hit is
promised at once. Otherwise the missing chunks are fetched into slots of the host pool, and the
answer is "ask again" until all fetches have ended or the deadline has passed. Then the longest hit
whose chunks are all held is promised. A shorter hit ends elsewhere, so its window may need chunks
that were not needed before; these are fetched, too, until the deadline.

A look-up finds what is held or stored (`_find`), chooses the part that is worth loading and is not
to be compared (`_choose`, `_candidate`), and settles on a hit (`_settle`). Once settled, it learns
from the fetches how fast each tier is (`_learn`). `Search` is the memory between the look-ups of a
request.

If another engine computes the prompt, a look-up waits for its chunks and meanwhile fetches those
that have come (`kvferry.cache.deciding.handovers`).

A hit that is audited is promised without the chunk to compare, mostly its last one; the record of
that chunk must be held nevertheless.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from kvferry.cache.config import RoleContext
from kvferry.cache.deciding.audits import Audits
from kvferry.cache.deciding.host_pool import HostPool
from kvferry.cache.deciding.policy import LoadPolicy
from kvferry.cache.deciding.requests import FailedKeys, HandoverPlan, RequestState, Search
from kvferry.cache.messages import SlotChunk
from kvferry.contract.messages import ASK_AGAIN, LookupMiss, LookupResult
from kvferry.store.base import ASK_SECONDS
from kvferry.types import ChunkKey

REPROBE_SECONDS = 60.0
"""If a request has waited for so long, the store is asked again what it has."""


class _Candidate(NamedTuple):
    """A hit that may be promised."""

    start: int
    stop: int
    """`[start, stop)` are the tokens to promise."""
    numbers: range
    """Indices of the chunks that must be held."""
    whole: range
    """Indices of the hit's whole chunks, before it was shortened for an audit."""
    audited: int | None
    """The last of `numbers`, if it is to be computed and compared."""
    is_lent: bool
    """Whether peers will read the chunks. They are lent whole only."""

    @property
    def num_slots(self) -> int:
        """Number of slots that it needs; an audit needs one more for what the engine computes."""
        return len(self.numbers) + (self.audited is not None)


class Lookup:
    """The look-ups of an engine. Runs in: scheduler thread; no I/O.

    Args:
        pool: holds chunks in memory.
        unreadable: chunks that are not offered, although the store may seem to have them.
        policy: decides whether loading is worth it, and how long it may take.
        audits: says which hits are compared with what the engine computes.
    """

    def __init__(
        self,
        context: RoleContext,
        pool: HostPool,
        unreadable: FailedKeys,
        policy: LoadPolicy,
        audits: Audits,
    ) -> None:
        self._chunk = context.chunk_tokens
        self._store = context.store
        self._observer = context.observer
        self._tables = context.tables
        self._clock = context.clock
        self._wait_seconds = context.config.load_timeout_seconds
        self._pool = pool
        self._unreadable = unreadable
        self._policy = policy
        self._audits = audits

    def answer(self, state: RequestState, num_tokens: int, num_local: int) -> LookupResult:
        """Answer for a request of `num_tokens`, of which the engine has the first `num_local`."""
        search = state.search = state.search or Search(began_at=self._clock())
        search.num_local = num_local
        is_promised = search.promised is not None and search.promised[0] == num_local
        if is_promised:
            return self._answer(state, search)
        self._withdraw(state)
        while search.awaited and not search.awaited[-1].filling:
            search.awaited.pop()
        if search.awaited and self._clock() < search.deadline:
            return ASK_AGAIN
        self.probe(state)
        known, miss, why = self._find(state.keys.keys, num_local // self._chunk)
        search.missed(miss, why)
        known, num_tokens = self._limited(state, search, known, num_tokens)
        if known < len(state.keys.keys) and search.miss in (None, LookupMiss.ABSENT):
            if search.miss is None and self._waits_for_store(state, search):
                return ASK_AGAIN
            if self._waits_for_producer(state, search, known, num_tokens):
                self._fetch_known(state, search, known, num_tokens)
                return ASK_AGAIN
            self._say_lacking(state, search)
        late = self._late(search)
        if not self._settle(state, search, self._choose(state, search, known), num_tokens):
            return ASK_AGAIN
        if search.promised is None:
            self.release(state)
        else:
            self._observer.observe("promise", self._clock() - search.began_at)
        self._learn(search, late)
        return self._answer(state, search)

    def _limited(
        self, state: RequestState, search: Search, known: int, num_tokens: int
    ) -> tuple[int, int]:
        """Cut `known` and `num_tokens` to what the request wants loaded (`max_load_tokens`)."""
        most = state.options.max_load_tokens
        if most is None or search.num_local + most >= self.limit(state, num_tokens):
            return known, num_tokens
        stop = search.num_local + most
        if known * self._chunk >= stop:
            search.missed(LookupMiss.NOT_LOADING, f"the request loads {most} tokens at most")
        return min(known, -(-stop // self._chunk)), stop + 1

    def _say_lacking(self, state: RequestState, search: Search) -> None:
        """Note that no store that answered has the next chunk, and name those that did not."""
        plan = state.handover
        if plan is not None and plan.miss is not LookupMiss.ABSENT:
            search.missed(plan.miss, plan.why)
            return
        away = "; ".join(f"{each.name} {each.fault}" for each in self._store.tiers() if each.fault)
        if search.miss is None:
            away = away or f"asked, and no answer within {ASK_SECONDS:g} s"
        search.missed(LookupMiss.AWAY if away else LookupMiss.ABSENT, away)

    def _waits_for_store(self, state: RequestState, search: Search) -> bool:
        """Whether the host must ask again, since the store still asks its medium what it has."""
        since = max(search.began_at, state.probed_at or 0.0)
        return search.phase == "asking" and self._clock() < since + ASK_SECONDS

    def _waits_for_producer(
        self, state: RequestState, search: Search, known: int, num_tokens: int
    ) -> bool:
        """Whether the host must ask again: another engine brings the first chunk not known yet."""
        plan = state.handover
        if plan is None or known >= plan.num_chunks or search.phase == "settled":
            return False
        self._note_progress(state, plan, known)
        waits = (
            self._clock() < plan.until
            and self._usable(plan.num_chunks, num_tokens) > search.num_local
            and self._store.awaits(state.keys.keys[known])
            and self._choose(state, search, known) == known
        )
        if plan.wait in ("none", "waits"):
            was_in_vain = plan.wait == "waits" and self._clock() >= plan.until
            plan.wait = "waits" if waits else "in vain" if was_in_vain else "none"
        return waits

    def _note_progress(self, state: RequestState, plan: HandoverPlan, known: int) -> None:
        """If chunks came since the last look-up, the others have as much time again."""
        before = plan.num_known
        plan.num_known = max(known, before or 0)
        until = min(self._clock() + self._wait_seconds, plan.latest)
        if before is None or known <= before:
            return
        plan.wait = "came"
        if until > plan.until:
            plan.until = until
            self._store.expect(state.keys.keys[known : plan.num_chunks], until)

    def _fetch_known(
        self, state: RequestState, search: Search, known: int, num_tokens: int
    ) -> None:
        """Fetch the known chunks of a hit whose other chunks are still to come. Half of the slots
        are left for requests that do not wait."""
        plan = state.handover
        stop = self._usable(0 if plan is None else plan.num_chunks, num_tokens)
        has_room = 2 * self._pool.num_taken < self._pool.num_slots
        if has_room and known * self._chunk > search.num_local < stop:
            hit = self._candidate(state, search.num_local, stop)
            if hit.num_slots <= self._pool.num_slots:
                self._fetch(state, search, hit, known)
        search.fetching_since = None  # later chunks get as much time again

    def _settle(self, state: RequestState, search: Search, known: int, num_tokens: int) -> bool:
        """Promise the longest hit of `known` chunks that is held, or none. False if the host must
        ask again: a longer one is being fetched, or waits for slots."""
        num_local, block = search.num_local, self._tables.block_size
        may_fetch = self._may_fetch(search)
        stop = self._usable(known, num_tokens)
        while stop > num_local:
            hit = self._candidate(state, num_local, stop)
            num_surplus = hit.num_slots - self._pool.num_slots
            if num_surplus > 0:
                search.missed(LookupMiss.NO_MEMORY)
                fits = self._usable(hit.numbers[-num_surplus], num_tokens)
                stop = min(fits, stop - block)
                continue
            lacking = self._lacking(state, hit)
            if lacking is None:
                if not self._promise(state, search, hit):
                    search.missed(LookupMiss.NO_MEMORY)
                return True
            if may_fetch and self._fetch(state, search, hit):
                return False
            search.missed(self._why_not_held(state.keys.keys[lacking], search, may_fetch=may_fetch))
            stop = min(self._usable(lacking, num_tokens), stop - block)
        return True

    def probe(self, state: RequestState) -> None:
        """Have the store find out what it has of a prompt, unless it has just been asked to."""
        now = self._clock()
        if state.probed_at is None or now - state.probed_at > REPROBE_SECONDS:
            state.probed_at = now
            self._store.probe(state.keys.keys)

    def limit(self, state: RequestState, num_tokens: int) -> int:
        """Tokens of the longest hit that a prompt of `num_tokens` could ever have."""
        return self._usable(len(state.keys.keys), num_tokens)

    def chunks(self, state: RequestState, start: int, stop: int) -> tuple[SlotChunk, ...]:
        """The chunks of a promised hit, or of a part of it, with their slots."""
        pinned = () if state.search is None else state.search.pinned
        slots = {slot.first_token: slot for slot in pinned}
        firsts = (number * self._chunk for number in self._numbers(start, stop))
        return tuple(SlotChunk(slots[first].index, slots[first].key, first) for first in firsts)

    def release(self, state: RequestState) -> None:
        """End the pins and the promise of a request."""
        if state.search is not None:
            self._pin_only(state.search, ())
        self._withdraw(state)

    def _withdraw(self, state: RequestState) -> None:
        """Withdraw the promise to a request, and with it the audit."""
        if state.search is not None:
            state.search.promised = None
        self._audits.release(state)

    def end_search(self, state: RequestState) -> None:
        """End the search of a request that was admitted, or is gone. If the request waits once
        more, another search begins."""
        self.release(state)
        state.search = None

    def end(self, state: RequestState) -> None:
        """Note that a request ended. Its whole prefix counts as used now: else the root, which is
        the oldest, would be evicted first."""
        self.end_search(state)
        self._store.touch(state.keys.keys)
        self._pool.touch(state.keys.keys)

    # -- parts ----------------------------------------------------------------------------------

    def _find(self, keys: Sequence[ChunkKey], first: int) -> tuple[int, LookupMiss | None, str]:
        """Return the index at which the known chunks from `first` on end, why, and details in
        words. The chunk there failed to be read lately, or has no slot and is not in the store. The
        reason is None if all are known, or while the store asks its medium, which takes a bounded
        time."""
        contains, find, unreadable = self._store.contains, self._pool.find, self._unreadable
        everything = self._tables.all_groups
        for index in range(first, len(keys)):
            key = keys[index]
            slot = find(key)
            if slot is None or not (slot.is_save or everything <= slot.held):
                # Not whole in memory, so it matters what the store has.
                if key in unreadable:
                    return index, *unreadable.why(key)
                if slot is None and not (is_stored := contains(key)):
                    return index, LookupMiss.ABSENT if is_stored is False else None, ""
        return max(first, len(keys)), None, ""

    def _choose(self, state: RequestState, search: Search, known: int) -> int:
        """Return the index of the first known chunk that is computed sooner than loaded; `known` if
        there is none. Decided before the first fetch and kept."""
        holds, everything, keys = self._pool.holds, self._tables.all_groups, state.keys.keys
        if search.worth is not None:
            until = min(known, search.worth[0])
            while until < known and holds(keys[until], everything):
                until += 1  # in memory by now
            if until < known:
                search.missed(LookupMiss.SLOWER, search.worth[1])
            return until
        is_begun = search.fetching_since is not None or search.fetched
        if is_begun or not self._policy.is_any_slow:
            return known
        first = search.num_local // self._chunk
        parts = [
            (
                None if holds(keys[number], everything) else self._store.tier_of(keys[number]),
                self._chunk,
            )
            for number in range(first, known)
        ]
        worth = self._policy.worth_loading(parts)
        if worth.num_chunks < len(parts):
            load, compute = worth.load_seconds, worth.compute_seconds
            why = f"expected {load:.3f} s to load, {compute:.3f} s to compute"
            search.missed(LookupMiss.SLOWER, why)
            search.worth = first + worth.num_chunks, why
        return first + worth.num_chunks

    def _usable(self, num_chunks: int, num_tokens: int) -> int:
        """Number of tokens in a hit of `num_chunks` leading chunks: whole blocks, never the last
        token."""
        block = self._tables.block_size
        return max(0, min(num_chunks * self._chunk, num_tokens - 1)) // block * block

    def _numbers(self, start: int, stop: int) -> range:
        """Indices of the chunks that a hit of `[start, stop)` needs: from the one with the first
        needed token up to `stop`. Empty if a chunk ends there and all windows are of one token."""
        first = self._tables.first_needed(start, stop) // self._chunk
        return range(first, max(first, -(-stop // self._chunk)))

    def _candidate(self, state: RequestState, start: int, stop: int) -> _Candidate:
        """Return the hit of stored tokens `[start, stop)`; it is shorter if it is to be audited."""
        whole = range(start // self._chunk, -(-stop // self._chunk))
        audited = self._audits.choose(state, whole)
        is_lent = state.lends_all
        if audited is None:
            return _Candidate(start, stop, self._numbers(start, stop), whole, None, is_lent)
        block = self._tables.block_size
        stop = max(start, audited * self._chunk // block * block)
        first = self._numbers(start, stop).start if start < stop else audited
        return _Candidate(start, stop, range(first, audited + 1), whole, audited, is_lent)

    def _groups(self, number: int, hit: _Candidate) -> frozenset[int]:
        """The groups of one chunk that a hit needs; every group if it is compared or lent."""
        if number == hit.audited or hit.is_lent:
            return self._tables.all_groups
        return self._tables.groups_of((number + 1) * self._chunk, hit.start, hit.stop)

    def _lacking(self, state: RequestState, hit: _Candidate) -> int | None:
        """Index of the first chunk in the last contiguous run of needed chunks that are not held;
        None if all are held.

        Every hit that ends inside or behind the run needs part of it, so the next candidate ends
        before the run. All candidates of a look-up together take linear time.
        """
        lacking = None
        keys, holds = state.keys.keys, self._pool.holds
        for number in reversed(hit.numbers):
            if not holds(keys[number], self._groups(number, hit)):
                lacking = number
            elif lacking is not None:
                break
        return lacking

    def _may_fetch(self, search: Search) -> bool:
        """Whether there is time left for fetches."""
        if search.phase == "fetching":
            return self._clock() < search.deadline
        return search.phase == "asking"

    def _why_not_held(self, key: ChunkKey, search: Search, *, may_fetch: bool) -> LookupMiss:
        """Why a known chunk is neither held nor fetched."""
        if search.gave_up is not None:
            return search.gave_up
        is_full = self._pool.num_taken == self._pool.num_slots
        has_slot = self._pool.find(key) is not None
        reason = LookupMiss.NO_MEMORY if is_full and not has_slot else LookupMiss.DEADLINE
        if not may_fetch:
            search.gave_up = reason
        return reason

    def _fetch(
        self, state: RequestState, search: Search, hit: _Candidate, known: int | None = None
    ) -> bool:
        """Fetch the chunks of a hit that are not held: all, or those before index `known`. True if
        the host must ask again.

        The chunks that are held are pinned first, so that none of them loses its slot to another
        chunk of the same hit.
        """
        numbers, keys = hit.numbers, state.keys.keys
        if known is not None:
            numbers = range(numbers.start, min(numbers.stop, known))
        # Count the audited chunk, too.
        num_tokens = len(numbers) * self._chunk if hit.audited is not None else hit.stop - hit.start
        now = self._clock()
        if search.fetching_since is None:
            search.fetching_since = now
            search.deadline = now + self._policy.wait_seconds(num_tokens)
        for number in numbers if hit.is_lent else ():
            if not self._pool.holds(keys[number], self._tables.all_groups):
                self._pool.drop(keys[number])  # a chunk that comes in parts is not lent
        self._pin_only(search, [keys[number] for number in numbers])
        for number in numbers:
            key, groups = keys[number], self._groups(number, hit)
            if self._pool.holds(key, groups):
                continue
            before = self._pool.find(key)
            slot = self._pool.fetch(key, number * self._chunk, groups)
            if slot is None:
                break
            if before is None:
                self._pool.pin(slot)
                search.pinned.append(slot)
            if not slot.is_save:
                search.fetched[key] = self._store.tier_of(key)
            search.awaited.append(slot)
        # A fetch will end, or another request will release its slots.
        return bool(search.awaited) or self._pool.num_taken > len(search.pinned)

    def _pin_only(self, search: Search, keys: Iterable[ChunkKey]) -> None:
        """Pin those of the chunks that have slots, then end the earlier pins of the request."""
        before, search.pinned = search.pinned, []
        search.awaited = []
        for key in keys:
            slot = self._pool.find(key)
            if slot is not None:
                self._pool.pin(slot)
                search.pinned.append(slot)
        self._pool.unpin_all(before)

    def _promise(self, state: RequestState, search: Search, hit: _Candidate) -> bool:
        """Pin exactly the chunks that a hit needs, all of them held, and promise the hit. False if
        there is no slot for the copy of its audit."""
        keys = state.keys.keys
        self._pin_only(search, [keys[number] for number in hit.numbers])
        audited = hit.audited
        if audited is not None and not self._audits.reserve(state, hit.whole, audited):
            return False
        search.promised = (hit.start, hit.stop)
        return True

    # -- what a search showed -------------------------------------------------------------------

    def _late(self, search: Search) -> set[str]:
        """The tiers that were too slow: a fetch of one of their chunks has not ended in time. Empty
        while there is time."""
        tiers = {search.fetched.get(slot.key) for slot in search.awaited if slot.filling}
        return {tier for tier in tiers if tier is not None} if search.phase == "fetching" else set()

    def _learn(self, search: Search, late: set[str]) -> None:
        """The search settled: tell the policy how fast the tiers brought what is promised, and
        which of them were `late`."""
        if not search.fetched:
            return
        for slow in late:
            tokens = self._chunk * sum(each == slow for each in search.fetched.values())
            since = search.fetching_since or 0.0  # never None: nothing is late before a fetch
            self._policy.saw_slow_load(slow, tokens, self._clock() - since)
        loads: dict[str, tuple[int, float]] = {}
        for slot in search.pinned:
            tier = search.fetched.get(slot.key)
            if tier is not None:
                tokens, seconds = loads.get(tier, (0, 0.0))
                loads[tier] = tokens + self._chunk, max(seconds, slot.seconds)
                slot.seconds = 0.0  # measured once
        search.loads.update(loads)
        for tier, (tokens, seconds) in loads.items():
            self._policy.saw_load(tier, tokens, seconds)

    @staticmethod
    def _answer(state: RequestState, search: Search) -> LookupResult:
        start, stop = search.promised or (0, 0)
        reason = search.miss if state.audit is None else LookupMiss.AUDIT
        return LookupResult(stop - start, False, reason)

"""Carries out what look-ups decide: the only code that pins, fetches and asks for a search."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from kvferry.cache.config import RoleContext
from kvferry.cache.deciding.audits import Audits
from kvferry.cache.deciding.failed_keys import RETRY_SECONDS, UNREADABLE_SECONDS, FailedKeys
from kvferry.cache.deciding.hold import Hold
from kvferry.cache.deciding.host_pool import HostPool
from kvferry.cache.deciding.lookup import Ask, Compute, Decision, Fetch, Lookup, Promise, Wait
from kvferry.cache.deciding.miss import Miss
from kvferry.cache.deciding.policy import LoadPolicy, ProducerWaits
from kvferry.cache.deciding.search import (
    Asking,
    Awaiting,
    Fetching,
    HandoverPlan,
    Hit,
    Search,
    Settled,
    Wanted,
)
from kvferry.cache.deciding.survey import Surveyor
from kvferry.cache.messages import Filled, SlotChunk
from kvferry.contract.messages import ASK_AGAIN, LookupMiss, LookupResult
from kvferry.keys import ChunkKeys, state_keys
from kvferry.record.check import SOUND, ReadFault
from kvferry.store.backoff import Backoff
from kvferry.store.base import ASK_SECONDS, ASKED, HERE, Where
from kvferry.types import ChunkKey, MultimodalItem

FIRST_PAUSE_SECONDS = 0.01
LAST_PAUSE_SECONDS = 0.25
"""Bounds of the pause after which the store is asked again for chunks that are awaited. It doubles
until one of them comes."""


STATE_KEYS, STATE_QUESTIONS = 32, 64
"""About how many parts of states a question to a store has, and how many questions a prompt."""


class Searches:
    """The searches of an engine. Runs in: scheduler thread; no I/O.

    Args:
        pool: holds chunks in memory.
        unreadable: chunks that are not offered, although the store may seem to have them.
        policy: learns how fast loads are.
        audits: says which hits are compared with what the engine computes.
        patience: learns what came of the waits for other engines.

    Attributes:
        rules: how look-ups are decided.
    """

    def __init__(
        self,
        context: RoleContext,
        pool: HostPool,
        unreadable: FailedKeys,
        policy: LoadPolicy,
        audits: Audits,
        patience: ProducerWaits,
    ) -> None:
        wait_seconds = context.config.load_timeout_seconds
        self.rules = Lookup(
            context.tables, context.chunk_tokens, wait_seconds, policy, context.states
        )
        self._chunk = context.chunk_tokens
        self._context = context
        self._store = context.store
        self._observer = context.observer
        self._all_groups = context.tables.all_groups
        self._clock = context.clock
        self._surveyor = Surveyor(context.tables, pool, self._store, unreadable, context.states)
        self._pool = pool
        self._unreadable = unreadable
        self._policy = policy
        self._audits = audits
        self._patience = patience

    def begin_epoch(self, namespace: bytes) -> None:
        """Look up in another namespace from now on."""
        self._store = self._context.store.in_namespace(namespace)
        tables, states = self._context.tables, self._context.states
        self._surveyor = Surveyor(tables, self._pool, self._store, self._unreadable, states)

    def probe(self, keys: Sequence[ChunkKey]) -> None:
        """Have the store find out what it has of a prompt."""
        self._store.probe(keys)
        if self._context.states is None:
            return
        # A store goes on only while it has some of what it was asked for. Most states are not
        # there, so a question is about few of them, from the last one on.
        num_parts = self._context.states.num_parts
        behind = [key for at, key in enumerate(keys) if self._context.states.is_behind(at)]
        parts = [part for key in reversed(behind) for part in state_keys(key, num_parts)]
        size = num_parts * max(1, STATE_KEYS // num_parts)
        for first in range(0, min(len(parts), size * STATE_QUESTIONS), size):
            self._store.probe(parts[first : first + size])

    def none(self) -> Search:
        """The search of a request that was never looked up."""
        return Search(Hold(self._pool), Backoff(self._clock, 0.0))

    def begin(
        self,
        keys: ChunkKeys,
        plan: HandoverPlan,
        most: int | None,
        asked_at: float,
        items: tuple[MultimodalItem, ...],
    ) -> Search:
        """Begin a search for the chunks of a prompt, of which the store was asked what it has.
        `most` tokens are loaded at most; the hit ends in none of `items`."""
        place, now = self._audits.draw(), self._clock()
        wanted = Wanted(keys.keys, plan, most, place, now, keys.mark, items)
        looks = Backoff(self._clock, FIRST_PAUSE_SECONDS, LAST_PAUSE_SECONDS)
        return Search(Hold(self._pool), looks, wanted, Asking(asked_at + ASK_SECONDS))

    def refuse(self, search: Search, num_local: int, miss: Miss) -> LookupResult:
        """Answer without a look at what there is."""
        search.num_local = num_local
        self._carry_out(search, self._ask(search, 0), Decision(Compute(miss)), frozenset())
        return self._answer(search)

    def answer(self, search: Search, num_tokens: int, num_local: int) -> LookupResult:
        """Answer for a request of `num_tokens`, of which the engine has the first `num_local`."""
        hit = search.hit
        if hit is None or hit.start != num_local:
            if self._nothing_came(search, num_local):
                return ASK_AGAIN
            search.withdraw()
            search.num_local = num_local
            if self._is_filling(search) or self._goes_on(search, num_tokens):
                return ASK_AGAIN
        return self._answer(search)

    def _answer(self, search: Search) -> LookupResult:
        hit, miss = search.hit, search.miss
        reason = None if miss is None else miss.reason
        if hit is None:
            return LookupResult(0, False, reason)
        if hit.is_shortened:
            reason = LookupMiss.AUDIT
        num_tokens = hit.stop - hit.start
        # A host moves states before a load that it waits for in the same step.
        is_async = hit.state is not None
        return LookupResult(num_tokens, is_async, reason)

    def _nothing_came(self, search: Search, num_local: int) -> bool:
        """Whether a search waits for the same chunk as before, and the store has not answered, or
        is not asked again yet. Nothing else matters till then: it may know thousands of chunks, and
        each step looks."""
        state = search.state
        if num_local != search.num_local or not isinstance(state, (Asking, Awaiting)):
            return False
        is_awaiting = isinstance(state, Awaiting)
        if is_awaiting and (search.wanted.plan.is_held or search.looks.is_over):
            return False
        if search.next_chunk is None or self._clock() >= state.until:
            return False
        key = search.wanted.keys[search.next_chunk]
        if self._pool.find(key) is not None:
            return False
        where = self._store.where(key)
        return where is not HERE if is_awaiting else where is ASKED

    def _is_filling(self, search: Search) -> bool:
        """Whether a fetch of the search goes on, in time. So nothing else matters."""
        state = search.state
        return isinstance(state, Fetching) and self._clock() < state.until and search.is_filling

    # -- decisions ------------------------------------------------------------------------------

    def _ask(self, search: Search, num_tokens: int) -> Ask:
        wanted, worth, now = search.wanted, search.worth, self._clock()
        return Ask(
            wanted,
            num_tokens,
            search.num_local,
            now,
            search.withdraw(),
            worth,
            is_chosen=bool(search.fetched) or worth is not None,
            is_due=now >= search.looks.until,
            audits_own=wanted.place is not None and self._audits.is_sampled(wanted.place),
        )

    def _goes_on(self, search: Search, num_tokens: int) -> bool:
        """Decide, and carry that out. Whether the host must ask again. If memory or the store
        cannot do what was decided, it is decided again."""
        keys, first = search.wanted.keys, search.num_local // self._chunk
        ask: Ask | None = self._ask(search, num_tokens)
        with_faults = search.wanted.plan.miss.reason is LookupMiss.ABSENT  # else that is why
        late = self._late(search)
        while ask is not None:
            with_tiers = self.rules.is_choosing(ask)
            survey = self._surveyor.survey(
                keys, first, with_tiers=with_tiers, with_faults=with_faults
            )
            ask = self._carry_out(search, ask, self.rules.decide(survey, ask), late)
        return not isinstance(search.state, Settled)

    def _carry_out(
        self, search: Search, ask: Ask, decision: Decision, late: frozenset[str]
    ) -> Ask | None:
        """Do what was decided. None if that is done, else the look-up to decide again."""
        act = decision.act
        search.miss, search.junction = act.miss, decision.junction
        if decision.came:
            self._patience.came()
            search.looks.succeeded()
        if isinstance(act, Wait) and (again := self._question(search, ask, act)) is not None:
            return again
        if decision.worth is not None:
            search.worth = decision.worth
        if decision.is_trial:
            self._policy.tries_slow()
        if isinstance(act, Wait):
            search.state, search.next_chunk = act.state, act.next_chunk
            if act.hit is not None:
                self._bring(search, act.hit, act.brings)
            return None
        if isinstance(act, Fetch):
            search.state = act.state
            self._bring(search, act.hit, act.hit.numbers)
            if search.is_filling or self._pool.num_taken > len(search.pinned):
                return None  # a fetch will end, or another request will release its slots
            chosen = ask._replace(worth=search.worth, is_chosen=True)
            return chosen._replace(state=act.state, in_vain=act.stop)
        hit = None
        if isinstance(act, Promise) and (hit := self._pinned(search, act.hit)) is None:
            return ask._replace(worth=search.worth, is_chosen=True, has_spare=False)
        self._settle(search, hit, late)
        return None

    def _question(self, search: Search, ask: Ask, act: Wait) -> Ask | None:
        """Ask the store what a wait wants to know. If there is no store in which the chunks may
        appear, return the look-up to decide again."""
        if isinstance(ask.state, Awaiting) and isinstance(act.state, Asking):
            wait = act.state.before
            if not (ask.wanted.plan.is_held or (wait is not None and wait.has_come)):
                self._patience.in_vain(ask.now)
        if act.asks:
            asked = [*search.wanted.keys[act.asks.start : act.asks.stop]]
            states = self._context.states
            if states is not None and states.is_behind(act.asks.stop - 1):
                asked += state_keys(asked[-1], states.num_parts)
            if self._store.probe(asked, again=True) is Where.ABSENT:
                state = ask.state
                if isinstance(act.state, Asking):
                    state = search.state = act.state._replace(until=ask.now)
                return ask._replace(state=state, may_appear=False)
            search.looks.failed()
        return None

    def _settle(self, search: Search, hit: Hit | None, late: frozenset[str]) -> None:
        """Enter `Settled` with a hit that is pinned, or with none."""
        before = search.withdraw()
        search.state = Settled(hit, before)  # what the audit has pinned has an owner from here on
        if hit is None:
            search.pinned.release()
        else:
            self._observer.observe("promise", self._clock() - search.wanted.began_at)
        if search.fetched:
            self._learn(search, before, late)

    def chunks(self, search: Search, start: int, stop: int) -> tuple[SlotChunk, ...]:
        """The chunks of a promised hit, or of a part of it, with their slots; and the parts of the
        state at its end, which a part of it does not have."""
        slots = {(slot.first_token, slot.part): slot for slot in search.pinned}
        wanted = [(number * self._chunk, -1) for number in self.rules.numbers(start, stop)]
        if search.hit is not None:
            wanted += [(stop, part) for part in range(search.hit.num_parts)]
        return tuple(
            SlotChunk(slots[each].index, slots[each].key, each[0], part=each[1]) for each in wanted
        )

    # -- slots ----------------------------------------------------------------------------------

    def _bring(self, search: Search, hit: Hit, numbers: range) -> None:
        """Pin some chunks of a hit, and fetch those that are not held.

        The chunks that are held are pinned first, so that none of them loses its slot to another
        chunk of the same hit.
        """
        wanted, pool, groups_of = search.wanted, self._pool, self.rules.groups
        keys, looks = wanted.keys, wanted.place is not None  # an audit looks at all of a hit
        for number in numbers if wanted.plan.lends else ():
            if not pool.holds(keys[number], self._all_groups):
                pool.drop(keys[number])  # a chunk that comes in parts is not lent
        self._pin_only(search, hit, numbers)
        for number in numbers:
            key, groups = keys[number], groups_of(wanted, number, hit)
            before = pool.find(key)
            if before is not None and groups <= before.held:
                continue
            first = number * self._chunk
            slot = pool.fetch(key, first, groups, wanted.mark, looks_at_values=looks)
            if slot is None:
                break
            if before is None:
                search.pinned.add(slot)
            if not slot.is_save:
                search.fetched[key] = self._store.tier_of(key)
        else:
            self._bring_state(search, hit)

    def _bring_state(self, search: Search, hit: Hit) -> None:
        """As `_bring`, the state of a hit."""
        for part, key in enumerate(self._state_keys(search, hit)):
            before = self._pool.find(key)
            if before is not None and self._all_groups <= before.held:
                continue
            mark = search.wanted.mark
            slot = self._pool.fetch(key, hit.stop, self._all_groups, mark, part=part)
            if slot is None:
                break
            if before is None:
                search.pinned.add(slot)
            if not slot.is_save:
                search.fetched[key] = self._store.tier_of(key)

    def _state_keys(self, search: Search, hit: Hit) -> list[ChunkKey]:
        """The keys of the parts of the state that a hit needs."""
        if hit.state is None:
            return []
        return state_keys(search.wanted.keys[hit.state], hit.num_parts)

    def _pin_only(self, search: Search, hit: Hit, numbers: range) -> None:
        """Pin those of the chunks that have slots, and of the parts of the hit's state; then end
        the earlier pins of the search."""
        keys = search.wanted.keys[numbers.start : numbers.stop]
        slots = map(self._pool.find, [*keys, *self._state_keys(search, hit)])
        search.pinned.keep_only(filter(None, slots))

    def _pinned(self, search: Search, hit: Hit) -> Hit | None:
        """Pin exactly the chunks that a hit needs, all of them held, and what its audit needs. None
        if there is no slot for the copy of the audit."""
        self._pin_only(search, hit, hit.numbers)
        if hit.audited is None:
            return hit
        audit = self._audits.reserve(search.wanted.keys, hit.whole, hit.audited)
        return None if audit is None else hit._replace(audit=audit)

    # -- what a search showed -------------------------------------------------------------------

    def _late(self, search: Search) -> frozenset[str]:
        """The tiers that were too slow: a fetch of one of their chunks has not ended in time."""
        if not isinstance(search.state, Fetching):
            return frozenset()
        tiers = (search.fetched.get(slot.key) for slot in search.pinned if slot.filling)
        return frozenset(tier for tier in tiers if tier is not None)

    def _learn(
        self, search: Search, before: Asking | Awaiting | Fetching, late: Iterable[str]
    ) -> None:
        """The search has settled: tell the policy how fast the tiers brought what is promised, and
        which of them were `late`."""
        if isinstance(before, Fetching):
            for slow in late:
                tokens = self._chunk * sum(each == slow for each in search.fetched.values())
                self._policy.saw_slow_load(slow, tokens, self._clock() - before.since)
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

    def learn_missed(
        self, missed: Mapping[ChunkKey, Filled], searches: Iterable[Search | None]
    ) -> None:
        """Learn that a rank could not read some chunks. They are not offered for some time, unless
        one of the searches waits for them: chunks that a peer may have soon are asked for, and what
        failed is read again."""
        now = self._clock()
        waiting = [each for each in searches if each is not None and now < each.wanted.plan.latest]
        held = [each for each in waiting if each.wanted.plan.is_held]
        soon: set[ChunkKey] = set()
        for key, filled in missed.items():
            fault, reason = filled.missed or "", LookupMiss.DAMAGED
            if fault == ReadFault.ABSENT:
                reason = LookupMiss.VANISHED
                if any(key in search.fetched for search in held):
                    soon.add(key)
                    continue
            elif fault == ReadFault.IO_ERROR:
                reason = LookupMiss.AWAY
                if any(key in search.fetched and search.reads_again() for search in waiting):
                    continue
            elif fault == ReadFault.NOT_FINITE:
                reason = LookupMiss.NOT_FINITE
            is_sound = fault in SOUND
            seconds = RETRY_SECONDS if is_sound else UNREADABLE_SECONDS
            why = filled.detail if is_sound else fault
            self._unreadable.add((key,), seconds, reason, why, filled.kind)
        for search in held if soon else ():
            # One question for all, as a store asks for the rest only if it has the first ones.
            self._store.probe([key for key in search.wanted.keys if key in soon], again=True)

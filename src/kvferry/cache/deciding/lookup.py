"""Look-ups: how many tokens of a prompt the connector can bring. The scheduler role asks for them.

A hit of tokens `[start, stop)` must bring everything that the next token attends to. Groups with
full attention need all chunks of the hit, groups with a window only the last ones, so the end of a
hit decides which chunks it needs (`kvferry.blocks.tables`).

A `Search` is the memory between the look-ups of a request, from the first one until the request is
admitted. Its state says what it waits for, and has the one deadline of the request:

    Asking ──▶ Awaiting ◀──▶ Fetching ──▶ Settled       Each of the others may settle at once.

It asks the store what it has, awaits chunks that another engine computes (those that have come are
fetched meanwhile), and fetches the missing chunks of a hit. Progress moves the deadline of a wait
on, up to one latest time.

A look-up takes the longest hit whose chunks are all held or stored. If all are held, the hit is
promised at once. Otherwise the missing chunks are fetched into slots of the host pool, and the
answer is "ask again" until all fetches have ended or the deadline has passed. Then the longest hit
whose chunks are all held is promised. A shorter hit ends elsewhere, so its window may need chunks
that were not needed before; these are fetched, too, until the deadline. If the host turns out to
have another number of tokens itself, the promise is withdrawn, and the search goes on in the state
before.

A hit that is audited is promised without the chunk to compare, mostly its last one; the record of
that chunk must be held nevertheless.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from kvferry.cache.config import RoleContext
from kvferry.cache.deciding.audits import Audit, Audits
from kvferry.cache.deciding.failed_keys import RETRY_SECONDS, UNREADABLE_SECONDS, FailedKeys
from kvferry.cache.deciding.host_pool import Hold, HostPool
from kvferry.cache.deciding.policy import LoadPolicy, ProducerWaits
from kvferry.cache.messages import Filled, SlotChunk
from kvferry.contract.messages import ASK_AGAIN, LookupMiss, LookupResult
from kvferry.errors import FaultKind
from kvferry.keys import ChunkKeys
from kvferry.record.check import SOUND, MissReason
from kvferry.store.backoff import Backoff
from kvferry.store.base import (
    ASK_SECONDS,
    ASKED,
    COMING,
    HERE,
    Where,
)
from kvferry.types import ChunkKey, MultimodalItem

FIRST_PAUSE_SECONDS = 0.01
LAST_PAUSE_SECONDS = 0.25
"""Bounds of the pause after which the store is asked again for chunks that are awaited. It doubles
until one of them comes."""

MAX_ASKED = 512
"""Most chunks in a question that is repeated, as the scheduler's thread goes through them."""


class Short(NamedTuple):
    """Why a hit is not longer: the reason, and details in words. None: nothing ended it, or the
    store is still asking its medium."""

    miss: LookupMiss | None
    why: str = ""
    kind: str = ""
    """The `FaultKind`, if a store is at fault."""


ABSENT, NOT_LOADING = Short(LookupMiss.ABSENT), Short(LookupMiss.NOT_LOADING)


class HandoverPlan(NamedTuple):
    """What to do with a request that another engine began, or will continue."""

    gives: bool = False  # another engine will continue it: all that the store lacks is stored
    lends: bool = False  # as `gives`, and peers will read it: each chunk is brought whole to memory
    is_turn: bool = False  # it continues from the KV of another engine, and gives what it generates
    num_chunks: int = 0  # number of leading chunks that are waited for
    is_held: bool = False  # a peer has them in memory, or soon will, and says itself what it lacks
    until: float = 0.0  # when the wait for chunks ends, if none of them comes before
    latest: float = 0.0  # when it ends although chunks still come
    short: Short = ABSENT  # why the store lacks a chunk


NO_HANDOVER = HandoverPlan()
"""No other engine takes part."""


class Wanted(NamedTuple):
    """What a search looks for: fixed when it begins."""

    keys: Sequence[ChunkKey] = ()  # of the whole chunks of the prompt
    plan: HandoverPlan = NO_HANDOVER  # what another engine does
    most: int | None = None  # most tokens to load; None: no limit
    place: float | None = None  # where its hit is audited (`Audits.draw`)
    began_at: float = 0.0  # time of the first look-up
    mark: bytes = b""  # of the salt of these keys
    items: tuple[MultimodalItem, ...] = ()  # in which no hit may end


class Hit(NamedTuple):
    """A hit that may be promised: tokens `[start, stop)`."""

    start: int
    stop: int
    numbers: range  # indices of the chunks that must be held
    whole: range  # indices of the hit's whole chunks, before it was shortened for an audit
    audited: int | None = None  # the last of `numbers`, if it is to be computed and compared
    audit: Audit | None = None  # what is reserved for that, once the hit is promised

    @property
    def num_slots(self) -> int:
        """Number of slots that it needs; an audit needs one more for what the engine computes."""
        return len(self.numbers) + (self.audited is not None)


class Awaiting(NamedTuple):
    """Another engine is to bring more chunks."""

    until: float
    num_known: int  # number of leading chunks that had come at the last look-up
    has_come: bool = False  # whether some of them came while the request waited


class Asking(NamedTuple):
    """The store is asked what it has; after a wait in vain once more. If more has come, the wait
    `before` goes on."""

    until: float
    before: Awaiting | None = None


class Fetching(NamedTuple):
    """The missing chunks of a hit are fetched. If a peer turns out not to have one yet, it is
    awaited as if from the start."""

    until: float
    since: float


class Settled(NamedTuple):
    """A hit is promised, or none can be. If it is withdrawn, the state `before` goes on."""

    hit: Hit | None
    before: Asking | Awaiting | Fetching


NOTHING, NEVER, NO_LOOKS = Wanted(), Asking(0.0), Backoff(float, 0.0)


@dataclass(slots=True)
class Search:
    """The search for a request's hit, from its first look-up until it is admitted.

    Invariants:
    - Without a hit, an answer keeps no pins.
    - Promised chunks are held by all ranks, and pinned until the search ends.
    - A promise stands until the host has another number of tokens itself. If the hit is audited,
      the promise has what the audit needs.
    - A look-up asks again only before the deadline of the state. Only chunks that came while
      another engine was awaited move a deadline on, up to the latest time of the plan. If nothing
      happens, each state comes once, and `Asking` once more after a wait in vain.
    - It asks only a store that has not answered, awaits only what may still come and makes a hit
      longer, and fetches only while a chunk comes or another request has slots to release. A
      request that was admitted awaits nothing more.
    """

    pinned: Hold  # slots of the hit, filled or still filling
    wanted: Wanted = NOTHING
    state: Asking | Awaiting | Fetching | Settled = NEVER
    num_local: int = 0  # tokens that the engine had itself at the last look-up
    # Chunks whose fetch the search waited for, and where from; another request may have begun it.
    fetched: dict[ChunkKey, str] = field(default_factory=dict)
    worth: tuple[int, str] | None = None  # first chunk that is not worth loading, and why
    # Tokens and seconds of what was fetched and promised, by where from.
    loads: dict[str, tuple[int, float]] = field(default_factory=dict)
    num_reads_left: int = 3  # failed reads of its chunks that are tried again
    short: Short = NOT_LOADING  # why the last answer was not longer
    next: Where = Where.ABSENT  # what the store said then of the first chunk that it does not have
    looks: Backoff = NO_LOOKS  # when awaited chunks are asked for again

    @property
    def hit(self) -> Hit | None:
        """The promised hit."""
        return self.state.hit if isinstance(self.state, Settled) else None

    @property
    def is_filling(self) -> bool:
        """Whether a slot of the hit is still filling. The last one mostly is the last to be filled,
        so this sees one slot only."""
        return any(slot.filling for slot in reversed(self.pinned))

    def withdraw(self) -> None:
        """Leave `Settled`: withdraw the promise, and with it the audit."""
        if isinstance(self.state, Settled):
            if self.hit is not None and self.hit.audit is not None:
                self.hit.audit.hold.release()
            self.state = self.state.before

    def release(self) -> None:
        """End the pins and the promise of a search that ends."""
        self.pinned.release()
        self.withdraw()

    def admit(self) -> Audit | None:
        """End the search of a request that was admitted. Its load takes the pins over before. The
        audit of its hit goes on: hand it over."""
        audit = self.hit and self.hit.audit
        self.pinned.release()
        self.state = NEVER
        return audit

    def wait(self, known: int = 0) -> Awaiting:
        """The wait for another engine: as it is, was or begins."""
        if isinstance(self.state, Awaiting):
            return self.state
        before = self.state.before if isinstance(self.state, Asking) else None
        return before or Awaiting(self.wanted.plan.until, known)

    def reads_again(self) -> bool:
        """Whether a chunk that it awaits, whose read failed, is to be read again. This uses up one
        of the reads that it has for that."""
        is_left = self.num_reads_left > 0
        self.num_reads_left -= is_left
        return is_left


class Lookup:
    """The look-ups of an engine. Runs in: scheduler thread; no I/O.

    Args:
        pool: holds chunks in memory.
        unreadable: chunks that are not offered, although the store may seem to have them.
        policy: decides whether loading is worth it, and how long it may take.
        audits: says which hits are compared with what the engine computes.
        patience: learns what came of the waits for other engines.
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
        self._chunk = context.chunk_tokens
        self._context = context
        self._store = context.store
        self._observer = context.observer
        self._tables = context.tables
        self._clock = context.clock
        self._wait_seconds = context.config.load_timeout_seconds
        self._pool = pool
        self._unreadable = unreadable
        self._policy = policy
        self._audits = audits
        self._patience = patience

    def begin_epoch(self, namespace: bytes) -> None:
        """Look up in another namespace from now on."""
        self._store = self._context.store.in_namespace(namespace)

    def probe(self, keys: Sequence[ChunkKey]) -> None:
        """Have the store find out what it has of a prompt."""
        self._store.probe(keys)

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
            reason, miss = filled.missed or "", LookupMiss.DAMAGED
            if reason == MissReason.ABSENT:
                miss = LookupMiss.VANISHED
                if any(key in search.fetched for search in held):
                    soon.add(key)
                    continue
            elif reason == MissReason.IO_ERROR:
                miss = LookupMiss.AWAY
                if any(key in search.fetched and search.reads_again() for search in waiting):
                    continue
            elif reason == MissReason.NOT_FINITE:
                miss = LookupMiss.NOT_FINITE
            is_sound = reason in SOUND
            seconds = RETRY_SECONDS if is_sound else UNREADABLE_SECONDS
            why = filled.detail if is_sound else reason
            self._unreadable.add((key,), seconds, miss, why, filled.kind)
        for search in held if soon else ():
            # One question for all, as a store asks for the rest only if it has the first ones.
            self._store.probe([key for key in search.wanted.keys if key in soon], again=True)

    # -- transitions ----------------------------------------------------------------------------

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
        return Search(Hold(self._pool), wanted, Asking(asked_at + ASK_SECONDS), looks=looks)

    def answer(self, search: Search, num_tokens: int, num_local: int) -> LookupResult:
        """Answer for a request of `num_tokens`, of which the engine has the first `num_local`."""
        hit = search.hit
        if hit is None or hit.start != num_local:
            if self._nothing_came(search, num_local):
                return ASK_AGAIN
            search.withdraw()
            search.num_local = num_local
            if self._goes_on(search, num_tokens):
                return ASK_AGAIN
            hit = search.hit
        if hit is None:
            return LookupResult(0, False, search.short.miss)
        reason = search.short.miss if hit.audit is None else LookupMiss.AUDIT
        return LookupResult(hit.stop - hit.start, False, reason)

    def _nothing_came(self, search: Search, num_local: int) -> bool:
        """Whether a search awaits the same chunk as before, and the store is not asked again yet.
        Nothing else matters till then: it may know thousands of chunks, and each step looks."""
        state = search.state
        if not isinstance(state, Awaiting) or num_local != search.num_local:
            return False
        if search.wanted.plan.is_held or search.looks.is_over:
            return False
        key = search.wanted.keys[max(state.num_known, num_local // self._chunk)]
        is_here = self._store.where(key) is HERE
        has_come = self._pool.find(key) is not None or is_here
        return not has_come and self._clock() < state.until

    def _goes_on(self, search: Search, num_tokens: int) -> bool:
        """Make the next transition. Whether the host must ask again."""
        if isinstance(search.state, Fetching) and self._may_fetch(search) and search.is_filling:
            return True
        known, end = self._known(search, num_tokens - 1)
        if search.short.miss in (None, LookupMiss.ABSENT):
            is_all, state = known == len(search.wanted.keys), search.state
            is_asked = not is_all and search.short.miss is None
            if is_asked and isinstance(state, Asking) and self._clock() < state.until:
                return True
            if self._awaits(search, known, end):
                return True
            if not is_all:
                self._say_lacking(search)
        return not self._settles(search, self._choose(search, known), end)

    def _awaits(self, search: Search, known: int, end: int) -> bool:
        """Enter `Awaiting`, or stay there, while another engine brings the first chunk not known
        yet. Fetch those that came."""
        plan = search.wanted.plan
        if self.usable(plan.num_chunks, end) <= search.num_local:
            return False
        if known >= min(plan.num_chunks, len(search.wanted.keys)):
            if isinstance(search.state, Awaiting):
                self._patience.came()
            return False
        wait, now = self._moved_on(search, known), self._clock()
        if now >= wait.until:
            return self._asks_once_more(search, wait, known)
        if not self._may_come(search, known) or self._choose(search, known) < known:
            return False
        search.state = wait
        self._fetch_known(search, known, end)
        return True

    def _moved_on(self, search: Search, known: int) -> Awaiting:
        """The wait. If more chunks have come, the others have as much time again, until the latest
        time. What the host has itself did not come."""
        wait = search.wait(known)
        if known <= max(wait.num_known, search.num_local // self._chunk):
            return wait
        self._patience.came()
        search.looks.succeeded()
        until = min(self._clock() + self._wait_seconds, search.wanted.plan.latest)
        return Awaiting(until, known, has_come=True)

    def _asks_once_more(self, search: Search, wait: Awaiting, known: int) -> bool:
        """Ask the store once more when a wait has ended: a host that computes for long looks up
        late. Whether it is asked."""
        state, now = search.state, self._clock()
        was_waiting = isinstance(state, Awaiting)
        is_new = was_waiting or (isinstance(state, Asking) and state.before is None)
        if not is_new or wait.until <= search.wanted.began_at:
            return False
        if was_waiting and not (wait.has_come or search.wanted.plan.is_held):
            self._patience.in_vain(now)
        is_asked = self._ask_again(search, known)
        search.state = Asking(now + ASK_SECONDS if is_asked else now, wait)
        return is_asked

    def _may_come(self, search: Search, known: int) -> bool:
        """Whether another engine may still bring the first chunk not known yet. Ask the store again
        after a pause."""
        plan, began_at = search.wanted.plan, search.wanted.began_at
        is_absent = search.next is not COMING and search.next is not ASKED
        if plan.is_held and is_absent and self._clock() >= began_at + ASK_SECONDS:
            return False  # the peer lacks it, and other stores have had some time to find it
        return not search.looks.is_over or self._ask_again(search, known)

    def _ask_again(self, search: Search, known: int) -> bool:
        """Ask the store again for awaited chunks, from the first not known yet on. False if there
        is no store in which they may appear."""
        stop = min(search.wanted.plan.num_chunks, known + MAX_ASKED)
        is_asked = self._store.probe(search.wanted.keys[known:stop], again=True)
        if is_asked:
            search.looks.failed()
        return is_asked

    def _fetch(self, search: Search, hit: Hit) -> bool:
        """Enter `Fetching`, or stay there: fetch the chunks of a hit that are not held. Whether a
        fetch will end, or another request will release its slots."""
        if not isinstance(search.state, Fetching):
            # Count the audited chunk, too.
            is_audited = hit.audited is not None
            num_tokens = len(hit.numbers) * self._chunk if is_audited else hit.stop - hit.start
            now = self._clock()
            search.state = Fetching(now + self._policy.wait_seconds(num_tokens), now)
        self._bring(search, hit, hit.numbers)
        return search.is_filling or self._pool.num_taken > len(search.pinned)

    def _settles(self, search: Search, known: int, end: int) -> bool:
        """Enter `Settled`: promise the longest hit of `known` chunks that is held, or none. False
        if a longer one is being fetched, or waits for slots."""
        num_local, block, late = search.num_local, self._tables.block_size, self._late(search)
        stop, promised = self.usable(known, end), None
        while (stop := self._outside_items(search, stop)) > num_local:
            hit = self._candidate(search, num_local, stop)
            num_surplus = hit.num_slots - self._pool.num_slots
            if num_surplus > 0:
                search.short = Short(LookupMiss.NO_MEMORY)
                stop = min(self.usable(hit.numbers[-num_surplus], end), stop - block)
                continue
            lacking = self._lacking(search, hit)
            if lacking is None:
                promised = self._pinned(search, hit)
                break
            if self._may_fetch(search) and self._fetch(search, hit):
                return False
            search.short = Short(self._why_not_held(search.wanted.keys[lacking]))
            stop = min(self.usable(lacking, end), stop - block)
        if promised is None:
            search.pinned.release()
        else:
            self._observer.observe("promise", self._clock() - search.wanted.began_at)
        self._learn(search, late)
        state = search.state
        search.state = Settled(promised, state.before if isinstance(state, Settled) else state)
        return True

    # -- what there is --------------------------------------------------------------------------

    def _known(self, search: Search, end: int) -> tuple[int, int]:
        """Count the leading chunks that are held or stored, and note what ended them. Return the
        number, and where a hit must end: at `end`, or where the request wants no more."""
        keys, first = search.wanted.keys, search.num_local // self._chunk
        known, search.short, search.next = self._find(keys, first)
        most = search.wanted.most
        if most is not None and search.num_local + most < self.usable(len(keys), end):
            end = search.num_local + most
            if known * self._chunk >= end:
                why = f"the request loads {most} tokens at most"
                search.short = Short(LookupMiss.NOT_LOADING, why)
            known = min(known, -(-end // self._chunk))
        return known, end

    def _find(self, keys: Sequence[ChunkKey], first: int) -> tuple[int, Short, Where]:
        where, find, unreadable = self._store.where, self._pool.find, self._unreadable
        everything = self._tables.all_groups
        for index in range(first, len(keys)):
            key = keys[index]
            slot = find(key)
            if slot is None or not (slot.is_save or everything <= slot.held):
                # Not whole in memory, so it matters what the store has.
                if key in unreadable:
                    return index, Short(*unreadable.why(key)), Where.ABSENT
                if slot is None and (found := where(key)) is not HERE:
                    return index, Short(None if found is ASKED else LookupMiss.ABSENT), found
        return max(first, len(keys)), Short(None), HERE

    def _say_lacking(self, search: Search) -> None:
        """Note that no store that answered has the next chunk, and name those that did not."""
        plan = search.wanted.plan
        if plan.short.miss is not LookupMiss.ABSENT:
            search.short = plan.short
            return
        faults = [(each.name, each.fault) for each in self._store.tiers() if each.fault]
        if search.short.miss is None and not faults:
            why = f"asked, and no answer within {ASK_SECONDS:g} s"
            search.short = Short(LookupMiss.AWAY, why, FaultKind.LATE)
        elif faults:
            why = "; ".join(f"{name} {fault}" for name, fault in faults)
            search.short = Short(LookupMiss.AWAY, why, faults[0][1].kind)
        else:
            search.short = ABSENT

    def _choose(self, search: Search, known: int) -> int:
        """Return the index of the first known chunk that is computed sooner than loaded; `known` if
        there is none. Decided before the first fetch and kept."""
        holds, everything, keys = self._pool.holds, self._tables.all_groups, search.wanted.keys
        is_begun = isinstance(search.state, Fetching) or search.fetched or search.worth
        if not is_begun and self._policy.is_any_slow:
            first = search.num_local // self._chunk
            tiers = [
                None if holds(key, everything) else self._store.tier_of(key)
                for key in keys[first:known]
            ]
            worth = self._policy.worth_loading(tiers, self._chunk)
            if worth.num_chunks < len(tiers):
                load, compute = worth.load_seconds, worth.compute_seconds
                why = f"expected {load:.3f} s to load, {compute:.3f} s to compute"
                search.worth = first + worth.num_chunks, why
        if search.worth is None:
            return known
        chosen = min(known, search.worth[0])
        while chosen < known and holds(keys[chosen], everything):
            chosen += 1  # in memory by now
        if chosen < known:
            search.short = Short(LookupMiss.SLOWER, search.worth[1])
        return chosen

    # -- hits -----------------------------------------------------------------------------------

    def usable(self, num_chunks: int, end: int) -> int:
        """Where a hit of `num_chunks` leading chunks ends: after a whole block, at `end` at most.
        The last token of a prompt is never part of a hit."""
        block = self._tables.block_size
        return max(0, min(num_chunks * self._chunk, end)) // block * block

    def _outside_items(self, search: Search, stop: int) -> int:
        """Return the last end of a block up to `stop` that is in no item."""
        block = self._tables.block_size
        for item in reversed(search.wanted.items):
            if item.offset < stop < item.offset + item.length:
                stop = item.offset // block * block
        return stop

    def chunks(self, search: Search, start: int, stop: int) -> tuple[SlotChunk, ...]:
        """The chunks of a promised hit, or of a part of it, with their slots."""
        slots = {slot.first_token: slot for slot in search.pinned}
        firsts = (number * self._chunk for number in self._numbers(start, stop))
        return tuple(SlotChunk(slots[first].index, slots[first].key, first) for first in firsts)

    def _numbers(self, start: int, stop: int) -> range:
        """Indices of the chunks that a hit of `[start, stop)` needs: from the one with the first
        needed token up to `stop`. Empty if a chunk ends there and all windows are of one token."""
        first = self._tables.first_needed(start, stop) // self._chunk
        return range(first, max(first, -(-stop // self._chunk)))

    def _candidate(self, search: Search, start: int, stop: int) -> Hit:
        """Return the hit of stored tokens `[start, stop)`; it is shorter if it is to be audited."""
        whole = range(start // self._chunk, -(-stop // self._chunk))
        audited = self._audits.choose(search.wanted.keys, whole, search.wanted.place)
        if audited is None:
            return Hit(start, stop, self._numbers(start, stop), whole)
        block = self._tables.block_size
        stop = audited * self._chunk // block * block
        stop = max(start, self._outside_items(search, stop))
        first = self._numbers(start, stop).start if start < stop else audited
        return Hit(start, stop, range(first, audited + 1), whole, audited)

    def _groups(self, search: Search, number: int, hit: Hit) -> frozenset[int]:
        """The groups of one chunk that a hit needs. Every group if it is compared, or if peers will
        read it: they are lent whole chunks only."""
        if number == hit.audited or search.wanted.plan.lends:
            return self._tables.all_groups
        return self._tables.groups_of((number + 1) * self._chunk, hit.start, hit.stop)

    def _lacking(self, search: Search, hit: Hit) -> int | None:
        """Index of the first chunk in the last contiguous run of needed chunks that are not held;
        None if all are held.

        Every hit that ends inside or behind the run needs part of it, so the next candidate ends
        before the run. All candidates of a look-up together take linear time.
        """
        lacking = None
        keys, holds = search.wanted.keys, self._pool.holds
        for number in reversed(hit.numbers):
            if not holds(keys[number], self._groups(search, number, hit)):
                lacking = number
            elif lacking is not None:
                break
        return lacking

    def _may_fetch(self, search: Search) -> bool:
        """Whether there is time left for fetches."""
        return not isinstance(search.state, Fetching) or self._clock() < search.state.until

    def _why_not_held(self, key: ChunkKey) -> LookupMiss:
        """Why a known chunk is neither held nor fetched."""
        is_full = self._pool.num_taken == self._pool.num_slots
        has_slot = self._pool.find(key) is not None
        return LookupMiss.NO_MEMORY if is_full and not has_slot else LookupMiss.DEADLINE

    # -- slots ----------------------------------------------------------------------------------

    def _fetch_known(self, search: Search, known: int, end: int) -> None:
        """Fetch the known chunks of a hit whose other chunks are still to come. Half of the slots
        are left for requests that do not wait."""
        stop = self.usable(search.wanted.plan.num_chunks, end)
        has_room = 2 * self._pool.num_taken < self._pool.num_slots
        if has_room and known * self._chunk > search.num_local:
            hit = self._candidate(search, search.num_local, stop)
            if hit.num_slots <= self._pool.num_slots:
                numbers = range(hit.numbers.start, min(hit.numbers.stop, known))
                self._bring(search, hit, numbers)

    def _bring(self, search: Search, hit: Hit, numbers: range) -> None:
        """Pin some chunks of a hit, and fetch those that are not held.

        The chunks that are held are pinned first, so that none of them loses its slot to another
        chunk of the same hit.
        """
        keys = search.wanted.keys
        for number in numbers if search.wanted.plan.lends else ():
            if not self._pool.holds(keys[number], self._tables.all_groups):
                self._pool.drop(keys[number])  # a chunk that comes in parts is not lent
        self._pin_only(search, [keys[number] for number in numbers])
        for number in numbers:
            key, groups = keys[number], self._groups(search, number, hit)
            if self._pool.holds(key, groups):
                continue
            before = self._pool.find(key)
            looks = search.wanted.place is not None  # what is audited is looked at altogether
            slot = self._pool.fetch(
                key, number * self._chunk, groups, search.wanted.mark, looks_at_values=looks
            )
            if slot is None:
                break
            if before is None:
                search.pinned.add(slot)
            if not slot.is_save:
                search.fetched[key] = self._store.tier_of(key)

    def _pin_only(self, search: Search, keys: Iterable[ChunkKey]) -> None:
        """Pin those of the chunks that have slots, then end the earlier pins of the search."""
        slots = map(self._pool.find, keys)
        search.pinned.keep_only(slot for slot in slots if slot is not None)

    def _pinned(self, search: Search, hit: Hit) -> Hit | None:
        """Pin exactly the chunks that a hit needs, all of them held, and what its audit needs. None
        if there is no slot for the copy of the audit."""
        keys = search.wanted.keys
        self._pin_only(search, [keys[number] for number in hit.numbers])
        if hit.audited is None:
            return hit
        audit = self._audits.reserve(keys, hit.whole, hit.audited)
        if audit is None:
            search.short = Short(LookupMiss.NO_MEMORY)
            return None
        return hit._replace(audit=audit)

    # -- what a search showed -------------------------------------------------------------------

    def _late(self, search: Search) -> set[str]:
        """The tiers that were too slow: a fetch of one of their chunks has not ended in time."""
        if not isinstance(search.state, Fetching):
            return set()
        tiers = (search.fetched.get(slot.key) for slot in search.pinned if slot.filling)
        return {tier for tier in tiers if tier is not None}

    def _learn(self, search: Search, late: set[str]) -> None:
        """The search settles: tell the policy how fast the tiers brought what is promised, and
        which of them were `late`."""
        if isinstance(search.state, Fetching):
            for slow in late:
                tokens = self._chunk * sum(each == slow for each in search.fetched.values())
                self._policy.saw_slow_load(slow, tokens, self._clock() - search.state.since)
        loads: dict[str, tuple[int, float]] = {}
        for slot in search.pinned if search.fetched else ():
            tier = search.fetched.get(slot.key)
            if tier is not None:
                tokens, seconds = loads.get(tier, (0, 0.0))
                loads[tier] = tokens + self._chunk, max(seconds, slot.seconds)
                slot.seconds = 0.0  # measured once
        search.loads.update(loads)
        for tier, (tokens, seconds) in loads.items():
            self._policy.saw_load(tier, tokens, seconds)

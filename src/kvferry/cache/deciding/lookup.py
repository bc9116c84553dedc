"""Look-ups: how many tokens of a prompt the connector can bring. Decided here, of values alone.

A hit of tokens `[start, stop)` must bring everything that the next token attends to. Groups with
full attention need all chunks of the hit, groups with a window only the last ones, so the end of a
hit decides which chunks it needs (`kvferry.blocks.tables`).

A look-up asks the store what it has, awaits chunks that another engine computes (those that have
come are fetched meanwhile), and fetches the missing chunks of a hit. Progress moves the deadline of
a wait on, up to one latest time. `kvferry.cache.deciding.search` has the states of this.

It takes the longest hit whose chunks are all held or stored. If all are held, the hit is promised
at once. Otherwise the missing chunks are fetched into slots of the host pool, and the answer is
"ask again" until all fetches have ended or the deadline has passed. Then the longest hit whose
chunks are all held is promised. A shorter hit ends elsewhere, so its window may need chunks that
were not needed before; these are fetched, too, until the deadline. If the host turns out to have
another number of tokens itself, the promise is withdrawn, and the search goes on in the state
before.

If the model has recurrent states, a hit ends where one is held, too, after the last token of a
chunk. Where KV reaches farther than a state, the host is asked for a state there.

A hit that is audited is promised without the chunk to compare, mostly its last one; the record of
that chunk must be held nevertheless.
"""

from __future__ import annotations

from typing import NamedTuple

from kvferry.blocks.tables import Tables
from kvferry.cache.config import StatePlaces
from kvferry.cache.deciding.miss import ABSENT, Miss
from kvferry.cache.deciding.policy import LoadPolicy
from kvferry.cache.deciding.search import (
    Asking,
    Awaiting,
    Fetching,
    Hit,
    Wanted,
    Worth,
    wait_of,
)
from kvferry.cache.deciding.survey import ASKED, FAILED, HELD, LACKING, STORED, ChunkView, Survey
from kvferry.contract.messages import LookupMiss
from kvferry.store.base import ASK_SECONDS

MAX_ASKED = 512
"""Most chunks in a question that is repeated, as the scheduler's thread goes through them."""

NO_CHUNKS = range(0)

_NO_STATE = ("", ASKED)
"""Where no hit ends."""


class Ask(NamedTuple):
    """A look-up: what is wanted, and what came of it so far."""

    wanted: Wanted
    num_tokens: int
    """Tokens of the request."""
    num_local: int
    """Of these, the first ones that the engine has itself."""
    now: float
    """Monotonic seconds."""
    state: Asking | Awaiting | Fetching
    """What the search waits for."""
    worth: Worth | None = None
    is_chosen: bool = False
    """Whether it was decided before how much is loaded: `worth`, or all."""
    is_due: bool = True
    """Whether the store may be asked again for chunks that are awaited."""
    may_appear: bool = True
    """False: no store was found in which awaited chunks may appear."""
    in_vain: int | None = None
    """Where the shortest hit ends whose chunks were to be fetched, and found no slot."""
    has_spare: bool = True
    """False: no slot was found for what an audit compares."""
    audits_own: bool = False
    """Whether an audit may compare a chunk that was computed here."""


class Promise(NamedTuple):
    """A hit whose chunks are all held."""

    hit: Hit
    miss: Miss | None
    """Why it is not longer; None: it is as long as it can be. So for the others."""


class Fetch(NamedTuple):
    """Fetch the chunks of a hit that are not held."""

    hit: Hit
    state: Fetching
    stop: int
    """Where the hit would end if it were not audited."""
    miss: Miss | None


class Wait(NamedTuple):
    """Ask again later. Meanwhile, ask the store for chunks, and fetch those that came."""

    state: Asking | Awaiting
    miss: Miss | None
    next_chunk: int | None
    """Index of the first chunk that is not here; None: the answer is about states."""
    asks: range = NO_CHUNKS
    """Indices of the chunks that the store is asked for."""
    brings: range = NO_CHUNKS
    """Indices of the chunks to fetch, for `hit`."""
    hit: Hit | None = None


class Compute(NamedTuple):
    """Nothing can be promised."""

    miss: Miss | None


class Decision(NamedTuple):
    """What a look-up comes to, and what it showed."""

    act: Promise | Fetch | Wait | Compute
    came: bool = False
    """Whether chunks came that the search awaited from another engine."""
    worth: Worth | None = None
    """What is loaded, to be kept; None: all, or that was not decided."""
    is_trial: bool = False
    """Whether all is loaded to see whether a slow tier has recovered."""
    junction: int = 0
    """After so many tokens the known KV ends, and no state is known: if one is kept there, later
    prompts that begin alike hit (`kvferry.types.SupportsJunction`). 0: none is missed."""


class Lookup:
    """How look-ups are decided. It changes nothing: each method is a function of its arguments, and
    of the rates that were measured.

    Args:
        tables: the engine's.
        chunk_tokens: tokens of a chunk.
        wait_seconds: how long each chunk that came lets the others be waited for.
        rates: decides whether loading is worth it, and how long it may take. It is only asked.
        states: where recurrent states are; None: the model has none.
    """

    def __init__(
        self,
        tables: Tables,
        chunk_tokens: int,
        wait_seconds: float,
        rates: LoadPolicy,
        states: StatePlaces | None = None,
    ) -> None:
        self._tables = tables
        self._chunk = chunk_tokens
        self._wait_seconds = wait_seconds
        self._rates = rates
        self._states = states

    def decide(self, survey: Survey, ask: Ask) -> Decision:
        """Decide a look-up by what there is."""
        last, state = survey.end, ask.state
        known, end, miss, is_open = self._reach(survey, ask)
        wait, came = None, False
        if is_open:
            is_asked = last is not None and last.what is ASKED
            if is_asked and isinstance(state, Asking) and ask.now < state.until:
                return Decision(Wait(state, miss, known))
            wait, came = self._wait(survey, ask, known, end, miss)
            if wait is not None and isinstance(wait.state, Asking):
                return Decision(wait, came)
            if last is not None and wait is None:
                miss = self._why_absent(last, ask)
        is_unsaid = self._states is not None and survey.is_state_asked
        if is_unsaid and isinstance(state, Asking) and ask.now < state.until:
            return Decision(Wait(state, miss, None), came)
        chosen, worth, is_trial = self._chosen(survey, ask, known)
        act: Promise | Fetch | Wait | Compute
        junction = 0
        if wait is not None and chosen == known:
            act = wait
        else:
            if worth is not None and chosen < known:
                miss = Miss(LookupMiss.SLOWER, worth.why)
            stop = self._outside_items(ask, self.usable(chosen, end))
            if stop > ask.num_local and (found := self._end_of_hit(survey, ask, stop)) < stop:
                why = f"KV of {stop} tokens is here, a state after {found} of them"
                miss, junction = Miss(LookupMiss.NO_STATE, why), stop
            nothing = stop <= ask.num_local
            act = Compute(miss) if nothing else self._settle(survey, ask, stop, end, miss)
        return Decision(act, came, worth, is_trial, junction)

    def is_choosing(self, ask: Ask) -> bool:
        """Whether it is to be decided how much is loaded: before the first fetch, if some tier is
        slow. The survey must then say where the chunks are."""
        is_chosen = ask.is_chosen or isinstance(ask.state, Fetching)
        return not is_chosen and self._rates.is_any_slow

    # -- how far a hit can reach ----------------------------------------------------------------

    def _reach(self, survey: Survey, ask: Ask) -> tuple[int, int, Miss | None, bool]:
        """Return how many leading chunks are here; where a hit must end: before the last token, or
        where the request wants no more; why it cannot be longer, None if nothing says so yet; and
        whether the next chunk may still come."""
        known, end, most, last = survey.num_known, ask.num_tokens - 1, ask.wanted.most, survey.end
        is_open = last is None or last.what is not FAILED
        miss = None if last is None or last.what is ASKED else last.miss if not is_open else ABSENT
        if most is not None and ask.num_local + most < self.usable(len(ask.wanted.keys), end):
            end = ask.num_local + most
            if known * self._chunk >= end:
                why = f"the request loads {most} tokens at most"
                miss, is_open = Miss(LookupMiss.NOT_LOADING, why), False
            known = min(known, -(-end // self._chunk))
        return known, end, miss, is_open

    def _why_absent(self, last: ChunkView, ask: Ask) -> Miss | None:
        """Why no store has the next chunk, which is not awaited."""
        planned = ask.wanted.plan.miss
        return last.miss if planned.reason is LookupMiss.ABSENT else planned

    def _chosen(self, survey: Survey, ask: Ask, known: int) -> tuple[int, Worth | None, bool]:
        """Return the index of the first known chunk that is computed sooner than loaded (`known` if
        there is none), what to keep of that, and whether all is loaded as a trial."""
        worth, chunks, is_trial = ask.worth, survey.chunks, False
        if self.is_choosing(ask):
            tiers = [
                None if chunk.what is HELD else chunk.tier
                for chunk in chunks[: known - survey.first]
            ]
            found = self._rates.worth_loading(tiers, self._chunk)
            is_trial = found.is_trial
            if found.num_chunks < len(tiers):
                load, compute = found.load_seconds, found.compute_seconds
                why = f"expected {load:.3f} s to load, {compute:.3f} s to compute"
                worth = Worth(survey.first + found.num_chunks, why)
        if worth is None:
            return known, None, is_trial
        chosen = max(survey.first, min(known, worth.stop))
        while chosen < known and survey.what(chosen) is HELD:
            chosen += 1  # in memory by now
        return chosen, worth, is_trial

    # -- waiting for another engine -------------------------------------------------------------

    def _wait(
        self, survey: Survey, ask: Ask, known: int, end: int, miss: Miss | None
    ) -> tuple[Wait | None, bool]:
        """Return how the first chunk that is not known is waited for while another engine brings
        it, or the question that ends such a wait; None if it is not waited for. So for the state
        behind the last chunk, which comes with that or soon after. Also whether some that were
        awaited came."""
        plan, keys = ask.wanted.plan, ask.wanted.keys
        if plan.num_chunks == 0:
            return None, False
        stop = self.usable(plan.num_chunks, end)
        if stop <= ask.num_local:
            return None, False
        lacks_state = known >= min(plan.num_chunks, len(keys))
        state = self._lacking_state(survey, ask, stop)
        if lacks_state and state is None:
            return None, isinstance(ask.state, Awaiting)
        wait, came = self._moved_on(ask, known)
        question = range(known, min(plan.num_chunks, known + MAX_ASKED))
        next_chunk: int | None = known
        if lacks_state and state is not None:
            question, next_chunk = range(state, state + 1), None
            since = ask.now if came else ask.wanted.began_at
            if came or not wait.has_come:
                wait = wait._replace(until=min(wait.until, since + ASK_SECONDS))
        if ask.now >= wait.until:
            if not self._asks_once_more(ask, wait):
                return None, came
            return Wait(Asking(ask.now + ASK_SECONDS, wait), miss, next_chunk, question), came
        is_late = ask.now >= ask.wanted.began_at + ASK_SECONDS
        if plan.is_held and is_late and survey.end is not None and survey.end.what is LACKING:
            return None, came  # the peer lacks it, and other stores have had some time to find it
        is_due = ask.is_due or came
        if is_due and not ask.may_appear:
            return None, came
        hit, brings = self._come(survey, ask, known, stop)
        asks = question if is_due else NO_CHUNKS
        return Wait(wait, miss, next_chunk, asks, brings, hit), came

    def _lacking_state(self, survey: Survey, ask: Ask, stop: int) -> int | None:
        """Index of the chunk before `stop` whose state is the last one, if that is not here."""
        number = stop // self._chunk - 1
        while self._states is not None and number >= ask.num_local // self._chunk:
            if self._states.is_behind(number):
                return number if survey.state(number) in _NO_STATE else None
            number -= 1
        return None

    def _moved_on(self, ask: Ask, known: int) -> tuple[Awaiting, bool]:
        """Return the wait, and whether more chunks have come. Then the others have as much time
        again, until the latest time. What the host has itself did not come."""
        wait = wait_of(ask.state, ask.wanted.plan, known)
        if known <= max(wait.num_known, ask.num_local // self._chunk):
            return wait, False
        until = min(ask.now + self._wait_seconds, ask.wanted.plan.latest)
        return Awaiting(until, known, has_come=True), True

    def _asks_once_more(self, ask: Ask, wait: Awaiting) -> bool:
        """Whether the store is asked once more when a wait has ended: a host that computes for long
        looks up late."""
        state = ask.state
        is_new = isinstance(state, Awaiting) or (isinstance(state, Asking) and state.before is None)
        return is_new and wait.until > ask.wanted.began_at

    def _come(self, survey: Survey, ask: Ask, known: int, stop: int) -> tuple[Hit | None, range]:
        """Return the known chunks of a hit whose other chunks are still to come, for a fetch. Half
        of the slots are left for requests that do not wait."""
        has_room = 2 * survey.num_taken < survey.num_slots
        if has_room and known * self._chunk > ask.num_local:
            # The state at its end is of no use before the chunks are known.
            hit = self._candidate(survey, ask, stop)._replace(state=None, num_parts=0)
            if hit.num_slots <= survey.num_slots:
                return hit, range(hit.numbers.start, min(hit.numbers.stop, known))
        return None, NO_CHUNKS

    # -- hits -----------------------------------------------------------------------------------

    def _settle(
        self, survey: Survey, ask: Ask, stop: int, end: int, miss: Miss | None
    ) -> Promise | Fetch | Compute:
        """Promise the longest hit up to `stop` that is held, unless a longer one can be fetched."""
        block = self._tables.block_size
        while (stop := self._end_of_hit(survey, ask, stop)) > ask.num_local:
            hit = self._candidate(survey, ask, stop)
            num_surplus = hit.num_slots - survey.num_slots
            if num_surplus > 0:
                miss = Miss(LookupMiss.NO_MEMORY)
                stop = min(self.usable(hit.numbers[-num_surplus], end), stop - block)
                continue
            lacking = self._lacking(survey, ask, hit)
            if lacking is None:
                if hit.audited is not None and not ask.has_spare:
                    return Compute(Miss(LookupMiss.NO_MEMORY))
                return Promise(hit, miss)
            if self._may_fetch(ask, stop):
                return Fetch(hit, self._fetching(ask, hit), stop, miss)
            is_full = survey.num_taken == survey.num_slots
            what = survey.state(lacking) if lacking == hit.state else survey.what(lacking)
            is_out = is_full and what is STORED
            miss = Miss(LookupMiss.NO_MEMORY if is_out else LookupMiss.DEADLINE)
            stop = min(self.usable(lacking, end), stop - block)
        return Compute(miss)

    def _may_fetch(self, ask: Ask, stop: int) -> bool:
        """Whether there is time left for fetches, and slots for those of this hit."""
        is_in_time = not isinstance(ask.state, Fetching) or ask.now < ask.state.until
        return is_in_time and (ask.in_vain is None or stop < ask.in_vain)

    def _fetching(self, ask: Ask, hit: Hit) -> Fetching:
        if isinstance(ask.state, Fetching):
            return ask.state
        # Count the audited chunk, too.
        is_audited = hit.audited is not None
        num_tokens = len(hit.numbers) * self._chunk if is_audited else hit.stop - hit.start
        return Fetching(ask.now + self._rates.wait_seconds(num_tokens), ask.now)

    def usable(self, num_chunks: int, end: int) -> int:
        """Where a hit of `num_chunks` leading chunks ends: after a whole block, at `end` at most.
        The last token of a prompt is never part of a hit."""
        block = self._tables.block_size
        return max(0, min(num_chunks * self._chunk, end)) // block * block

    def _outside_items(self, ask: Ask, stop: int) -> int:
        """Return the last end of a block up to `stop` that is in no item."""
        block = self._tables.block_size
        for item in reversed(ask.wanted.items):
            if item.offset < stop < item.offset + item.length:
                stop = item.offset // block * block
        return stop

    def _end_of_hit(self, survey: Survey, ask: Ask, stop: int) -> int:
        """Return the last end of a block up to `stop` where a hit may end: in no item, and where a
        state is, if the model has any. What the engine has itself, if there is none."""
        stop = self._outside_items(ask, stop)
        while self._states is not None and stop > ask.num_local:
            if survey.state(stop // self._chunk - 1) not in _NO_STATE:
                return stop
            stop = self._outside_items(ask, stop - self._tables.block_size)
        return stop

    def numbers(self, start: int, stop: int) -> range:
        """Indices of the chunks that a hit of `[start, stop)` needs: from the one with the first
        needed token up to `stop`. Empty if a chunk ends there and all windows are of one token."""
        first = self._tables.first_needed(start, stop) // self._chunk
        return range(first, max(first, -(-stop // self._chunk)))

    def _candidate(self, survey: Survey, ask: Ask, stop: int) -> Hit:
        """Return the hit of stored tokens up to `stop`; it is shorter if it is to be audited."""
        start = ask.num_local
        whole = range(start // self._chunk, -(-stop // self._chunk))
        audited = self._audited(survey, ask, whole)
        if audited is None:
            hit = Hit(start, stop, self.numbers(start, stop), whole)
        else:
            block = self._tables.block_size
            stop = audited * self._chunk // block * block
            stop = max(start, self._end_of_hit(survey, ask, stop))
            first = self.numbers(start, stop).start if start < stop else audited
            hit = Hit(start, stop, range(first, audited + 1), whole, audited)
        if self._states is None or start == stop:
            return hit
        state, num_parts = stop // self._chunk - 1, self._states.num_parts
        return hit._replace(state=state, num_parts=num_parts)

    def _audited(self, survey: Survey, ask: Ask, whole: range) -> int | None:
        """Choose the chunk of a hit to compare, by index; the hit then ends before it. None if the
        hit is not audited.

        The end of a hit costs least: one chunk is computed again. But if the beginning is wrong and
        later records were computed on it, they agree with each other and the end shows nothing. So
        one in n hits of n chunks is compared at its start, which costs one chunk more on average.
        Chunks that this engine saved itself are passed over, but not in hits sampled at the rate of
        the option `audit`. Behind a state, the next chunk costs nothing if its KV is known: it is
        computed anyway, on the state that is loaded.
        """
        place = ask.wanted.place
        if place is None:
            return None
        from_front = place * len(whole) < 1
        if self._states is not None and not from_front and whole.stop < survey.num_known:
            whole = range(whole.start, whole.stop + 1)
        for number in whole if from_front else reversed(whole):
            if ask.audits_own or not survey.is_own(number):
                return number
        return None

    def groups(self, wanted: Wanted, number: int, hit: Hit) -> frozenset[int]:
        """The groups of one chunk that a hit needs. Every group if it is compared, or if peers will
        read it: they are lent whole chunks only."""
        if number == hit.audited or wanted.plan.lends:
            return self._tables.all_groups
        return self._tables.groups_of((number + 1) * self._chunk, hit.start, hit.stop)

    def _lacking(self, survey: Survey, ask: Ask, hit: Hit) -> int | None:
        """Index of the first chunk in the last contiguous run of needed chunks that are not held,
        or of the one whose state is not; None if all are held.

        Every hit that ends inside or behind the run needs part of it, so the next candidate ends
        before the run. All candidates of a look-up together take linear time.
        """
        lacking, chunks, first = None, survey.chunks, survey.first
        for number in reversed(hit.numbers):
            chunk = chunks[number - first]
            if chunk.what is HELD or self.groups(ask.wanted, number, hit) <= chunk.held:
                if lacking is not None:
                    break
            else:
                lacking = number
        if lacking is None and hit.state is not None and survey.state(hit.state) is not HELD:
            return hit.state
        return lacking

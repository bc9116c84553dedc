"""One live request: what the scheduler role knows of it, and has decided for it.

Each event of a request is one method here, which ends all that the event ends.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from kvferry.cache.deciding.audits import Audit
from kvferry.cache.deciding.hold import Hold
from kvferry.cache.deciding.search import NO_HANDOVER, HandoverPlan, Search
from kvferry.cache.messages import Load
from kvferry.journal import JournalAnswer
from kvferry.keys import ChunkKeys
from kvferry.types import ExtraKeys, RequestView


@dataclass(slots=True, eq=False)
class Request:
    """One live request. Runs in: scheduler thread.

    Invariant: it is in `at_work` while it has work.
    """

    view: RequestView  # as the host showed it last
    keys: ChunkKeys  # of its whole chunks
    inputs: tuple[ExtraKeys, int]  # extra keys and prompt tokens for which these keys stand
    arrived_at: float  # seconds since 1970
    at_work: dict[Request, None] = field(repr=False)  # see `Requests`
    is_queued: bool = False  # it waits for another engine, and the host has not looked it up yet
    search: Search | None = None  # from its first look-up until it is admitted
    load: tuple[Load, Hold] | None = None  # for the next plan, with the pins of its slots
    audit: Audit | None = None  # of its hit; perhaps no more expected
    probed_at: float | None = None  # when the store was last asked what it has of the prompt
    saves_blocked: bool = False  # a load failed on blocks that it may share, and it still has them
    is_saving: bool = False  # whether later steps of it may bring saves
    next_save: int = 0  # chunks before it are stored, on their way, or not to be saved
    last_state: int = 0  # after so many tokens its last state is that was loaded, saved or stored
    is_erased: bool = False  # by a command, while it ran: nothing more of it is stored
    lacks_slot: bool = False  # the host pool has no slot for the next chunk to save
    handover: HandoverPlan = NO_HANDOVER
    answer: JournalAnswer | None = None  # what its tokens got at its first admission
    uncached: JournalAnswer | None = None  # the same, if it runs and could not be cached then
    is_past: bool = False  # its epoch is over: it is kept for its answer, and nothing is cached

    def is_of(self, view: RequestView) -> bool:
        """Whether the keys stand for what the request is now."""
        return self.inputs == (view.extra_keys, view.num_prompt_tokens)

    @property
    def has_work(self) -> bool:
        """Whether a plan is to carry something of it."""
        if self.load is not None or self.is_saving or self.is_queued:
            return True
        return self.audit is not None and self.audit.is_expected

    @property
    def is_loading(self) -> bool:
        """Whether the next plan carries an async load of it."""
        return self.load is not None and self.load[0].is_async

    def holds(self) -> Iterator[Hold]:
        """All pins that it has."""
        if self.search is not None:
            yield self.search.pinned
            if self.search.hit is not None and self.search.hit.audit is not None:
                yield self.search.hit.audit.hold
        if self.audit is not None and self.audit.is_expected:
            yield self.audit.hold
        if self.load is not None:
            yield self.load[1]

    # -- events ---------------------------------------------------------------------------------

    def grow(self, keys: ChunkKeys, inputs: tuple[ExtraKeys, int]) -> None:
        """It has other inputs, as when a session grows: all of it is hashed again."""
        self.end_search()
        self.is_saving = False
        self.keys, self.inputs = keys, inputs
        self.probed_at, self.last_state = None, 0

    def queue(self) -> None:
        """Its chunks are fetched when its turn comes, after all that wait already."""
        self.is_queued = True
        self.at_work.pop(self, None)
        self.at_work[self] = None

    def admit_uncached(self, answer: JournalAnswer) -> None:
        """The host gave it blocks, and it may not be cached now."""
        self.uncached = answer

    def become_cacheable(self) -> None:
        """It may be cached from now on. It was counted as a miss."""
        self.answer, self.uncached = self.uncached, None
        self._wait_no_more()

    def admit(self) -> None:
        """The host gave it blocks. What was decided for its earlier ones is over; without a look-up
        before, it has those still, as when its async load has ended. Nothing is saved until `save`
        says so: if its load cannot be planned, it computes on unfilled blocks."""
        self._wait_no_more()
        self.uncached = None
        self.is_saving = False
        self.drop_load()
        if self.search is not None:
            self.drop_audit()

    def lose_blocks(self, *, is_admitted: bool) -> None:
        """The host took its blocks back: what it may have shared is its no more. If it is admitted
        again since, its load is for the new ones."""
        self.saves_blocked = False
        if not is_admitted:
            self.drop_load()
            self.drop_audit()

    def block_saves(self) -> None:
        """It may have computed on blocks with wrong content: save nothing until it loses them."""
        self.saves_blocked = True
        self.is_saving = False

    def erase(self) -> None:
        """A command erased it while it lives: nothing more of it is stored. What it was promised is
        looked for again, unless the host counts on it."""
        self.is_erased = True
        self.is_saving = False
        self.end_search()

    def save(self, first: int) -> None:
        """Consider its chunks, from this one on."""
        self.next_save = first
        self.is_saving = True
        self.at_work.setdefault(self)

    def promise(self, load: Load, hold: Hold) -> None:
        """The host counts on a load."""
        self.drop_load()
        self.load = load, hold
        self.at_work.setdefault(self)

    def expect(self, audit: Audit) -> None:
        """A later step of it computes the chunk to compare."""
        self.drop_audit()
        self.audit = audit
        self.at_work.setdefault(self)

    def outlive_epoch(self) -> None:
        """It runs on after its epoch. What it computes goes on from KV of before."""
        self.give_back()
        self.uncached = self.uncached or self.answer
        self.is_past = True

    def give_back(self) -> None:
        """It ended, or nothing that was decided for it holds any more."""
        self.at_work.pop(self, None)  # first: no plan carries anything of it, whatever raises
        self.is_saving = self.is_queued = False
        self.end_search()
        self.drop_load()
        self.drop_audit()

    # -- parts of events ------------------------------------------------------------------------

    def _wait_no_more(self) -> None:
        self.is_queued = False
        self.handover = self.handover._replace(until=0.0, latest=0.0)

    def end_search(self) -> None:
        """End its search. If it waits once more, another one begins."""
        if self.search is not None:
            self.search.release()
            self.search = None

    def drop_load(self) -> None:
        """Drop its load: a plan carries it now, or it lost its blocks."""
        if self.load is not None:
            _load, hold = self.load
            self.load = None
            hold.release()

    def drop_audit(self) -> None:
        """Give up its audit if the copy is still expected."""
        if self.audit is not None:
            self.audit.give_up()
            self.audit = None

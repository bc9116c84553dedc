"""The memory between the look-ups of one request: what it looks for, waits for and has.

A `Search` lasts from the first look-up of a request until the request is admitted. Its state says
what it waits for, and has the one deadline of the request:

    Asking ──▶ Awaiting ◀──▶ Fetching ──▶ Settled       Each of the others may settle at once.

`kvferry.cache.deciding.lookup` decides the next state, `kvferry.cache.deciding.searches` enters it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from kvferry.cache.deciding.audits import Audit
from kvferry.cache.deciding.hold import Hold
from kvferry.cache.deciding.miss import ABSENT, NOT_LOADING, Miss
from kvferry.store.backoff import Backoff
from kvferry.types import ChunkKey, MultimodalItem


class HandoverPlan(NamedTuple):
    """What to do with a request that another engine began, or will continue."""

    gives: bool = False  # another engine will continue it: all that the store lacks is stored
    lends: bool = False  # as `gives`, and peers will read it: each chunk is brought whole to memory
    is_turn: bool = False  # it continues from the KV of another engine, and gives what it generates
    num_chunks: int = 0  # number of leading chunks that are waited for
    is_held: bool = False  # a peer has them in memory, or soon will, and says itself what it lacks
    until: float = 0.0  # when the wait for chunks ends, if none of them comes before
    latest: float = 0.0  # when it ends although chunks still come
    miss: Miss = ABSENT  # why the store lacks a chunk


NO_HANDOVER = HandoverPlan()
"""No other engine takes part."""


class Wanted(NamedTuple):
    """What a search looks for."""

    keys: Sequence[ChunkKey] = ()  # of the whole chunks of the request, as they become whole
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
    state: int | None = None  # index of the chunk whose state must be held; None: of none
    num_parts: int = 0  # the slots that this state takes

    @property
    def is_shortened(self) -> bool:
        """Whether it ends before the chunk to compare, which it had else."""
        return self.audited is not None and self.audited < self.whole.stop

    @property
    def num_slots(self) -> int:
        """Number of slots that it needs; an audit needs one more for what the engine computes."""
        return len(self.numbers) + self.num_parts + (self.audited is not None)


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


State = Asking | Awaiting | Fetching | Settled


def wait_of(state: State, plan: HandoverPlan, known: int) -> Awaiting:
    """Return the wait for another engine: as it is, was or begins."""
    if isinstance(state, Awaiting):
        return state
    before = state.before if isinstance(state, Asking) else None
    return before or Awaiting(plan.until, known)


class Worth(NamedTuple):
    """How much of a hit is loaded, as the rest is computed sooner."""

    stop: int
    """Index of the first chunk that is not loaded."""
    why: str


NOTHING, ENDED = Wanted(), Asking(0.0)


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
    looks: Backoff  # when awaited chunks are asked for again
    wanted: Wanted = NOTHING
    state: State = ENDED
    num_local: int = 0  # tokens that the engine had itself at the last look-up
    # Chunks whose fetch the search waited for, and where from; another request may have begun it.
    fetched: dict[ChunkKey, str] = field(default_factory=dict)
    worth: Worth | None = None  # decided before the first fetch, and kept
    # Tokens and seconds of what was fetched and promised, by where from.
    loads: dict[str, tuple[int, float]] = field(default_factory=dict)
    num_reads_left: int = 3  # failed reads of its chunks that are tried again
    # Index of the chunk for which the last decision was to wait; None: it was not, or for a state.
    next_chunk: int | None = None
    miss: Miss | None = NOT_LOADING  # why the last answer was not longer; None: nothing ended it
    junction: int = 0  # see `Decision.junction`

    @property
    def hit(self) -> Hit | None:
        """The promised hit."""
        return self.state.hit if isinstance(self.state, Settled) else None

    @property
    def is_filling(self) -> bool:
        """Whether a slot of the hit is still filling. The last one mostly is the last to be filled,
        so this sees one slot only."""
        return any(slot.filling for slot in reversed(self.pinned))

    def withdraw(self) -> Asking | Awaiting | Fetching:
        """Leave `Settled`: withdraw the promise, and with it the audit. Return the state that goes
        on."""
        if isinstance(self.state, Settled):
            if self.state.hit is not None and self.state.hit.audit is not None:
                self.state.hit.audit.hold.release()
            self.state = self.state.before
        return self.state

    def release(self) -> None:
        """End the pins and the promise of a search that ends."""
        self.pinned.release()
        self.withdraw()

    def admit(self) -> Audit | None:
        """End the search of a request that was admitted. Its load takes the pins over before. The
        audit of its hit goes on: hand it over."""
        audit = self.hit and self.hit.audit
        self.pinned.release()
        self.state = ENDED
        return audit

    def reads_again(self) -> bool:
        """Whether a chunk that it awaits, whose read failed, is to be read again. This uses up one
        of the reads that it has for that."""
        is_left = self.num_reads_left > 0
        self.num_reads_left -= is_left
        return is_left

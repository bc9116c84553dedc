"""What the scheduler role remembers: the state of live requests, and chunks that failed to be read.

`SharedStorageScheduler` owns `Requests`, and removes a state in `request_finished`. `Lookup`,
`SavePlan`, `Audits`, `Handovers` and `Accounts` change the states. All run on the scheduler thread.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Literal

from kvferry.cache.deciding.host_pool import Slot
from kvferry.cache.messages import Filled, Load
from kvferry.contract.messages import LookupMiss
from kvferry.journal import JournalAnswer
from kvferry.keys import ChunkKeys
from kvferry.types import DEFAULT_OPTIONS, ChunkKey, ExtraKeys, RequestOptions, RequestView

UNREADABLE_SECONDS = 60.0
"""How long a chunk that could not be read is not offered, unless it is stored again. Not for ever,
because another process may repair the record unseen."""

RETRY_SECONDS = 3.0
"""The same if the store did not answer, or no longer had the chunk: nothing is wrong with the
record, and a server that is back is to be used soon."""

REFUSED_SECONDS = 3600.0
"""How long it is known why a chunk was not stored."""

MAX_FAILED = 100_000
"""Number of failed chunks beyond which all are forgotten."""


@dataclass(slots=True, eq=False)
class Audit:
    """The comparison of a promised hit with what the engine computes.

    Attributes:
        record: pinned slot with the record of the compared chunk.
        copy: pinned slot for what the engine computes.
        is_at_end: False if chunks that this engine did not save follow the compared one in the hit.
            Faults that grow with the position, such as other rotary frequencies, may not show then.
        load: load of the hit, once it is admitted; None if nothing is loaded, or the host cannot
            compute it again.
        results: results of the ranks that have compared their part.
    """

    record: Slot
    copy: Slot
    is_at_end: bool
    load: Load | None = None
    results: list[Filled] = field(default_factory=list)


@dataclass(slots=True, kw_only=True)
class HandoverPlan:
    """What to do with a request that another engine began, or will continue.

    Attributes:
        gives: another engine will continue it, so each chunk that the store lacks is stored.
        lends: as `gives`, and each chunk is brought whole into memory, for peers to read.
        is_turn: it continues from the KV of another engine, and gives what it generates, too.
        num_chunks: number of leading chunks that are waited for.
        num_known: number of leading chunks that had come at the last look-up; None before it.
        until: when the wait for chunks ends, if no more of them come before.
        latest: when it ends although chunks still come.
        wait: what came of the wait: none was needed yet, or the last look-up waits, or chunks came
            meanwhile, or none came in time.
        num_reads_left: number of failed reads of its chunks that are tried again.
        miss: the reason given for a chunk that the store lacks.
        why: details of `miss` in words, or empty.
    """

    gives: bool = False
    lends: bool = False
    is_turn: bool = False
    num_chunks: int = 0
    num_known: int | None = None
    until: float = 0.0
    latest: float = 0.0
    wait: Literal["none", "waits", "came", "in vain"] = "none"
    num_reads_left: int = 3
    miss: LookupMiss = LookupMiss.ABSENT
    why: str = ""

    def end_wait(self) -> None:
        """Wait for nothing more: what has not come by the admission is computed here."""
        self.until = self.latest = 0.0


@dataclass(slots=True)
class Search:
    """The search for a request's hit, from its first look-up until it is admitted.

    Attributes:
        num_local: tokens that the engine had itself at the last look-up.
        pinned: slots of the hit, filled or still filling, which the search keeps from eviction.
        awaited: slots of `pinned` that were filling when the search last fetched. A look-up removes
            filled ones from the end only, so others may be filled, too.
        fetched: chunks whose fetch the search waited for, and where from (`Store.tier_of`). Another
            request may have begun the fetch.
        began_at: time of its first look-up.
        fetching_since: time when its fetches began; None if there were none, and while another
            engine is still to bring more.
        deadline: time by which its fetches must have ended.
        worth: index of the first chunk that is not worth loading, and the seconds expected to load
            and to compute all in words; None while all chunks are worth it.
        gave_up: why no more is fetched for it; None: more may be fetched.
        loads: tokens and seconds of what was fetched and promised, by where from.
        promised: tokens `[start, stop)` of the last positive answer.
        miss: why the last answer was not longer; NOT_LOADING if there was none.
        why: details of `miss` in words, or empty.
    """

    num_local: int = 0
    pinned: list[Slot] = field(default_factory=list)
    awaited: list[Slot] = field(default_factory=list)
    fetched: dict[ChunkKey, str] = field(default_factory=dict)
    began_at: float = 0.0
    fetching_since: float | None = None
    deadline: float = 0.0
    worth: tuple[int, str] | None = None
    gave_up: LookupMiss | None = None
    loads: dict[str, tuple[int, float]] = field(default_factory=dict)
    promised: tuple[int, int] | None = None
    miss: LookupMiss | None = LookupMiss.NOT_LOADING
    why: str = ""

    def missed(self, miss: LookupMiss | None, why: str = "") -> None:
        """Note why the answer is not longer."""
        self.miss, self.why = miss, why

    @property
    def phase(self) -> Literal["asking", "fetching", "settled"]:
        """The search asks what the store has, fetches it, or is settled: a hit is promised, or no
        more is fetched. If a promise is withdrawn, the search returns to the phase before."""
        if self.promised is not None or self.gave_up is not None:
            return "settled"
        return "asking" if self.fetching_since is None else "fetching"


@dataclass(slots=True)
class RequestState:
    """One live request.

    Attributes:
        keys: keys of its whole chunks.
        inputs: extra keys and number of prompt tokens for which these keys stand.
        arrived_at: when it came, seconds since 1970.
        search: search for its hit; None until the first look-up, and from admission to the next
            look-up.
        probed_at: when the store was last asked what it has of the prompt; None: not yet.
        saves_blocked: a load failed on blocks that it may share, so no more of it is saved until it
            has new blocks.
        next_save: index of a chunk; those before it are stored, on their way, or not to be saved.
        lacks_slot: the host pool has no slot for the next chunk to save.
        audit: audit of the promised hit, if it has one.
        handover: None if no other engine takes part.
        options: what the request asks of the cache.
        answer: what its tokens got at its first admission; None before that.
        sample: random number in [0, 1) that decides whether its hit is audited, and from which end;
            None: not drawn yet.
    """

    keys: ChunkKeys
    inputs: tuple[ExtraKeys, int]
    arrived_at: float
    search: Search | None = None
    probed_at: float | None = None
    saves_blocked: bool = False
    next_save: int = 0
    lacks_slot: bool = False
    audit: Audit | None = None
    handover: HandoverPlan | None = None
    options: RequestOptions = DEFAULT_OPTIONS
    answer: JournalAnswer | None = None
    sample: float | None = None

    def is_of(self, request: RequestView) -> bool:
        """Whether the keys stand for what the request is now."""
        return self.inputs == (request.extra_keys, request.num_prompt_tokens)

    @property
    def gives_all(self) -> bool:
        """Whether another engine will continue it, so each chunk that the store lacks is stored."""
        return self.handover is not None and self.handover.gives

    @property
    def lends_all(self) -> bool:
        """Whether peers may also read each of its chunks from memory."""
        return self.handover is not None and self.handover.lends


class FailedKeys:
    """Chunks whose read or write failed a short time ago, and why. Not thread-safe."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._failed: dict[bytes, tuple[float, LookupMiss, str]] = {}

    def __contains__(self, key: bytes) -> bool:
        return key in self._failed and self._clock() < self._failed[key][0]

    def why(self, key: bytes) -> tuple[LookupMiss, str]:
        """Return why a chunk that is here failed, and details in words."""
        return self._failed[key][1:]

    def add(self, keys: Iterable[bytes], seconds: float, miss: LookupMiss, why: str = "") -> None:
        if len(self._failed) > MAX_FAILED:
            self._failed.clear()
        self._failed.update(dict.fromkeys(keys, (self._clock() + seconds, miss, why)))

    def discard(self, key: bytes) -> None:
        """Forget a chunk: it was stored again."""
        self._failed.pop(key, None)

    def clear(self) -> None:
        self._failed.clear()


class Requests:
    """The live requests that may be cached. Runs in: scheduler thread; not thread-safe.

    Args:
        namespace: digest that roots the chunk keys.
        clock: monotonic seconds.

    Attributes:
        namespace: digest that roots the keys of new requests.
        by_id: the state of each request.
        unreadable: chunks that are not offered, although the store may seem to have them.
        refused: chunks that the store did not take.
    """

    def __init__(
        self,
        namespace: bytes,
        chunk_tokens: int,
        clock: Callable[[], float],
    ) -> None:
        self.namespace = namespace
        self._chunk_tokens = chunk_tokens
        self.by_id: dict[str, RequestState] = {}
        self.unreadable = FailedKeys(clock)
        self.refused = FailedKeys(clock)

    def track(self, request: RequestView) -> RequestState:
        """Return the state of a request, with the keys of all chunks that are whole by now. A new
        request gets a new state. If a session grew, all is hashed again: the host took back tokens
        that it had not computed, and an item may cover what had none."""
        state = self.by_id.get(request.request_id)
        if state is None or not state.is_of(request):
            keys = ChunkKeys(self.namespace, self._chunk_tokens, request.extra_keys)
            inputs = request.extra_keys, request.num_prompt_tokens
            if state is None:
                state = RequestState(keys, inputs, time.time(), options=request.options)
                self.by_id[request.request_id] = state
            else:
                state.keys, state.inputs = keys, inputs
                state.probed_at = None
        state.keys.extend(request.all_token_ids)
        return state

    def begin_epoch(self, namespace: bytes) -> None:
        """Forget all requests. New ones get keys of that namespace."""
        self.namespace = namespace
        self.by_id.clear()
        self.unreadable.clear()

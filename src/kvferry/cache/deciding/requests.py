"""What the scheduler role remembers of live requests, and the chunks that requests ask to keep.

`SharedStorageScheduler` owns `Requests`, begins and ends searches, and removes a state in
`request_finished`. `SavePlan`, `Handovers` and `Accounts` change the states. All run on the
scheduler thread.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvferry.cache.deciding.failed_keys import FailedKeys
from kvferry.cache.deciding.lookup import NO_HANDOVER, HandoverPlan, Search
from kvferry.errors import ConfigError, StoreError
from kvferry.journal import JournalAnswer
from kvferry.keys import ChunkKeys
from kvferry.observe import Observer
from kvferry.store.base import Catalogue
from kvferry.store.io_pool import IOPool, Job
from kvferry.types import ChunkKey, ExtraKeys, RequestView

MAX_WAITING = 1 << 16
"""Most chunks whose pins may wait for their save. With one more, the oldest is forgotten."""


@dataclass(slots=True)
class RequestState:
    """One live request."""

    keys: ChunkKeys  # of its whole chunks
    inputs: tuple[ExtraKeys, int]  # extra keys and prompt tokens for which these keys stand
    arrived_at: float  # seconds since 1970
    search: Search | None = None  # from its first look-up until it is admitted
    probed_at: float | None = None  # when the store was last asked what it has of the prompt
    saves_blocked: bool = False  # a load failed on blocks that it may share, and it still has them
    next_save: int = 0  # chunks before it are stored, on their way, or not to be saved
    is_erased: bool = False  # by a command, while it ran: nothing more of it is stored
    lacks_slot: bool = False  # the host pool has no slot for the next chunk to save
    handover: HandoverPlan = NO_HANDOVER
    answer: JournalAnswer | None = None  # what its tokens got at its first admission

    def is_of(self, request: RequestView) -> bool:
        """Whether the keys stand for what the request is now."""
        return self.inputs == (request.extra_keys, request.num_prompt_tokens)


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
                state = RequestState(keys, inputs, time.time())
                self.by_id[request.request_id] = state
            else:
                state.keys, state.inputs = keys, inputs
                state.probed_at = None
        state.keys.extend(request.all_token_ids)
        return state

    def behind(self, key: bytes) -> list[ChunkKey]:
        """Return the chunks of live requests from this one on. Rare; walks all live requests."""
        found: dict[ChunkKey, None] = {}
        for state in self.by_id.values():
            keys = state.keys.keys
            if key in keys:
                found.update(dict.fromkeys(keys[keys.index(ChunkKey(key)) :]))
        return list(found)

    def begin_epoch(self, namespace: bytes) -> None:
        """Forget all requests. New ones get keys of that namespace."""
        self.namespace = namespace
        self.by_id.clear()
        self.unreadable.clear()


class RequestPins:
    """The pins that requests ask for: they keep the chunks of a prompt from eviction once these are
    stored. `add` and `stored` run in the scheduler thread; a thread of its own does the I/O."""

    def __init__(self, store: Catalogue, observer: Observer) -> None:
        self._store = store
        self._observer = observer
        self._waiting: OrderedDict[ChunkKey, float] = OrderedDict()
        self._thread = IOPool(1, "kvferry-pin")

    def add(self, keys: Sequence[ChunkKey], seconds: float) -> None:
        """Pin those of `keys` that are stored for `seconds` from now, the others as they come."""
        until = time.time() + seconds
        self._waiting.update(dict.fromkeys(keys, until))
        while len(self._waiting) > MAX_WAITING:
            self._waiting.popitem(last=False)
        self._pin_soon(keys, until)

    def stored(self, key: ChunkKey) -> None:
        """A chunk was saved."""
        if key in self._waiting:
            self._pin_soon([key], self._waiting.pop(key))

    def _pin_soon(self, keys: Sequence[ChunkKey], until: float) -> None:
        def pin(_job: Job[None]) -> None:
            try:
                if time.time() < until:
                    self._store.pin(keys, until, by_client=True)
            except (ConfigError, StoreError):  # it cannot pin, or clients have pinned enough
                self._observer.count("pins_refused")

        self._thread.submit(pin)

    def close(self) -> None:
        """Make the pins that are due, in bounded time."""
        self._thread.close()

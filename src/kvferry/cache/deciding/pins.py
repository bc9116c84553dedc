"""The chunks that requests ask to keep."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Sequence

from kvferry.cache.deciding.rank_slots import RankSlots
from kvferry.observe import Observer
from kvferry.store.base import Store
from kvferry.store.catalogue import pin_for_client
from kvferry.store.io_pool import IOPool, Job
from kvferry.types import ChunkKey

MAX_WAITING = 1 << 16
"""Most chunks whose pins may wait for their save. With one more, the oldest is forgotten."""


class RequestPins:
    """The pins that requests ask for: they keep the chunks of a prompt from eviction once these are
    stored. `add` and `stored` run in the scheduler thread; a thread of its own does the I/O.

    Attributes:
        orders: what the next plan has ranks that are apart pin of their shards; it clears them.
    """

    def __init__(self, store: Store, ranks: RankSlots, observer: Observer) -> None:
        self._store = store
        self._ranks = ranks
        self._observer = observer
        self.orders: list[tuple[tuple[ChunkKey, ...], float]] = []
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
            if time.time() >= until:
                return
            if not pin_for_client(self._store.catalogues(), keys, until):
                self._observer.count("pins_refused")

        if self._ranks.are_apart:
            self.orders.append((tuple(keys), until))
        self._thread.submit(pin)

    def close(self) -> None:
        """Make the pins that are due, in bounded time."""
        self._thread.close()

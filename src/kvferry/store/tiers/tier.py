"""One store among several: its calls, with their limits, and what they mean for its health.

`TieredStore` calls a `Tier` for look-ups, reads and writes, on the threads of its own callers. The
thread of each tier opens its store, tries it, and copies values to it.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from typing import NamedTuple

from kvferry.errors import StoreError, StorePlaceError
from kvferry.observe import Observer
from kvferry.store.base import PutResult, ReadRange, Store, StoreStat, TierStatus, Value
from kvferry.store.tiers.health import Health, Limit, Patience, State
from kvferry.types import ChunkKey

logger = logging.getLogger(__name__)


_WAIT_SECONDS = 0.5
"""Longest single wait of a start: an interrupt just before a wait is seen only after it."""

_TRIAL_KEY = ChunkKey(b"\xff" * 32)
"""A key of no record: a trial reads it to see whether a store answers."""


class Unopened(NamedTuple):
    """A store that is still to be opened.

    Attributes:
        url: URL of the store, without credentials.
        open: opens the store, on a thread of the tier. Gets False if it must not make a store where
            there is none. Raises StoreError if the medium does not answer, and is then called
            again.
    """

    url: str
    open: Callable[[bool], Store]


class Tier:
    """One store, its health and its limits. Thread-safe.

    Args:
        given: the store, or how it is opened.
        number: place among the tiers; 0 is the nearest.
        clock: clock that gives monotonic seconds, as deadlines do.

    Attributes:
        name: name in metrics: the scheme of its URL, with `number` if a nearer tier has the same.
        store: the store; None until it is open.
        up: the store while it may be asked, else None. Look-ups only read this, once.
        calls: clock and limits of calls, and the reads under way.
        opening: done after the first try to open the store; has the error if that failed.
    """

    def __init__(
        self,
        given: Store | Unopened,
        number: int,
        observer: Observer,
        clock: Callable[[], float],
        patience: Patience,
    ) -> None:
        self.number = number
        self.url = given.url
        self.name = given.url.partition(":")[0]
        self.store: Store | None = None
        self.up: Store | None = None
        self.opening: Future[None] = Future()
        self.calls = Calls(clock, patience)
        self._observer = observer
        self._health = Health(f"store {given.url}", clock, patience)
        self._lock = threading.Lock()
        self._open: Callable[[bool], Store]
        if isinstance(given, Unopened):
            self._open = given.open
        else:
            store = given
            self._open = lambda _may_create: store
            self.try_if_due()

    # -- health ---------------------------------------------------------------------------------

    def _event(self, event: Callable[[Health], str | None]) -> None:
        with self._lock:
            line = event(self._health)
            self.up = self.store if self._health.is_up else None
        if line:
            logger.warning("%s", line)

    @property
    def accepts_writes(self) -> bool:
        """See `Health.accepts_writes`, and `Store.takes_values`. Memory only."""
        store = self.up
        return self._health.accepts_writes and (store is None or store.takes_values)

    @property
    def next_try(self) -> float:
        """See `Health.next_try`."""
        return self._health.next_try

    def try_if_due(self) -> None:
        """Open the store, or check whether it answers, if that is due. Blocks on I/O."""
        with self._lock:
            is_due = self._health.claim_try()
        if is_due and self.store is None:
            self._try_open()
        elif is_due:
            self.check_now()

    def _try_open(self) -> None:
        try:
            store = self._open(self._health.may_create)
        except BaseException as error:  # also a library's panic: the start raises or logs it
            fault = error
            self._event(lambda health: health.open_failed(fault))
            if not self.opening.done():
                self.opening.set_exception(fault)
            return
        store.on_result(self._on_result)
        with self._lock:
            self.store = store
        self._event(Health.opened)
        if self._health.state is State.CLOSED:  # meanwhile
            store.close()
        if not self.opening.done():
            self.opening.set_result(None)

    def wait_opened(self, seconds: float) -> BaseException | None:
        """Wait for the first try to open the store. Return its error if the store never opens."""
        while seconds > 0.0 and not wait([self.opening], min(seconds, _WAIT_SECONDS)).done:
            seconds -= _WAIT_SECONDS
        if not self.opening.done():
            self._event(lambda health: health.is_late(self.calls.patience.start_seconds))
            return None
        fault = self.opening.exception()
        return None if isinstance(fault, StoreError) else fault

    def leave_out(self, fault: StorePlaceError) -> None:
        """The start goes on without the store, because of its `fault`."""
        self._event(lambda health: health.is_left_out(fault))

    def check_now(self) -> bool:
        """Read a key of no record. Whether the store answers and is up. Blocks on I/O."""
        store = self.store
        if store is None:
            return False
        trial_seconds = self.calls.patience.min_write_seconds
        with self._lock:
            generation, is_wanted = self._health.generation, self._health.begin_check()
        try:
            store.read(_TRIAL_KEY, (), self.calls.clock() + trial_seconds)
        except StoreError as error:
            fault = error
            self._event(lambda health: health.failed(fault, generation))
            return False
        self._event(lambda health: health.succeeded(generation))
        if is_wanted:
            why = store.refusal
            self._event(lambda health: health.write_refused(why))
        return self._health.is_up

    def _on_result(self, fault: StoreError | None) -> None:
        """Hear that a probe ended. Ignored while the store is away: the probe may be older."""
        if fault is None:
            self._event(lambda health: health.succeeded(health.generation) if health.is_up else "")
        else:
            self._event(lambda health: health.failed(fault, health.generation))

    def find_overdue(self) -> None:
        """Report each read that hangs to the health, as a failure. Such a read, as on a mount that
        hangs, is long past its limit and still holds its thread. Memory only."""
        reading = self.calls.reading
        overdue = self.calls.clock() - self.calls.read_limit.seconds
        overdue -= 2 * self.calls.patience.min_limit_seconds
        for call, started in tuple(reading.items()) if reading else ():
            if started < overdue and reading.pop(call, None) is not None:
                self._event(lambda health: health.failed("a read does not end", health.generation))

    # -- calls ----------------------------------------------------------------------------------

    def count(self, what: str, result: str) -> None:
        """Count a result of "reads", "writes" or "copies" under the name of this tier."""
        self._observer.count(f"tier_{what}/{self.name}/{result}")

    @property
    def status(self) -> TierStatus:
        """State of the tier and counts of its store. Memory only."""
        state, since, because = self._health.standing
        since = time.time() - (self.calls.clock() - since)
        fault = self._health.fault if self._health.is_up else f"{state}: {because}"
        return TierStatus(self.name, state, since, because, self.stat(), fault)

    def read(self, key: ChunkKey, ranges: Sequence[ReadRange], deadline: float) -> int | None:
        """Do `ask`, and count the result."""
        try:
            size = self.ask(key, ranges, deadline)
        except StoreError:
            self.count("reads", "failed")
            raise
        self.count("reads", "miss" if size is None else "hit")
        if size is not None:
            num_bytes = sum(max(0, min(len(buffer), size - start)) for start, buffer in ranges)
            self._observer.count(f"tier_read_bytes/{self.name}", num_bytes)
        return size

    def ask(self, key: ChunkKey, ranges: Sequence[ReadRange], deadline: float) -> int | None:
        """Do `Store.read` within the limit of this tier, and report the result to its health."""
        store, calls, call = self.store, self.calls, object()
        if store is None:
            raise StoreError(f"store {self.url} is not open yet")
        started, generation = calls.clock(), self._health.generation
        calls.reading[call] = started
        try:
            size = store.read(key, ranges, min(deadline, started + calls.read_limit.seconds))
        except StoreError as error:
            now, fault = calls.clock(), error
            calls.read_limit.saw(now - started)
            # A read that had little time and took all of it says nothing about the store.
            is_blamed = now < deadline or now - started >= calls.patience.min_limit_seconds / 2
            if calls.reading.pop(call, None) is not None and is_blamed:
                self._event(lambda health: health.failed(fault, generation))
            raise
        finally:
            calls.reading.pop(call, None)
        self._event(lambda health: health.succeeded(generation))
        if size is not None:
            calls.read_limit.saw(calls.clock() - started)
        return size

    def put_all(self, values: Sequence[Value], deadline: float) -> list[PutResult]:
        """Do `Store.put_all` for `values_per_put` values at a time. Each such call gets the limit
        of a write, but no longer than `deadline`. Values are FAILED without a try while the tier
        accepts no writes."""
        results: list[PutResult] = []
        while len(results) < len(values):
            store, start = self.store, len(results)
            if store is None or not self.accepts_writes:
                self.count("writes", "skipped")
                results.append(PutResult.FAILED)
            else:
                some = values[start : start + store.values_per_put]
                results += self._put_some(store, some, deadline)
        return results

    def _put_some(self, store: Store, values: Sequence[Value], deadline: float) -> list[PutResult]:
        calls, generation = self.calls, self._health.generation
        started = calls.clock()
        results = store.put_all(values, min(deadline, started + calls.write_limit.seconds))
        seconds = calls.clock() - started
        if any(result is not PutResult.EXISTS for result in results):
            calls.write_limit.saw(seconds)
        for result in results:
            if result is PutResult.FAILED:
                self._event(lambda health: health.write_failed(seconds, generation))
            elif result is PutResult.NO_SPACE:
                self._event(lambda health: health.no_room(seconds))
            elif result is PutResult.STORED:
                self._event(Health.stored)
            self.count("writes", result)
        return results

    def discard(self, key: ChunkKey, reason: str) -> None:
        """Do `Store.discard`; nothing while the store is not up."""
        if (store := self.up) is not None:
            store.discard(key, reason)

    def delete(self, key: ChunkKey) -> bool:
        """Do `Store.delete`; nothing while the store is not up."""
        return (store := self.up) is not None and store.delete(key)

    def has(self, key: ChunkKey) -> bool:
        """Whether the store is up and known to have `key`. Memory only."""
        return (store := self.up) is not None and bool(store.contains(key))

    def stat(self) -> StoreStat:
        """See `Store.stat`."""
        return StoreStat(self.url, 0, 0, None, False) if self.store is None else self.store.stat()

    def close(self) -> None:
        """Close the store. If it is being opened, the thread that opens it closes it then."""
        self._event(Health.close)
        if self.store is not None:
            self.store.close()

    def __repr__(self) -> str:
        return f"<Tier {self.number} {self.url}: {self._health.state}>"


class Calls:
    """How long the calls of one tier take and may take.

    Attributes:
        reading: start of each read under way, by an object that stands for the read.
    """

    def __init__(self, clock: Callable[[], float], patience: Patience) -> None:
        self.clock = clock
        self.patience = patience
        self.read_limit = Limit(patience.min_limit_seconds, patience.max_limit_seconds)
        self.write_limit = Limit(patience.min_write_seconds, patience.max_limit_seconds)
        self.reading: dict[object, float] = {}

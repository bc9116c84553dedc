"""One store among several: its calls, and what they mean for its health.

`TieredStore` calls a `Tier` for look-ups, reads and writes, on the threads of its own callers. The
thread of each tier opens its store, tries it, and copies values to it.
"""

from __future__ import annotations

import copy
import logging
import math
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from functools import partial
from itertools import takewhile
from weakref import WeakSet

from kvferry.errors import Fault, FaultKind, StoreError
from kvferry.observe import Observer
from kvferry.store.base import (
    HERE,
    Put,
    PutResult,
    ReadRange,
    RecordBytes,
    Store,
    StoreStat,
    TierStatus,
    Value,
)
from kvferry.store.erasures import Erasures
from kvferry.store.faults import Calls, Faults
from kvferry.store.kinds import is_peer
from kvferry.store.servers.remote import RemoteStore
from kvferry.store.tiers.health import Health, Patience, State
from kvferry.types import ChunkKey

logger = logging.getLogger(__name__)


_ERASED = Fault(FaultKind.REFUSED, "a command erased it")
_FAILED = Fault(FaultKind.BUG, "a write failed, and the store does not say why")
_HANGS = Fault(FaultKind.LATE, "a read does not end")

_WAIT_SECONDS = 0.5
"""Longest single wait of a start: an interrupt just before a wait is seen only after it."""


@dataclass(frozen=True, slots=True)
class Unopened:
    """A store that is still to be opened.

    Attributes:
        url: URL of the store, without credentials.
        open: opens the store, on a thread of the tier. Gets False if it must not make a store where
            there is none. Raises StoreError if the medium does not answer, and is then called
            again.
        calls: what the opening, and the client that it makes, do now.
    """

    url: str
    open: Callable[[bool], Store]
    calls: Calls = field(default_factory=Calls)


class Tier:
    """One store and its health. Thread-safe.

    Args:
        given: the store, or how it is opened.
        name: its name in metrics.
        number: place among the tiers; 0 is the nearest.
        clock: clock that gives monotonic seconds, as deadlines do.

    Attributes:
        namespace: that of the values; None: the one that the store was opened for.
        store: the store, in that namespace; None until it is open.
        up: the store while it may be asked, else None. Look-ups only read this, once.
        opening: done after the first try to open the store; has the error if that failed.
        faults: boundary of the tier's thread.
        when_due: called when the store is to be opened or tried, now or later.
        erasures: says what must be neither written nor read; None: nothing was erased.
    """

    def __init__(
        self,
        given: Store | Unopened,
        name: str,
        number: int,
        observer: Observer,
        clock: Callable[[], float],
        patience: Patience,
    ) -> None:
        self.name = name
        self.number = number
        self.given = given
        self.is_peer = is_peer(given.url)
        self.namespace: bytes | None = None
        self.store: Store | None = None
        self.up: Store | None = None
        self.opening: Future[None] = Future()
        self.clock = clock
        self.patience = patience
        self.when_due: Callable[[], object] = lambda: None
        self.erasures: Erasures | None = None
        self._observer = observer
        self.faults = Faults(given.url, observer, clock)
        self._health = Health(f"store {given.url}", clock, patience)
        self._reading: dict[object, float] = {}  # by read or trial under way, its deadline
        self._calls = given.calls if isinstance(given, Unopened | RemoteStore) else Calls()
        self._lock = threading.Lock()
        self._views = WeakSet([self])  # this tier in each namespace
        if not isinstance(given, Unopened):
            self.try_if_due()

    # -- health ---------------------------------------------------------------------------------

    def _event(self, event: Callable[[Health], str | None]) -> None:
        with self._lock:
            line = event(self._health)
            for view in self._views:
                view.up = view.store if self._health.is_up else None
        if line:
            logger.warning("%s", line)
        if self.next_try < math.inf:
            self.when_due()

    def accepts(self) -> Fault | None:
        """See `Store.accepts`, and `Health.accepts_writes`. Memory only."""
        store = self.up  # first: None also while a store is about to be used again
        if store is None or not self._health.accepts_writes:
            return self._stands()
        return store.accepts()

    @property
    def is_read_only(self) -> bool:
        """Whether the store takes no values, and deletes none, whatever its health: it is a peer,
        or was opened so. Memory only."""
        why = None if self.store is None else self.store.accepts()
        return why is not None and why.kind is FaultKind.READ_ONLY

    def _stands(self) -> Fault:
        """The state of a tier that does not take values, or is not asked, and why."""
        state, _, because = self._health.standing
        kind = FaultKind.CLOSED if state is State.CLOSED else FaultKind.AWAY
        kind, text = because or (kind, "")
        return Fault(kind, f"{state}: {text}")

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
        elif is_due and self.store is not None:
            until, call = self.clock() + self.patience.trial_seconds, object()
            self._reading[call] = until
            try:
                with self.faults.guard("trial", passes=StoreError):
                    self.store.check_medium(until)
            except StoreError as error:
                self._event(partial(Health.is_lost, why=error.fault))
            else:
                self._event(Health.trial_answered)
            finally:
                self._reading.pop(call, None)

    def _try_open(self) -> None:
        try:
            given = self.given
            store = given.open(self._health.may_create) if isinstance(given, Unopened) else given
        except BaseException as error:  # also a library's panic: the start raises or logs it
            self._event(partial(Health.open_failed, error=error))
            if not self.opening.done():
                self.opening.set_exception(error)
            return
        store.on_result(self._on_result)
        with self._lock:
            for view in self._views:
                view._place(store)
        self._event(Health.opened)
        if self._health.state is State.CLOSED:  # meanwhile
            store.close()
        if not self.opening.done():
            self.opening.set_result(None)

    def _place(self, store: Store) -> None:
        if isinstance(store, RemoteStore):
            self._calls = store.calls
        self.store = store if self.namespace is None else store.in_namespace(self.namespace)

    def in_namespace(self, namespace: bytes | None) -> Tier:
        """Return this tier as it asks its store in a namespace; None: in its own. All but the store
        is shared."""
        if namespace in (None, self.namespace):
            return self
        view = copy.copy(self)
        view.namespace, view.store, view.up = namespace, None, None
        with self._lock:
            self._views.add(view)
            if self.store is not None:
                view._place(self.store)
                view.up = view.store if self._health.is_up else None
        return view

    def wait_opened(self, seconds: float) -> BaseException | None:
        """Wait for the first try to open the store. Return its error if the store never opens."""
        while seconds > 0.0 and not wait([self.opening], min(seconds, _WAIT_SECONDS)).done:
            seconds -= _WAIT_SECONDS
        if not self.opening.done():
            limit = self.patience.start_seconds
            why = f"did not open within {limit:g} s" if limit else "opens in the background"
            late = self._calls.take_late(math.inf) if limit else ()
            for said, what in late:
                why += f", in {said}"
                self._observer.count(f"store_{what}_failed")
            because = Fault(FaultKind.LATE, why) if late else None
            self.leave_out(f"{why}: serving without it until it does", because)
            return None
        fault = self.opening.exception()
        return None if isinstance(fault, StoreError) else fault

    def leave_out(self, why: str, because: Fault | None = None) -> None:
        """The start goes on without the store; see `Health.is_left_out`."""
        self._event(partial(Health.is_left_out, why=why, because=because))

    def _on_result(self, fault: StoreError | None) -> None:
        """Hear that a probe ended."""
        self._event(Health.answered if fault is None else partial(Health.failed, why=fault.fault))

    def find_overdue(self) -> None:
        """Report each read that hangs to the health. Such a read, as on a mount that hangs, is long
        past its deadline and still holds its thread. Name each call of a client that does. Memory
        only."""
        overdue, why = self.clock() - self.patience.hang_seconds, _HANGS
        for said, what in self._calls.take_late(overdue):
            why = self.faults.does_not_end(what, said)
            self._event(partial(Health.hangs, why=why))
        for call, deadline in tuple(self._reading.items()) if self._reading else ():
            if deadline < overdue and self._reading.pop(call, None) is not None:
                self._event(partial(Health.is_lost, why=why))

    # -- calls ----------------------------------------------------------------------------------

    def count(self, what: str, result: str) -> None:
        """Count a result of "reads", "writes" or "copies" under the name of this tier."""
        self._observer.count(f"tier_{what}/{self.name}/{result}")

    @property
    def status(self) -> TierStatus:
        """State of the tier. Memory only."""
        state, since, because = self._health.standing
        since = time.time() - (self.clock() - since)
        return TierStatus(self.name, state, since, because, self.stat, self.fault)

    @property
    def fault(self) -> Fault | None:
        """See `TierStatus.fault`."""
        return self._health.fault if self._health.is_up else self._stands()

    @property
    def away(self) -> StoreError:
        """The error of a call that is not made, because the store is not asked now."""
        kind, text = self._stands()
        return StoreError(kind, f"{self.name} {text}")

    def read(
        self, key: ChunkKey, ranges: Sequence[ReadRange], deadline: float
    ) -> RecordBytes | None:
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

    def ask(
        self, key: ChunkKey, ranges: Sequence[ReadRange], deadline: float
    ) -> RecordBytes | None:
        """Do `Store.read`, and report the result to the health. What was erased, and is there all
        the same, is deleted and not found."""
        store, call = self.store, object()
        if store is None:
            raise StoreError(FaultKind.AWAY, f"store {self.given.url} is not open yet")
        started = self.clock()
        self._reading[call] = deadline
        try:
            size = store.read(key, ranges, deadline)
        except StoreError as error:
            now = self.clock()
            is_long = now - started >= self.patience.long_seconds
            is_counted = self._reading.pop(call, None) is None  # it was overdue
            # A read that was given little time says nothing about the store: a machine that stalls
            # makes it longer.
            had_time = deadline - started >= self.patience.long_seconds
            if not is_counted and now < deadline:
                self._event(partial(Health.failed, why=error.fault, is_long=is_long))
            elif not is_counted and had_time:
                self._event(partial(Health.is_lost, why=error.fault))
            raise
        finally:
            self._reading.pop(call, None)
        self._event(Health.answered)
        starts = [buffer for start, buffer in ranges[:1] if start == 0]
        if size is not None and starts and self.erasures and self._is_erased((key, starts)):
            self.erasures.wrote((key, starts), self.clock())
            return None
        return size

    def put_all(self, values: Sequence[Value], deadline: float) -> list[Put]:
        """Do `Store.put_all` for `values_per_put` values at a time. Each such call has
        `write_seconds`, but no longer than `deadline`. Values fail without a try while the tier
        accepts none."""
        answers: list[Put] = []
        while len(answers) < len(values):
            store, start, why = self.up, len(answers), self.accepts()
            if store is None or why is not None:
                self.count("writes", "away" if store is None else "skipped")
                answers.append(Put.failed(why or self._stands()))
                continue
            if self._is_erased(values[start]):
                self.count("writes", "erased")
                answers.append(Put.failed(_ERASED))
                continue
            some = values[start : start + store.values_per_put]
            some = list(takewhile(lambda each: not self._is_erased(each), some))
            began = self.clock()
            ended = store.put_all(some, min(deadline, began + self.patience.write_seconds))
            for result, fault in ended:
                if result is PutResult.FAILED:
                    self._event(partial(Health.write_failed, why=fault or _FAILED))
                elif result is PutResult.NO_SPACE:
                    self._event(Health.no_room)
                elif result is PutResult.STORED:
                    self._event(Health.stored)
                self.count("writes", result)
            for value, answer in zip(some, ended, strict=True):
                if self.erasures is not None and answer.result is PutResult.STORED:
                    self.erasures.wrote(value, began)
            answers += ended
        return answers

    def _is_erased(self, value: Value) -> bool:
        return self.erasures is not None and self.erasures.refuses(value)

    def discard(self, key: ChunkKey, reason: str) -> None:
        """Do `Store.discard`; nothing while the store is not up."""
        if (store := self.up) is not None:
            store.discard(key, reason)

    def delete(self, key: ChunkKey) -> bool:
        """Do `Store.delete`; nothing while the store is not up."""
        return (store := self.up) is not None and store.delete(key)

    def has(self, key: ChunkKey) -> bool:
        """Whether the store is up and known to have `key`. Memory only."""
        return (store := self.up) is not None and store.where(key) is HERE

    def stat(self) -> StoreStat:
        """See `Store.stat`."""
        url = self.given.url
        return StoreStat(url, 0, 0, None, False) if self.store is None else self.store.stat()

    def close(self) -> None:
        """Close the store. If it is being opened, the thread that opens it closes it then."""
        self._event(Health.close)
        if self.store is not None:
            self.store.close()

    def __repr__(self) -> str:
        return f"<Tier {self.number} {self.given.url}: {self._health.state}>"

"""Several stores as one, nearest first; each is a tier with its own circuit breaker.

A value is read from the first tier that has it, and then copied to the nearest; peers that are not
known to have it are asked last. It is written at once to the nearest tier that takes it; the
threads of farther tiers read it back from there and copy it. A `check`, if given, verifies each
copy. While a tier is away, reads skip it and nothing is copied to it. Calls come on the threads of
the engine or command that opened the store URLs.
"""

from __future__ import annotations

import copy
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence, Set
from contextlib import suppress
from functools import partial
from typing import cast

from kvferry.errors import Fault, StoreError, StorePlaceError
from kvferry.observe import Observer
from kvferry.store.base import (
    ABSENT,
    ASKED,
    CLOSED,
    COMING,
    COMPUTED_WRONG,
    HERE,
    NO_DEADLINE,
    Address,
    Buffer,
    Put,
    PutResult,
    ReadRange,
    RecordBytes,
    Store,
    StoreStat,
    TierStatus,
    Value,
    ValueCheck,
    Where,
)
from kvferry.store.catalogue import Catalogue
from kvferry.store.erasures import HEAD_BYTES, Erasures, Stores, names_in
from kvferry.store.io_pool import end_when_dropped
from kvferry.store.kinds import ends_with_process, is_peer, is_private
from kvferry.store.tiers.health import Patience
from kvferry.store.tiers.thread import TierThread
from kvferry.store.tiers.tier import Tier, Unopened
from kvferry.types import ChunkKey

_MAX_SERVED = 4096

_LEAVE_SECONDS = 1.0
"""How long a close waits for a thread that reads notices, because a mount may hang."""


class TieredStore(Store):
    """Tiers as one store; see the module. Closing it closes them.

    Args:
        stores: one or more stores, nearest first. Those that are not open yet are opened in
            parallel. A store that does not open in time, or whose medium does not answer, is used
            once it does.
        check: tells which values are wrong; these are not copied to another tier. With None, values
            of up to 1 GiB are copied unchecked.
        clock: clock that gives monotonic seconds, as deadlines do.

    Raises:
        Exception: what a store that can never be opened raised in time, or the `StorePlaceError` of
            the first store if all raised one; all stores are closed.
    """

    def __init__(
        self,
        stores: Sequence[Store | Unopened],
        observer: Observer | None = None,
        *,
        check: ValueCheck | None = None,
        clock: Callable[[], float] = time.monotonic,
        patience: Patience | None = None,
    ) -> None:
        observer = Observer() if observer is None else observer
        self._clock = clock
        self._patience = Patience() if patience is None else patience
        self._tiers = tuple(
            Tier(store, name, number, observer, clock, self._patience)
            for number, (store, name) in enumerate(zip(stores, _names_of(stores), strict=True))
        )
        self.url = ", ".join(store.url for store in stores)
        self._served: OrderedDict[ChunkKey, Tier] = OrderedDict()
        self._threads = tuple(TierThread(tier, observer, check) for tier in self._tiers)
        self._origin: TieredStore | None = None  # of a view of another namespace
        self._closing = threading.Event()
        tiers = self._tiers
        self._erasures = Erasures(
            partial(_notices, tiers),
            partial(_delete, tiers),
            partial(_drop, tiers),
            observer,
            clock,
        )
        for tier in tiers:
            tier.erasures = self._erasures
        self._end = partial(
            _close, tiers, self._threads, self._erasures, clock, self._patience.close_seconds
        )
        self._keep = end_when_dropped(self, f"store {self.url}", self._end)
        self._serving = threading.Lock()
        self._deleting = threading.Lock()
        for tier, thread in zip(self._tiers, self._threads, strict=True):
            if tier.store is None and not thread.start():
                thread.run_due()  # on this thread, as the process can start none
        self._wait_opened()
        if not all(ends_with_process(store.url) for store in stores):  # no command reaches others
            self._erasures.start()
        self.multi_process = all(
            tier.store is None or tier.store.multi_process for tier in self._tiers
        )

    def _wait_opened(self) -> None:
        until = self._clock() + self._patience.start_seconds
        try:
            left_out: list[tuple[Tier, StorePlaceError]] = []
            for tier in self._tiers:
                fault = tier.wait_opened(until - self._clock())
                if isinstance(fault, StorePlaceError):
                    left_out.append((tier, fault))
                elif fault is not None:
                    raise fault
            if len(left_out) == len(self._tiers):
                raise left_out[0][1]
            for tier, why in left_out:
                tier.leave_out(f"cannot be opened: {why}: serving without it until it can")
        except BaseException:  # also an interrupt by a user who waits no longer
            self.close()
            raise

    # -- reads ----------------------------------------------------------------------------------

    def where(self, key: ChunkKey) -> Where:
        answer = ABSENT
        for tier in self._tiers:  # not `_up`: a look-up asks for each chunk
            if (store := tier.up) is None:
                continue
            found = store.where(key)
            if found is HERE:
                return found
            if found is ASKED or answer is ABSENT:
                answer = found
        return answer

    def read(
        self, key: ChunkKey, ranges: Sequence[ReadRange], deadline: float = NO_DEADLINE
    ) -> RecordBytes | None:
        fault: StoreError | None = None
        # A question to each of several peers would cost more than the read.
        for tier in sorted(self._tiers, key=lambda tier: tier.is_peer and not tier.has(key)):
            if self._closing.is_set():
                return None
            if not self._is_up(tier):
                tier.count("reads", "away")
                fault = fault or tier.away
                continue
            try:
                size = tier.read(key, ranges, deadline)
            except StoreError as error:
                fault = error
                continue
            if size is not None:
                self._serve(key, tier)
                return size
        if fault is not None:
            raise fault
        return None

    def _is_up(self, tier: Tier) -> bool:
        """Whether the tier is up, also though reads hang there. Memory only."""
        tier.find_overdue()
        if tier.up is None:
            self._threads[tier.number].start()  # if the process could start none before
        return tier.up is not None

    def _serve(self, key: ChunkKey, tier: Tier) -> None:
        """Remember which tier served a value, and have it copied to the nearest tier."""
        if len(self._tiers) == 1:
            return
        with self._serving:
            self._served[key] = tier
            self._served.move_to_end(key)
            if len(self._served) > _MAX_SERVED:
                self._served.popitem(last=False)
        if tier.number and self._tiers[0].accepts() is None:
            self._threads[0].add(key, tier)

    def discard(self, key: ChunkKey, reason: str) -> None:
        """Discard a value in the tier that served it, and in nearer tiers, which can only hold
        copies. Farther tiers may hold a good one, but not of what its writer computed wrong. That,
        and what is not known to have been served, is discarded in all."""
        is_written_so = reason in (PutResult.NOT_FINITE, COMPUTED_WRONG)
        # Not removed: two readers may find the same copy wrong.
        served = None if is_written_so else self._served.get(key)
        self._cancel_copies(key)
        for tier in self._tiers if served is None else self._tiers[: served.number + 1]:
            tier.discard(key, reason)

    # -- writes ---------------------------------------------------------------------------------

    def accepts(self) -> Fault | None:
        why = None
        for tier in self._tiers:
            fault = tier.accepts()
            if fault is None:
                return None
            why = _joined(why, tier, fault)
        return why

    def put(self, key: ChunkKey, buffers: Sequence[Buffer], deadline: float = NO_DEADLINE) -> Put:
        return self.put_all([(key, buffers)], deadline)[0]

    @property
    def values_per_put(self) -> int:
        """That of the nearest tier that accepts writes now."""
        stores = (tier.store for tier in self._tiers if tier.accepts() is None)
        return next((store.values_per_put for store in stores if store is not None), 1)

    def put_all(self, values: Sequence[Value], deadline: float = NO_DEADLINE) -> list[Put]:
        answers = [Put.failed(CLOSED)] * len(values)
        whys: dict[int, Fault] = {}
        left = list(range(len(values)))
        for tier in self._tiers:
            if self._closing.is_set() or not left:
                break
            tried = tier.put_all([values[place] for place in left], deadline)
            for place, answer in zip(left, tried, strict=True):
                answers[place] = answer
                if answer.is_there:
                    self._write_behind(values[place][0], tier)
                elif answer.fault is not None:
                    whys[place] = _joined(whys.get(place), tier, answer.fault)
                    answers[place] = Put.failed(whys[place])
            left = [place for place in left if not answers[place].is_there]
        return answers

    def _write_behind(self, key: ChunkKey, tier: Tier) -> None:
        for farther in self._tiers[tier.number + 1 :]:
            if not (farther.is_read_only or farther.has(key)):
                self._threads[farther.number].add(key, tier)

    def _cancel_copies(self, key: ChunkKey) -> None:
        for thread in self._threads:
            thread.cancel(key)

    def delete(self, key: ChunkKey) -> bool:
        self._cancel_copies(key)
        with self._deleting:  # so that of racing deletes, one removes all copies
            removed = [tier.delete(key) for tier in self._tiers]
        return any(removed)

    def erased_since(self, number: int) -> Sequence[str]:
        return self._erasures.since(number)

    def touch(self, keys: Iterable[ChunkKey]) -> None:
        keys = tuple(keys)
        for tier in self._tiers:
            if tier.store is not None:
                tier.store.touch(keys)

    def tier_of(self, key: ChunkKey) -> str:
        """See `Store.tier_of`: `TierStatus.name` of the nearest tier known to have `key`, else of
        the last."""
        for tier in self._tiers:
            if tier.has(key):
                return tier.name
        return self._tiers[-1].name

    # -- what is there --------------------------------------------------------------------------

    def _up(self) -> Iterator[Store]:
        """Yield the stores that may be asked now."""
        return (store for tier in self._tiers if (store := tier.up) is not None)

    def probe(self, keys: Sequence[ChunkKey], *, again: bool = False) -> Where:
        up = [store for tier in self._tiers if self._is_up(tier) and (store := tier.up) is not None]
        found = {store.probe(keys, again=again) for store in up}
        return next((each for each in (ASKED, COMING) if each in found), ABSENT)

    def learn(self, keys: Sequence[ChunkKey], holder: Address | None = None) -> bool:
        """See `Store.learn`. What was stored is in the nearest tier that several processes share;
        what a peer holds is read from a tier of it, also one that is away."""
        if holder is None:
            return any(store.multi_process and store.learn(keys) for store in self._up())
        stores = [tier.store for tier in self._tiers if tier.store is not None]
        found = [store.learn(keys, holder) for store in stores]
        return any(found)

    def on_result(self, heard: Callable[[StoreError | None], None]) -> None:
        pass  # each tier hears of its own store

    def wait_indexed(self, timeout: float) -> bool:
        deadline = self._clock() + timeout
        answers = [store.wait_indexed(max(0.0, deadline - self._clock())) for store in self._up()]
        return bool(answers) and all(answers)

    # -- other faces ----------------------------------------------------------------------------

    def in_namespace(self, namespace: bytes) -> TieredStore:
        stores = [tier.store for tier in self._tiers]
        if all(each is not None and each.in_namespace(namespace) is each for each in stores):
            return self
        view = copy.copy(self)
        view._tiers = tuple(tier.in_namespace(namespace) for tier in self._tiers)
        view._origin = self._origin or self  # whose end would close the tiers
        return view

    def catalogues(self) -> list[Catalogue | Fault]:
        found: list[Catalogue | Fault] = []
        for tier in self._tiers:
            found += [tier.away.fault] if tier.up is None else tier.up.catalogues()
        return found

    def describe(self, namespace: bytes, description: str) -> None:
        """Give a description to every tier that is open: one that is away writes it once it is
        back."""
        for tier in self._tiers:
            if tier.store is not None:
                tier.store.describe(namespace, description)

    def stat(self) -> StoreStat:
        """Sums over the tiers; a value in two tiers counts twice."""
        stats = [tier.stat() for tier in self._tiers]
        return StoreStat(
            url=self.url,
            num_records=sum(stat.num_records for stat in stats),
            used_bytes=sum(stat.used_bytes for stat in stats),
            max_bytes=stats[0].max_bytes if len(stats) == 1 else None,
            index_complete=all(stat.index_complete for stat in stats),
        )

    def tiers(self) -> list[TierStatus]:
        return [tier.status for tier in self._tiers]

    def close(self) -> None:
        """Let copies go on for a limited time, then close all tiers."""
        self._closing.set()
        self._keep()
        self._end()

    def __repr__(self) -> str:
        return f"<TieredStore {', '.join(map(repr, self._tiers))}>"


def _joined(why: Fault | None, tier: Tier, fault: Fault) -> Fault:
    """Why several tiers do not take a value, by name: of the kind of the nearest."""
    said = f"{tier.name}: {fault}"
    return Fault(fault.kind, said) if why is None else Fault(why.kind, f"{why}; {said}")


def _close(
    tiers: Iterable[Tier],
    threads: Iterable[TierThread],
    erasures: Erasures,
    clock: Callable[[], float],
    seconds: float,
) -> None:
    until = clock() + seconds
    for tier in tiers:
        if tier.store is None:
            tier.close()
    for thread in threads:
        thread.close(until)
    erasures.close(_LEAVE_SECONDS)
    for tier in tiers:
        tier.close()


def _notices(tiers: Iterable[Tier]) -> dict[object, str | None]:
    found: dict[object, str | None] = {}
    for tier in tiers:
        with suppress(StoreError), tier.faults.guard("notice", passes=StoreError):
            if (store := tier.up) is not None:
                found[tier] = store.catalogue().notice()
    return found


def _delete(
    tiers: Iterable[Tier], namespace: bytes | None, key: ChunkKey, given: Stores | None
) -> Stores:
    """Delete a value from the tiers, or from those given. Return the ones that may still have it,
    and could delete it later: they failed, or are away."""
    left: list[Tier] = []
    for tier in tiers if given is None else cast("Collection[Tier]", given):
        if tier.store is None:  # it has nothing of this process
            continue
        is_gone = tier.is_read_only  # it stays there, whatever is tried
        with suppress(StoreError), tier.faults.guard("delete", passes=StoreError):
            if (view := tier.in_namespace(namespace)).up is not None:
                until = tier.clock() + tier.patience.trial_seconds
                is_gone = view.delete(key) or is_gone or view.ask(key, (), until) is None
        if not is_gone:
            left.append(tier)
    return left


def _drop(tiers: Iterable[Tier], names: Set[str]) -> None:
    for tier in tiers:
        if (store := tier.store) is None or not is_private(tier.given.url):
            continue
        with suppress(StoreError), tier.faults.guard("delete", passes=StoreError):
            for entry in store.catalogue().scan():
                view, head = store.in_namespace(entry.namespace), bytearray(HEAD_BYTES)
                view.read(entry.key, [(0, memoryview(head))])
                if not names.isdisjoint(names_in((entry.key, [head]))):
                    view.delete(entry.key)


def _names_of(stores: Sequence[Store | Unopened]) -> list[str]:
    """Return names for metrics: the scheme; of several peers, each with its address; else with the
    tier's number, if a nearer one has the same."""
    schemes, names = [store.url.partition(":")[0] for store in stores], list[str]()
    for number, (scheme, store) in enumerate(zip(schemes, stores, strict=True)):
        if is_peer(store.url) and schemes.count(scheme) > 1:
            names.append(store.url.replace("://", " "))
        else:
            names.append(f"{scheme}{number}" if scheme in names else scheme)
    return names

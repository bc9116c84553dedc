"""Several stores as one, nearest first; each behind a breaker and a limit of its own.

A value is read from the first tier that has it and brought nearer. It is written to the nearest
tier at once, and to the others by a thread of each that reads it back from there. Each copy is
verified. A tier that fails is left alone: then it has nothing, and what is to be written to it
waits.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from functools import partial

from kvferry.errors import StoreError
from kvferry.observe import Observer
from kvferry.store.base import (
    NO_DEADLINE,
    Buffer,
    Entry,
    PutResult,
    ReadRange,
    Store,
    StoreStat,
    SupportsShardedWrite,
    ValueCheck,
)
from kvferry.store.tiers.tier import Tier
from kvferry.types import ChunkKey

logger = logging.getLogger(__name__)

MAX_BEHIND = 4096
"""Values that wait to be copied to one tier; the oldest is dropped for a new one."""

MAX_COPY_BYTES = 1 << 30
"""A larger value is no record of ours; the bound where values cannot be checked."""

BEHIND_SECONDS = 30.0
"""Deadline of one write to a farther tier."""

CLOSE_SECONDS = 5.0
_LOOK_SECONDS = 0.05
"""How often is looked whether a tier takes values again."""
_MAX_SERVED = 4096


class TierCopies:
    """Copies values to one tier, on a thread of its own that starts with the first one. They wait
    while the tier takes none, and one that the tier did not answer waits again."""

    def __init__(self, target: Tier, observer: Observer, check: ValueCheck | None = None) -> None:
        self._target = target
        self._observer = observer
        self._check = check
        # What waits, oldest first, and the tier that has it.
        self._waiting: OrderedDict[ChunkKey, Tier] = OrderedDict()
        self._copying: ChunkKey | None = None
        self._is_removed = False
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._closed = False

    def add(self, key: ChunkKey, source: Tier) -> None:
        """Copy a value later. Never blocks."""
        with self._changed:
            is_under_way = key == self._copying and not self._is_removed
            if self._closed or key in self._waiting or is_under_way:
                return
            if len(self._waiting) >= MAX_BEHIND:
                self._waiting.popitem(last=False)
                self._count("dropped")
            self._waiting[key] = source
            if self._thread is None:
                thread = threading.Thread(target=self._run, name="kvferry-behind", daemon=True)
                with suppress(RuntimeError):  # no thread can be had: the next value tries again
                    thread.start()
                    self._thread = thread
            self._changed.notify()

    def removes(self, key: ChunkKey) -> None:
        """A value is about to be removed: no copy of it may bring it back."""
        with self._changed:
            self._waiting.pop(key, None)
            if key == self._copying:
                self._is_removed = True

    @property
    def num_waiting(self) -> int:
        """With the one under way."""
        with self._changed:
            return len(self._waiting) + (self._copying is not None)

    def _count(self, result: str) -> None:
        self._observer.count(f"tier{self._target.number}_behind_{result}")

    def _run(self) -> None:
        while (taken := self._take()) is not None:
            key, source = taken
            result: PutResult | None = PutResult.FAILED
            try:
                result = self._copy(key, source)
            except Exception:  # outermost loop of the thread: the next copies go on
                logger.exception("copying a value to another tier failed")
            with self._changed:
                self._copying = None
            if result is not None:
                self._count(result)

    def _take(self) -> tuple[ChunkKey, Tier] | None:
        """The next value to copy, when the tier takes one; None at the end."""
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._closed)
                if not self._waiting:
                    return None
                if self._closed or self._target.takes_values:
                    self._copying, source = self._waiting.popitem(last=False)
                    self._is_removed = False
                    return self._copying, source
            time.sleep(_LOOK_SECONDS)

    def _copy(self, key: ChunkKey, source: Tier) -> PutResult | None:
        """Copy one value; None if it waits again, as it does while a tier is away or full. One that
        a tier refuses otherwise, or that is no sound record, is dropped, so that it does not block
        the queue."""
        target, until = self._target, time.monotonic() + BEHIND_SECONDS
        if not (source.is_asked and target.takes_values):
            return self._put_back(key, source)
        asked = target
        try:
            size = target.ask(key, (), until)  # costs less than to read and send it
            if size is not None and (self._check is None or size == self._check.num_bytes):
                return PutResult.EXISTS
            asked = source
            value = self._value(key, source, until)
            if value is None:
                return PutResult.FAILED
            asked = target
            result = target.write(partial(target.store.put, key, [value]), until)
        except StoreError:
            result = PutResult.FAILED
        if result is PutResult.STORED and self._is_removed:  # since it was read
            target.store.delete(key)
        elif result is PutResult.NO_SPACE or (result is PutResult.FAILED and not asked.answers()):
            return self._put_back(key, source)
        return result

    def _value(self, key: ChunkKey, source: Tier, until: float) -> memoryview | None:
        """What is copied; None if it is gone, or wrong and so discarded. Raises StoreError."""
        check = self._check
        size = source.ask(key, (), until) if check is None else check.num_bytes
        if size is None or (check is None and size > MAX_COPY_BYTES):
            return None
        value = memoryview(bytearray(size))
        found = source.ask(key, [(0, value)], until)
        if check is None or found is None:
            return value if found == size else None
        reason = check.why_wrong(key, value[:found], found)
        if reason is not None:  # once more: another process may have replaced it meanwhile
            found = source.ask(key, [(0, value)], until)
            reason = None if found is None else check.why_wrong(key, value[:found], found)
        if reason is not None:
            self._observer.count("records_corrupt")
            source.store.discard(key, reason)
        return None if reason is not None or found is None else value

    def _put_back(self, key: ChunkKey, source: Tier) -> PutResult | None:
        """FAILED at the end, else None."""
        with self._changed:
            if self._closed or self._is_removed:
                return PutResult.FAILED
            self._waiting[key] = source
            self._waiting.move_to_end(key, last=False)
        time.sleep(_LOOK_SECONDS)
        return None

    def close(self, until: float) -> None:
        """Go on until a monotonic time; what is left then is not copied. Idempotent."""
        with self._changed:
            thread, was_closed = self._thread, self._closed
            self._closed = True
            self._changed.notify()
        if thread is not None and not was_closed:
            thread.join(max(0.0, until - time.monotonic()))
            with self._changed:
                self._waiting.clear()


class TieredStore(Store):
    """Tiers as one store; see the module. Closing it closes them.

    Args:
        stores: nearest first; at least one.
        check: a value that it finds wrong is not copied to another tier. None copies what has at
            most `MAX_COPY_BYTES`.
        clock: monotonic seconds, for the breakers.
    """

    def __init__(
        self,
        stores: Sequence[Store],
        observer: Observer | None = None,
        *,
        check: ValueCheck | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._observer = Observer() if observer is None else observer
        self._tiers = tuple(
            Tier(store, number, self._observer, clock) for number, store in enumerate(stores)
        )
        for tier in self._tiers:
            if tier.name in {nearer.name for nearer in self._tiers[: tier.number]}:
                tier.name += str(tier.number)
        self.url = ", ".join(store.url for store in stores)
        self.multi_process = all(store.multi_process for store in stores)
        self._served: OrderedDict[ChunkKey, Tier] = OrderedDict()
        self._serving = threading.Lock()
        self._begun: dict[str, ChunkKey] = {}
        self._copies = tuple(TierCopies(tier, self._observer, check) for tier in self._tiers)
        self._closed = False
        self._deleting = threading.Lock()

    # -- reads ----------------------------------------------------------------------------------

    def contains(self, key: ChunkKey) -> bool | None:
        answer: bool | None = False
        for tier in self._tiers:
            found = tier.store.contains(key) if tier.is_asked else False
            if found:
                return True
            if found is None:
                answer = None
        return answer

    def read(
        self, key: ChunkKey, ranges: Sequence[ReadRange], deadline: float = NO_DEADLINE
    ) -> int | None:
        fault = None
        for tier in self._tiers:
            if self._closed:
                return None
            if not tier.is_asked:
                self._observer.count(f"tier{tier.number}_skipped")
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

    def _serve(self, key: ChunkKey, tier: Tier) -> None:
        """Remember who served a value, and bring it nearer."""
        if len(self._tiers) == 1:
            return
        with self._serving:
            self._served[key] = tier
            self._served.move_to_end(key)
            if len(self._served) > _MAX_SERVED:
                self._served.popitem(last=False)
        if tier.number and self._tiers[0].takes_values:
            self._copies[0].add(key, tier)

    def discard(self, key: ChunkKey, reason: str) -> None:
        """Not in tiers behind the one that served it, which may be right. A nearer one has at most
        a copy of what was served."""
        served = self._served.get(key)  # kept: two may find the same copy wrong
        self._removes(key)
        for tier in self._tiers if served is None else self._tiers[: served.number + 1]:
            if tier.is_asked:
                tier.store.discard(key, reason)

    # -- writes ---------------------------------------------------------------------------------

    @property
    def takes_values(self) -> bool:
        return any(tier.takes_values for tier in self._tiers)

    def put(
        self, key: ChunkKey, buffers: Sequence[Buffer], deadline: float = NO_DEADLINE
    ) -> PutResult:
        result = PutResult.FAILED
        for tier in self._tiers:
            if self._closed:
                break
            result = tier.write(partial(tier.store.put, key, buffers), deadline)
            if result in (PutResult.STORED, PutResult.EXISTS):
                self._write_behind(key, tier)
                break
        return result

    def _write_behind(self, key: ChunkKey, tier: Tier) -> None:
        for farther in self._tiers[tier.number + 1 :]:
            if not farther.store.contains(key):
                self._copies[farther.number].add(key, tier)

    def _removes(self, key: ChunkKey) -> None:
        for copies in self._copies:
            copies.removes(key)

    def delete(self, key: ChunkKey) -> bool:
        self._removes(key)
        with self._deleting:  # of racing deletes, one removes the value from all tiers
            removed = [tier.store.delete(key) for tier in self._tiers if tier.is_asked]
        return any(removed)

    def touch(self, keys: Iterable[ChunkKey]) -> None:
        keys = tuple(keys)
        for tier in self._tiers:
            tier.store.touch(keys)

    def tier_of(self, key: ChunkKey) -> str:
        """The scheme of a tier; of a second one of the same scheme, with its number."""
        for tier in self._tiers:
            if tier.is_asked and tier.store.contains(key):
                return tier.name
        return self._tiers[-1].name

    # -- values that several ranks write --------------------------------------------------------

    def begin(
        self, key: ChunkKey, num_bytes: int, deadline: float = NO_DEADLINE
    ) -> str | PutResult:
        answer: str | PutResult = PutResult.FAILED
        for tier in self._tiers:
            store: object = tier.store
            if isinstance(store, SupportsShardedWrite):
                answer = tier.begin(partial(store.begin, key, num_bytes), deadline)
                if answer is PutResult.EXISTS:
                    self._write_behind(key, tier)
                    return answer
                if not isinstance(answer, PutResult):
                    session = f"{tier.number}:{answer}"
                    self._begun[session] = key
                    return session
        return answer

    def write_at(
        self,
        session: str,
        offset: int,
        buffers: Sequence[Buffer],
        deadline: float = NO_DEADLINE,
    ) -> bool:
        _, store, name = self._of_session(session)
        return store is not None and store.write_at(name, offset, buffers, deadline)

    def commit(self, session: str, head: Buffer, deadline: float = NO_DEADLINE) -> PutResult:
        tier, store, name = self._of_session(session)
        key = self._begun.pop(session, None)
        if tier is None or store is None or key is None:
            return PutResult.FAILED
        result = tier.write(partial(store.commit, name, head), deadline, is_begun=True)
        if result is PutResult.STORED:
            self._write_behind(key, tier)
        elif result is PutResult.FAILED:
            store.abort(name)  # where the write was skipped
        return result

    def abort(self, session: str) -> None:
        _, store, name = self._of_session(session)
        if store is not None and self._begun.pop(session, None) is not None:
            store.abort(name)

    def _of_session(self, session: str) -> tuple[Tier | None, SupportsShardedWrite | None, str]:
        number, _, name = session.partition(":")
        for tier in self._tiers:
            store: object = tier.store
            if str(tier.number) == number and isinstance(store, SupportsShardedWrite):
                return tier, store, name
        return None, None, name

    # -- what is there --------------------------------------------------------------------------

    def probe(self, keys: Sequence[ChunkKey]) -> None:
        for tier in self._tiers:
            if tier.is_asked:
                tier.store.probe(keys)

    def note_stored(self, key: ChunkKey) -> None:
        """In the nearest tier that several processes share: there it was written."""
        for tier in self._tiers:
            if tier.store.multi_process and tier.is_asked:
                tier.store.note_stored(key)
                return

    def wait_indexed(self, timeout: float) -> bool:
        deadline = time.monotonic() + timeout
        return all(
            tier.store.wait_indexed(max(0.0, deadline - time.monotonic()))
            for tier in self._tiers
            if tier.is_asked
        )

    def recent(self, limit: int) -> Iterator[Entry]:
        """Of the nearest tier that knows."""
        for tier in self._tiers:
            if tier.is_asked:
                with suppress(StoreError):
                    return tier.store.recent(limit)
        return super().recent(limit)

    def describe(self, namespace: bytes, description: str | None = None) -> str | None:
        """In every tier."""
        said = [
            tier.store.describe(namespace, description) for tier in self._tiers if tier.is_asked
        ]
        return next(filter(None, said), None)

    def stat(self) -> StoreStat:
        """Sums over the tiers; a value in two tiers counts twice."""
        stats = [tier.store.stat() for tier in self._tiers]
        return StoreStat(
            url=self.url,
            num_records=sum(stat.num_records for stat in stats),
            used_bytes=sum(stat.used_bytes for stat in stats),
            max_bytes=None,
            index_complete=all(stat.index_complete for stat in stats),
        )

    def close(self) -> None:
        """Copies go on for a limited time first."""
        self._closed = True
        until = time.monotonic() + CLOSE_SECONDS
        for copies in self._copies:
            copies.close(until)
        for tier in self._tiers:
            tier.close()

    def __repr__(self) -> str:
        return f"<TieredStore {self.url} {'closed' if self._closed else 'open'}>"

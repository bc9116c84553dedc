"""Records that stay in free staging after they were read, so that a next hit on them reads nothing.

Each was verified when it was read, and nobody has written to its memory since: it is right. What
may have happened to the stored record meanwhile is asked of the store at each use, at the price
of one look at its stamp: before a hit is promised or, where it is promised because the store has
heard of no change (`reservations`), a little later. One that is gone, replaced or written to is
read like any other, so that damage is found and told. Where all that is known is that something was
done to it, such as noting its last use, it is used, and read again a little later.

Runs in: worker. `take_all` on the model runner's thread, `confirm` on I/O threads; a thread of its
own does all else.
"""

from __future__ import annotations

import heapq
import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from kvferry.connectors.shared_storage.load_memory import read_chunk
from kvferry.connectors.shared_storage.messages import ChunkRef
from kvferry.errors import StoreError
from kvferry.record.check import MissReason, parse_head
from kvferry.store.base import Entry, SupportsScan, SupportsStamp
from kvferry.store.cpus import leave_processor
from kvferry.store.staging import Content, Kept
from kvferry.types import ChunkKey

if TYPE_CHECKING:
    from kvferry.connectors.shared_storage.rank_rows import RankRows
    from kvferry.observe import Observer
    from kvferry.record.schema import RecordSchema
    from kvferry.store.base import Store
    from kvferry.store.staging import Staging

logger = logging.getLogger(__name__)

PREPARED_BYTES = 64 << 20
"""Memory of staging to have ready: more than most steps use of slots that are not kept."""

RECHECK_SECONDS = 1.0
"""How long after its use a record is read again: not beside the first token of a hit, and once for
several hits."""

FILL_SECONDS = 60.0
"""After this, an engine that has started serves what it has in memory by then."""

FILL_TRIES = 3
"""How often a record is begun that hits keep from being read to its end."""

SCAN_SECONDS = 5.0
"""How long to look for what was used last: some hundred thousand records."""

PREPARE_SECONDS = 5.0
"""What memory is not ready by then is gotten where it is used: records in doubt wait for this."""

GIVE_WAY_SECONDS = 0.01
"""How often to look whether hits have ended."""

LATE_SECONDS = 30.0
"""If a record has waited so long to be read again, others in doubt are not used any more."""


class _Doubt(NamedTuple):
    """Something was done to a stored record; what is in memory was used all the same."""

    content: Content
    since: float


class KeptRecords:
    """What one rank keeps. Does nothing if staging keeps nothing, or the store has no stamps.

    Args:
        rows: what this rank reads of a record.
        store: where records come from.
        staging: keeps them.
        is_busy: whether hits are under way, from their reads to the end of the forward that uses
            them: this gives way to them.
        observer: receives counts.
    """

    def __init__(
        self,
        rows: RankRows,
        store: Store,
        staging: Staging,
        is_busy: Callable[[], bool],
        observer: Observer,
    ) -> None:
        self._rows = rows
        self._store = store
        self._stamps = store if isinstance(store, SupportsStamp) and staging.max_kept else None
        self._staging = staging
        self._is_busy = is_busy
        self._observer = observer
        self._lock = threading.Lock()
        self._unasked: dict[bytes, Content] = {}
        self._doubted: dict[bytes, _Doubt] = {}
        self._wake = threading.Event()
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Begin to fill memory with what was used last. Once only."""
        if self._stamps is None or self._thread is not None:
            return
        thread = threading.Thread(target=self._run, name="kvferry-kept", daemon=True)
        try:
            thread.start()
        except RuntimeError:  # the process has as many as it may have
            logger.warning("no thread for records in memory: none is brought in beforehand")
        else:
            self._thread = thread

    def take_all(self, chunks: Sequence[ChunkRef]) -> list[Kept | None]:
        """For each chunk the slot that holds it, if there is one: the caller's from now on. Memory
        only."""
        if self._stamps is None:
            return [None] * len(chunks)
        kept = self._staging.take_all([ChunkKey(chunk.key) for chunk in chunks])
        for index, (chunk, held) in enumerate(zip(chunks, kept, strict=True)):
            if held is not None and held.content.first_token != chunk.first_token:
                self._staging.release(held.slot)  # a read will say what is wrong with it
                kept[index] = None
        return kept

    def confirm(self, content: Content) -> bool:
        """Whether what a slot holds may be used. May block on the store; never raises."""
        may_be_used = self._is_as_stored(content)
        if may_be_used:
            self._observer.count("kept_used")
        return may_be_used

    def check_later(self, contents: Iterable[Content]) -> None:
        """After a use that was not confirmed, have the thread see whether the store still has what
        was used: if not, there is no other use without that it was read again. Memory only."""
        with self._lock:
            if self._has_thread:
                self._unasked.update((content.key, content) for content in contents)
                self._wake.set()
                return
        for content in contents:
            content.stamp = None

    def _is_as_stored(self, content: Content) -> bool:
        before = content.stamp
        if self._stamps is None or before is None:
            return False
        try:
            now = self._stamps.stamp(content.key)
        except StoreError:
            return False
        if now is None or now.value != before.value:
            return False
        is_same = before.changes is not None and now.changes == before.changes
        if is_same:
            content.stamp = now
            return True
        return not now.written and self._doubt(content)

    def _doubt(self, content: Content) -> bool:
        """Have it read again in a while. False if that is far behind, or never comes."""
        now = time.monotonic()
        with self._lock:
            if not self._has_thread:
                return False
            oldest = next(iter(self._doubted.values()), None)
            if oldest is not None and now - oldest.since > LATE_SECONDS:
                return False
            known = self._doubted.get(content.key)
            self._doubted[content.key] = _Doubt(content, now if known is None else known.since)
            self._wake.set()
        return True

    @property
    def _has_thread(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def used(self) -> None:
        """Slots were given back: have memory ready in their place, and read again what is in doubt,
        in a while. Memory only."""
        if self._thread is not None:
            self._wake.set()

    def close(self, timeout: float) -> bool:
        """Stop, waiting for at most `timeout` seconds. True if the thread ended."""
        self._closed.set()
        self._wake.set()
        if self._thread is not None:
            self._thread.join(timeout)
        return self._thread is None or not self._thread.is_alive()

    # -- the thread -----------------------------------------------------------------------------

    def _run(self) -> None:
        leave_processor()
        try:
            self._fill()
        except Exception as error:
            self._failed("no more records are brought into memory", error)
        while not self._closed.is_set():
            # What gets memory holds up others that do, a forward for one.
            until = time.monotonic() + PREPARE_SECONDS
            self._staging.prepare(PREPARED_BYTES, partial(self._may_go_on, until))
            self._wake.wait()
            self._closed.wait(RECHECK_SECONDS)
            self._wake.clear()
            self._catch_up()

    def _failed(self, what: str, error: Exception) -> None:
        self._observer.count("kept_failed")
        logger.error("%s", what, exc_info=error)

    def _may_go_on(self, until: float) -> bool:
        """Wait while hits are under way; False if this is closed, or it is `until`."""
        while self._is_busy() and not self._closed.is_set() and time.monotonic() < until:
            self._closed.wait(GIVE_WAY_SECONDS)
        return not self._closed.is_set() and time.monotonic() < until

    def _fill(self) -> None:
        started = time.monotonic()
        until = started + FILL_SECONDS
        for entry in self._used_last(started + SCAN_SECONDS):
            if not self._bring_in(entry, until):
                break
        num_kept = self._staging.num_kept
        if num_kept:
            num_bytes, seconds = num_kept * self._rows.slot_bytes, time.monotonic() - started
            logger.info("%.0f MB of records in memory after %.1f s", num_bytes / 1e6, seconds)

    def _used_last(self, until: float) -> list[Entry]:
        """What was used last, the most recent first, as far as it is found by `until`."""
        # Of a store that models share, not all records of our size are ours.
        count = 4 * self._staging.max_kept
        return heapq.nlargest(count, self._found(until), key=lambda entry: entry.last_used)

    def _found(self, until: float) -> Iterator[Entry]:
        if not isinstance(self._store, SupportsScan):
            return
        num_bytes = self._rows.schema.record_bytes
        with suppress(StoreError):
            for entry in self._store.scan():
                if self._closed.is_set() or time.monotonic() > until:
                    return
                if entry.num_bytes == num_bytes:
                    yield entry

    def _bring_in(self, entry: Entry, until: float) -> bool:
        """Bring in one record if it is of this engine; False if it was the last one: no room, or no
        time."""
        schema = self._rows.schema
        first_token: int | None = None
        for _ in range(FILL_TRIES):
            self._catch_up()
            if not self._may_go_on(until) or self._staging.num_kept >= self._staging.max_kept:
                return False
            if first_token is None:
                first_token = self._first_token(schema, entry)
            if first_token is None:
                return True
            read = self._fill_slot(schema, ChunkRef(entry.key, first_token))
            if read is not MissReason.CANCELLED:
                return read is not MissReason.NO_STAGING
        return True

    def _fill_slot(self, schema: RecordSchema, chunk: ChunkRef) -> Content | MissReason:
        """Read one record into a free slot, which then holds it. Given up when a hit begins."""
        # What is kept is free, too, but not for this.
        others = self._staging.num_kept + self._staging.num_slots // 4
        slot = self._staging.acquire(keep_free=others)
        if slot is None:
            return MissReason.NO_STAGING
        read: Content | MissReason | None = None
        try:
            read = read_chunk(
                *(self._store, self._rows, schema, chunk, self._staging.view(slot), None),
                cancelled=lambda: self._is_busy() or self._closed.is_set(),
            )
        finally:
            if isinstance(read, Content):
                self._staging.release_oldest(Kept(slot, read))
                self._observer.count("kept_filled")
            else:
                self._staging.release(slot)
        return read

    def _first_token(self, schema: RecordSchema, entry: Entry) -> int | None:
        """Where the chunk of a record begins; None if it is not one of this namespace."""
        head = memoryview(bytearray(schema.header_bytes))
        try:
            # What is no record is left alone: opening it would take it out of the store.
            there = self._stamps is not None and self._stamps.stamp(entry.key) is not None
            source = self._store.open_read(entry.key) if there else None
            if source is None:
                return None
            with source:
                info = parse_head(head[: source.read_into(head, 0)], source.size)
        except StoreError:
            return None
        if isinstance(info, MissReason) or info.schema.namespace != schema.namespace:
            return None
        return info.first_token

    def _catch_up(self) -> None:
        """Look at what was used without a look, and read again what is in doubt."""
        while not self._closed.is_set():
            with self._lock:
                if self._unasked:
                    content, look = self._unasked.pop(next(iter(self._unasked))), True
                elif self._doubted:
                    content, look = self._doubted.pop(next(iter(self._doubted))).content, False
                else:
                    return
            self._may_go_on(time.monotonic() + RECHECK_SECONDS)
            try:
                if not (look and self._is_as_stored(content)):
                    self._read_again(content)
            except Exception as error:
                self._failed("a record in memory cannot be read again", error)

    def _read_again(self, content: Content) -> None:
        content.stamp = None  # not to be trusted until it was read
        chunk = ChunkRef(content.key, content.first_token)
        # To memory of its own: the slot may be in use.
        read = read_chunk(
            *(self._store, self._rows, content.schema, chunk, self._rows.scratch(), self._observer),
            cancelled=self._closed.is_set,
            in_scratch=True,
        )
        if isinstance(read, Content):
            content.stamp = read.stamp
        self._observer.count("kept_rechecked")

"""The index of the store: tables of a database beside the directory, and the keys read from them.

`FileStore` uses it on the threads of its callers, and its upkeep on a thread of its own. The index
is a cache of the directory. One transaction evicts to make room for a value, gives its file the
name of its record, and adds its row. If the process is killed, SQLite rolls the transaction back,
and the upkeep corrects rows that disagree with files.

Several processes on one disk share one index. On a network mount, whose locks are unreliable, each
machine has an index of its own, in the user's cache directory.
"""

from __future__ import annotations

import errno
import heapq
import math
import os
import socket
import sqlite3
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from operator import attrgetter
from typing import NamedTuple

from kvferry.errors import Fault, FaultKind
from kvferry.observe import Observer
from kvferry.record.check import namespace_of
from kvferry.store.base import EXISTS, STORED, Put
from kvferry.store.catalogue import Entry, Removal
from kvferry.store.file.database import (
    Damaged,
    Database,
    IndexUnavailable,
    checked,
    execute,
    read_keys,
    read_rows,
)
from kvferry.store.file.directory import Directory
from kvferry.store.file.pins import Pins
from kvferry.store.file.settings import FileSettings
from kvferry.store.file.writing import Writing
from kvferry.types import ChunkKey

NO_QUOTA = 1 << 62

_BATCH = 1024
"""Rows per transaction of long work, so that other processes can write in between."""
PAUSE_SECONDS = 0.005
"""Pause after a batch of evictions, in which other processes can write."""
_MAX_NOTES = 65536
_NOTE_STEP = 1e-6
"""Each chunk of a prefix counts as used a microsecond before its parent. So suffixes are evicted
first, since a chunk without its prefix is worth nothing."""
_MAX_HIDDEN = 4096
_ENTRY = "id, key, num_bytes, last_used, namespace, pinned_until"
_NEXT = f"WHERE id > ? ORDER BY id LIMIT {_BATCH}"
_AFTER = f"SELECT {_ENTRY} FROM records WHERE id > :id ORDER BY id LIMIT {_BATCH}"
_UNPINNED = (
    f"SELECT {_ENTRY} FROM records WHERE pinned_until = 0 AND (last_used, id) < (:used, :id) "
    f"ORDER BY last_used DESC, id DESC LIMIT {_BATCH}"
)
_PINNED = (
    f"SELECT {_ENTRY} FROM records WHERE (pinned_until, last_used, id) > (:pinned, :used, :id) "
    f"ORDER BY pinned_until, last_used, id LIMIT {_BATCH}"
)
_INSERT = "INSERT OR IGNORE INTO records (key, num_bytes, last_used, namespace) {}"
_SET_USED = (
    "UPDATE records SET last_used = column2 FROM ({}) WHERE key = column1 AND last_used < column2"
)

_SCHEMA = (
    "CREATE TABLE records (id INTEGER PRIMARY KEY AUTOINCREMENT, key BLOB NOT NULL UNIQUE, "
    "num_bytes INTEGER NOT NULL, last_used REAL NOT NULL, namespace BLOB NOT NULL, "
    "pinned_until REAL NOT NULL DEFAULT 0.0)",
    # `pinned_until` is 0 in rows that may be evicted, so a search for these reads no pinned row.
    "CREATE INDEX records_by_use ON records (pinned_until, last_used)",
    "CREATE TABLE removals (id INTEGER PRIMARY KEY AUTOINCREMENT, key BLOB NOT NULL, "
    "num_bytes INTEGER NOT NULL, at REAL NOT NULL, reason TEXT NOT NULL, detail TEXT NOT NULL, "
    "by TEXT NOT NULL)",
    "CREATE TABLE totals (num_records INTEGER NOT NULL, num_bytes INTEGER NOT NULL, "
    "is_complete INTEGER NOT NULL)",
    "INSERT INTO totals VALUES (0, 0, 0)",
    *(
        f"CREATE TRIGGER records_{event} AFTER {event} ON records BEGIN UPDATE totals SET "
        f"num_bytes = num_bytes {sign} {row}.num_bytes, num_records = num_records {sign} 1; END"
        for event, sign, row in (("INSERT", "+", "new"), ("DELETE", "-", "old"))
    ),
)


class Totals(NamedTuple):
    """What counts against the quota."""

    num_records: int
    num_bytes: int
    is_complete: bool
    """Whether the index was completed: the whole directory was compared with it."""


class KnownKeys:
    """The keys that are known to be stored: answers `contains` without a lock. Stays empty unless
    it `tracks_keys`, which only look-ups need."""

    def __init__(self, tracks_keys: bool = True) -> None:
        self.tracks_keys = tracks_keys
        self._keys: set[ChunkKey] = set()
        self._hidden: set[ChunkKey] = set()

    def contains(self, key: ChunkKey) -> bool:
        return key in self._keys

    def add(self, key: ChunkKey) -> None:
        if self.tracks_keys and key not in self._hidden:
            self._keys.add(key)

    def discard(self, key: ChunkKey) -> None:
        self._keys.discard(key)

    def hide(self, key: ChunkKey) -> None:
        """Forget a key whose record is broken and cannot be taken out; do not learn it again."""
        if len(self._hidden) < _MAX_HIDDEN:
            self._hidden.add(key)
        self.discard(key)

    def note_written(self, key: ChunkKey) -> None:
        """Add a key that this process has just written; an earlier `hide` no longer holds."""
        self._hidden.discard(key)
        self.add(key)

    def clear(self) -> None:
        self._keys = set()


ABOVE_QUOTA = Fault(FaultKind.FULL, "its quota has no room for the value")


class Index:
    """The database (see `Database`) and the keys that this process knows from it. Thread-safe; not
    for a forked child. All methods but `close` and `note` may raise `IndexUnavailable`, or another
    OSError of the directory.

    Attributes:
        totals: totals as of the last transaction; read without a lock.
        all_known: event that is set once `known` has every stored key.
        pins: which records are not evicted, and until when.
    """

    def __init__(
        self,
        path: str | None,
        directory: Directory,
        known: KnownKeys,
        *,
        observer: Observer,
        read_only: bool,
        settings: FileSettings,
    ) -> None:
        self.database = Database(
            path,
            _SCHEMA,
            read_only=read_only,
            lock_seconds=settings.bounds.lock_seconds,
            mode=directory.file_mode,
        )
        self.directory = directory
        self.known = known
        self._observer = observer
        self._notes: dict[ChunkKey, float] = {}
        self._last_record = self._last_removal = 0
        self._was_open = False
        self.settings = settings
        self.totals = Totals(0, 0, is_complete=False)
        self.all_known = threading.Event()
        self.pins = Pins(self.database, settings.wall)

    @property
    def is_ours(self) -> bool:
        return self.database.is_ours

    def open(self) -> bool:
        """Open the database unless it is open. True if that cleared the known keys."""
        if not self.database.open():
            return False
        self.all_known.clear()
        # A database that replaced ours may be an older copy: compare the directory with it again.
        is_other = self._was_open and not self.database.read_only
        try:
            with self._transaction(writes=is_other) as db:
                if is_other:
                    db.execute("UPDATE totals SET is_complete = 0 WHERE is_complete = 1")
                self._learn_anew(*self._last_ids(db))
        except OSError:
            self.database.close()  # so that the next call starts again
            raise
        self._was_open = True
        return True

    def close(self) -> None:
        self.database.close()

    def add_written(
        self,
        written: Sequence[Writing],
        max_bytes: int,
        refused: Callable[[OSError], Put],
    ) -> list[Put]:
        """Evict to make room for values, give their files the names of records, and add a row for
        each file that got its name. One transaction does it all, so that no process evicts a value
        before its file has its name.

        Args:
            refused: gives the answer for a value whose file cannot be named, and of all after it.

        Returns:
            The answers for the first values. There are fewer answers than values if the next one
            needs more room than one transaction may make.
        """
        results: list[Put] = []
        rows: list[tuple[ChunkKey, int, float, bytes]] = []
        with self._transaction(writes=True) as db:
            if max_bytes < NO_QUOTA and not self.totals.is_complete:
                raise IndexUnavailable(errno.EAGAIN, "the index is being made")
            try:
                for value in written:
                    result = EXISTS
                    if not value.is_taken():
                        has_room = self._make_room(db, max_bytes, value.num_bytes, rows)
                        if has_room is None:
                            break
                        result = Put.failed(ABOVE_QUOTA)
                        if has_room:
                            result = STORED if value.place() else EXISTS
                    results.append(result)
                    if result is STORED:
                        namespace = namespace_of(value.head) or b""
                        rows.append((value.key, value.num_bytes, self.settings.wall(), namespace))
            except OSError as error:
                results += [refused(error)] * (len(written) - len(results))
            self._insert(db, rows)
        return results

    def _make_room(
        self,
        db: sqlite3.Connection,
        max_bytes: int,
        num_bytes: int,
        rows: list[tuple[ChunkKey, int, float, bytes]],
    ) -> bool | None:
        """Evict if need be. Whether there is room now for a value, beside all that is counted and
        the `rows` to insert; None if another transaction must evict more."""
        if max_bytes >= NO_QUOTA:
            return True
        pending = sum(row[1] for row in rows)
        if self.totals.num_bytes + pending + num_bytes <= max_bytes:
            return True
        self._insert(db, rows)  # so that they, too, can be evicted
        self._read_totals(db)
        has_evicted = self._evict(db, max_bytes - num_bytes)
        if self._read_totals(db).num_bytes + num_bytes <= max_bytes:
            return True
        if has_evicted:
            return None
        self._check_totals(db)
        self._observer.count("store_put_no_space")
        return False

    def _insert(
        self, db: sqlite3.Connection, rows: list[tuple[ChunkKey, int, float, bytes]]
    ) -> None:
        """Insert `rows`, and clear the list."""
        if rows:
            keys = [row[:1] for row in rows]  # a file that vanished may have left its row
            execute(db, "DELETE FROM records WHERE key IN ({})", keys)
            execute(db, _INSERT, rows)
            for key, *_ in rows:
                self.known.note_written(key)
            rows.clear()

    def shrink(self, max_bytes: int, unused_since: float = 0.0) -> None:
        """Evict, as `_evict` does, in batches between which other processes can write."""
        while True:
            with self._transaction(writes=True) as db:
                if not self._evict(db, max_bytes, unused_since):
                    return
            time.sleep(PAUSE_SECONDS)

    def add(self, keys: Iterable[ChunkKey]) -> int:
        """Add rows for those of `keys` that have files; return their number."""
        found = [(key, there) for key in keys if (there := self.directory.find(key)) is not None]
        rows = [(key, each.num_bytes, each.modified, self._namespace(key)) for key, each in found]
        if rows:
            with self._transaction(writes=True) as db:
                execute(db, _INSERT, rows)
                for key, _ in found:
                    self.known.add(key)
        return len(rows)

    def forget(self, keys: Sequence[ChunkKey], reason: str, detail: str = "") -> int:
        """Remove the rows of those of `keys` whose files are gone; return their number."""
        with self._transaction(writes=True) as db:
            gone = [key for key in keys if self.directory.find(key) is None]
            self._take_out(db, gone, reason, detail)
        return len(gone)

    def complete(self) -> None:
        """Mark the index as complete: it was compared with the whole directory."""
        with self._transaction(writes=True) as db:
            self._check_totals(db)
            db.execute("UPDATE totals SET is_complete = 1 WHERE is_complete = 0")

    def note(self, keys: Iterable[ChunkKey]) -> None:
        """Note in memory that `keys`, in prompt order, were used now. Keeps 65,536 at most."""
        used = self.settings.wall()
        notes = self._notes
        for key in keys:
            if len(notes) >= _MAX_NOTES and key not in notes:
                break
            notes[key] = used
            used -= _NOTE_STEP

    def flush(self) -> None:
        notes, self._notes = self._notes, {}
        used = iter(list(notes.items()))  # another thread may still add to them
        while batch := list(islice(used, _BATCH)):
            with self._transaction(writes=True) as db:
                execute(db, _SET_USED, batch)

    def follow(self) -> bool:
        """Learn which records were added and removed, up to 1,024 of each. Whether there are more.
        Every method changes the known keys inside its transaction. So a key that another thread or
        process removes afterwards does not come back, and the removal is learned later."""
        with self._transaction(writes=False) as db:
            last_record, last_removal = self._last_ids(db)
            row = db.execute("SELECT ifnull(min(id), 0) FROM removals").fetchone()
            (oldest_removal,) = checked(row, "n")
            if last_record < self._last_record or not (
                oldest_removal - 1 <= self._last_removal <= last_removal
            ):
                # The history no longer holds all removals, or this is another database.
                self._learn_anew(last_record, last_removal)
            last, keys = read_keys(db, f"removals {_NEXT}", self._last_removal)
            self._last_removal = max(last, self._last_removal)
            for key in keys:
                self.known.discard(key)
            if len(keys) < _BATCH:  # after removals: a key may be removed and added again
                last, keys = read_keys(db, f"records {_NEXT}", self._last_record)
                self._last_record = max(last, self._last_record)
                for key in keys:
                    self.known.add(key)
        is_behind = len(keys) == _BATCH
        if not is_behind and self.totals.is_complete:
            self.all_known.set()
        return is_behind

    def _learn_anew(self, last_record: int, last_removal: int) -> None:
        self.known.clear()
        self._last_record = 0 if self.known.tracks_keys else last_record
        self._last_removal = last_removal

    def _last_ids(self, db: sqlite3.Connection) -> tuple[int, int]:
        rows = db.execute("SELECT name, seq FROM sqlite_sequence")
        given = dict(checked(row, "sn") for row in rows)
        last_record, last_removal = given.get("records", 0), given.get("removals", 0)
        for table, last in (("records", last_record), ("removals", last_removal)):
            newest = db.execute(f"SELECT ifnull(max(id), 0) FROM {table}").fetchone()
            if checked(newest, "n")[0] > last:
                raise Damaged("an id is beyond its sequence")
        return last_record, last_removal

    def keys(self, first: bytes, last: bytes) -> Iterator[ChunkKey]:
        """Yield the keys from `first` to `last` that have rows; their files may be gone."""
        with self._transaction(writes=False) as db:
            found = read_keys(db, "records WHERE key BETWEEN ? AND ?", first, last)[1]
        yield from found

    def entries(self, limit: int | None = None) -> Iterator[Entry]:
        """Yield all records by id, or the `limit` most recently used ones. Those that are used
        meanwhile may be missing."""
        if limit is None:
            yield from self._in_slices(_AFTER)
            return
        by_use = attrgetter("last_used")
        pinned = sorted(self._in_slices(_PINNED), key=by_use, reverse=True)
        unpinned = self._in_slices(_UNPINNED)
        yield from islice(heapq.merge(pinned, unpinned, key=by_use, reverse=True), limit)

    def _in_slices(self, query: str) -> Iterator[Entry]:
        """Yield the records of a query that begins behind the last record of the slice before: a
        long read keeps other threads and processes from writing."""
        last: dict[str, float] = {"id": 0, "used": math.inf, "pinned": 0.0}
        while True:
            with self._transaction(writes=False) as db:
                rows = read_rows(db, _ENTRY, query, last)
                found = [checked(row, "nkntbt") for row in rows]
                for row in found[-1:]:
                    # Read once more, because old versions of SQLite quote some times inexactly.
                    times = "SELECT last_used, pinned_until FROM records WHERE id = ?"
                    used, pinned = checked(db.execute(times, row[:1]).fetchone(), "tt")
                    last = {"id": row[0], "used": used, "pinned": pinned}
            yield from (Entry(*row[1:]) for row in found)
            if len(found) < _BATCH:
                return

    def removals(self, count: int) -> Iterator[Removal]:
        query = "SELECT key, num_bytes, at, reason, detail, by FROM removals"
        with self._transaction(writes=False) as db:
            rows = db.execute(f"{query} ORDER BY id DESC LIMIT ?", (count,))
            found = [Removal(*checked(row, "kntsss")) for row in rows]
        yield from found

    def _evict(self, db: sqlite3.Connection, max_bytes: int, unused_since: float = 0.0) -> bool:
        """Remove the least recently used records without a pin, until at most `max_bytes` are
        counted and none of these was last used before `unused_since`. Stop after 1,024 records,
        because other writers wait. Whether any record was evicted."""
        excess = self.totals.num_bytes - max_bytes
        if excess <= 0 and not unused_since:
            return False
        gone: list[ChunkKey] = []
        kept: list[ChunkKey] = []
        evicted_bytes = 0
        query = (
            "SELECT key, num_bytes, last_used FROM records WHERE pinned_until = 0 "
            "ORDER BY last_used LIMIT ?"
        )
        oldest = db.execute(query, (_BATCH,))
        while (row := oldest.fetchone()) is not None:
            key, num_bytes, last_used = checked(row, "knt")
            if excess <= evicted_bytes and last_used >= unused_since:
                break
            try:
                self.directory.remove(key)
            except OSError:
                kept.append(key)
            else:
                gone.append(key)
                evicted_bytes += num_bytes
        oldest.close()
        if kept:  # their files cannot be removed: try others first from now on
            execute(db, _SET_USED, [(key, self.settings.wall()) for key in kept])
        self._take_out(db, gone, "evicted", "")
        if gone:
            self._observer.count("store_evicted_records", len(gone))
            self._observer.count("store_evicted_bytes", evicted_bytes)
        return bool(gone)

    def _take_out(
        self, db: sqlite3.Connection, gone: Sequence[ChunkKey], reason: str, detail: str
    ) -> None:
        if not gone:
            return
        for key in gone:
            self.known.discard(key)
        now, by = self.settings.wall(), f"{os.getpid()}@{socket.gethostname()}"
        # The process that took the row out during a comparison has noted the reason.
        join = "JOIN" if reason == "vanished" else "LEFT JOIN"
        execute(
            db,
            "INSERT INTO removals SELECT NULL, column1, ifnull(num_bytes, 0), column2, column3, "
            f"column4, column5 FROM ({{}}) {join} records ON key = column1",
            [(key, now, reason, detail, by) for key in gone],
        )
        execute(db, "DELETE FROM records WHERE key IN ({})", [(key,) for key in gone])
        bound = "DELETE FROM removals WHERE id <= (SELECT max(id) FROM removals) - ?"
        db.execute(bound, (self.settings.bounds.max_removals,))

    def _namespace(self, key: ChunkKey) -> bytes:
        return namespace_of(self.directory.read_head(key)) or b""

    def _check_totals(self, db: sqlite3.Connection) -> None:
        query = "SELECT count(*), ifnull(sum(num_bytes), 0) FROM records"
        if db.execute(query).fetchone() != self._read_totals(db)[:2]:
            raise Damaged("the totals are no sum")

    def _read_totals(self, db: sqlite3.Connection) -> Totals:
        row = db.execute("SELECT num_records, num_bytes, is_complete FROM totals").fetchone()
        num_records, num_bytes, is_complete = checked(row or (), "nnn")
        self.totals = Totals(num_records, num_bytes, bool(is_complete))
        return self.totals

    @contextmanager
    def _transaction(self, *, writes: bool) -> Iterator[sqlite3.Connection]:
        with self.database.transaction(writes=writes) as db:
            self._read_totals(db)
            yield db
            if writes:
                self._read_totals(db)

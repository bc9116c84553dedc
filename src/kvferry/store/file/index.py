"""What is in the store: a SQLite database that the processes of one machine share.

It is a cache of the directory. A write is two short transactions around the file: *reserve*, which
evicts in the same transaction if the quota asks for it, and *confirm*. A process may be killed at
any instant: transactions are whole, a reservation whose file nobody has locked any more is given
back by the next one that looks, and rows and files that disagree are found by comparing them, one
shard at a time. A database that is damaged, replaced or gone is made anew and filled by listing.

Several processes on one disk are safe with it; a directory on a network mount has one index per
machine, on that machine's own disk, since locks of network file systems are not to be relied on.

The journal is kept (PERSIST), not a write-ahead log: that needs a shared mapping, and whoever
truncates its file kills every process that uses it.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import heapq
import logging
import os
import secrets
import sqlite3
import stat
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Literal, NamedTuple, Protocol, TypeVar
from urllib.parse import quote

from kvferry.store.base import Entry, Removal
from kvferry.types import ChunkKey

T = TypeVar("T")
logger = logging.getLogger(__name__)

LOCK_SECONDS = 2.0
"""How long anybody waits for another process, or for another thread of this one."""

MAX_REMOVALS = 16384
EVICT_MORE = 16
"""So many records may go beyond what is needed: not every write into a full store evicts."""

_BATCH = 1024
_SLICE = 8192
_EVICT_AT_ONCE = 512
_PAUSE_SECONDS = 0.005
"""After so many, others get a turn."""
_ANY = "surrogateescape"  # a path may be any bytes
_ENTRY = "key, num_bytes, last_used, namespace FROM records"
_MAX_STEPS = 1 << 53
_FILES = ("", "-journal", "-wal", "-shm")
_PRIVATE = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
_SCHEMA = (
    "CREATE TABLE records (id INTEGER PRIMARY KEY AUTOINCREMENT, key BLOB NOT NULL UNIQUE, "
    "num_bytes INTEGER NOT NULL, last_used REAL NOT NULL, namespace BLOB)",
    "CREATE INDEX records_by_use ON records (last_used)",
    "CREATE INDEX records_unnamed ON records (id) WHERE namespace IS NULL",
    "CREATE TABLE writing (file TEXT PRIMARY KEY, key BLOB NOT NULL, num_bytes INTEGER NOT NULL)",
    "CREATE TABLE quarantine (file TEXT PRIMARY KEY, num_bytes INTEGER NOT NULL, "
    "since REAL NOT NULL)",
    "CREATE TABLE removals (id INTEGER PRIMARY KEY AUTOINCREMENT, key BLOB NOT NULL, "
    "num_bytes INTEGER NOT NULL, at REAL NOT NULL, reason TEXT NOT NULL, detail TEXT NOT NULL, "
    "by TEXT NOT NULL)",
    "CREATE TABLE totals (num_records INTEGER NOT NULL, num_bytes INTEGER NOT NULL, "
    "is_complete INTEGER NOT NULL)",
    *(
        f"CREATE TRIGGER {table}_{event} AFTER {event} ON {table} BEGIN UPDATE totals SET "
        f"num_bytes = num_bytes {sign} {row}.num_bytes, "
        f"num_records = num_records {sign} {int(table == 'records')}; END"
        for table in ("records", "writing", "quarantine")
        for event, sign, row in (("INSERT", "+", "new"), ("DELETE", "-", "old"))
    ),
)
_BROKEN = frozenset(
    {sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_ERROR, sqlite3.SQLITE_READONLY}
)


class IndexUnavailable(OSError):
    """The index cannot be asked or changed now: locked, full, damaged, closed."""


class Totals(NamedTuple):
    """What is counted against the quota: records, what is being written, and quarantine."""

    num_records: int
    num_bytes: int
    is_complete: bool
    """Whether the whole directory was listed into it."""


class Seen(NamedTuple):
    """How far somebody has followed the index."""

    record: int = 0
    removal: int = 0


class Known(Protocol):
    """Somebody who follows the index.

    Attributes:
        learns: False for one that keeps nothing, and is told only what it must forget.
    """

    learns: bool

    def add(self, key: ChunkKey) -> None:
        """It is there."""

    def discard(self, key: ChunkKey) -> None:
        """It is not there."""

    def clear(self) -> None:
        """Nothing that was told holds."""


class Index:
    """One connection, used by one thread at a time. Thread-safe; a forked child has none.

    Args:
        path: of the database; None keeps it in memory, for a directory that only may be read.
        read_only: never changes it; then it must be there.
        by: who this is, in the history of removals.
        wall: seconds since the epoch.

    Raises:
        IndexUnavailable: from every method.
    """

    def __init__(
        self, path: str | None, *, read_only: bool, by: str, wall: Callable[[], float]
    ) -> None:
        self._path = path
        self._read_only = read_only
        self._by = by
        self._wall = wall
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._db: sqlite3.Connection | None = None
        self._inode = 0
        self._is_broken = False
        self._version = -1
        self._schema = 0
        self._steps = 0.0
        self.totals = Totals(0, 0, is_complete=False)
        """As of the last look; without a lock."""
        os.register_at_fork(after_in_child=partial(_leak_after_fork, weakref.ref(self)))

    @property
    def is_ours(self) -> bool:
        """Whether this is the process that made it."""
        return os.getpid() == self._pid

    def open(self) -> bool:
        """Open the database, if it is not: made anew if it is missing, damaged or of another
        version. True if what was known of it no longer holds."""
        with self._locked():
            if self._db is not None and not self._is_broken and self._inode == self._inode_now():
                return False
            self._close()
            self._db = self._connect()
            self._inode = self._inode_now()
            self._is_broken = False
            self._version = -1
            return True

    def close(self) -> None:
        """Idempotent."""
        with suppress(IndexUnavailable), self._locked():
            self._close()

    def changed(self) -> bool:
        """Whether another process changed it since this was asked last."""
        with self._locked():
            if self._db is None:
                return False
            self._check_place()
            version = self._db.execute("PRAGMA data_version").fetchone()[0]
            changed, self._version = bool(version != self._version), version
        return changed

    def reserve(
        self,
        key: ChunkKey,
        num_bytes: int,
        file: str,
        max_bytes: int | None,
        remove: Callable[[ChunkKey], bool],
        drop: Callable[[str], None],
    ) -> tuple[bool | None, list[tuple[ChunkKey, int]]]:
        """Room for a value that is written to `file`.

        Args:
            key: of the value.
            num_bytes: of the value.
            file: its name while it is written.
            max_bytes: the quota.
            remove: takes a record out of the directory, while others wait.
            drop: takes a file out of quarantine.

        Returns:
            Whether there is room, None if there may be soon; and the records that were evicted for
            it, with their sizes.
        """
        with self._changing() as db:
            evicted: list[tuple[ChunkKey, int]] = []
            if max_bytes is not None:
                if not self._read_totals(db).is_complete:
                    raise IndexUnavailable(errno.EAGAIN, "the index is being made")
                evicted = self._evict(db, max_bytes - num_bytes, max_bytes // 64, remove, drop)
                if self._read_totals(db).num_bytes + num_bytes > max_bytes:
                    others = db.execute("SELECT 1 FROM writing").fetchone()
                    if evicted or others:
                        return None, evicted
                    self._check_totals(db)
                    return False, evicted
            db.execute("INSERT INTO writing VALUES (?, ?, ?)", (file, key, num_bytes))
        return True, evicted

    def shrink(
        self, max_bytes: int, remove: Callable[[ChunkKey], bool], drop: Callable[[str], None]
    ) -> list[tuple[ChunkKey, int]]:
        """Evict until at most `max_bytes` are stored, one batch at a time: ends when nothing goes
        any more."""
        evicted: list[tuple[ChunkKey, int]] = []
        while True:
            with self._changing() as db:
                gone = self._evict(db, max_bytes, 0, remove, drop)
            if not gone:
                return evicted
            evicted += gone
            time.sleep(_PAUSE_SECONDS)

    def confirm(self, file: str, key: ChunkKey, num_bytes: int, namespace: bytes | None) -> None:
        """What was reserved is stored. Nothing happens if it is reserved no more: whoever released
        it has looked what is there."""
        with self._changing() as db:
            if db.execute("DELETE FROM writing WHERE file = ?", (file,)).rowcount == 0:
                return
            db.execute("DELETE FROM records WHERE key = ?", (key,))  # whose file went unnoticed
            self._insert(db, [(key, num_bytes, self._wall(), namespace)])

    def release(self, file: str) -> bool:
        """What was reserved is not stored. False if nothing was reserved (any more)."""
        with self._changing() as db:
            return db.execute("DELETE FROM writing WHERE file = ?", (file,)).rowcount > 0

    def add(self, rows: Iterable[tuple[ChunkKey, int, float, bytes | None]]) -> None:
        """Records that the directory has: key, bytes, last use, namespace. What is known already
        stays as it is."""
        with self._changing() as db:
            self._insert(db, rows)

    def forget(
        self, keys: Sequence[ChunkKey], reason: str, detail: str, gone: Callable[[ChunkKey], bool]
    ) -> list[tuple[ChunkKey, int]]:
        """Take out records for which `gone` says, while nobody else writes, that they are gone;
        with their sizes as they were counted."""
        out: list[tuple[ChunkKey, int]] = []
        with self._changing() as db:
            for key in keys:
                row = db.execute("SELECT num_bytes FROM records WHERE key = ?", (key,)).fetchone()
                if gone(key):
                    out.append((key, _number(row[0]) if row else 0))
            self._take_out(db, out, reason, detail)
        return out

    def quarantined(self, file: str, num_bytes: int) -> None:
        """A file is in quarantine."""
        with self._changing() as db:
            row = (file, num_bytes, self._wall())
            db.execute("INSERT OR IGNORE INTO quarantine VALUES (?, ?, ?)", row)

    def compare_quarantine(self, listed: Callable[[], Mapping[str, tuple[int, float]]]) -> None:
        """Exactly what `listed` says, while nobody else writes, is in quarantine."""
        with self._changing() as db:
            files = listed()
            known = {file for (file,) in db.execute("SELECT file FROM quarantine")}
            for file in known - files.keys():
                db.execute("DELETE FROM quarantine WHERE file = ?", (file,))
            rows = [(file, files[file][0], self._wall()) for file in files.keys() - known]
            db.executemany("INSERT INTO quarantine VALUES (?, ?, ?)", rows)

    def complete(self) -> None:
        """The whole directory was compared."""
        with self._changing() as db:
            self._check_totals(db)
            db.execute("UPDATE totals SET is_complete = 1 WHERE is_complete = 0")

    def touch(self, used: Sequence[tuple[ChunkKey, float]]) -> None:
        """When records were used, in seconds since the epoch."""
        for start in range(0, len(used), _BATCH):
            with self._changing() as db:
                db.executemany(
                    "UPDATE records SET last_used = ?2 WHERE key = ?1 AND last_used < ?2",
                    used[start : start + _BATCH],
                )

    def name(self, namespaces: Sequence[tuple[ChunkKey, bytes]]) -> None:
        """The namespaces of records, as their heads say; empty for what is no record."""
        with self._changing() as db:
            db.executemany("UPDATE records SET namespace = ?2 WHERE key = ?1", namespaces)

    def unnamed(self, count: int) -> list[ChunkKey]:
        """Records whose namespace nobody knows yet."""
        query = "SELECT key FROM records WHERE namespace IS NULL ORDER BY id LIMIT ?"
        with self._reading() as db:
            return [_key(key) for (key,) in db.execute(query, (count,))]

    def follow(self, seen: Seen, known: Known) -> tuple[Seen, bool]:
        """Tell `known` what came and went, up to 1024 of each; how far, and whether that is all.

        It is told before anybody else changes the index through this object, so that what is taken
        out from then on is not brought back.
        """
        with self._reading() as db:
            ends = dict(db.execute("SELECT name, seq FROM sqlite_sequence"))
            last = Seen(_number(ends.get("records", 0)), _number(ends.get("removals", 0)))
            oldest = db.execute("SELECT min(id) FROM removals").fetchone()[0] or 0
            if last.record < seen.record or not oldest - 1 <= seen.removal <= last.removal:
                # More went than is kept, or this is another database.
                known.clear()
                seen = Seen()
            if seen == Seen():
                seen = Seen(0 if known.learns else last.record, last.removal)
            query = "SELECT id, key FROM removals WHERE id > ? ORDER BY id LIMIT ?"
            removed = db.execute(query, (seen.removal, _BATCH)).fetchall()
            added = []
            if len(removed) < _BATCH:  # what went, first
                query = "SELECT id, key FROM records WHERE id > ? ORDER BY id LIMIT ?"
                added = db.execute(query, (seen.record, _BATCH)).fetchall()
            for _, key in removed:
                known.discard(_key(key))
            for _, key in added:
                known.add(_key(key))
        record = added[-1][0] if added else seen.record
        removal = removed[-1][0] if removed else seen.removal
        return Seen(record, removal), max(len(removed), len(added)) < _BATCH

    def keys_between(self, first: bytes, end: bytes | None) -> set[ChunkKey]:
        """Keys from `first` on, below `end`."""
        query = "SELECT key FROM records WHERE key >= ?" + (" AND key < ?" if end else "")
        with self._reading() as db:
            return {_key(key) for (key,) in db.execute(query, (first, end) if end else (first,))}

    def entries(
        self, order: Literal["last_used", "num_bytes"] | None = None, limit: int = -1
    ) -> Iterator[Entry]:
        """Records: the `limit` used last, or the largest, first; -1 for all."""
        if order == "last_used":
            query = f"SELECT {_ENTRY} ORDER BY last_used DESC LIMIT ?"
            with self._reading() as db:
                return iter([_entry(row) for row in db.execute(query, (limit,))])
        by = " ORDER BY num_bytes DESC" if order else ""
        found = self._slices(f"SELECT {_ENTRY} WHERE id > ? AND id <= ?{by} LIMIT ?", _entry, limit)
        if order is None:
            return found
        count = self.totals.num_records if limit < 0 else limit
        return iter(heapq.nlargest(count, found, key=lambda entry: entry.num_bytes))

    def _slices(
        self, query: str, read: Callable[[tuple[object, ...]], T], *arguments: int
    ) -> Iterator[T]:
        """What a query finds in one slice of the ids after another: who reads keeps others from
        writing."""
        first = 0
        end: int | None = 0
        while end is not None:
            with self._reading() as db:
                border = "SELECT id FROM records WHERE id > ? ORDER BY id LIMIT 1 OFFSET ?"
                row = db.execute(border, (first, _SLICE)).fetchone()
                end = None if row is None else row[0]
                last = 1 << 62 if end is None else end
                found = [read(row) for row in db.execute(query, (first, last, *arguments))]
            yield from found
            first = last

    def least_recent(self, before: float, count: int) -> list[ChunkKey]:
        """Records that were not used since `before`, the oldest first."""
        query = "SELECT key FROM records WHERE last_used < ? ORDER BY last_used LIMIT ?"
        with self._reading() as db:
            return [_key(key) for (key,) in db.execute(query, (before, count))]

    def writing(self) -> dict[str, ChunkKey]:
        """Files that are being written, or were when their writer died."""
        with self._reading() as db:
            return {
                _text(file): _key(key) for file, key in db.execute("SELECT file, key FROM writing")
            }

    def in_quarantine(self) -> list[tuple[str, int]]:
        """Files in quarantine and their bytes, the oldest first."""
        query = "SELECT file, num_bytes FROM quarantine ORDER BY since, rowid"
        with self._reading() as db:
            return [(_text(file), _number(num_bytes)) for file, num_bytes in db.execute(query)]

    def by_namespace(self) -> dict[bytes, tuple[int, int]]:
        """Records and bytes of each namespace."""
        query = (
            "SELECT namespace, count(*), sum(num_bytes) FROM records WHERE id > ? AND id <= ? "
            "GROUP BY namespace"
        )
        found: dict[bytes, tuple[int, int]] = {}
        for namespace, count, num_bytes in self._slices(query, _share):
            before = found.get(namespace, (0, 0))
            found[namespace] = (before[0] + count, before[1] + num_bytes)
        return found

    def removals(self, count: int) -> list[Removal]:
        """The last ones, newest first."""
        query = (
            "SELECT key, num_bytes, at, reason, detail, by FROM removals ORDER BY id DESC LIMIT ?"
        )
        with self._reading() as db:
            return [
                Removal(
                    _key(key), _number(size), _float(at), _text(reason), _text(detail), _text(by)
                )
                for key, size, at, reason, detail, by in db.execute(query, (count,))
            ]

    def _evict(
        self,
        db: sqlite3.Connection,
        max_bytes: int,
        more: int,
        remove: Callable[[ChunkKey], bool],
        drop: Callable[[str], None],
    ) -> list[tuple[ChunkKey, int]]:
        """Quarantine, then what was used longest ago, until at most `max_bytes` are counted; then
        what fits into `more` bytes. A bounded number of records: others wait meanwhile."""
        excess = self._read_totals(db).num_bytes - max_bytes
        if excess <= 0:
            return []
        query = "SELECT file, num_bytes FROM quarantine ORDER BY since, rowid"
        for file, num_bytes in db.execute(query).fetchall():
            if excess <= 0:
                break
            with suppress(OSError):  # or else the medium holds on to it
                drop(_text(file))
                db.execute("DELETE FROM quarantine WHERE file = ?", (file,))
                excess -= _number(num_bytes)
        gone: list[tuple[ChunkKey, int]] = []
        kept = 0
        query = "SELECT key, num_bytes FROM records ORDER BY last_used LIMIT ? OFFSET ?"
        while len(gone) + kept < _EVICT_AT_ONCE:
            rows = db.execute(query, (EVICT_MORE, len(gone) + kept))
            batch = [(_key(key), _number(num_bytes)) for key, num_bytes in rows]
            for key, num_bytes in batch:
                if excess <= 0 and (num_bytes > excess + more or len(gone) >= EVICT_MORE):
                    break
                try:
                    remove(key)
                except OSError:
                    kept += 1  # the medium holds on to it
                else:
                    gone.append((key, num_bytes))
                    excess -= num_bytes
            else:
                if batch:
                    continue
            break
        self._take_out(db, gone, "evicted", "")
        return gone

    def _take_out(
        self, db: sqlite3.Connection, gone: Sequence[tuple[ChunkKey, int]], reason: str, detail: str
    ) -> None:
        db.executemany("DELETE FROM records WHERE key = ?", [(key,) for key, _ in gone])
        now = self._wall()
        db.executemany(
            "INSERT INTO removals VALUES (NULL, ?, ?, ?, ?, ?, ?)",
            [(key, num_bytes, now, reason, detail, self._by) for key, num_bytes in gone],
        )
        db.execute(
            "DELETE FROM removals WHERE id <= (SELECT max(id) FROM removals) - ?", (MAX_REMOVALS,)
        )

    def _insert(
        self, db: sqlite3.Connection, rows: Iterable[tuple[ChunkKey, int, float, bytes | None]]
    ) -> None:
        db.executemany(
            "INSERT OR IGNORE INTO records (key, num_bytes, last_used, namespace) "
            "VALUES (?, ?, ?, ?)",
            rows,
        )

    def _check_totals(self, db: sqlite3.Connection) -> None:
        query = (
            "SELECT (SELECT count(*) FROM records), ifnull(sum(num_bytes), 0) FROM "
            "(SELECT num_bytes FROM records UNION ALL SELECT num_bytes FROM writing "
            "UNION ALL SELECT num_bytes FROM quarantine)"
        )
        if db.execute(query).fetchone() != self._read_totals(db)[:2]:
            raise _Damaged("the totals are no sum")

    def _read_totals(self, db: sqlite3.Connection) -> Totals:
        row = db.execute("SELECT num_records, num_bytes, is_complete FROM totals").fetchone()
        if row is None:
            raise _Damaged("there are no totals")
        self.totals = Totals(_number(row[0]), _number(row[1]), is_complete=bool(row[2]))
        return self.totals

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """For this thread alone, with errors translated."""
        if not self.is_ours:
            raise IndexUnavailable(errno.EPERM, "a forked process has no index")
        if not self._lock.acquire(timeout=LOCK_SECONDS):
            raise IndexUnavailable(errno.EAGAIN, "another thread holds the index")
        try:
            yield
        except (sqlite3.Error, _Damaged) as error:
            code = getattr(error, "sqlite_errorcode", None)
            if code is None or code & 0xFF in _BROKEN:
                self._is_broken = True
            number = errno.ENOSPC if code == sqlite3.SQLITE_FULL else errno.EIO
            raise IndexUnavailable(number, f"the index: {error}") from error
        finally:
            self._lock.release()

    @contextmanager
    def _reading(self) -> Iterator[sqlite3.Connection]:
        with self._locked(), self._transaction("BEGIN") as db:
            self._read_totals(db)
            yield db

    @contextmanager
    def _changing(self) -> Iterator[sqlite3.Connection]:
        with self._locked(), self._transaction("BEGIN IMMEDIATE") as db:
            yield db
            self._read_totals(db)

    @contextmanager
    def _transaction(self, begin: str) -> Iterator[sqlite3.Connection]:
        db = self._db
        if db is None:
            raise IndexUnavailable(errno.EBADF, "the index is closed")
        self._check_place()
        _begin(db, begin)
        try:
            self._check(db)
            yield db
            db.execute("COMMIT")
        except BaseException:
            with suppress(sqlite3.Error):
                db.rollback()
            raise

    def _check(self, db: sqlite3.Connection) -> None:
        """That it still is what was opened, and no copy of earlier was written over it."""
        schema = db.execute("PRAGMA schema_version").fetchone()[0]
        steps = db.execute("SELECT total(seq) FROM sqlite_sequence").fetchone()[0]
        if schema != self._schema or not self._steps <= steps < _MAX_STEPS:
            raise _Damaged("another database was written over it")
        self._steps = steps

    def _connect(self) -> sqlite3.Connection:
        """Raises: OSError."""
        path = self._path
        if path is None:
            return self._prepared(":memory:")
        if self._read_only:
            return self._prepared(f"file:{quote(path, errors=_ANY)}?mode=ro")
        os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
        if not _is_file(f"{path}.lock"):
            os.rename(f"{path}.lock", f"{path}.lock.{secrets.token_hex(8)}.broken")
        lock = os.open(f"{path}.lock", _PRIVATE, 0o600)
        try:
            # Others may find it damaged at the same time: the first makes it anew.
            _wait_for(lock)
            if self._is_broken and self._inode == self._inode_now():
                self._set_aside(path)
            try:
                return self._prepared(f"file:{quote(path, errors=_ANY)}?mode=rwc")
            except (sqlite3.Error, _Damaged) as error:
                code = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_CORRUPT)
                if code & 0xFF not in _BROKEN | {sqlite3.SQLITE_CANTOPEN}:
                    raise
            self._set_aside(path)
            return self._prepared(f"file:{quote(path, errors=_ANY)}?mode=rwc")
        finally:
            os.close(lock)

    def _check_place(self) -> None:
        """SQLite finds a journal by its name: one of another database would be taken for ours."""
        if self._inode != self._inode_now():
            raise IndexUnavailable(errno.ESTALE, "another index stands in its place")
        self._check_files()

    def _check_files(self) -> None:
        for suffix in _FILES if self._path is not None else ():
            with suppress(FileNotFoundError):
                # SQLite would follow a link, and wait for ever at a fifo.
                mode = os.lstat(f"{self._path}{suffix}").st_mode
                if not stat.S_ISREG(mode) or not (self._read_only or mode & 0o600 == 0o600):
                    raise _Damaged("not a file, or not to be written")

    def _prepared(self, name: str) -> sqlite3.Connection:
        self._check_files()
        if self._path is not None and not self._read_only:
            # Private, as its journal is then. One that is there is not opened here: closing it
            # would take the locks of all this process's connections off it.
            with suppress(FileExistsError):
                os.close(os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
        db = sqlite3.connect(
            name, timeout=LOCK_SECONDS, isolation_level=None, check_same_thread=False, uri=True
        )
        try:
            for pragma in ("trusted_schema = OFF", "mmap_size = 0", "synchronous = OFF"):
                db.execute(f"PRAGMA {pragma}")
            query = "SELECT sql FROM sqlite_master WHERE name NOT LIKE 'sqlite_%'"
            if not self._read_only:
                db.execute("PRAGMA journal_mode = PERSIST")
                if db.execute(query).fetchone() is None:
                    db.execute("BEGIN IMMEDIATE")
                    for statement in _SCHEMA:
                        db.execute(statement)
                    db.execute("INSERT INTO totals VALUES (0, 0, 0)")
                    db.execute("COMMIT")
            if {text for (text,) in db.execute(query)} != set(_SCHEMA):
                raise _Damaged("another schema")
            self._schema = db.execute("PRAGMA schema_version").fetchone()[0]
            self._steps = 0.0
            self._read_totals(db)
        except BaseException:
            db.close()
            raise
        return db

    def _set_aside(self, path: str) -> None:
        for suffix in _FILES:
            with suppress(FileNotFoundError):
                try:
                    os.replace(f"{path}{suffix}", f"{path}{suffix}.broken")
                except OSError:
                    os.rename(f"{path}{suffix}", f"{path}{suffix}.{secrets.token_hex(8)}.broken")
        logger.warning("the index %s cannot be used: it is made anew from the directory", path)

    def _inode_now(self) -> int:
        if self._path is None:
            return 0
        try:
            return os.lstat(self._path).st_ino
        except OSError:
            return -1

    def _close(self) -> None:
        if self._db is not None:
            self._db.close()
            self._db = None

    def leak(self) -> None:
        """Never close the connection: in a forked child that would undo what its parent does."""
        if self._db is not None:
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._db))
            self._db = None


def _leak_after_fork(index: weakref.ref[Index]) -> None:
    forked = index()
    if forked is not None:
        forked.leak()


class _Damaged(Exception):
    """The database holds what no store of ours writes."""


def _begin(db: sqlite3.Connection, how: str) -> None:
    """Begin a transaction. SQLite's own waiting looks rarely in the end, and misses short gaps."""
    end = time.monotonic() + LOCK_SECONDS
    db.execute("PRAGMA busy_timeout = 0")
    try:
        while True:
            try:
                db.execute(how)
            except sqlite3.OperationalError as error:
                if error.sqlite_errorcode & 0xFF != sqlite3.SQLITE_BUSY or time.monotonic() > end:
                    raise
                time.sleep(0.001)
            else:
                return
    finally:
        db.execute(f"PRAGMA busy_timeout = {int(LOCK_SECONDS * 1000)}")


def _is_file(path: str) -> bool:
    """Whether that is a file, or nothing."""
    try:
        return stat.S_ISREG(os.lstat(path).st_mode)
    except FileNotFoundError:
        return True


def _wait_for(lock: int) -> None:
    end = time.monotonic() + LOCK_SECONDS
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > end:
                raise
            time.sleep(0.005)
        else:
            return


def _key(value: object) -> ChunkKey:
    if not isinstance(value, bytes) or len(value) != 32:
        raise _Damaged("a key has not 32 bytes")
    return ChunkKey(value)


def _number(value: object) -> int:
    if not isinstance(value, int) or value < 0:
        raise _Damaged("a number is none")
    return value


def _float(value: object) -> float:
    if not isinstance(value, float):
        raise _Damaged("a time is none")
    return value


def _namespace(value: object) -> bytes:
    return value if isinstance(value, bytes) else b""


def _entry(row: tuple[object, ...]) -> Entry:
    key, num_bytes, last_used, namespace = row
    return Entry(_key(key), _number(num_bytes), _float(last_used), _namespace(namespace))


def _share(row: tuple[object, ...]) -> tuple[bytes, int, int]:
    namespace, count, num_bytes = row
    return _namespace(namespace), _number(count), _number(num_bytes)


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise _Damaged("a text is none")
    return value

"""A SQLite file that the processes of one machine share and that may break at any time.

The file is a cache of other data. If it is missing, damaged, of another schema, or overwritten by
an older copy, every transaction raises `IndexUnavailable` until the next `open`. That call renames
what is there to `*.broken` and creates an empty database, unless the database is read-only. No call
waits for a lock longer than the `lock_seconds` of its `Database`.

Used by `Index` and its `Pins` for a store directory; the store's calls and its upkeep thread share
one `Database`.

The database uses a rollback journal (PERSIST). A write-ahead log needs a shared mapping, and a
process that truncates the mapped file kills all others with SIGBUS.
"""

from __future__ import annotations

import ctypes
import errno
import logging
import os
import secrets
import sqlite3
import stat
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any
from urllib.parse import quote

from kvferry.errors import ConfigError
from kvferry.store.file.fileio import PRIVATE, open_at
from kvferry.types import ChunkKey

logger = logging.getLogger(__name__)

_MAX_STEPS = 1 << 53
"""Bound of the sum of all AUTOINCREMENT sequences. SQLite returns the sum as a float, which is
exact up to here."""

_FILES = ("", "-journal", "-wal", "-shm")
_BROKEN = frozenset(
    {sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_ERROR, sqlite3.SQLITE_READONLY}
)


class IndexUnavailable(OSError):
    """The index cannot be read or changed now: locked, full, damaged, closed."""


class Damaged(sqlite3.Error):
    """The database holds values that kvferry never writes. A transaction in which this is raised
    raises `IndexUnavailable` instead, and the next `open` replaces the database."""


class Database:
    """One connection behind a lock. Thread-safe; a forked child cannot use it. `open` and
    `transaction` may raise `IndexUnavailable`; `open` may also raise another OSError of the
    directory.

    Args:
        path: path of the database; None keeps it in memory.
        schema: statements that make the database, as SQLite keeps them. One must make a table with
            AUTOINCREMENT: its sequence only grows, which shows whether a database is an older copy.
        read_only: whether to change nothing; then the database must exist.
        lock_seconds: how long a call waits for another process, or for another thread of this one.
        mode: mode of the file, if this makes it.
    """

    def __init__(
        self,
        path: str | None,
        schema: Sequence[str],
        *,
        read_only: bool,
        lock_seconds: float,
        mode: int = PRIVATE,
    ) -> None:
        if sqlite3.sqlite_version_info < (3, 33):
            raise ConfigError(f"SQLite {sqlite3.sqlite_version} is too old: 3.33 is needed")
        self._path = path
        self._schema = schema
        self.read_only = read_only
        self._timeout = lock_seconds
        self._mode = mode
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._db: sqlite3.Connection | None = None
        self._inode = 0
        self._is_broken = False
        self._identity = (0, 0)
        self._steps = 0.0
        os.register_at_fork(after_in_child=partial(_leak_after_fork, weakref.ref(self)))

    @property
    def is_ours(self) -> bool:
        return os.getpid() == self._pid

    def open(self) -> bool:
        """Open the database unless it is open. True if it was opened (again), so that what was
        read from it before no longer holds."""
        with self._locked():
            if self._db is not None and not self._is_broken and self._inode == self._inode_now():
                return False
            self._close()
            self._db = self._connect()
            self._is_broken = False
            return True

    def close(self) -> None:
        with suppress(IndexUnavailable), self._locked():
            self._close()

    @contextmanager
    def transaction(self, *, writes: bool) -> Iterator[sqlite3.Connection]:
        """Run the block in a transaction, which is rolled back if the block raises."""
        with self._locked():
            db = self._db
            if db is None:
                raise IndexUnavailable(errno.EAGAIN, "the index is closed")
            self._check_place()
            db.execute("BEGIN IMMEDIATE" if writes else "BEGIN")
            try:
                self._check_content(db)
                yield db
                db.execute("COMMIT")
            except BaseException:
                with suppress(sqlite3.Error):
                    db.rollback()
                raise

    @contextmanager
    def _locked(self) -> Iterator[None]:
        if not self.is_ours:
            raise IndexUnavailable(errno.EPERM, "a forked process has no index")
        if not self._lock.acquire(timeout=self._timeout):
            raise IndexUnavailable(errno.EAGAIN, "another thread holds the index")
        try:
            yield
        except sqlite3.Error as error:
            code = _code(error)
            self._is_broken |= code in _BROKEN
            number = errno.ENOSPC if code == sqlite3.SQLITE_FULL else errno.EIO
            raise IndexUnavailable(number, f"the index: {error}") from error
        finally:
            self._lock.release()

    def _check_content(self, db: sqlite3.Connection) -> None:
        """Raise if another database or an older copy was written over this one."""
        steps = db.execute("SELECT total(seq) FROM sqlite_sequence").fetchone()[0]
        if _identity(db) != self._identity or not self._steps <= steps < _MAX_STEPS:
            raise Damaged("another database was written over it")
        self._steps = steps

    def _check_place(self) -> None:
        """Raise if another file took the place of the database or of its journal. SQLite would
        replay the journal of another database, follow a link, or block on a fifo."""
        if self._inode != self._inode_now():
            raise IndexUnavailable(errno.EAGAIN, "another index has replaced it")
        for suffix in _FILES if self._path is not None else ():
            with suppress(FileNotFoundError):
                mode = os.lstat(f"{self._path}{suffix}").st_mode
                if not stat.S_ISREG(mode) or not (self.read_only or mode & 0o600 == 0o600):
                    raise Damaged("not a file, or not writable")

    def _connect(self) -> sqlite3.Connection:
        path = self._path
        if path is None:
            return self._prepared(":memory:")
        uri = f"file:{quote(path, errors='surrogateescape')}"  # a path may be any bytes
        if self.read_only:
            return self._prepared(f"{uri}?mode=ro")
        os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
        if self._is_broken and self._inode == self._inode_now():
            self._set_all_aside(path)
        found = self._inode_now()
        try:
            return self._prepared(f"{uri}?mode=rwc")
        except sqlite3.Error as error:
            if _code(error) not in _BROKEN | {sqlite3.SQLITE_CANTOPEN}:
                raise
        if found == self._inode_now():  # otherwise another process has replaced it
            self._set_all_aside(path)
        return self._prepared(f"{uri}?mode=rwc")

    def _prepared(self, name: str) -> sqlite3.Connection:
        self._inode = self._inode_now()
        self._check_place()
        if self._path is not None and not self.read_only:
            # SQLite gives the journal the same mode. An existing file is not opened: closing it
            # would drop this process's locks on it.
            with suppress(FileExistsError):
                os.close(open_at(self._path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, self._mode))
        self._inode = self._inode_now()  # before it is opened: a later replacement is noticed
        db = sqlite3.connect(
            name, timeout=self._timeout, isolation_level=None, check_same_thread=False, uri=True
        )
        try:
            for pragma in ("trusted_schema = OFF", "mmap_size = 0", "synchronous = OFF"):
                db.execute(f"PRAGMA {pragma}")
            query = "SELECT sql FROM sqlite_master WHERE name NOT LIKE 'sqlite_%'"
            if not self.read_only:
                db.execute("PRAGMA journal_mode = PERSIST")
                db.execute("BEGIN IMMEDIATE")
                if db.execute(query).fetchone() is None:
                    for statement in self._schema:
                        db.execute(statement)
                    db.execute(f"PRAGMA user_version = {secrets.randbits(31)}")
                db.execute("COMMIT")
            made = {text for text in self._schema if text.startswith("CREATE")}
            if {text for (text,) in db.execute(query)} != made:
                raise Damaged("another schema")
            self._identity = _identity(db)
            self._steps = 0.0
            self._check_content(db)
        except BaseException:
            db.close()
            raise
        return db

    def _set_all_aside(self, path: str) -> None:
        # The database goes last: SQLite would replay a journal left behind onto the next one.
        for file in (f"{path}{suffix}" for suffix in reversed(_FILES)):
            with suppress(FileNotFoundError):
                try:
                    os.replace(file, f"{file}.broken")
                except OSError:  # the file or its target is a directory
                    os.rename(file, f"{file}.{secrets.token_hex(8)}.broken")
        logger.warning("the index %s cannot be used: it is rebuilt from the directory", path)

    def _inode_now(self) -> int:
        with suppress(OSError):
            return 0 if self._path is None else os.lstat(self._path).st_ino
        return -1

    def _close(self) -> None:
        if self._db is not None:
            self._db.close()
            self._db = None


def _leak_after_fork(database: weakref.ref[Database]) -> None:
    """Keep a forked child from closing the connection: that would undo what its parent does."""
    forked = database()
    if forked is not None and forked._db is not None:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(forked._db))
        forked._db = None


def _code(error: sqlite3.Error) -> int:
    """Primary error code. An error that does not come from SQLite itself counts as damage."""
    code: int = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_CORRUPT)
    return code & 0xFF


def _identity(db: sqlite3.Connection) -> tuple[int, int]:
    """Two numbers in the header of a database: one changes with the schema, one is random."""
    schema = db.execute("PRAGMA schema_version").fetchone()[0]
    return schema, db.execute("PRAGMA user_version").fetchone()[0]


def execute(db: sqlite3.Connection, statement: str, rows: Sequence[Sequence[object]]) -> None:
    """Execute one statement for all rows, which replace its `{}`. With one statement per row, a
    busy thread could keep the GIL for 5 ms at each, while other processes wait for our lock."""
    row = f"({', '.join('?' * len(rows[0]))})"
    values = f"VALUES {', '.join([row] * len(rows))}"
    db.execute(statement.format(values), [value for row in rows for value in row])


def read_keys(db: sqlite3.Connection, rows: str, *arguments: object) -> tuple[int, list[ChunkKey]]:
    """Last id and keys of `rows`, the SQL after FROM. One step, for the reason in `execute`."""
    query = f"SELECT ifnull(max(id), 0), group_concat(hex(key)) FROM (SELECT id, key FROM {rows})"
    last, text = db.execute(query, arguments).fetchone()
    keys = [bytes.fromhex(key) for key in text.split(",")] if text else []
    return checked((last,), "n")[0], [checked((key,), "k")[0] for key in keys]


def read_rows(
    db: sqlite3.Connection, columns: str, rows: str, arguments: Mapping[str, object]
) -> list[list[int | float | bytes]]:
    """Values of these columns, separated by commas, of `rows`, a SELECT. One step, for the reason
    in `execute`. Raises `Damaged` if a value is neither number nor bytes."""
    quoted = " || ' ' || ".join(f"quote({column})" for column in columns.split(", "))
    (text,) = db.execute(f"SELECT group_concat({quoted}) FROM ({rows})", arguments).fetchone()
    try:
        return [list(map(_unquoted, row.split(" "))) for row in text.split(",")] if text else []
    except ValueError as error:
        raise Damaged("a row of the index is wrong") from error


def _unquoted(value: str) -> int | float | bytes:
    """Read what SQLite's `quote` wrote. Raises ValueError."""
    if value.startswith("X'"):
        return bytes.fromhex(value[2:-1])
    return int(value) if value.isdigit() else float(value)


_IS_KIND: dict[str, Callable[[object], bool]] = {
    "k": lambda value: type(value) is bytes and len(value) == 32,
    "n": lambda value: type(value) is int and value >= 0,
    "t": lambda value: type(value) is float,
    "s": lambda value: type(value) is str,
    "b": lambda value: type(value) is bytes,
}


def checked(row: Sequence[object], kinds: str) -> tuple[Any, ...]:
    """Return `row` if its values are of these `kinds`: k key, n number, t time, s string, b bytes.
    Raises `Damaged` if not."""
    if len(row) != len(kinds) or not all(_IS_KIND[k](v) for k, v in zip(kinds, row, strict=True)):
        raise Damaged(f"a row of the index is wrong: {row!r:.100}")
    return tuple(row)

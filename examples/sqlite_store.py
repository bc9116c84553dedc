"""A kind of store in one file (docs/store-authors.md): values in an SQLite database, which stands
for any server that keeps bytes under names. Its URLs are `sqlite:///absolute/file.db`.
"""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass

from kvferry.errors import ConfigError, FaultKind, StoreError
from kvferry.store.base import Buffer, PutResult, ReadRange
from kvferry.store.kind import Opening, StoreKind, StoreUrl
from kvferry.store.memory import copy_ranges
from kvferry.store.servers.remote import RemoteClient, RemoteStore

PAGE = 1000
LONGEST_SECONDS = 30.0


class SqliteClient(RemoteClient):
    """Each call has a connection of its own, so threads share nothing."""

    def __init__(self, path: str) -> None:
        self._path = path
        with self._database(time.monotonic() + LONGEST_SECONDS) as database:
            database.execute(
                "CREATE TABLE IF NOT EXISTS kv (name TEXT PRIMARY KEY, value BLOB, used REAL)"
            )

    @contextmanager
    def _database(self, deadline: float) -> Iterator[sqlite3.Connection]:
        left = min(deadline - time.monotonic(), LONGEST_SECONDS)
        if left <= 0:
            raise StoreError(FaultKind.LATE, "sqlite: no time was left for the call")
        try:
            with closing(sqlite3.connect(self._path, timeout=left)) as database, database:
                database.execute("PRAGMA synchronous = OFF")  # a store need not survive power loss
                yield database
        except sqlite3.Error as error:
            raise StoreError(FaultKind.REFUSED, f"sqlite: {error}") from error

    def read(self, name: str, ranges: Sequence[ReadRange], deadline: float) -> int | None:
        with self._database(deadline) as database:
            row = database.execute("SELECT value FROM kv WHERE name = ?", [name]).fetchone()
        return None if row is None else copy_ranges(row[0], ranges)

    def put(
        self, name: str, buffers: Sequence[Buffer], deadline: float, *, replaces: bool = False
    ) -> PutResult:
        verb = "REPLACE" if replaces else "IGNORE"
        with self._database(deadline) as database:
            done = database.execute(
                f"INSERT OR {verb} INTO kv VALUES (?, ?, ?)",
                [name, b"".join(buffers), time.time()],
            )
        return PutResult.STORED if done.rowcount else PutResult.EXISTS

    def exists(self, names: Sequence[str], deadline: float) -> list[bool]:
        with self._database(deadline) as database:
            query = "SELECT 1 FROM kv WHERE name = ?"
            return [database.execute(query, [name]).fetchone() is not None for name in names]

    def delete(self, name: str, deadline: float) -> bool:
        with self._database(deadline) as database:
            return database.execute("DELETE FROM kv WHERE name = ?", [name]).rowcount > 0

    def scan(self, prefix: str, deadline: float) -> Iterator[tuple[str, int, float]]:
        rows, last = [], prefix
        while True:  # page by page, so that no writer waits for the reader of the list
            with self._database(deadline) as database:
                rows = database.execute(
                    "SELECT name, length(value), used FROM kv WHERE name > ? AND name < ? "
                    "ORDER BY name LIMIT ?",
                    [last, prefix + "\U0010ffff", PAGE],
                ).fetchall()
            if not rows:
                return
            yield from rows
            last = rows[-1][0]

    def close(self) -> None:
        """Nothing is open between calls."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SqliteOptions:
    """The options of a URL; this kind has none."""


def _check_path(where: str, _raw_path: str, path: str) -> None:
    if not path.startswith("/"):
        raise ConfigError(f"{where}: not an absolute path; write sqlite:///absolute/file.db")


def _open(url: StoreUrl, _options: SqliteOptions, opening: Opening) -> RemoteStore:
    try:
        return RemoteStore(str(url), SqliteClient(url.path), opening)
    except StoreError as error:
        raise ConfigError(f"{url.where} cannot be used: {error}") from error


KIND = StoreKind(options=SqliteOptions, open=_open, check_path=_check_path)

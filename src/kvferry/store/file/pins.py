"""Pins: records of a directory store that are not evicted before a given time.

`FileStore` calls `Pins.pin` for commands and for requests that ask for pins. The upkeep thread ends
pins.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import islice

from kvferry.store.catalogue import too_many_pins
from kvferry.store.file.database import Database, checked
from kvferry.types import ChunkKey

_BATCH = 1024
_SUM = "SELECT ifnull(sum(num_bytes), 0) FROM records WHERE"


class Pins:
    """The pins in an index. All may raise `IndexUnavailable`.

    Args:
        database: database of the index.
        wall: clock that gives seconds since the epoch.
    """

    def __init__(self, database: Database, wall: Callable[[], float]) -> None:
        self._transaction = database.transaction
        self._wall = wall

    def pin(
        self, keys: Iterable[ChunkKey], until: float, max_bytes: int, *, extends: bool = False
    ) -> int:
        """Pin the stored records of `keys` until `until`, or unpin them if that is past. Return
        their number. With `extends`, records with longer pins keep these, and are not counted.
        Raises ConfigError before more than `max_bytes` are pinned; earlier batches stay pinned."""
        ends = until <= self._wall()
        wanted, num_pinned = iter(keys), 0
        with self._transaction(writes=False) as db:
            (pinned_bytes,) = checked(db.execute(f"{_SUM} pinned_until > 0").fetchone(), "n")
        while batch := list(islice(wanted, _BATCH)):
            here = f"key IN ({', '.join('?' * len(batch))})"
            with self._transaction(writes=True) as db:
                query = f"{_SUM} pinned_until = 0 AND {here}"
                (added,) = checked(db.execute(query, batch).fetchone(), "n")
                if not ends and pinned_bytes + added > max_bytes:
                    query = "SELECT count(*) FROM records WHERE pinned_until > 0"
                    raise too_many_pins(*checked(db.execute(query).fetchone(), "n"))
                changed = db.execute(
                    f"UPDATE records SET pinned_until = ? WHERE {here} AND pinned_until < ?",
                    (0.0 if ends else until, *batch, until if extends else float("inf")),
                )
                num_pinned += changed.rowcount
                pinned_bytes += added
        return num_pinned

    def end_due(self) -> None:
        """End the pins whose time has come."""
        now = self._wall()
        query = "SELECT EXISTS (SELECT 1 FROM records WHERE pinned_until > 0 AND pinned_until <= ?)"
        with self._transaction(writes=False) as db:
            (is_due,) = checked(db.execute(query, (now,)).fetchone(), "n")
        while is_due:  # in batches, so that other processes can write
            with self._transaction(writes=True) as db:
                changed = db.execute(
                    "UPDATE records SET pinned_until = 0 WHERE id IN (SELECT id FROM records "
                    f"WHERE pinned_until > 0 AND pinned_until <= ? LIMIT {_BATCH})",
                    (now,),
                )
                is_due = changed.rowcount == _BATCH

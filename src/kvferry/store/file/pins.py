"""Pins: records of a directory store that are not evicted before a given time.

`FileStore` calls `Pins.pin` for commands. For a request that asks for pins it calls `Pins.add`, and
the upkeep thread applies these. That thread also ends pins.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from typing import NamedTuple

from kvferry.errors import ConfigError
from kvferry.observe import Observer
from kvferry.store.base import too_many_pins
from kvferry.store.file.database import Database, checked
from kvferry.types import ChunkKey

logger = logging.getLogger(__name__)

WAIT_SECONDS = 60.0
"""How long a pin waits for a record that is still to be stored."""

_MAX_WAITING = 1024
"""Most prompts whose pins wait. With one more, the oldest is forgotten."""

_BATCH = 1024
_SUM = "SELECT ifnull(sum(num_bytes), 0) FROM records WHERE"


class _Waiting(NamedTuple):
    """Records to pin, some of which may not be stored yet."""

    keys: Sequence[ChunkKey]
    until: float
    waits_until: float


class Pins:
    """The pins in an index. `add` uses memory only; all else may raise `IndexUnavailable`.

    Args:
        database: database of the index.
        is_known: whether a record is known to be stored.
        wall: clock that gives seconds since the epoch.
    """

    def __init__(
        self,
        database: Database,
        is_known: Callable[[ChunkKey], bool],
        observer: Observer,
        wall: Callable[[], float],
    ) -> None:
        self._transaction = database.transaction
        self._is_known = is_known
        self._observer = observer
        self._wall = wall
        self._waiting: deque[_Waiting] = deque(maxlen=_MAX_WAITING)

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

    def add(self, keys: Sequence[ChunkKey], seconds: float) -> None:
        """Have the next `apply` pin `keys` for `seconds` from now. Never blocks."""
        now = self._wall()
        self._waiting.append(_Waiting(keys, now + seconds, now + WAIT_SECONDS))

    def apply(self, max_bytes: int) -> None:
        """Pin the waiting records that are stored by now. Count a prompt whose pins would exceed
        `max_bytes`, and forget what is left of it."""
        for _ in range(len(self._waiting)):
            waiting = self._waiting.popleft()
            here = [key for key in waiting.keys if self._is_known(key)]
            try:
                if here:
                    self.pin(here, waiting.until, max_bytes, extends=True)
            except ConfigError:
                self._observer.count("pins_refused")
                logger.debug("%d records not pinned: pins fill a quarter of quota", len(here))
                continue
            except OSError:
                self._waiting.appendleft(waiting)
                raise
            left = set(waiting.keys).difference(here)
            if left and self._wall() < min(waiting.until, waiting.waits_until):
                self._waiting.append(waiting._replace(keys=[k for k in waiting.keys if k in left]))

"""Records in memory that a hit was promised of, until the worker role gets the plan that says so.

Where scheduler and worker role share a process, a look-up takes what is kept in staging itself: it
is verified and in hand, so the hit is promised at once, without a step in which to ask for it. But
only if the store would have heard of a change to the stored record, and has not.

A host may build the two roles apart. They find each other here, by the name of their engine.
"""

from __future__ import annotations

import logging
import os
import threading
import weakref
from collections import defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvferry.types import ChunkKey

if TYPE_CHECKING:
    from kvferry.connectors.shared_storage.messages import ChunkRef
    from kvferry.store.base import SupportsWatch
    from kvferry.store.staging import Content, Kept, Staging

logger = logging.getLogger(__name__)


class Reservations:
    """By prefetch, the slots that were taken for it. Thread-safe; memory only.

    Args:
        staging: of the one rank that there is.
        store: where its records are from; knows without a look whether they are still there.
    """

    def __init__(self, staging: Staging, store: SupportsWatch) -> None:
        self._staging = staging
        self._store = store
        self._lock = threading.Lock()
        self._taken: dict[int, list[Kept]] = {}
        self._closed = False

    def reserve(self, ticket: int, chunks: Sequence[ChunkRef]) -> bool:
        """Take the slots that hold all of `chunks`; False, and none is taken, if one is missing or
        in doubt. Runs in: scheduler."""
        taken = self._staging.take_all([ChunkKey(chunk.key) for chunk in chunks])
        held = [one for one in taken if one is not None]
        is_all = len(held) == len(chunks) and all(
            self._is_as_read(one.content, chunk) for one, chunk in zip(held, chunks, strict=True)
        )
        with self._lock:
            if is_all and not self._closed:
                self._taken[ticket] = held
                return True
        self._give_back(held)
        return False

    def _is_as_read(self, content: Content, chunk: ChunkRef) -> bool:
        stamp = content.stamp
        if stamp is None or content.first_token != chunk.first_token:
            return False
        return self._store.is_unchanged(content.key, stamp)

    def claim(self, ticket: int, chunks: Sequence[ChunkRef]) -> list[Kept] | None:
        """The slots of a prefetch of `chunks`, in that order: the caller's from now on. None if
        they were not reserved. Runs in: worker."""
        with self._lock:
            held = self._taken.pop(ticket, None)
        if held is None or [one.content.key for one in held] == [chunk.key for chunk in chunks]:
            return held
        self._give_back(held)  # reserved by somebody else's scheduler role
        return None

    def cancel(self, ticket: int) -> None:
        """Nobody will claim them."""
        with self._lock:
            held = self._taken.pop(ticket, ())
        self._give_back(held)

    @property
    def closed(self) -> bool:
        """Whether the worker role is closed."""
        return self._closed

    def close(self) -> None:
        """The worker role is closed: reserve nothing from now on."""
        with self._lock:
            self._closed = True
            tickets = list(self._taken)
        for ticket in tickets:
            self.cancel(ticket)

    def _give_back(self, held: Sequence[Kept]) -> None:
        # The last one first: a chunk whose prefix is gone is worth nothing.
        for one in reversed(held):
            self._staging.release(one.slot, content=one.content)


_of_engines: defaultdict[tuple[int, str], weakref.WeakSet[Reservations]]
_of_engines = defaultdict(weakref.WeakSet)
_lock = threading.Lock()


def publish(engine: str, reservations: Reservations) -> None:
    """Let the scheduler role of `engine` find them, if it is in this process."""
    with _lock:
        for name in [name for name, known in _of_engines.items() if not known]:
            del _of_engines[name]
        _of_engines[os.getpid(), engine].add(reservations)
    if find(engine) is None:
        logger.warning(
            "several engines of this process are named %s and use one store: give each another "
            "engine_id, so that hits in memory are promised at once",
            engine.split(maxsplit=1)[0],
        )


def find(engine: str) -> Reservations | None:
    """Those of the worker role of `engine`, if it is in this process. Of two of one name, nobody
    can tell whose slots are meant: then there are none."""
    with _lock:
        known = _of_engines.get((os.getpid(), engine), ())
        alive = [reservations for reservations in known if not reservations.closed]
    return alive[0] if len(alive) == 1 else None

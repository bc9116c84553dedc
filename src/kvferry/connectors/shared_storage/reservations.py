"""Records in memory that a hit was promised of, until the worker role gets the plan that says so.

Where scheduler and worker role share a process, a look-up takes what is kept in staging itself: it
is verified and in hand, so the hit is promised at once, without a step in which to ask for it. But
only if the store would have heard of a change to the stored record, and has not.

A host may build the two roles apart. They find each other here, by the name of their engine.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvferry.types import ChunkKey

if TYPE_CHECKING:
    from kvferry.connectors.shared_storage.messages import ChunkRef
    from kvferry.store.base import SupportsWatch
    from kvferry.store.staging import Content, Kept, Staging


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

    def claim(self, ticket: int) -> list[Kept] | None:
        """The slots of a prefetch, in the order of its chunks: the caller's from now on. None if
        none were reserved. Runs in: worker."""
        with self._lock:
            return self._taken.pop(ticket, None)

    def cancel(self, ticket: int) -> None:
        """Nobody will claim them."""
        self._give_back(self.claim(ticket) or ())

    @property
    def closed(self) -> bool:
        """Whether nothing is reserved any more."""
        return self._closed

    def close(self) -> None:
        """Reserve nothing from now on."""
        with self._lock:
            self._closed = True
            tickets = list(self._taken)
        for ticket in tickets:
            self.cancel(ticket)

    def _give_back(self, held: Sequence[Kept]) -> None:
        # The last one first: a chunk whose prefix is gone is worth nothing.
        for one in reversed(held):
            self._staging.release(one.slot, content=one.content)


_of_engines: weakref.WeakValueDictionary[tuple[int, str], Reservations]
_of_engines = weakref.WeakValueDictionary()
_lock = threading.Lock()


def publish(engine: str, reservations: Reservations) -> None:
    """Let the scheduler role of `engine` find them, if it is in this process. If two worker roles
    have one name, nobody can tell whose slots are meant: then none are reserved."""
    with _lock:
        other = find(engine)
        if other is None or other.closed:
            _of_engines[os.getpid(), engine] = reservations
            return
    other.close()
    reservations.close()


def find(engine: str) -> Reservations | None:
    """Those of the worker role of `engine`, if it is in this process."""
    return _of_engines.get((os.getpid(), engine))

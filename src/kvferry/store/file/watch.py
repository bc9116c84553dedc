"""Whether records changed, known without a look at the medium: from what the system tells."""

from __future__ import annotations

import threading

from kvferry.store.file import inotify
from kvferry.store.file.inotify import Inotify
from kvferry.store.file.layout import key_of_record_name
from kvferry.types import ChunkKey

_CHANGES = (
    inotify.MODIFY
    | inotify.MOVED_FROM
    | inotify.MOVED_TO
    | inotify.DELETE
    | inotify.DELETE_SELF
    | inotify.MOVE_SELF
)
_ALL_LOST = inotify.GONE | inotify.OVERFLOW
_MAX_CHANGED = 8192
_NEWS_BYTES = 64 << 10


class RecordWatch:
    """Changes to the records of a store, counted. Thread-safe.

    Raises:
        OSError: the system does not tell (any more of us).
    """

    def __init__(self) -> None:
        self._inotify = Inotify()
        self._lock = threading.Lock()
        self._watched: set[str] = set()
        self._moment = 0
        self._complete_since = 0  # changes before this moment may have been lost
        self._changed: dict[ChunkKey, int] = {}

    def follow(self, directory: str) -> int | None:
        """Listen to what is done in a directory of records; the present moment. None if that cannot
        be done. May block on the medium."""
        if directory not in self._watched:
            try:
                # Not under the lock, which look-ups take.
                self._inotify.add(directory, _CHANGES)
            except OSError:
                return None
            with self._lock:
                self._watched.add(directory)
        with self._lock:
            # While older news wait, none is right: they would be taken for later ones. And they may
            # say that it was another directory of this name that was followed.
            is_known = self._take_news() and directory in self._watched
            return self._moment if is_known else None

    def is_unchanged(self, key: ChunkKey, since: int) -> bool:
        """Whether nothing was done to a record since a moment. Memory only; False if not known."""
        with self._lock:
            is_complete = self._take_news() and since >= self._complete_since
            return is_complete and self._changed.get(key, 0) <= since

    def close(self) -> None:
        """Know nothing from now on. Idempotent."""
        with self._lock:
            self._inotify.close()

    def _take_news(self) -> bool:
        """Whether this was all."""
        try:
            news, is_all = self._inotify.take(_NEWS_BYTES)
        except OSError:
            self._lose_all()
            return False
        for _, what, name in news:
            self._note(what, name)
        return is_all

    def _note(self, what: int, name: str) -> None:
        if what & _ALL_LOST:
            self._lose_all()
            return
        key = key_of_record_name(name)
        if key is None:
            return
        if len(self._changed) >= _MAX_CHANGED:
            self._lose_all()
        self._moment += 1
        self._changed[key] = self._moment

    def _lose_all(self) -> None:
        """Directories are to be followed anew, and all that was read before is in doubt."""
        self._watched.clear()
        self._changed.clear()
        self._moment += 1
        self._complete_since = self._moment

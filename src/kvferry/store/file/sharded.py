"""Several processes writing one record: hidden until the one that began it commits."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence

from kvferry.store.base import Buffer, PutResult
from kvferry.store.file.faults import Faults
from kvferry.store.file.fileio import FileIO, as_views
from kvferry.store.file.layout import Layout
from kvferry.store.file.writing import PendingWrite, RecordWriting

Reserve = Callable[[bytes, int], "PendingWrite | PutResult"]


class ShardedWrites:
    """Sessions of one store. Thread-safe.

    A session is named after its temporary file, `<writer id>/<number>-<token>`: that is all another
    process needs to write into it, and nothing else is accepted as a name. After a fork the child
    has none: their account is the parent's.
    """

    def __init__(self, io: FileIO, layout: Layout, writing: RecordWriting, faults: Faults) -> None:
        self._io = io
        self._layout = layout
        self._writing = writing
        self._faults = faults
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._begun: dict[str, PendingWrite] = {}

    def begin(self, pending: PendingWrite) -> str:
        """Give a reserved record its size and a name.

        Raises:
            OSError: the medium refused; abort.
        """
        self._writing.extend(pending)
        session = f"{pending.slot.writer.id}/{pending.slot.path.rpartition('/')[2]}"
        with self._lock:
            self._begun[session] = pending
        return session

    def write_at(self, session: str, offset: int, buffers: Sequence[Buffer]) -> bool:
        """Write a range; False if the session does not exist, has ended, is too small for the
        range, or the medium refused."""
        path = self._layout.session_file(session)
        if path is None or offset < 0:
            return False
        views = as_views(buffers)
        try:
            if offset + sum(view.nbytes for view in views) > self._io.lstat(path).st_size:
                return False
            self._writing.write_range(path, views, offset)
        except FileNotFoundError:
            return False
        except OSError as error:
            self._faults.write_failed(error)
            return False
        return True

    def take(self, session: str) -> PendingWrite | None:
        """End a session begun here: whoever takes it commits or aborts it."""
        with self._lock:
            return self._begun.pop(session, None) if self._pid == os.getpid() else None

    def take_all(self) -> list[PendingWrite]:
        """End all sessions begun here."""
        with self._lock:
            begun, self._begun = self._begun, {}
        return list(begun.values()) if self._pid == os.getpid() else []

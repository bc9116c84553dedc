"""Which writer this store is at the moment, if any: registered, or fenced off and anew."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from kvferry.errors import ConfigError
from kvferry.store.file.faults import READ_ONLY
from kvferry.store.file.fileio import FileIO, exists
from kvferry.store.file.layout import Layout, make_directories, open_root
from kvferry.store.file.ledger import Owner, this_process
from kvferry.store.file.removal import Remover
from kvferry.store.file.slots import Slots
from kvferry.store.file.writer import Writer


class Member(NamedTuple):
    """One registration."""

    writer: Writer
    remover: Remover
    owner: Owner
    slots: Slots


class Membership:
    """Registers this store as a writer. Thread-safe.

    Args:
        io: system calls.
        layout: where the store is.
        wall: seconds since the epoch.
        create: make the store again if its directory was removed.
    """

    def __init__(
        self, io: FileIO, layout: Layout, wall: Callable[[], float], *, create: bool
    ) -> None:
        self._create = create
        self._io = io
        self._layout = layout
        self._wall = wall
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._member: Member | None = None
        self._is_wanted = False

    @property
    def current(self) -> Member | None:
        """The registration to write with; None when read-only, closed, or in a forked child, whose
        parent owns the ledger: open the store again there."""
        return self._member if self._pid == os.getpid() else None

    def join(self) -> Member:
        """Register.

        Raises:
            OSError: the store cannot be written. Unless it is because nobody may write there,
                `rejoin_if_fenced` tries again.
        """
        self._is_wanted = True
        try:
            return self._join()
        except OSError as error:
            self._is_wanted = error.errno not in READ_ONLY
            raise

    def _join(self) -> Member:
        make_directories(self._layout, self._io)
        owner = this_process(self._pid)
        writer = Writer(self._io, self._layout, owner, self._wall)
        self._member = Member(writer, Remover(self._io, self._layout, writer), owner, Slots())
        return self._member

    def rejoin_if_fenced(self) -> bool:
        """Register again if our directory was taken over or removed, or if there was no room for
        it before. True if that was done.

        Raises:
            OSError: the store cannot be written now.
        """
        with self._lock:
            member = self.current
            if member is None and (not self._is_wanted or self._pid != os.getpid()):
                return False
            if member is not None and not member.writer.is_fenced():
                return False
            self._check_root()
            self._join()
            if member is not None:
                # What it counted belongs to whoever took it over, or went with the directory.
                member.writer.close(0.0)
            return True

    def _check_root(self) -> None:
        """What opening does, with one difference: a directory that is there but is no store (any
        more) is left alone. It may be the mount point of one that was unmounted."""
        create = self._create and not exists(self._io, self._layout.root)
        try:
            open_root(Path(self._layout.root), self._io, create=create)
        except ConfigError as error:
            raise OSError(errno.ENOENT, str(error)) from error

    def leave(self, timeout: float) -> None:
        """Hand the account over to the next store that looks. Bounded by `timeout` seconds."""
        self._is_wanted = False
        member, self._member = self.current, None
        if member is not None:
            member.writer.close(timeout)

"""How one record gets its place: temporary file, reservation, bytes, link.

    1. create writers/<id>/tmp/<number>-<token>       empty, so nothing to count yet
    2. ledger: added += bytes, pending                from here the bytes are ours to write
    3. write
    4. link to records/<shard>/<key>.safetensors      the commit point; the first writer wins
    5. pending entry cleared, in the ledger whenever that is written next
    6. unlink the temporary file

Steps 1 and 2 make a slot, often several at once (see `slots`).

A recovery that finds the entry pending looks at the temporary file: two links, or none left:
committed. One link: not committed, the bytes are given back.
"""

from __future__ import annotations

import errno
import mmap
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Literal, NamedTuple

from kvferry.store.file.fileio import (
    BLOCK_BYTES,
    O_DIRECT,
    FileIO,
    address_of,
    ensure_directory,
    exists,
    is_aligned,
    write_all,
)
from kvferry.store.file.layout import Layout
from kvferry.store.file.slots import Slot
from kvferry.store.file.ways import WORTH_BYTES, Ways
from kvferry.store.file.writer import Writer
from kvferry.types import ChunkKey

DirectIO = Literal["auto", "off", "on"]
_NO_LINKS = frozenset({errno.EPERM, errno.EOPNOTSUPP, errno.ENOTSUP, errno.ENOSYS, errno.EMLINK})
_EITHER_WAY = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.ENOENT, errno.EROFS})
"""Writes that fail so fail through the page cache, too."""

_COPY_BYTES = 1 << 20
"""Unaligned buffers up to this size (a record's head) are copied so that the rest can go direct."""


class PendingWrite(NamedTuple):
    """A reserved, hidden record."""

    key: ChunkKey
    slot: Slot


class RecordWriting:
    """Steps 1 to 6 for the records of one store. Thread-safe.

    Args:
        io: system calls.
        layout: where the store is.
        direct_io: "on" writes past the page cache where buffers allow it, "off" through it, "auto"
            whichever way `ways` finds right.
        clock: monotonic seconds.
    """

    def __init__(
        self, io: FileIO, layout: Layout, direct_io: DirectIO, clock: Callable[[], float]
    ) -> None:
        self._io = io
        self._layout = layout
        self._direct = direct_io != "off" and O_DIRECT != 0
        self._ways = Ways(clock) if direct_io == "auto" else None
        self._links = True

    def make_slots(self, writer: Writer, num_bytes: int, num_slots: int) -> list[Slot]:
        """Steps 1 and 2. None at all if too many writes are pending.

        Raises:
            OSError: the medium refused, or the writer was fenced off (FileNotFoundError).
        """
        slots: list[Slot] = []
        is_reserved = False
        try:
            for _ in range(num_slots):
                number, path = writer.new_temporary()
                self._io.close(self._io.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL))
                slots.append(Slot(writer, number, num_bytes, path))
            is_reserved = writer.reserve(dict.fromkeys((slot.number for slot in slots), num_bytes))
        finally:
            if not is_reserved:
                for slot in slots:
                    self._drop(slot.path)
        return slots if is_reserved else []

    def give_back(self, slots: Sequence[Slot]) -> None:
        """Give reservations back, all of one writer. Never raises. The entries go before the files:
        a pending entry without file counts as committed."""
        if slots:
            slots[0].writer.give_back([slot.number for slot in slots])
            for slot in slots:
                self._drop(slot.path)

    def write(self, pending: PendingWrite, views: Sequence[memoryview]) -> None:
        """Step 3, from the front of the record on; the whole record, or what ranks left out.

        Raises:
            OSError: the medium refused; abort.
        """
        prepared = self._prepared(pending, views) if self._direct else None
        if prepared is None:
            self._write_cached(pending, views)
        elif self._ways is None:
            self._write_direct(pending, prepared)
        else:
            direct = self._ways.choose_direct()
            write = self._write_direct if direct else self._write_cached
            with self._ways.timed(pending.slot.num_bytes, direct=direct):
                write(pending, prepared)

    def write_range(self, path: str, views: Sequence[memoryview], offset: int) -> None:
        """Step 3, a range of a temporary file that exists."""
        fd = self._io.open(path, os.O_WRONLY)
        try:
            write_all(self._io, fd, views, offset)
        finally:
            self._io.close(fd)

    def extend(self, pending: PendingWrite) -> None:
        """Give the hidden record its size, so that others can tell what is inside it."""
        fd = self._io.open(pending.slot.path, os.O_WRONLY)
        try:
            self._io.truncate(fd, pending.slot.num_bytes)
        finally:
            self._io.close(fd)

    def commit(self, pending: PendingWrite) -> bool:
        """Steps 4 to 6. False if the key was stored by somebody else meanwhile.

        Raises:
            OSError: the medium refused, or the writer was fenced off; abort.
        """
        slot, target = pending.slot, self._layout.record(pending.key)
        try:
            won = self._place(slot.path, target)
        except FileNotFoundError:
            # The first record of its shard, or our directory is gone: then this raises again.
            ensure_directory(self._io, os.path.dirname(target))
            won = self._place(slot.path, target)
        if not won:
            self.abort(pending)
            return False
        slot.writer.settle(slot.number)
        self._drop(slot.path)
        return True

    def abort(self, pending: PendingWrite) -> None:
        """Give the reservation back. Never raises."""
        self.give_back([pending.slot])

    def _place(self, source: str, target: str) -> bool:
        if self._links:
            try:
                self._io.link(source, target)
            except OSError as error:
                if self._is_same(source, target):
                    return True  # done, whatever the answer: a network file system asked twice
                if error.errno == errno.EEXIST:
                    return False
                if error.errno not in _NO_LINKS:
                    raise
                self._links = False
            else:
                return True
        # Without hard links two writers of one key can both believe to be first. The later one
        # replaces the earlier with equal bytes; one record too many stays counted until the next
        # reconciliation.
        if exists(self._io, target):
            return False
        self._io.rename(source, target)
        return True

    def _is_same(self, source: str, target: str) -> bool:
        try:
            return os.path.samestat(self._io.lstat(source), self._io.lstat(target))
        except OSError:
            return False

    def _drop(self, path: str) -> None:
        # Renamed away, or taken over with its directory; recovery removes what is left.
        with suppress(OSError):
            self._io.unlink(path)

    def _prepared(
        self, pending: PendingWrite, views: Sequence[memoryview]
    ) -> Sequence[memoryview] | None:
        """A whole record as buffers that can go past the page cache; None if they cannot."""
        if sum(view.nbytes for view in views) < pending.slot.num_bytes:
            return None  # padding would go over what others wrote behind it
        if not all(is_aligned(view.nbytes) for view in views[:-1]):
            return None
        # What would be copied first, or is small, gains nothing by it.
        copies = self._ways is None
        if not copies and pending.slot.num_bytes < WORTH_BYTES:
            return None
        prepared = [ready for view in views if (ready := _aligned(view, copies=copies)) is not None]
        return prepared if len(prepared) == len(views) else None

    def _write_cached(self, pending: PendingWrite, views: Sequence[memoryview]) -> None:
        self.write_range(pending.slot.path, views, 0)

    def _write_direct(self, pending: PendingWrite, views: Sequence[memoryview]) -> None:
        """Write past the page cache; once that failed, through it from then on."""
        try:
            fd = self._io.open(pending.slot.path, os.O_WRONLY | O_DIRECT)
            try:
                write_all(self._io, fd, views, 0)
                if not is_aligned(pending.slot.num_bytes):
                    self._io.truncate(fd, pending.slot.num_bytes)  # what pads the last buffer
            finally:
                self._io.close(fd)
        except OSError as error:
            if error.errno in _EITHER_WAY:
                raise
            self._direct = False
            self._write_cached(pending, views)
            self.extend(pending)  # rather, cut off what pads the buffers


def _aligned(view: memoryview, *, copies: bool) -> memoryview | None:
    """`view` itself if the disk can read it directly, else, with `copies`, a padded copy if it is
    small."""
    if is_aligned(view.nbytes) and not view.readonly and is_aligned(address_of(view)):
        return view
    if not copies or view.nbytes > _COPY_BYTES:
        return None
    padded = -(-view.nbytes // BLOCK_BYTES) * BLOCK_BYTES
    copy = memoryview(mmap.mmap(-1, padded))
    copy[: view.nbytes] = view
    return copy

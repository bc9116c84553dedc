"""The writer directory of one open store: its account, its unfinished files, its trash.

Only the owner calls these methods. When another store takes the directory over (see `recovery`),
every path of ours stops existing, so nothing we do afterwards is counted twice: the owner notices
`is_fenced`, forgets its counts, which the other one now holds, and registers again under a new id.
"""

from __future__ import annotations

import errno
import os
import re
import secrets
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress

from kvferry.store.file.fileio import FileIO, exists, remove_tree, write_all
from kvferry.store.file.layout import Layout
from kvferry.store.file.ledger import (
    COPY_BYTES,
    MAX_ABSORBED,
    MAX_PENDING,
    NOTHING,
    Intent,
    Ledger,
    Mark,
    Net,
    Owner,
    encode,
)

_UNREGISTERED = re.compile(r"\.new-([0-9a-f]{32})-(\d{1,9})-(\d{1,19})-[0-9a-f]{16}")


def unregistered_name(owner: Owner, writer_id: str) -> str:
    """Name of a writer directory that is still being made: says who makes it."""
    return f".new-{owner.host.hex()}-{owner.pid}-{owner.start}-{writer_id}"


def unregistered_owner(name: str) -> Owner | None:
    """Who makes, or began to make, a writer directory; None for other names."""
    match = _UNREGISTERED.fullmatch(name)
    return match and Owner(bytes.fromhex(match[1]), int(match[2]), int(match[3]))


class Writer:
    """Owner's view of one writer directory. Thread-safe.

    Every change of the ledger is one write of its whole state, so a write that failed is made good
    by the next one.
    """

    def __init__(self, io: FileIO, layout: Layout, owner: Owner, wall: Callable[[], float]) -> None:
        """Create and register the directory.

        Raises:
            OSError: the store cannot be written.
        """
        self.id = secrets.token_hex(8)
        self.path = layout.writer(self.id)
        self._io = io
        self._wall = wall
        self._lock = threading.Lock()
        self._ledger = Ledger(owner=owner)
        self._taken_over: frozenset[str] = frozenset()
        self._account = (NOTHING, self._taken_over)
        self._last_copy = 1
        self._last_temporary = 0
        self._fd = -1
        self._is_behind = False
        self._is_closing = False
        hidden = f"{layout.writers}/{unregistered_name(owner, self.id)}"
        try:
            self._register(hidden)
        except OSError:
            # Tried again for as long as the disk is full: each attempt takes back what it made.
            if self._fd >= 0:
                io.close(self._fd)
            with suppress(OSError):
                remove_tree(io, hidden)
            raise

    def _register(self, hidden: str) -> None:
        for path in (hidden, f"{hidden}/tmp", f"{hidden}/trash"):
            self._io.mkdir(path)
        self._fd = self._io.open(f"{hidden}/ledger", os.O_RDWR | os.O_CREAT | os.O_EXCL)
        # Both copies: from here on a write needs no new space on most file systems, so that a full
        # disk does not keep us from giving space back.
        self._write()
        self._write()
        # Renamed into place whole: a visible writer always has a ledger.
        self._io.rename(hidden, self.path)

    @property
    def finished_batch(self) -> int:
        return self._ledger.finished_batch

    @property
    def intent(self) -> Intent | None:
        return self._ledger.intent

    @property
    def absorbed(self) -> frozenset[str]:
        with self._lock:
            return frozenset(self._ledger.absorbed)

    def num_bytes_with(self, marks: Iterable[Mark]) -> int:
        """Bytes of this writer as of now, plus those of the others in `marks`, an earlier sum over
        all ledgers. Takes no lock: it never waits for a write that hangs."""
        net, taken_over = self._account
        others = sum(
            mark.net.num_bytes
            for mark in marks
            if mark.writer_id != self.id and mark.writer_id not in taken_over
        )
        return net.num_bytes + others

    def is_fenced(self) -> bool:
        """Whether another store took this directory over, or somebody removed it."""
        try:
            return not exists(self._io, f"{self.path}/ledger")
        except OSError:
            return False

    @property
    def num_free(self) -> int:
        """How many more writes may be pending."""
        return MAX_PENDING - len(self._ledger.pending)

    def new_temporary(self) -> tuple[int, str]:
        """Number and path for the temporary file of a write. The file is made before `reserve`:
        a pending entry whose file is gone then means that it got its final name. Nobody can make up
        its name, which is that of a session if ranks write it."""
        with self._lock:
            self._last_temporary += 1
            number = self._last_temporary
        return number, f"{self.path}/tmp/{number:016x}-{secrets.token_hex(8)}"

    def reserve(self, sizes: Mapping[int, int]) -> bool:
        """Count records, by number of their temporary file, before their first byte is written.
        False if too many are pending.

        Raises:
            OSError: the ledger could not be written; nothing is reserved.
        """
        with self._lock:
            if self._is_closing:
                raise OSError(errno.EBADF, "the writer is closed")
            if len(sizes) > self.num_free:
                return False
            with self._change() as ledger:
                ledger.pending |= sizes
                added = Net(added_bytes=sum(sizes.values()), added_records=len(sizes))
                ledger.net = ledger.net.plus(added)
        return True

    def settle(self, number: int) -> None:
        """End a pending write that was committed: its bytes stay counted. The ledger says so with
        its next write: until then the file of the entry has two links, or none: that says so."""
        with self._lock:
            if self._ledger.pending.pop(number, None) is not None:
                self._is_behind = True
                self._end_if_closing()

    def give_back(self, numbers: Collection[int]) -> None:
        """End pending writes that were not committed: their bytes no longer count. Never raises; a
        ledger that cannot be written now is right again after its next write."""
        with self._lock:
            pending = self._ledger.pending
            sizes = [pending.pop(number) for number in numbers if number in pending]
            if not sizes:
                return
            given_back = Net(removed_bytes=sum(sizes), removed_records=len(sizes))
            self._ledger.net = self._ledger.net.plus(given_back)
            self._is_behind = True  # until it is written
            self._try_write()
            self._publish()
            self._end_if_closing()

    def catch_up(self) -> None:
        """Write what `settle` left to the next write: only then others call the store still."""
        with self._lock:
            if self._is_behind:
                self._try_write()

    def intend(self, intent: Intent) -> None:
        """Declare that the files of a trash batch are about to be unlinked."""
        with self._lock, self._change() as ledger:
            ledger.intent = intent

    def finish_batch(self) -> None:
        """Count the intended batch as removed; its files are gone."""
        with self._lock, self._change() as ledger:
            intent = ledger.intent
            if intent is not None:
                removed = Net(removed_bytes=intent.num_bytes, removed_records=intent.num_records)
                ledger.net = ledger.net.plus(removed)
                ledger.finished_batch = intent.batch
                ledger.intent = None

    def fold(self, writer_id: str, net: Net) -> bool:
        """Take over the counts of an absorbed writer, once. False if its slot list is full."""
        with self._lock:
            if writer_id in self._ledger.absorbed:
                return True
            if len(self._ledger.absorbed) >= MAX_ABSORBED:
                return False
            with self._change() as ledger:
                ledger.net = ledger.net.plus(net)
                ledger.absorbed = ledger.absorbed | {writer_id}
                self._taken_over |= {writer_id}
        return True

    def forget_absorbed(self, writer_id: str) -> None:
        """The directory of an absorbed writer is gone."""
        with self._lock:
            self._ledger.absorbed = self._ledger.absorbed - {writer_id}
            self._try_write()

    def correct(self, difference: Net) -> None:
        """Adjust the counts to what a scan found on disk."""
        with self._lock, self._change() as ledger:
            ledger.net = ledger.net.plus(difference)

    def beat(self) -> None:
        """Show that this writer lives."""
        with self._lock:
            self._try_write()

    def close(self, timeout: float) -> None:
        """Mark the account as ready to be taken over. Bounded by `timeout` seconds if a write
        hangs; then the next store finds out by itself that this process is gone."""
        if not self._lock.acquire(timeout=timeout):
            return
        try:
            # With writes still pending it stays open: it must look alive until they end.
            self._is_closing = True
            self._end_if_closing()
        finally:
            self._lock.release()

    def _end_if_closing(self) -> None:
        if self._is_closing and not self._ledger.pending and self._fd >= 0:
            self._ledger.closed = True
            self._try_write()
            self._io.close(self._fd)
            self._fd = -1

    @contextmanager
    def _change(self) -> Iterator[Ledger]:
        """Change the ledger and write it; if that fails, the change has not happened."""
        ledger = self._ledger
        before = (ledger.net, ledger.finished_batch, ledger.intent, ledger.absorbed)
        pending, taken_over = dict(ledger.pending), self._taken_over
        try:
            yield ledger
            self._write()
        except BaseException:
            ledger.net, ledger.finished_batch, ledger.intent, ledger.absorbed = before
            ledger.pending, self._taken_over = pending, taken_over
            raise
        finally:
            self._publish()

    def _publish(self) -> None:
        """Make net and absorbed writers, which belong together, visible in one assignment."""
        self._account = (self._ledger.net, self._taken_over)

    def _try_write(self) -> None:
        # After a failure the state in memory is right and goes out whole with the next write.
        with suppress(OSError):
            self._write()

    def _write(self) -> None:
        if self._fd < 0:
            raise OSError("the writer is closed")
        self._ledger.sequence += 1
        self._ledger.heartbeat = self._wall()
        # A write that fails may have torn its copy: the next attempt goes to the same place, and
        # the other copy, the last good one, stays.
        copy = 1 - self._last_copy
        data = memoryview(encode(self._ledger))
        write_all(self._io, self._fd, [data], copy * COPY_BYTES)
        self._last_copy = copy
        self._is_behind = False

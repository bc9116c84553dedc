"""Taking over what dead writers left: exact, by whoever comes first, killed at any instant or not.

    1. rename writers/X to writers/ME/absorbed/X     one winner; all of X's own paths cease to exist
    2. settle: its intended batch is unlinked, its other trash goes through our own trash, temporary
       files that were never linked are emptied
    3. our ledger, one write: its counts are added to ours and X is noted as absorbed
    4. delete the directory, then the note

Whoever dies between two steps is absorbed in turn, and what it was absorbing with it.
"""

from __future__ import annotations

import stat
import threading
from collections.abc import Callable

from kvferry.store.file.fileio import FileIO, ensure_directory, list_directory, remove_tree
from kvferry.store.file.layout import Layout, is_writer_name
from kvferry.store.file.ledger import Ledger, Net, Owner, find_ledger, is_alive
from kvferry.store.file.membership import Member
from kvferry.store.file.usage import list_absorbed
from kvferry.store.file.writer import unregistered_owner

SILENT_SECONDS = 60.0
"""A writer on another host is dead when its ledger did not change for so long while we watched (its
clock does not matter), or"""
STALE_SECONDS = 600.0
"""when its heartbeat is so old that no clock difference explains it."""


class Recovery:
    """Finds and absorbs dead writers. Thread-safe.

    Args:
        io: system calls.
        layout: where the store is.
        clock: monotonic seconds.
        wall: seconds since the epoch.
    """

    def __init__(
        self,
        io: FileIO,
        layout: Layout,
        clock: Callable[[], float],
        wall: Callable[[], float],
    ) -> None:
        self._io = io
        self._layout = layout
        self._clock = clock
        self._wall = wall
        self._lock = threading.Lock()
        self._seen: dict[str, tuple[int, float]] = {}

    def run(self, member: Member) -> int:
        """Absorb every dead writer into `member`; returns how many were taken over.

        Raises:
            OSError: the medium failed, or `member` itself was fenced off.
        """
        with self._lock:
            self._finish(member)
            names = self._io.listdir(self._layout.writers)
            for gone in self._seen.keys() - set(names):
                del self._seen[gone]
            return sum(self._consider(member, name) for name in names)

    def _consider(self, member: Member, name: str) -> bool:
        maker = unregistered_owner(name)
        if maker is not None:
            self._remove_unregistered(member, name, maker)
            return False
        if name == member.writer.id or not is_writer_name(name):
            return False
        if not self._is_dead(name, member):
            return False
        ensure_directory(self._io, f"{member.writer.path}/absorbed")
        taken = f"{member.writer.path}/absorbed/{name}"
        try:
            self._io.rename(self._layout.writer(name), taken)
        except FileNotFoundError:
            return False
        self._settle_into(member, name)
        return True

    def _is_dead(self, name: str, member: Member) -> bool:
        path = self._layout.writer(name)
        try:
            if not stat.S_ISDIR(self._io.lstat(path).st_mode):
                return False  # a link or a file of such a name is nobody's account
            ledger = find_ledger(self._io, path)
        except FileNotFoundError:
            return False
        if ledger is not None:
            if ledger.closed:
                return True
            if ledger.owner.host == member.owner.host:
                return not is_alive(ledger.owner)
            if self._wall() - ledger.heartbeat > STALE_SECONDS:
                return True
        sequence = -1 if ledger is None else ledger.sequence
        seen = self._seen.get(name)
        if seen is None or seen[0] != sequence:
            self._seen[name] = (sequence, self._clock())
            return False
        return self._clock() - seen[1] > SILENT_SECONDS

    def _remove_unregistered(self, member: Member, name: str, maker: Owner) -> None:
        """Delete what a process left that died while it registered: nothing in it counts."""
        path = f"{self._layout.writers}/{name}"
        try:
            age = self._wall() - self._io.lstat(path).st_mtime
        except FileNotFoundError:
            return
        is_local = maker.host == member.owner.host
        if (is_local and not is_alive(maker)) or age > STALE_SECONDS:
            remove_tree(self._io, path)

    def _finish(self, member: Member) -> None:
        """Steps 2 to 4 for what an earlier run of ours could not finish."""
        for name in list_absorbed(self._io, member.writer.path):
            if name in member.writer.absorbed:
                self._delete(member, name)
            else:
                self._settle_into(member, name)
        remaining = set(list_absorbed(self._io, member.writer.path))
        for name in member.writer.absorbed - remaining:
            member.writer.forget_absorbed(name)

    def _settle_into(self, member: Member, name: str) -> None:
        net = self._settle(member, f"{member.writer.path}/absorbed/{name}")
        if member.writer.fold(name, net):
            self._delete(member, name)

    def _delete(self, member: Member, name: str) -> None:
        try:
            remove_tree(self._io, f"{member.writer.path}/absorbed/{name}")
        except OSError:
            # Its counts are in ours already; the directory is tried again with the next run.
            return
        member.writer.forget_absorbed(name)

    def _settle(self, member: Member, path: str) -> Net:
        """What a fenced writer's counts come to. Repeatable: a crash in between changes nothing."""
        ledger = find_ledger(self._io, path)
        children = filter(is_writer_name, list_directory(self._io, f"{path}/absorbed"))
        if ledger is None:
            # Lost with a power failure. Its records are still there; a reconciliation counts them.
            net, absorbed = Net(), set[str]()
        else:
            net, absorbed = self._settle_writes(path, ledger), ledger.absorbed
            net = net.plus(self._settle_trash(member, path, ledger))
        for child in children:
            if child not in absorbed:
                net = net.plus(self._settle(member, f"{path}/absorbed/{child}"))
        return net

    def _settle_writes(self, path: str, ledger: Ledger) -> Net:
        names = {name[:16]: name for name in list_directory(self._io, f"{path}/tmp")}
        net = ledger.net
        for number, num_bytes in ledger.pending.items():
            name = names.get(f"{number:016x}")
            if name is None:
                continue
            status = self._io.lstat(f"{path}/tmp/{name}")
            if status.st_nlink > 1 or not stat.S_ISREG(status.st_mode):
                continue
            # Emptied, not unlinked: the file must stay as the proof that it was never linked, but
            # its bytes must be off the disk before they are given back.
            self._io.truncate_path(f"{path}/tmp/{name}")
            net = net.plus(Net(removed_bytes=num_bytes, removed_records=1))
        return net

    def _settle_trash(self, member: Member, path: str, ledger: Ledger) -> Net:
        net = Net()
        intent = ledger.intent
        if intent is not None:
            remove_tree(self._io, f"{path}/trash/{intent.batch}")
            net = Net(removed_bytes=intent.num_bytes, removed_records=intent.num_records)
        for batch in list_directory(self._io, f"{path}/trash"):
            if batch.isdecimal() and int(batch) > ledger.finished_batch:
                directory = f"{path}/trash/{batch}"
                names = list_directory(self._io, directory)
                member.remover.remove([f"{directory}/{name}" for name in names])
        return net

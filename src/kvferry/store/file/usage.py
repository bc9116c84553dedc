"""How much a store holds, over all processes: the sum of their ledgers."""

from __future__ import annotations

import errno
from typing import NamedTuple

from kvferry.store.file.fileio import FileIO
from kvferry.store.file.layout import Layout, is_writer_name
from kvferry.store.file.ledger import Ledger, Mark, find_ledger, read_ledger


class Usage(NamedTuple):
    """Sum of all ledgers at some moment during the call."""

    num_bytes: int
    num_records: int
    marks: frozenset[Mark]
    """Counts per writer: equal marks mean that nobody wrote or removed in between."""
    quiet: bool
    """No write was pending and no batch half removed."""


def read_usage(io: FileIO, layout: Layout) -> Usage:
    """Add up all ledgers. Never misses a writer that is being absorbed meanwhile, nor counts it
    twice.

    A writer moves by rename from `writers/` into the directory of the one that absorbs it, and its
    counts move by one write of that one's ledger. So the order is: list the children, then read the
    parent's ledger, then the children that this ledger does not contain. Whatever moves between two
    of these steps shows as a missing file, and the whole sum is taken again.

    Raises:
        OSError: the medium failed.
    """
    for _ in range(100):
        found: dict[str, Ledger | None] = {}
        names = {name for name in io.listdir(layout.writers) if is_writer_name(name)}
        try:
            for name in names:
                _read_tree(io, layout.writer(name), name, found)
        except FileNotFoundError:
            # Without the directory itself there is nothing to take again.
            io.lstat(layout.writers)
            continue
        # One that was read here and has left since may be in another ledger as well.
        if names.issubset(io.listdir(layout.writers)):
            return _sum(found)
    raise OSError(errno.EAGAIN, "the ledgers would not hold still")


def _read_tree(io: FileIO, path: str, name: str, found: dict[str, Ledger | None]) -> None:
    children = list_absorbed(io, path)
    # An absorbed writer without ledger may just be deleted, its counts being elsewhere by now: then
    # all is read again. Outside `absorbed/` nothing is ever deleted.
    is_absorbed = path.endswith(f"/absorbed/{name}")
    ledger = read_ledger(io, path) if is_absorbed else find_ledger(io, path)
    if name in found:
        raise FileNotFoundError(errno.ENOENT, "a writer moved while it was read", path)
    found[name] = ledger
    for child in children:
        if ledger is None or child not in ledger.absorbed:
            _read_tree(io, f"{path}/absorbed/{child}", child, found)


def list_absorbed(io: FileIO, writer_path: str) -> list[str]:
    """Ids of the writers that a writer has taken over and not yet deleted."""
    try:
        names = io.listdir(f"{writer_path}/absorbed")
    except (FileNotFoundError, NotADirectoryError):
        return []
    return [name for name in names if is_writer_name(name)]


def _sum(found: dict[str, Ledger | None]) -> Usage:
    ledgers = {name: ledger for name, ledger in found.items() if ledger is not None}
    num_bytes = sum(ledger.net.num_bytes for ledger in ledgers.values())
    num_records = sum(ledger.net.num_records for ledger in ledgers.values())
    return Usage(
        num_bytes=num_bytes,
        num_records=num_records,
        marks=frozenset(Mark(name, ledger.net) for name, ledger in ledgers.items()),
        quiet=not any(ledger.pending or ledger.intent for ledger in ledgers.values()),
    )


def inodes_in_commit(io: FileIO, layout: Layout) -> frozenset[tuple[int, int]]:
    """Device and inode of every temporary file of every writer, absorbed ones included.

    A record whose inode is among them was linked into place by a writer that has not yet cleared
    its pending entry. Until it has (or its recovery has), the record must not be unlinked: two
    links are the proof that the write was committed.
    """
    found: set[tuple[int, int]] = set()
    waiting = [layout.writer(name) for name in io.listdir(layout.writers)]
    while waiting:
        path = waiting.pop()
        waiting += [f"{path}/absorbed/{child}" for child in list_absorbed(io, path)]
        try:
            names = io.listdir(f"{path}/tmp")
        except (FileNotFoundError, NotADirectoryError):
            continue
        for name in names:
            try:
                status = io.lstat(f"{path}/tmp/{name}")
            except FileNotFoundError:
                continue
            found.add((status.st_dev, status.st_ino))
    return frozenset(found)

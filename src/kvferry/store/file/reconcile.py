"""Correcting the counts after somebody changed the store behind our back.

Ledgers are exact for everything kvferry does. Files deleted, cut or copied in by hand are found by
adding up what is on disk while nobody writes or removes; the difference goes into our own ledger.
"""

from __future__ import annotations

import fcntl
import logging
import os
from collections.abc import Generator

from kvferry.store.file.eviction import list_files
from kvferry.store.file.fileio import FileIO, list_directory
from kvferry.store.file.layout import NUM_SHARDS, Layout, is_writer_name
from kvferry.store.file.ledger import Net
from kvferry.store.file.usage import list_absorbed, read_usage
from kvferry.store.file.writer import Writer

logger = logging.getLogger(__name__)


def reconcile(io: FileIO, layout: Layout, writer: Writer) -> Generator[None, None, Net | None]:
    """Compare ledgers and disk and correct the sum in `writer`.

    A generator, so that a background thread can do other things between two directories.

    Returns:
        The correction (all zero if the counts were right); None if the store was not still or
        another process is at it: then nothing was changed.

    The lock only keeps two processes from correcting the same difference twice. Where a file system
    lies about locks, the next reconciliation corrects that, too.

    Raises:
        OSError: the medium failed.
    """
    fd = io.open(layout.reconcile_lock, os.O_RDWR | os.O_CREAT)
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return None
        return (yield from _reconcile(io, layout, writer))
    finally:
        io.close(fd)


def _reconcile(io: FileIO, layout: Layout, writer: Writer) -> Generator[None, None, Net | None]:
    """Look twice before a correction: what was caught in the middle of something looks different
    the second time, what was changed from outside does not."""
    found = yield from _difference(io, layout)
    if found is None:
        return None
    more_bytes, more_records, _marks = found
    if more_bytes or more_records:
        again = yield from _difference(io, layout)
        if again != found:
            return None
    correction = Net(
        max(more_bytes, 0), max(-more_bytes, 0), max(more_records, 0), max(-more_records, 0)
    )
    if any(correction):
        logger.warning(
            "store %s: files were changed from outside: counts were off by %d bytes and %d "
            "records, corrected",
            layout.root,
            more_bytes,
            more_records,
        )
        writer.correct(correction)
    return correction


def _difference(
    io: FileIO, layout: Layout
) -> Generator[None, None, tuple[int, int, object] | None]:
    """Bytes and records on disk beyond what the ledgers say, and the state of the ledgers that this
    holds for; None if the store was not still."""
    before = read_usage(io, layout)
    # A record set aside meanwhile would be found in its shard and again in quarantine.
    quarantined = set(io.listdir(layout.quarantine))
    num_bytes = num_records = 0
    directories = [layout.shard(shard) for shard in range(NUM_SHARDS)]
    for directory in [*directories, layout.quarantine]:
        files = list_files(io, directory)
        num_bytes += sum(file.num_bytes for file in files)
        num_records += len(files)
        yield
    # Before the second look at the ledgers: a removal that leaves the trash later shows in them.
    if _has_trash(io, layout):
        return None
    after = read_usage(io, layout)
    was_still = before.quiet and after.quiet and before.marks == after.marks
    if not was_still or quarantined != set(io.listdir(layout.quarantine)):
        return None
    return num_bytes - after.num_bytes, num_records - after.num_records, after.marks


def _has_trash(io: FileIO, layout: Layout) -> bool:
    """Whether a removal is under way: its files are off their places but still counted. So may be
    those of a writer that is just being absorbed."""
    waiting = [layout.writer(name) for name in io.listdir(layout.writers) if is_writer_name(name)]
    while waiting:
        path = waiting.pop()
        try:
            io.lstat(path)  # gone: it is moving, and what is in it not seen for sure
        except FileNotFoundError:
            return True
        trash = f"{path}/trash"
        if any(list_directory(io, f"{trash}/{batch}") for batch in list_directory(io, trash)):
            return True
        waiting += [f"{path}/absorbed/{child}" for child in list_absorbed(io, path)]
    return False

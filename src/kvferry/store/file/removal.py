"""Taking files out so that the count stays exact through a kill at any instant.

    1. rename each victim into our trash/<batch>/   one process wins each file
    2. ledger: intent (batch, bytes, records)       from here the batch will go, whoever finishes it
    3. unlink
    4. ledger: removed += bytes, batch finished

Killed before 2, the whole batch is still in the trash and recovery counts it by listing; killed
after, the intent says how much it was. Bytes are subtracted only when they are off the disk, so the
ledgers never claim less than the disk holds. A file counts with its size at the time of removal.
"""

from __future__ import annotations

import os
import stat
import threading
from collections.abc import Iterable
from typing import NamedTuple

from kvferry.store.file.fileio import FileIO, ensure_directory, remove_tree
from kvferry.store.file.layout import Layout
from kvferry.store.file.ledger import Intent
from kvferry.store.file.usage import inodes_in_commit
from kvferry.store.file.writer import Writer


class Removed(NamedTuple):
    """What one call took out."""

    num_records: int = 0
    num_bytes: int = 0
    names: tuple[str, ...] = ()
    """File names of the victims this call won."""


def batch_contents(io: FileIO, layout: Layout, path: str) -> tuple[int, int]:
    """Bytes and number of the records in a trash batch that nobody finished.

    A file that turns out to be in the middle of its writer's commit is moved to quarantine, where
    it stays counted and is removed later: unlinked now, its recovery would take it for never
    written.
    """
    num_bytes = num_records = 0
    in_commit: frozenset[tuple[int, int]] | None = None
    for name in io.listdir(path):
        status = io.lstat(f"{path}/{name}")
        if not stat.S_ISREG(status.st_mode):
            continue
        if status.st_nlink > 1:
            in_commit = inodes_in_commit(io, layout) if in_commit is None else in_commit
            if (status.st_dev, status.st_ino) in in_commit:
                io.rename(f"{path}/{name}", f"{layout.quarantine}/{name}.in_commit")
                continue
        num_bytes += status.st_size
        num_records += 1
    return num_bytes, num_records


class Remover:
    """Removes files for one writer, one batch at a time. Thread-safe."""

    def __init__(self, io: FileIO, layout: Layout, writer: Writer) -> None:
        self._io = io
        self._layout = layout
        self._writer = writer
        self._lock = threading.Lock()
        self._num_names = 0

    def remove(self, paths: Iterable[str]) -> Removed:
        """Remove what is there of `paths`.

        Raises:
            OSError: the medium failed; counts stay exact, and the next call finishes the batch.
        """
        with self._lock:
            self._finish()
            batch = self._writer.finished_batch + 1
            directory = f"{self._writer.path}/trash/{batch}"
            # An earlier attempt may have left files there: they go with this batch.
            ensure_directory(self._io, directory)
            names = tuple(os.path.basename(path) for path in paths if self._take(path, directory))
            num_bytes, num_records = batch_contents(self._io, self._layout, directory)
            self._writer.intend(Intent(batch, num_bytes, num_records))
            self._finish()
            return Removed(num_records, num_bytes, names)

    def _take(self, path: str, directory: str) -> bool:
        self._num_names += 1
        name = f"{os.path.basename(path)}.{self._writer.id}.{self._num_names}"
        try:
            self._io.rename(path, f"{directory}/{name}")
        except FileNotFoundError:
            # Either another process won this one, or our directory was taken from us.
            self._io.lstat(directory)
            return False
        return True

    def _finish(self) -> None:
        intent = self._writer.intent
        if intent is not None:
            # Directories that stood in place of a record go as well.
            remove_tree(self._io, f"{self._writer.path}/trash/{intent.batch}")
            self._writer.finish_batch()

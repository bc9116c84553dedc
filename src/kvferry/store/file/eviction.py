"""Who has to go: quarantine first, then what was used longest ago.

A small store is listed whole, so eviction is exact LRU. In a large one, shards are drawn at random
until they held enough candidates, and only the oldest quarter of those is used before the next
draw. Candidates are kept between calls, because a draw costs a `stat` per file; each is looked at
again before it is chosen, and one that was used since is skipped.
"""

from __future__ import annotations

import os
import random
import stat
from collections.abc import Iterator
from typing import NamedTuple

from kvferry.store.file.fileio import FileIO
from kvferry.store.file.layout import NUM_SHARDS, Layout, key_of_record_name
from kvferry.store.file.usage import inodes_in_commit

MIN_CANDIDATES = 1024


class Candidate(NamedTuple):
    """One file and when it was last used, in nanoseconds since the epoch."""

    used: int
    path: str
    num_bytes: int


class Evictor:
    """Chooses victims; removes nothing. Not thread-safe: one eviction at a time."""

    def __init__(self, io: FileIO, layout: Layout, rng: random.Random) -> None:
        self._io = io
        self._layout = layout
        self._rng = rng
        self._pool: list[Candidate] = []
        self._in_commit: frozenset[tuple[int, int]] | None = None

    def choose(self, num_bytes: int) -> list[str]:
        """Files that hold at least `num_bytes` together, the least useful first; fewer if there is
        no more.

        Raises:
            OSError: the medium failed.
        """
        self._in_commit = None
        chosen: dict[str, None] = {}
        freed = 0
        for candidate in self._candidates():
            if freed >= num_bytes:
                self._pool.append(candidate)
                break
            size = self._size_if_idle(candidate)
            if size is not None and candidate.path not in chosen:
                chosen[candidate.path] = None
                freed += size
        return list(chosen)

    def _candidates(self) -> Iterator[Candidate]:
        """Quarantine, then the pool, then two fresh draws: in the second are the files that the
        first left out because they had been used since the pool was made."""
        yield from list_files(self._io, self._layout.quarantine)
        for _ in range(2):
            while self._pool:
                yield self._pool.pop()
            self._pool = self._draw()
        while self._pool:
            yield self._pool.pop()

    def _draw(self) -> list[Candidate]:
        """A fresh pool, the oldest last."""
        found: list[Candidate] = []
        shards = list(range(NUM_SHARDS))
        self._rng.shuffle(shards)
        num_seen = 0
        for shard in shards:
            num_seen += 1
            found += [
                candidate
                for candidate in list_files(self._io, self._layout.shard(shard))
                if key_of_record_name(os.path.basename(candidate.path)) is not None
            ]
            if len(found) >= MIN_CANDIDATES:
                break
        found.sort(reverse=True)
        return found if num_seen == NUM_SHARDS else found[-(len(found) // 4) :]

    def _size_if_idle(self, candidate: Candidate) -> int | None:
        """Size of a file that was not used since it became a candidate and that no writer is just
        committing; else None."""
        try:
            status = self._io.lstat(candidate.path)
        except FileNotFoundError:
            return None
        if not stat.S_ISREG(status.st_mode) or status.st_mtime_ns > candidate.used:
            return None
        if status.st_nlink > 1:
            # Somebody's backup by hard links, or a commit under way.
            if self._in_commit is None:
                self._in_commit = inodes_in_commit(self._io, self._layout)
            if (status.st_dev, status.st_ino) in self._in_commit:
                return None
        return status.st_size


def list_files(io: FileIO, directory: str) -> list[Candidate]:
    """Regular files of a directory, the oldest first; empty if it does not exist."""
    try:
        names = io.listdir(directory)
    except FileNotFoundError:
        return []
    found = []
    for name in names:
        try:
            status = io.lstat(f"{directory}/{name}")
        except FileNotFoundError:
            continue
        if stat.S_ISREG(status.st_mode):
            found.append(Candidate(status.st_mtime_ns, f"{directory}/{name}", status.st_size))
    return sorted(found)

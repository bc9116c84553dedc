"""The embedded store: a directory that processes share, bounded in bytes, with no server."""

from __future__ import annotations

import logging
import random
import stat
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path

from kvferry.config import StoreUrl
from kvferry.errors import StoreError
from kvferry.observe import Observer
from kvferry.store.base import Buffer, Entry, PutResult, Source, Stamp, Store, StoreStat
from kvferry.store.file import maintenance
from kvferry.store.file.faults import READ_ONLY
from kvferry.store.file.fileio import FileIO, as_views
from kvferry.store.file.layout import open_root, shard_of
from kvferry.store.file.maintenance import GcReport, Progress, RepairReport, VerifyReport
from kvferry.store.file.reading import NotARecord, ReadAbilities, open_record, stamp_of
from kvferry.store.file.sharded import ShardedWrites
from kvferry.store.file.volume import Volume
from kvferry.store.file.watch import RecordWatch
from kvferry.store.file.writing import DirectIO, PendingWrite
from kvferry.types import ChunkKey

logger = logging.getLogger(__name__)

CLOSE_SECONDS = 5.0
NO_OBSERVER = Observer()


class FileStore(Store):
    """Values as files under one directory. Thread-safe; any number of processes may open it.

    Guarantees, for every process that is killed at any instant:
    - A value is whole or absent. Nothing is synced: after a power loss a record may be cut, which
      its checksums show.
    - The bytes counted are exact, and never less than what is on disk, so the quota holds. What
    dead
      processes had reserved comes back by itself.
    - No operation raises for a full, read-only, failing or vanished directory, except
      `Source.read_into` and `open_read` for a record that is there and cannot be read.

    Has more public methods than most classes here: the store contract and its four optional
    abilities in one place, each a few lines over the part that does the work.
    """

    multi_process = True

    def __init__(
        self,
        root: Path,
        *,
        max_bytes: int | None = None,
        create: bool = True,
        read_only: bool = False,
        observer: Observer = NO_OBSERVER,
        direct_io: DirectIO = "auto",
        index: bool = True,
        background: bool = True,
        io: FileIO | None = None,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
        rng: random.Random | None = None,
    ) -> None:
        """Open a store; returns before the index is filled.

        Args:
            root: the directory; made a store if it is absent or empty and `create` is set.
            max_bytes: quota over all processes, None for none. Each process enforces its own value.
            create: make the store if it is not there.
            read_only: never write. A directory that cannot be written is opened so with a warning.
            observer: receives counts named `store_...`.
            direct_io: "off" never passes by the page cache; "auto" does for cold reads, and for
                writes while the disk keeps up with them; "on" for all writes. See
                `reading` and `ways`.
            index: know what is stored, for `contains`, at the price of listing every directory once
                and then of taking what the system tells, or a look at each, once a second.
                Without, `contains` finds nothing, and `stat` counts no records.
            background: run the upkeep in a thread. Without, it runs in `maintain` only.
            io: system calls, for tests.
            clock: monotonic seconds.
            wall: seconds since the epoch.
            rng: draws shards for eviction and pages to look at.

        Raises:
            ConfigError: `root` cannot be used.
        """
        io = FileIO() if io is None else io
        layout = open_root(root, io, create=create and not read_only)
        self.url = str(StoreUrl(scheme="file", path=layout.root))
        rng = random.Random() if rng is None else rng
        self._abilities = ReadAbilities(rng=rng)
        self._abilities.direct &= direct_io != "off"
        self._closed = False
        self._watch: RecordWatch | None = None
        self._has_index = index
        self._wall = wall
        self._volume = Volume(
            io,
            layout,
            max_bytes=max_bytes,
            create=create,
            direct_io=direct_io,
            index=index,
            observer=observer,
            clock=clock,
            wall=wall,
            rng=rng,
        )
        self._sessions = ShardedWrites(io, layout, self._volume.writing, self._volume.faults)
        if not read_only:
            self._join()
        try:
            self._volume.quota.refresh()
        except OSError as error:
            self._volume.faults.failed("open", error)
        if background:
            self._volume.upkeep.background.start()

    def _join(self) -> None:
        try:
            self._volume.membership.join()
        except OSError as error:
            if error.errno not in READ_ONLY:
                self._volume.faults.failed("open", error)
                return
            logger.warning(
                "store %s cannot be written (%s): opened read-only, nothing will be stored",
                self.url,
                error.strerror,
            )

    @property
    def is_read_only(self) -> bool:
        """Whether this store cannot write: asked for, not permitted, or closed."""
        return self._volume.membership.current is None

    def contains(self, key: ChunkKey) -> bool:
        return self._volume.index.contains(key)

    def open_read(self, key: ChunkKey) -> Source | None:
        volume = self._volume
        if self._closed:
            return None
        try:
            moment = self._follow(key)  # before: what happens from here on counts
            source = open_record(
                volume.io, volume.layout.record(key), self._abilities, self._wall()
            )
        except NotARecord:
            volume.set_aside(key, "not_a_file")
            return None
        except OSError as error:
            volume.faults.failed("read", error)
            raise StoreError(
                f"record {key.hex()} of {self.url} cannot be opened: {error.strerror}"
            ) from error
        if source is None:
            volume.index.discard(key)
        elif source.stamp is not None:
            source.stamp = source.stamp._replace(moment=moment)
        return source

    def stamp(self, key: ChunkKey) -> Stamp | None:
        """What tells whether a record is still what was read; see `SupportsStamp`.

        Raises:
            StoreError: the medium failed.
        """
        if self._closed:
            return None
        try:
            moment = self._follow(key)
            status = self._volume.io.lstat(self._volume.layout.record(key))
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            self._volume.faults.failed("read", error)
            raise StoreError(
                f"record {key.hex()} of {self.url} cannot be looked at: {error.strerror}"
            ) from error
        if not stat.S_ISREG(status.st_mode):
            return None
        return stamp_of(status, self._wall())._replace(moment=moment)

    def watch(self) -> bool:
        """Listen to changes; see `SupportsWatch`."""
        if self._watch is None and not self._closed:
            try:
                self._watch = RecordWatch()
            except OSError as error:
                logger.info("changes to %s are not told of: %s", self.url, error.strerror)
        return self._watch is not None

    def is_unchanged(self, key: ChunkKey, since: Stamp) -> bool:
        """Whether a record is known to be what it was; see `SupportsWatch`."""
        if self._watch is None or since.moment is None:
            return False
        return self._watch.is_unchanged(key, since.moment)

    def _follow(self, key: ChunkKey) -> int | None:
        if self._watch is None:
            return None
        return self._watch.follow(self._volume.layout.shard(shard_of(key)))

    def put(self, key: ChunkKey, buffers: Sequence[Buffer]) -> PutResult:
        views = as_views(buffers)
        pending = self._volume.reserve(key, sum(view.nbytes for view in views))
        if isinstance(pending, PutResult):
            return pending
        return self._volume.commit(pending, views)

    def discard(self, key: ChunkKey, reason: str) -> None:
        self._volume.set_aside(key, reason)

    def delete(self, key: ChunkKey) -> bool:
        try:
            return self._volume.remove([key]).num_records > 0
        except OSError as error:
            self._volume.faults.failed("delete", error)
            return False

    def touch(self, keys: Iterable[ChunkKey]) -> None:
        if not self.is_read_only:
            self._volume.upkeep.recency.note(keys)

    def stat(self) -> StoreStat:
        quota = self._volume.quota
        return StoreStat(
            url=self.url,
            num_records=len(self._volume.index),
            used_bytes=self._volume.used_bytes(),
            max_bytes=quota.max_bytes,
            index_complete=self._volume.upkeep.refresh.is_complete,
        )

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        if self._watch is not None:
            self._watch.close()
        # Given back by the background thread, as all else: a disk that hangs must not hold us.
        abandoned = self._sessions.take_all()
        self._volume.upkeep.background.stop(CLOSE_SECONDS, partial(self._abort_all, abandoned))
        self._volume.index.clear()

    def _abort_all(self, abandoned: Sequence[PendingWrite]) -> None:
        for pending in abandoned:
            self._volume.writing.abort(pending)
        self._volume.rest(always=True)

    def scan(self) -> Iterator[Entry]:
        """Every record at some moment during the call; see `SupportsScan`.

        Raises:
            StoreError: the medium failed.
        """
        return iter(()) if self._closed else maintenance.scan(self._volume)

    def probe(self, keys: Sequence[ChunkKey]) -> None:
        """Ask the background whether these are here; see `SupportsProbe`."""
        self._volume.upkeep.refresh.request(keys)
        self._volume.upkeep.background.wake()

    def note_stored(self, key: ChunkKey) -> None:
        """Put a key into the index; see `SupportsProbe`."""
        self._volume.index.add(key)

    def wait_indexed(self, timeout: float) -> bool:
        """Wait for the first fill of the index; see `SupportsProbe`."""
        return self._has_index and self._volume.upkeep.refresh.wait_complete(timeout)

    def begin(self, key: ChunkKey, num_bytes: int) -> str | PutResult:
        """Begin a record that several processes write; see `SupportsShardedWrite`."""
        pending = self._volume.reserve(key, num_bytes)
        if isinstance(pending, PutResult):
            return pending
        try:
            return self._sessions.begin(pending)
        except OSError as error:
            self._volume.writing.abort(pending)
            return self._volume.write_failed(error)

    def write_at(self, session: str, offset: int, buffers: Sequence[Buffer]) -> bool:
        """Write a range of a record that any process has begun; see `SupportsShardedWrite`."""
        return self._sessions.write_at(session, offset, buffers)

    def commit(self, session: str, head: Buffer) -> PutResult:
        """Make a record visible; see `SupportsShardedWrite`."""
        pending = self._sessions.take(session)
        if pending is None:
            return PutResult.FAILED
        return self._volume.commit(pending, as_views([head]))

    def abort(self, session: str) -> None:
        """Give a record up; see `SupportsShardedWrite`."""
        pending = self._sessions.take(session)
        if pending is not None:
            self._volume.writing.abort(pending)

    def maintain(self) -> None:
        """Do all upkeep that is due now, in this thread: for stores opened without background."""
        # Twice, because some jobs wait for what others do in the first round.
        for _ in range(2):
            self._volume.upkeep.background.run_until_idle()

    def verify(self, progress: Progress | None = None) -> VerifyReport:
        """Check every record and quarantine the bad ones; see `maintenance.verify`."""
        return maintenance.verify(self._volume, progress)

    def repair(self, progress: Progress | None = None) -> RepairReport:
        """Verify, recover and correct the counts; see `maintenance.repair`."""
        return maintenance.repair(self._volume, progress)

    def gc(self, max_bytes: int | None = None, older_than_seconds: float | None = None) -> GcReport:
        """Remove old and surplus records; see `maintenance.gc`."""
        return maintenance.gc(self._volume, max_bytes, older_than_seconds, self._wall())

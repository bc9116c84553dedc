"""The embedded store: a directory that processes share, bounded in bytes, with no server.

`FileStore` is the store of `file:` URLs. `kvferry.store.base` says which calls use memory only and
which block on I/O. Background work is in `Upkeep`.
"""

from __future__ import annotations

import hashlib
import logging
import os
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

from blake3 import blake3

from kvferry.errors import ConfigError, Fault, FaultKind, StoreError
from kvferry.filesystem import is_of_one_machine, user_cache, why_untrusted
from kvferry.observe import Observer
from kvferry.store.base import (
    ABSENT,
    CLOSED,
    COMING,
    EXISTS,
    HERE,
    NO_DEADLINE,
    STORED,
    Address,
    Buffer,
    Put,
    ReadRange,
    RecordBytes,
    SingleStore,
    StoreStat,
    Value,
    Where,
)
from kvferry.store.catalogue import Catalogue
from kvferry.store.faults import Faults, fault_kind
from kvferry.store.file.catalogue import FileCatalogue
from kvferry.store.file.database import IndexUnavailable
from kvferry.store.file.directory import (
    MARKER,
    NotAFile,
    open_root,
    record_name,
)
from kvferry.store.file.fileio import OpenRecord, as_views
from kvferry.store.file.index import (
    ABOVE_QUOTA,
    NO_QUOTA,
    PAUSE_SECONDS,
    Index,
    KnownKeys,
)
from kvferry.store.file.settings import FileSettings
from kvferry.store.file.upkeep import Upkeep
from kvferry.store.file.writing import Writing
from kvferry.store.io_pool import end_when_dropped
from kvferry.store.kind import StoreUrl
from kvferry.types import ChunkKey

logger = logging.getLogger(__name__)

_READ_ONLY = Fault(FaultKind.READ_ONLY, "it is opened read-only")
_INDEXING = Fault(FaultKind.INDEXING, "its index is not complete yet")


class FileStore(SingleStore):
    """Values as files under one directory. Thread-safe; any number of processes may open it.

    Guarantees, for every process that is killed at any instant:
    - A value is whole or absent. Nothing is synced: after a power loss a record may be cut, which
      its checksums show.
    - Records stay within the quota. In addition, quarantined files take a twentieth of it at most,
      and each writer has up to `values_per_put` hidden values on the disk; others remove what dead
      writers left.
    - If the directory is full, read-only, failing or gone, nothing raises but the `read` of a
      record that cannot be read, and calls for commands (listing, `gc`, `pin`, `facts`).

    Attributes:
        directory, index, upkeep: the parts of the store; for tools and tests.
    """

    multi_process = True
    quarantines = True
    values_per_put = 8

    def __init__(
        self,
        root: Path,
        *,
        max_bytes: int | None = None,
        read_only: bool = False,
        observer: Observer | None = None,
        background: bool = True,
        settings: FileSettings = FileSettings(),  # noqa: B008  # frozen
    ) -> None:
        """Open a store; returns before all that it holds is known.

        Args:
            root: the directory; if absent or empty, made a store where `settings` allow it.
            max_bytes: quota over all processes, None for none. Each process enforces its own value.
            read_only: never write. Implied, with a warning, if the directory cannot be written.
            observer: receives counts named `store_...`.
            background: run the upkeep in a thread. Without one, it runs in `maintain` only.

        Raises:
            ConfigError: `root` cannot be used.
            StoreError: the medium does not answer now.
        """
        self.directory = open_root(
            root, create=settings.create and not read_only, mode=int(settings.mode, 8)
        )
        self.url = str(StoreUrl(scheme="file", path=self.directory.root))
        self._max_bytes = NO_QUOTA if max_bytes is None else max_bytes
        self._settings = settings
        self._closed = False
        observer = Observer() if observer is None else observer
        self._faults = Faults(self.url, observer, settings.clock)
        self._known = KnownKeys(tracks_keys=settings.index)
        self.is_read_only = read_only or not os.access(self.directory.root, os.W_OK)
        self._warn(is_forced=self.is_read_only and not read_only)
        self._keep_quota(max_bytes)
        file = settings.index_file
        machines_share = file is not None or not is_of_one_machine(self.directory.root)
        try:
            self.index, compares = self._open_index(file, machines_share)
        except OSError as error:
            said = f"{self.url} does not answer: {error.strerror}"
            raise StoreError(fault_kind(error), said) from error
        self.upkeep = Upkeep(
            self.index,
            self._faults,
            max_bytes=self._max_bytes,
            machines_share=machines_share,
            changes=not self.is_read_only,
            compares=compares,
        )
        end = partial(self.upkeep.stop, settings.bounds.close_seconds)
        self._keep = end_when_dropped(self, f"store {self.url}", end)
        if background:
            try:
                self.upkeep.start()
            except BaseException:  # also for a Ctrl-C: no caller could end the thread
                self.close()
                raise

    def _keep_quota(self, max_bytes: int | None) -> None:
        """Note the quota of an engine. A command gives no quota, or asks for no keys."""
        is_of_engine = self._settings.create and (max_bytes or self._settings.index)
        if is_of_engine and not self.is_read_only:
            with suppress(StoreError), self._faults.guard("open"):
                self.directory.keep_quota(max_bytes)

    def _warn(self, *, is_forced: bool) -> None:
        shares_group = self._settings.mode == "0770"
        if untrusted := why_untrusted(self.directory.root, shares_group=shares_group):
            logger.warning("store %s %s: other users can change it", self.url, untrusted)
        if is_forced:
            logger.warning("store %s cannot be written: it is opened read-only", self.url)

    def _open_index(self, file: Path | None, machines_share: bool) -> tuple[Index, bool]:
        """Open the index. Also return whether this process compares it with the directory all the
        time."""
        make = partial(
            Index, directory=self.directory, known=self._known, observer=self._faults.observer
        )
        path: str | None = f"{self.directory.root}/index.sqlite3" if file is None else str(file)
        if file is None and machines_share:
            path = _private_index(self.directory.root)
        if path is not None:
            index = make(path, read_only=self.is_read_only, settings=self._settings)
            try:
                with self._faults.guard("open", is_logged=not self.is_read_only):
                    index.open()
                    if not self.is_read_only:
                        if not index.totals.is_complete and self.directory.is_empty():
                            index.complete()
                        return index, self._known.tracks_keys
                    if index.totals.is_complete:
                        return index, False
            except StoreError as error:
                has_place = not machines_share or isinstance(error.__cause__, IndexUnavailable)
                if has_place and not self.is_read_only:
                    return index, self._known.tracks_keys  # the upkeep opens it
        # No complete index can be opened: this process keeps one in memory.
        if not self.directory.is_empty():
            logger.warning(
                "store %s has no usable index: kvferry lists the directory, so it does not know "
                "the times of last use or the removals",
                self.url,
            )
        index = make(None, read_only=False, settings=self._settings)
        index.open()
        return index, True

    def accepts(self) -> Fault | None:
        if self.is_read_only:
            return _READ_ONLY
        if not self.writes:
            return CLOSED
        return _INDEXING if self._waits_for_index else None

    @property
    def _waits_for_index(self) -> bool:
        """Whether writes are refused until the index knows how much of the quota is used."""
        return self._max_bytes < NO_QUOTA and not self.index.totals.is_complete

    def where(self, key: ChunkKey) -> Where:
        return HERE if self._known.contains(key) else ABSENT

    def read(
        self, key: ChunkKey, ranges: Sequence[ReadRange], deadline: float = NO_DEADLINE
    ) -> RecordBytes | None:
        if self._closed:
            return None
        name = record_name(key)  # raises: a key of another length is the caller's mistake
        with self._faults.guard("read", f"{name} cannot be read"):
            try:
                opened = self.directory.open_record(key)
            except NotAFile:
                self.discard(key, "not_a_file")
                return None
            if opened is None:
                self._miss(key)
                return None
            with OpenRecord(*opened, direct=self._settings.direct_io != "off") as record:
                record.read(ranges, deadline)
                return RecordBytes(record.size)

    def check_medium(self, deadline: float) -> None:
        with self._faults.guard("check", "does not answer", is_logged=False):
            self.directory.start_of(MARKER, 1)
            self.directory.listed("records")

    def put(self, key: ChunkKey, buffers: Sequence[Buffer], deadline: float = NO_DEADLINE) -> Put:
        return self.put_all([(key, buffers)], deadline)[0]

    def put_all(self, values: Sequence[Value], deadline: float = NO_DEADLINE) -> list[Put]:
        for key, _ in values:
            record_name(key)  # raises: a key of another length is the caller's mistake
        results: list[Put] = []
        while len(results) < len(values):
            results += self._put_some(values[len(results) :][: self.values_per_put])
        return results

    def discard(self, key: ChunkKey, reason: str) -> None:
        if not self.writes:
            self._known.hide(key)
            return
        try:
            with self._faults.guard("quarantine", passes=FileNotFoundError):
                moved = self.directory.quarantine(key, reason)
        except FileNotFoundError:
            self._miss(key)
            return
        except StoreError:
            self._known.hide(key)  # so that the broken record is not offered again
            return
        self._faults.observer.count("store_quarantined")
        if moved:
            logger.warning("store %s: record %s quarantined: %s", self.url, key.hex(), reason)
        self._forget(key, "damaged", reason)
        with suppress(StoreError), self._faults.guard("upkeep"):  # which does it again
            self.directory.bound_quarantine(self._max_bytes)

    def delete(self, key: ChunkKey) -> bool:
        if not self.writes:
            return False
        try:
            with self._faults.guard("delete"):
                removed = self.directory.remove(key)
        except StoreError:
            return False
        if removed:
            self._forget(key, "deleted")
        else:
            self._miss(key)
        return removed

    def touch(self, keys: Iterable[ChunkKey]) -> None:
        if self.writes:
            self.index.note(keys)

    def stat(self) -> StoreStat:
        totals = self.index.totals
        return StoreStat(
            url=self.url,
            num_records=totals.num_records,
            used_bytes=totals.num_bytes,
            max_bytes=self._max_bytes if self._max_bytes < NO_QUOTA else None,
            index_complete=self.index.all_known.is_set(),
        )

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._keep()
        if self.index.is_ours:  # in a forked child, locks may be held for ever
            self.upkeep.stop(self._settings.bounds.close_seconds)
        self._known.clear()

    def describe(self, namespace: bytes, description: str) -> None:
        if not self.writes:
            return
        name = f"{namespace.hex()}.json"
        with suppress(StoreError), self._faults.guard("describe"):
            # First kept, so that it comes once the medium answers, if it does not now.
            self.directory.keep_text(name, description, "namespaces", is_there=True)
            if self.directory.read_text(name, "namespaces") != description:
                self.directory.keep_text(name, description, "namespaces")

    def in_namespace(self, namespace: bytes) -> FileStore:
        return self

    def catalogues(self) -> Sequence[Catalogue]:
        return [FileCatalogue(self, self._faults, self._max_bytes, self._settings.wall)]

    def on_result(self, heard: Callable[[StoreError | None], None]) -> None:
        pass  # a look at a directory that fails says nothing of its records

    def probe(self, keys: Sequence[ChunkKey], *, again: bool = False) -> Where:
        is_asked = not self._closed and self.index.is_ours and self._known.tracks_keys
        if is_asked:
            self.upkeep.probe(keys)
        return COMING if is_asked else ABSENT

    def learn(self, keys: Sequence[ChunkKey], holder: Address | None = None) -> bool:
        is_here = holder is None and not self._closed
        for key in keys if is_here else ():
            self._known.add(key)
        return is_here

    def wait_indexed(self, timeout: float) -> bool:
        return self.index.all_known.wait(timeout)

    def maintain(self) -> None:
        """Do all upkeep now, on this thread: for stores opened with `background=False`."""
        if not self._closed and self.index.is_ours:
            self.upkeep.run_until_idle()

    @property
    def is_closed(self) -> bool:
        return self._closed

    @property
    def writes(self) -> bool:
        """Whether this process may write: the store is open and writable, and no fork has it."""
        return not self._closed and not self.is_read_only and self.index.is_ours

    def _put_some(self, values: Sequence[Value]) -> list[Put]:
        found: list[Writing | Put] = []
        refusal: Put | None = None
        try:
            for key, buffers in values:
                try:
                    with self._faults.guard("put"):
                        found.append(refusal or self._write(key, as_views(buffers)))
                except StoreError as error:
                    refusal = Put.failed(error.fault)
                    self._miss(key)
                    found.append(refusal)
            written = [each for each in found if isinstance(each, Writing)]
            rest = iter(self._finish(written) if written else ())
            return [next(rest) if isinstance(each, Writing) else each for each in found]
        finally:
            for each in found:
                if isinstance(each, Writing):
                    each.close()

    def _write(self, key: ChunkKey, views: Sequence[memoryview]) -> Writing | Put:
        """Write a value into a hidden file, or return why not. Raises OSError if the medium
        refuses."""
        if not self.writes:
            return Put.failed(self.accepts() or CLOSED)
        writing = Writing(self.directory, key)
        try:
            if writing.is_taken():
                self.probe([key])
                result = EXISTS
            elif sum(view.nbytes for view in views) > self._max_bytes:
                result = Put.failed(ABOVE_QUOTA)
            elif self._waits_for_index:
                self._faults.observer.count("store_put_skipped")
                result = Put.failed(_INDEXING)
            else:
                writing.write(views)
                return writing
        except BaseException:
            writing.close()
            raise
        writing.close()
        return result

    def _finish(self, written: Sequence[Writing]) -> list[Put]:
        """Place values and add them to the index; return an answer for each."""
        results = self._add(written)
        for writing, result in zip(written, results, strict=True):
            if result is STORED:
                self._faults.observer.count("store_put_records")
                self._faults.observer.count("store_put_bytes", writing.num_bytes)
                continue
            writing.unplace()  # no row would count it against the quota
            if result is EXISTS:
                self.probe([writing.key])
            else:
                self._miss(writing.key)
        return results

    def _add(self, written: Sequence[Writing]) -> list[Put]:
        results: list[Put] = []
        until = self._faults.clock() + self._settings.bounds.room_seconds
        rest = Put.failed(ABOVE_QUOTA)
        try:
            with self._faults.guard("put"):
                while left := written[len(results) :]:
                    some = self.index.add_written(left, self._max_bytes, self._faults.write_failed)
                    results += some
                    if not some:
                        if self._faults.clock() >= until:
                            break
                        time.sleep(PAUSE_SECONDS)  # so that others can write
        except StoreError as error:
            rest = Put.failed(error.fault)
        return results + [rest] * (len(written) - len(results))

    def _forget(self, key: ChunkKey, reason: str, detail: str = "") -> None:
        """Remove a key from the index if its file is gone."""
        try:
            with self._faults.guard("index"):
                self.index.forget([key], reason, detail)
        except StoreError:
            self._miss(key)  # its row goes when its shard is compared next

    def _miss(self, key: ChunkKey) -> None:
        """Forget a key without a file. The upkeep looks again: the file may just have come."""
        if self._known.contains(key):
            self._known.discard(key)
            self.probe([key])


def _private_index(root: str) -> str | None:
    """Path of this machine's index of a directory that machines share; None if this user has no
    directory for caches."""
    name = root.encode(errors="surrogateescape")
    with suppress(ConfigError):
        folder = user_cache() / "kvferry" / "index"
        # Earlier versions named it by BLAKE2, which hosts in FIPS mode refuse in several ways.
        with suppress(ValueError, TypeError, AttributeError):
            older = folder / f"{hashlib.blake2b(name, digest_size=16).hexdigest()}.sqlite3"
            if older.exists():
                return str(older)
        return str(folder / f"{blake3(name).hexdigest(16)}.sqlite3")
    return None

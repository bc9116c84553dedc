"""The background work of a store, in one thread: follow the index, compare it with the directory,
write back times of use, and clean up after dead writers."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial

from kvferry.store.faults import Faults
from kvferry.store.file.database import IndexUnavailable
from kvferry.store.file.directory import NUM_SHARDS, Directory
from kvferry.store.file.index import Index
from kvferry.types import ChunkKey

logger = logging.getLogger(__name__)

TICK_SECONDS = 0.25
"""How late this process learns what another one stored."""

FLUSH_SECONDS = 2.0
CLEAN_SECONDS = 60.0
COMPARE_SECONDS = 1.0
ABANDONED_SECONDS = 3600.0
"""How long another machine's half-written file is left alone."""

_YOUNG_SECONDS = 1.0
_DUTY = 20
"""Comparing a shard is followed by so many times its own duration of rest."""
_SETTLED_SECONDS = 1.0
"""A directory that changed later may change again within the same tick of its clock."""
_MAX_PROBES = 256
_BATCH = 256
_QUARANTINE_FRACTION = 20
"""At most one twentieth of the quota is quarantine, but the newest file stays."""


class ShardComparison:
    """The index against the directory, which is right, one shard at a time."""

    def __init__(self, directory: Directory, index: Index) -> None:
        self._directory = directory
        self._index = index
        self.restart()

    def restart(self) -> None:
        """Compare everything (again)."""
        self.is_done = False
        """Whether everything was compared; set by the caller, who counts the rest too."""
        self._marks = [(-1, 0)] * NUM_SHARDS
        self._last = NUM_SHARDS - 1

    def due(self) -> tuple[list[int], list[int]]:
        """Shards that were not compared yet, or are other directories than those that were; and
        those whose files changed since. Each in the order of their turn."""
        turns = [(self._last + 1 + turn) % NUM_SHARDS for turn in range(NUM_SHARDS)]
        marks = {shard: self._directory.mark_of_shard(shard) for shard in turns}
        new = [shard for shard in turns if marks[shard][0] != self._marks[shard][0]]
        return new, [shard for shard in turns if marks[shard] != self._marks[shard]]

    def compare(self, shard: int) -> int:
        """Make the index say what is in a shard; how many rows were wrong.

        Raises:
            IndexUnavailable: not now.
            OSError: the shard cannot be listed; it is looked at again in its turn.
        """
        mark = self._directory.mark_of_shard(shard)
        is_settled = self._index.wall() - mark[1] / 1e9 > _SETTLED_SECONDS
        self._last = shard
        try:
            there = self._directory.list_shard(shard)
        except OSError:
            self._marks[shard] = (mark[0], -1)
            raise
        end = bytes([(shard + 1) << 3]) if shard + 1 < NUM_SHARDS else None
        listed = self._index.keys_between(bytes([shard << 3]), end)
        extra = there - listed
        if extra:
            written = extra & set(self._index.writing().values())  # who writes them counts them
            extra -= written
            is_settled &= not written  # unless another writer was first
        num_wrong = 0
        for batch in _batches(extra):
            num_wrong += self._index.add(batch)
        for batch in _batches(listed - there):
            num_wrong += self._index.forget(batch, "vanished")
        self._marks[shard] = mark if is_settled else (mark[0], -1)
        return num_wrong


class Upkeep:
    """The thread and its work. `probe`, `stop` and `clean` are for any thread.

    Args:
        max_bytes: the quota.
        machines_share: whether machines with other indexes use the directory, too.
        changes: whether anything may be written.
        compares: whether to compare the index with the directory all the time; else, if anything
            may be written, only until the index is complete.
    """

    def __init__(
        self,
        directory: Directory,
        index: Index,
        faults: Faults,
        *,
        max_bytes: int | None,
        machines_share: bool,
        changes: bool,
        compares: bool,
    ) -> None:
        self._directory = directory
        self._index = index
        self._faults = faults
        self._max_bytes = max_bytes
        self._machines_share = machines_share
        self._changes = changes
        self._compares = compares
        self._comparison = ShardComparison(directory, index)
        self._due = {"flush": 0.0, "clean": 0.0, "compare": 0.0}
        self._probes: deque[tuple[ChunkKey, ...]] = deque()
        self._wake = threading.Event()
        self._stopping = False
        self._turn = threading.Lock()
        self._thread: threading.Thread | None = None

    def probe(self, keys: Sequence[ChunkKey]) -> None:
        """Look for the files of these keys soon; dropped when too many wait. Memory only. An index
        that only may be read learns nothing this way."""
        if not self._compares:
            return
        if len(self._probes) >= _MAX_PROBES:
            self._faults.observer.count("store_probe_dropped")
            return
        self._probes.append(tuple(keys))
        self._wake.set()

    def start(self) -> None:
        """Start the thread. It never keeps the process from ending."""
        self._thread = threading.Thread(target=self._run, name="kvferry-store", daemon=True)
        self._thread.start()

    def stop(self, timeout: float, last: Callable[[], None]) -> None:
        """Stop after the current step, and do `last`. Waits `timeout` seconds at most, so that a
        hanging disk does not block the caller."""
        self._last = last
        self._stopping = True
        self._wake.set()
        if self._thread is None:
            self._end()
        else:
            self._thread.join(timeout)

    def run_until_idle(self) -> None:
        """Do all that is due, and compare everything, in this thread."""
        self._comparison.restart()
        self._due = dict.fromkeys(self._due, 0.0)
        while self.step(rests=False):
            pass

    def clean(self) -> None:
        """Release the reservations of dead writers and remove their files."""
        if not self._changes:
            return
        for file, key in self._index.writing().items():
            if self._directory.is_locked(file):
                continue
            self._index.add([key])
            # A writer that lives and is about to confirm has dropped its file itself.
            was_there = self._directory.drop(file)  # counted until it is gone
            if self._index.release(file) and was_there:
                self._faults.observer.count("store_recovered_writes")
        # A file without a reservation may be new: its writer is about to reserve. On a network
        # mount it may belong to another machine, whose locks do not show here.
        files = set(self._directory.list_writing()) - self._index.writing().keys()
        bound = ABANDONED_SECONDS if self._machines_share else _YOUNG_SECONDS
        for file, silent in self._directory.silent_seconds(files).items():
            if silent > bound and (self._machines_share or not self._directory.is_locked(file)):
                self._directory.drop(file)
        quota = self._max_bytes
        self._index.bound_quarantine(None if quota is None else quota // _QUARANTINE_FRACTION)

    def step(self, *, rests: bool = True) -> bool:
        """One bounded piece of all that is due. Whether there is more to do at once."""
        more = False
        with self._turn:
            for job in (self._reopen, self._answer, self._clean, self._flush):
                self._try(job)
            more |= self._try(self._compare, rests)
            more |= self._try(self._keep_below_quota)
            more |= self._try(self._index.follow)
        return more and not self._stopping

    def _try(self, job: Callable[..., bool | None], *arguments: bool) -> bool:
        return not self._stopping and self._do(partial(job, *arguments))

    def _do(self, job: Callable[[], object], name: str = "upkeep") -> bool:
        try:
            return bool(job())
        except OSError as error:
            self._faults.failed(name, error)
        except Exception:
            # The outermost loop of this thread: one broken job must not stop the others.
            logger.exception("kvferry store: upkeep failed")
        return False

    def _run(self) -> None:
        while not self._stopping:
            if not self.step():
                self._wake.wait(TICK_SECONDS)
                self._wake.clear()
        self._end()

    def _end(self) -> None:
        if self._changes:
            self._do(self._index.flush, "recency")
        self._do(self._last)
        self._do(self._index.close)

    def _is_due(self, job: str, seconds: float) -> bool:
        now = self._faults.clock()
        if now < self._due[job]:
            return False
        self._due[job] = now + seconds
        return True

    def _reopen(self) -> None:
        if self._index.open():
            self._comparison.restart()
            self._due = dict.fromkeys(self._due, 0.0)

    def _answer(self) -> None:
        """Add the probed keys that have files: of each prefix, up to the first that has none."""
        while self._probes:
            for key in self._probes.popleft():
                if not self._index.knows(key) and not self._index.add([key]):
                    break

    def _flush(self) -> None:
        if self._changes and self._is_due("flush", FLUSH_SECONDS):
            self._index.flush()

    def _clean(self) -> None:
        if self._is_due("clean", CLEAN_SECONDS):
            self.clean()

    def _compare(self, rests: bool) -> bool:
        """Compare the next shard: each once after opening, then those whose directory changed."""
        if not self._compares and (not self._changes or self._index.totals.is_complete):
            return False
        started = self._faults.clock()
        if rests and started < self._due["compare"]:
            return False
        new, changed = self._comparison.due()
        is_complete = self._index.totals.is_complete
        if not new and not (is_complete and self._comparison.is_done):
            self._finish_comparison()
        if not changed:
            self._due["compare"] = started + COMPARE_SECONDS
            return False
        try:
            # Once complete, a folder that is replaced all the time must not keep others waiting.
            due = changed if is_complete else new or changed
            num_wrong = self._comparison.compare(due[0])
            self._faults.observer.count("store_index_corrected", num_wrong)
        except IndexUnavailable:
            raise
        except OSError as error:
            self._faults.failed("upkeep", error)  # the others can be compared
        if new and not (rests and self._index.totals.is_complete):
            return True
        now = self._faults.clock()
        rest = 0.0 if new or self._machines_share else COMPARE_SECONDS
        self._due["compare"] = now + max(rest, _DUTY * (now - started))
        return False

    def _finish_comparison(self) -> None:
        """Count what is no record, and check the totals."""
        try:
            self.clean()
        except IndexUnavailable:
            raise
        except OSError as error:
            self._faults.failed("upkeep", error)
        if self._changes or not self._index.totals.is_complete:
            self._index.complete()
        self._comparison.is_done = True

    def _keep_below_quota(self) -> None:
        """Evict for files that were not reserved here: of machines with another index, or placed by
        hand."""
        quota, totals = self._max_bytes, self._index.totals
        if quota is not None and totals.is_complete and totals.num_bytes > quota:
            self._index.shrink(quota)


def _batches(keys: set[ChunkKey]) -> list[list[ChunkKey]]:
    """The keys in batches, between which other processes get a turn."""
    ordered = sorted(keys)
    return [ordered[start : start + _BATCH] for start in range(0, len(ordered), _BATCH)]

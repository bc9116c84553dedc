"""The background work of a directory store, in one thread: follow the index, compare it with the
directory, write back times of use, and clean up after dead writers. `FileStore` starts it."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial

from kvferry.errors import StoreError
from kvferry.store.faults import Faults
from kvferry.store.file.database import IndexUnavailable
from kvferry.store.file.directory import NUM_SHARDS
from kvferry.store.file.index import Index
from kvferry.store.file.settings import FileBounds
from kvferry.types import ChunkKey

_SETTLED_SECONDS = 1.0
"""A directory that changed more recently than this may change again with an equal time."""
_CACHED_SECONDS = 60.0
"""How long a network mount may show an old listing with a new time: NFS caches for a minute."""
_MAX_PROBES = 256
_BATCH = 256


class ShardComparison:
    """Corrects the index by the directory, shard by shard; a shard is one directory of records. The
    first pass compares all shards, a later pass those that changed after their comparison or
    less than `settled_seconds` before it. `waiting` has the shards that are left of a pass."""

    def __init__(self, index: Index, settled_seconds: float) -> None:
        self._index = index
        self._settled_seconds = settled_seconds
        self.restart()

    def restart(self) -> None:
        self.is_first_pass = True
        self.waiting = list(range(NUM_SHARDS))
        self._marks = [(-1, 0)] * NUM_SHARDS

    def next_pass(self) -> None:
        self.is_first_pass = False
        now = map(self._index.directory.mark_of_shard, range(NUM_SHARDS))
        self.waiting = [n for n, mark in enumerate(now) if mark != self._marks[n]]

    def compare(self, shard: int) -> int:
        """Correct the index of one shard; return how many rows were wrong. If that fails, or if the
        shard may just have changed, the next pass compares it again."""
        index = self._index
        mark = index.directory.mark_of_shard(shard)
        self._marks[shard] = (mark[0], -1)
        is_settled = index.settings.wall() - mark[1] / 1e9 > self._settled_seconds
        there = index.directory.list_shard(shard)
        listed = set(index.keys(bytes([shard << 3]), bytes([shard << 3 | 7]) + bytes([255] * 32)))
        num_wrong = sum(index.add(batch) for batch in _batches(there - listed))
        num_wrong += sum(index.forget(batch, "vanished") for batch in _batches(listed - there))
        if is_settled:
            self._marks[shard] = mark
        return num_wrong


class Upkeep:
    """The thread and its work. Any thread may call `probe`, `stop`, `clean` and `may_pin`.

    Args:
        faults: receives errors; this work also uses its clock.
        machines_share: whether machines with other indexes use the directory, too.
        changes: whether anything may be written.
        compares: whether to compare all the time, or only to complete an index that may be written.
    """

    def __init__(
        self,
        index: Index,
        faults: Faults,
        *,
        max_bytes: int,
        machines_share: bool,
        changes: bool,
        compares: bool,
    ) -> None:
        self._index = index
        self._faults = faults
        self._max_bytes = max_bytes
        self._machines_share = machines_share
        self._changes = changes
        self._compares = compares
        self.comparison = ShardComparison(
            index, _CACHED_SECONDS if machines_share else _SETTLED_SECONDS
        )
        self._due = {"flush": 0.0, "clean": 0.0, "compare": 0.0}
        self._probes: deque[tuple[ChunkKey, ...]] = deque()
        self._wake = threading.Event()
        self._is_stopped = False
        self._thread: threading.Thread | None = None

    def probe(self, keys: Sequence[ChunkKey]) -> None:
        """See `Store.probe`."""
        if not self._compares:
            self._wake.set()  # to follow what others store
            return
        if len(self._probes) >= _MAX_PROBES:
            self._faults.observer.count("store_probe_dropped")
            return
        self._probes.append(tuple(keys))
        self._wake.set()

    def start(self) -> None:
        self._thread = threading.Thread(target=self._run, name="kvferry-store", daemon=True)
        self._thread.start()

    def stop(self, timeout: float) -> None:
        """Stop after the current job. Waits `timeout` seconds at most for the thread; without a
        thread, does the last work here."""
        self._is_stopped = True
        self._wake.set()
        if self._thread is None:
            self._run()
        else:
            with suppress(RuntimeError):  # its start was interrupted; if it comes to run, it ends
                self._thread.join(timeout)

    def run_until_idle(self) -> None:
        self._restart()
        while self.step(rests=False):
            pass

    def clean(self) -> None:
        """Remove the hidden files of dead writers, and add to the index the records that they had
        placed. Bound the quarantine, and end the pins that are due. Write the marker and the
        descriptions of this process again if people removed them."""
        if not self._changes:
            return
        directory = self._index.directory
        with self._past_errors_of_files():
            if not directory.is_empty():  # below a mount that is away, no store is made
                directory.restore_texts()
        for file, found in directory.list_files("writing").items():
            # By this machine's clock, which stamps the files, and not by `settings.wall`.
            is_old = time.time() - found.modified >= self._bounds.abandoned_seconds
            with self._past_errors_of_files():
                key, is_of_this_machine = directory.written_by(file)
                if self._machines_share and not (is_of_this_machine or is_old):
                    continue  # the lock of its writer may not be seen here
                add = partial(self._index.add, [key])
                if directory.drop_abandoned(file, is_old=is_old, first=add):
                    self._faults.observer.count("store_recovered_writes")
        directory.bound_quarantine(self._max_bytes)
        self._index.pins.end_due()

    def step(self, *, rests: bool = True) -> bool:
        """Do one bounded piece of each job that is due. Whether there is more to do at once."""
        more = False
        for job in (
            self._reopen,
            self._answer,
            self._clean,
            self._flush,
            partial(self._compare, rests),
            self._keep_below_quota,
            self._index.follow,
        ):
            if self._is_stopped:
                return False
            more |= self._do(job)
        return more

    def _do(self, job: Callable[[], object], name: str = "upkeep") -> bool:
        # One broken job must not stop the others.
        with suppress(StoreError), self._faults.guard(name):
            return bool(job())
        return False

    def _run(self) -> None:
        while not self._is_stopped:
            if not self.step():
                self._wake.wait(self._bounds.tick_seconds)
                self._wake.clear()
        if self._changes:
            self._do(self._index.flush, "recency")
        self._do(self._index.close)

    @property
    def _bounds(self) -> FileBounds:
        return self._index.settings.bounds

    def _is_due(self, job: str, seconds: float) -> bool:
        now = self._faults.clock()
        if now < self._due[job]:
            return False
        self._due[job] = now + seconds
        return True

    def _restart(self) -> None:
        self.comparison.restart()
        self._due = dict.fromkeys(self._due, 0.0)

    def _reopen(self) -> None:
        if self._index.open():
            self._restart()

    def _answer(self) -> None:
        """Add the probed keys that have files; stop in each prefix at the first that has none."""
        while self._probes:
            for key in self._probes.popleft():
                if not self._index.known.contains(key) and not self._index.add([key]):
                    break

    def _flush(self) -> None:
        if self._changes and self._is_due("flush", self._bounds.flush_seconds):
            self._index.flush()

    @property
    def may_pin(self) -> bool:
        """Whether pins hold. Other machines that share the directory would evict pinned records."""
        return self._changes and not self._machines_share

    def _clean(self) -> None:
        if self._is_due("clean", self._bounds.clean_seconds):
            self.clean()

    def _compare(self, rests: bool) -> bool:
        """Compare the next shard. Whether to go on with another at once: only in the first pass,
        if the index is incomplete or `rests` is False."""
        if not self._compares and (not self._changes or self._index.totals.is_complete):
            return False
        started = self._faults.clock()
        if rests and started < self._due["compare"]:
            return False
        comparison = self.comparison
        if not comparison.waiting:
            if comparison.is_first_pass or not self._index.totals.is_complete:
                self._index.complete()
            comparison.next_pass()
        if not comparison.waiting:
            self._due["compare"] = started + self._bounds.compare_seconds
            return False
        num_wrong = 0
        with self._past_errors_of_files():
            num_wrong = comparison.compare(comparison.waiting[0])
            self._faults.observer.count("store_index_corrected", num_wrong)
        del comparison.waiting[0]
        is_first = comparison.is_first_pass
        if is_first and not (rests and self._index.totals.is_complete):
            return True
        now = self._faults.clock()
        rest = 0.0 if is_first or self._machines_share else self._bounds.compare_seconds
        own_rest = self._bounds.rest_factor * (now - started) / max(num_wrong, 1)
        self._due["compare"] = now + max(rest, own_rest)
        return False

    @contextmanager
    def _past_errors_of_files(self) -> Iterator[None]:
        """Raise errors of the index; log those of files: one bad directory stops nothing else."""
        with suppress(StoreError), self._faults.guard("upkeep", passes=IndexUnavailable):
            yield

    def _keep_below_quota(self) -> None:
        """Evict what exceeds the quota after other machines, or people, placed files."""
        totals = self._index.totals
        if self._changes and totals.is_complete and totals.num_bytes > self._max_bytes:
            self._index.shrink(self._max_bytes)


def _batches(keys: set[ChunkKey]) -> list[list[ChunkKey]]:
    ordered = sorted(keys)
    return [ordered[start : start + _BATCH] for start in range(0, len(ordered), _BATCH)]

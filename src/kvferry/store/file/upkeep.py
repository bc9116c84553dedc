"""What a store does on its own, in one thread: follow the index, compare it with the directory,
write back what was used when, and clear away what dead writers left."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence

from kvferry.observe import Observer
from kvferry.record.check import namespace_of
from kvferry.store.file.directory import NUM_SHARDS, Directory, NotARecord
from kvferry.store.file.index import Index, IndexUnavailable, Seen
from kvferry.store.known_keys import KnownKeys
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
_MAX_NOTES = 65536
_NOTE_STEP = 1e-6
"""Each chunk of a prefix counts as used a microsecond before its parent: suffixes go first, since a
chunk without its prefix is worth nothing."""
_HEADS_PER_STEP = 64
_MAX_QUARANTINE_FILES = 64
_QUARANTINE_FRACTION = 20
"""At most one twentieth of the quota is quarantine, but the newest file stays."""


class Upkeep:
    """The thread and its work. `probe`, `note`, `wait_complete` and `stop` are for any thread.

    Args:
        directory: the files.
        index: what is in them.
        known: kept up with the index.
        machines_share: whether machines with other indexes use the directory, too.
        changes: whether anything may be written.
        max_bytes: the quota.
        failed: told what failed, and how.
        observer: receives counts.
        clock: monotonic seconds.
        wall: seconds since the epoch.
    """

    def __init__(
        self,
        directory: Directory,
        index: Index,
        known: KnownKeys,
        *,
        machines_share: bool,
        changes: bool,
        compares: bool,
        max_bytes: int | None,
        failed: Callable[[str, OSError], object],
        observer: Observer,
        clock: Callable[[], float],
        wall: Callable[[], float],
    ) -> None:
        self._directory = directory
        self._index = index
        self._known = known
        self._machines_share = machines_share
        self._changes = changes
        self._compares = compares
        self._max_bytes = max_bytes
        self._failed = failed
        self._observer = observer
        self._clock = clock
        self._wall = wall
        self._complete = threading.Event()
        self._probes: deque[tuple[ChunkKey, ...]] = deque()
        self._notes: dict[ChunkKey, float] = {}
        self._seen = Seen()
        self._is_behind = True
        self._has_unnamed = True
        self._left, self._is_first_pass = set(range(NUM_SHARDS)), True
        self._marks = [(0, 0)] * NUM_SHARDS
        self._last_shard = 0
        self._due = {"flush": 0.0, "clean": 0.0, "compare": 0.0}
        self._wake = threading.Event()
        self._stopping = False
        self._turn = threading.Lock()
        self._thread: threading.Thread | None = None

    @property
    def is_complete(self) -> bool:
        """Whether all that is stored is known."""
        return self._complete.is_set()

    def wait_complete(self, timeout: float) -> bool:
        return self._complete.wait(timeout)

    def probe(self, keys: Sequence[ChunkKey]) -> None:
        """Find out soon whether these are there; dropped when too many wait. Memory only."""
        if len(self._probes) >= _MAX_PROBES:
            self._observer.count("store_probe_dropped")
            return
        self._probes.append(tuple(keys))
        self._wake.set()

    def note(self, keys: Iterable[ChunkKey]) -> None:
        """These were used just now, the nearest to the root of the prefix first. Memory only;
        beyond 65536 waiting keys more are dropped."""
        used = self._wall()
        notes = self._notes
        for key in keys:
            if len(notes) >= _MAX_NOTES and key not in notes:
                break
            notes[key] = used
            used -= _NOTE_STEP

    def start(self) -> None:
        """Start the thread. It never keeps the process from ending."""
        self._thread = threading.Thread(target=self._run, name="kvferry-store", daemon=True)
        self._thread.start()

    def stop(self, timeout: float, last: Callable[[], None]) -> None:
        """Stop after the step under way, and do `last`; waits `timeout` seconds at most, so that a
        disk that hangs holds nobody. Once only."""
        self._last = last
        self._stopping = True
        self._wake.set()
        if self._thread is None:
            self._end()
        else:
            self._thread.join(timeout)

    def run_until_idle(self) -> None:
        """Do all that is due, and compare everything, in this thread."""
        self._left, self._is_first_pass = set(range(NUM_SHARDS)), True
        self._due = dict.fromkeys(self._due, 0.0)
        while self.step(rests=False):
            pass

    def flush(self) -> None:
        """Write back when records were used."""
        notes, self._notes = self._notes, {}
        if notes and self._changes:
            self._index.touch(list(notes.items()))

    def clean(self) -> None:
        """Give back what dead writers reserved, and remove what they left."""
        if not self._changes:
            return
        for file, key in self._index.writing().items():
            if self._directory.is_locked(file):
                continue
            self._learn([key])
            self._directory.drop(file)  # counted until it is gone
            if self._index.release(file):
                self._observer.count("store_recovered_writes")
        # Somebody is about to reserve room for a new one. On a network mount it may be another
        # machine's, whose locks do not show here.
        files = set(self._directory.list_writing()) - self._index.writing().keys()
        bound = ABANDONED_SECONDS if self._machines_share else _YOUNG_SECONDS
        for file, silent in self._directory.silent_seconds(files).items():
            if silent > bound and (self._machines_share or not self._directory.is_locked(file)):
                self._directory.drop(file)
        self._bound_quarantine()

    def step(self, *, rests: bool = True) -> bool:
        """One bounded piece of all that is due. Whether there is more to do at once."""
        more = False
        with self._turn:
            for job in (self._reopen, self._answer, self._clean, self._flush, self._name):
                more |= self._try(job)
            more |= self._try(self._compare_next, rests)
            more |= self._try(self._follow)
        return more and not self._stopping

    def _try(self, job: Callable[..., bool], *arguments: bool) -> bool:
        try:
            return not self._stopping and job(*arguments)
        except OSError as error:
            self._failed("upkeep", error)
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
        try:
            self.flush()
        except OSError as error:
            self._failed("recency", error)
        self._last()
        self._index.close()

    def _is_due(self, job: str, seconds: float) -> bool:
        now = self._clock()
        if now < self._due[job]:
            return False
        self._due[job] = now + seconds
        return True

    def _reopen(self) -> bool:
        if self._index.open():
            self._left, self._is_first_pass = set(range(NUM_SHARDS)), True
            self._marks = [(0, 0)] * NUM_SHARDS
            self._due = dict.fromkeys(self._due, 0.0)
            self._complete.clear()
            self._known.clear()
            self._seen, self._is_behind = Seen(), True
            self._has_unnamed = True
        return False

    def _follow(self) -> bool:
        self._is_behind |= self._index.changed()
        if not self._is_behind:
            return False
        self._seen, is_all = self._index.follow(self._seen, self._known)
        self._is_behind = not is_all
        if is_all and self._index.totals.is_complete:
            self._complete.set()
        return not is_all

    def _answer(self) -> bool:
        while self._probes:
            for key in self._probes.popleft():
                if not self._known.contains(key) and not self._learn([key]):
                    break
        return False

    def _learn(self, keys: Iterable[ChunkKey]) -> int:
        """Put those of `keys` that the directory has into the index; how many."""
        found = [(key, there) for key in keys if (there := self._directory.find(key)) is not None]
        if found:
            self._index.add([(key, there.num_bytes, there.modified, None) for key, there in found])
        for key, _ in found:
            self._known.add(key)
        self._has_unnamed |= bool(found)
        return len(found)

    def _flush(self) -> bool:
        if self._is_due("flush", FLUSH_SECONDS):
            self.flush()
        return False

    def _clean(self) -> bool:
        if self._is_due("clean", CLEAN_SECONDS):
            self.clean()
        return False

    def _compare_next(self, rests: bool) -> bool:
        """Compare the next shard: each once after opening, then those whose directory changed."""
        if not self._compares and self._index.totals.is_complete:
            return False
        if rests and self._clock() < self._due["compare"]:
            return False
        if not self._left:
            marks = [self._directory.mark_of_shard(shard) for shard in range(NUM_SHARDS)]
            changed = {shard for shard in range(NUM_SHARDS) if marks[shard] != self._marks[shard]}
            if not changed:
                self._due["compare"] = self._clock() + COMPARE_SECONDS
                return False
            # Other directories than those that were compared, or none: nothing known of them holds.
            other = {shard for shard in changed if marks[shard][0] != self._marks[shard][0]}
            next_shard = min(changed, key=lambda s: (s - self._last_shard - 1) % NUM_SHARDS)
            self._left = other or {next_shard}
        shard = self._left.pop()
        started = self._clock()
        mark = self._directory.mark_of_shard(shard)
        settled = self._wall() - mark[1] / 1e9 > _SETTLED_SECONDS
        try:
            self._compare(shard)
        except IndexUnavailable:
            self._left.add(shard)
            raise
        except OSError as error:
            self._failed("upkeep", error)  # the others can be compared
            settled = False
        if self._is_first_pass and not self._left:
            self._left.add(shard)  # again, should this fail
            self.clean()  # which counts quarantine
            self._index.complete()
            self._left.clear()
            self._is_first_pass, self._is_behind = False, True
        self._marks[shard] = mark if settled else (mark[0], -1)
        self._last_shard = shard
        self._keep_below_quota()
        now = self._clock()
        if self._left and not (rests and self._index.totals.is_complete):
            return True
        rest = 0.0 if self._left or self._machines_share else COMPARE_SECONDS
        self._due["compare"] = now + max(rest, _DUTY * (now - started))
        return False

    def _compare(self, shard: int) -> None:
        """Make the index say what is in a shard."""
        there = self._directory.list_shard(shard)
        end = bytes([(shard + 1) << 3]) if shard + 1 < NUM_SHARDS else None
        listed = self._index.keys_between(bytes([shard << 3]), end)
        extra = there - listed
        if extra:
            extra -= set(self._index.writing().values())  # who writes them counts them
        self._observer.count("store_index_corrected", self._learn(extra))
        gone = list(listed - there)
        for start in range(0, len(gone), _MAX_PROBES):
            batch = gone[start : start + _MAX_PROBES]
            out = self._index.forget(batch, "vanished", "", self._is_gone)
            for key, _ in out:
                self._known.discard(key)
            self._observer.count("store_index_corrected", len(out))

    def _is_gone(self, key: ChunkKey) -> bool:
        return self._directory.find(key) is None

    def _keep_below_quota(self) -> None:
        """What others wrote who have another index, or put there by hand, counts as well."""
        if self._max_bytes is not None and self._index.totals.num_bytes > self._max_bytes:
            evicted = self._index.shrink(
                self._max_bytes, self._directory.remove, self._directory.remove_quarantined
            )
            for key, _ in evicted:
                self._known.discard(key)
            if evicted:
                self._observer.count("store_evicted_records", len(evicted))
                self._observer.count("store_evicted_bytes", sum(size for _, size in evicted))

    def _name(self) -> bool:
        """Find out of which namespace the records are that were found in the directory."""
        if not self._has_unnamed or not self._changes:
            return False
        keys = self._index.unnamed(_HEADS_PER_STEP)
        if keys:
            self._index.name([(key, self._namespace(key)) for key in keys])
        self._has_unnamed = len(keys) == _HEADS_PER_STEP
        return False

    def _namespace(self, key: ChunkKey) -> bytes:
        """As the record's head says; empty if it says nothing."""
        try:
            return namespace_of(self._directory.read_head(key)) or b""
        except (OSError, NotARecord):
            return b""

    def _bound_quarantine(self) -> None:
        self._index.compare_quarantine(self._directory.list_quarantine)
        kept = self._index.in_quarantine()
        total = sum(num_bytes for _, num_bytes in kept)
        is_surplus = False
        bound = None if self._max_bytes is None else self._max_bytes // _QUARANTINE_FRACTION
        while len(kept) > 1 and (
            len(kept) > _MAX_QUARANTINE_FILES or (bound is not None and total > bound)
        ):
            name, num_bytes = kept.pop(0)
            self._directory.remove_quarantined(name)
            total -= num_bytes
            is_surplus = True
        if is_surplus:
            self._index.compare_quarantine(self._directory.list_quarantine)

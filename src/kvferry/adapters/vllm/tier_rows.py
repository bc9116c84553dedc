"""The work of `KVFerryTier` without vLLM's types: keeps rows in a store, under the host's keys.

A row is a chunk of the host's memory. The scheduler's thread makes all calls, for each chunk or
step, and does no I/O: it asks memory, submits batches and polls them. I/O threads copy between rows
and record images, and only until the job is given up: no thread touches rows of a reported job.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from kvferry.adapters.row_cache import STORE_SECONDS, RowCache
from kvferry.observe import Observer
from kvferry.record.schema import RecordSchema
from kvferry.store.base import (
    ABSENT,
    ASK_SECONDS,
    ASKED,
    HERE,
    PutResult,
    Store,
)
from kvferry.store.record_client import Batch
from kvferry.types import ChunkKey

DRAIN_SECONDS = 5.0
"""How long a drain waits for rows under way before it gives them up."""

MAX_KNOWN = 1 << 16
"""Stored rows whose removal is watched for, at most; each further row replaces another."""

_WATCHED_PER_STEP = 64


class Finished(NamedTuple):
    """A job that ended. `moved` are the keys of rows that were moved, in the order of the job."""

    job_id: int
    success: bool
    moved: Sequence[bytes]
    seconds: float
    num_bytes: int


@dataclass(slots=True)
class _Transfer:
    """A load or a store that is not reported yet."""

    keys: Sequence[bytes]
    request: str | None
    """The request of a load; None for a store."""
    batch: Batch[Any]
    """With results of `ReadFault` for a load, of `PutResult` for a store."""
    deadline: float
    submitted: float
    is_late: bool = False
    """Whether it was given up. It may still wait for a copy under way."""


@dataclass(slots=True)
class _RequestRows:
    """What is remembered of a request until it ends.

    Attributes:
        keys: keys of records, by the host's keys.
        asked: when the store was first asked about a key that it did not know, by key.
        missed: keys that were not found, or whose load failed. They stay misses: a host that hears
            of a hit again would load it again, for ever.
    """

    keys: dict[bytes, ChunkKey] = field(default_factory=dict)
    asked: dict[bytes, float] = field(default_factory=dict)
    missed: set[bytes] = field(default_factory=set)


class TierRows:
    """The rows of one tier. Runs in: the host's scheduler thread, one call at a time.

    Args:
        store: the store, which `close` closes.
        schema: schema from `RecordSchema.for_rows`.
        rows: the host's memory, `[num_rows, row_bytes]` of bytes.
        load_seconds: time after which rows that have not arrived are reported as failed.
    """

    def __init__(
        self,
        store: Store,
        schema: RecordSchema,
        rows: np.ndarray,
        observer: Observer,
        *,
        io_threads: int = 4,
        load_seconds: float = 5.0,
    ) -> None:
        self._store = store
        self._rows: np.ndarray | None = rows
        self._observer = observer
        self._cache = RowCache(
            store, schema, observer, io_threads=io_threads, threads="kvferry-tier"
        )
        self._load_seconds = load_seconds
        self._jobs: dict[int, _Transfer] = {}
        self._finished: list[Finished] = []
        self._requests: dict[str, _RequestRows] = {}
        self._to_ask: list[ChunkKey] = []
        self._watch = _Watch(store)
        self._stored: list[bytes] = []

    # ---- look-ups

    def lookup(self, key: bytes, request: str) -> bool | None:
        """Whether a row is there. None: the store is still being asked, look up again in the next
        step. A row that is not found `ASK_SECONDS` after the first None is a miss."""
        known = self._requests.setdefault(request, _RequestRows())
        if key in known.missed or self._cache.is_stalled:
            return False
        record = known.keys.get(key)
        if record is None:
            record = known.keys[key] = self._cache.record(key)
        where = self._cache.values.where(record)
        if where is HERE:
            return True
        asked = known.asked.get(key)
        if asked is None:
            known.asked[key] = time.monotonic()
            self._to_ask.append(record)
            if self._cache.values.probe(()) is ASKED:
                return None
        elif time.monotonic() >= asked + ASK_SECONDS:
            self._observer.count("lookup_deadline")
        elif where is ASKED:
            return None
        known.missed.add(key)
        return False

    def flush(self) -> None:
        """End the step's look-ups: ask the store about the keys that it does not know."""
        if self._to_ask:
            self._cache.values.probe(self._to_ask)
            self._to_ask = []

    def forget(self, request: str) -> None:
        """Forget a request, which ended."""
        self._requests.pop(request, None)

    def touch(self, keys: Iterable[bytes]) -> None:
        """Note that these rows were used."""
        self._cache.values.touch([self._cache.record(key) for key in keys])

    # ---- jobs

    def store(self, job_id: int, keys: Collection[bytes], places: Sequence[int]) -> None:
        """Submit a job that stores the rows which the store lacks. If the store takes none now, the
        job fails without I/O."""
        wanted = [
            (key, place)
            for key, place in zip(keys, places, strict=True)
            if self._cache.values.where(self._cache.record(key)) is not HERE
        ]

        def fill(index: int, payload: memoryview) -> None:
            assert self._rows is not None, "closing gives every job up"
            np.copyto(np.frombuffer(payload, np.uint8), self._rows[wanted[index][1]])

        now = time.monotonic()
        deadline = now + STORE_SECONDS
        batch = self._cache.store([self._cache.record(key) for key, _ in wanted], fill, deadline)
        self._jobs[job_id] = _Transfer([key for key, _ in wanted], None, batch, deadline, now)

    def load(
        self, job_id: int, keys: Collection[bytes], places: Sequence[int], request: str
    ) -> None:
        """Submit a job that fills rows. Each is verified before a byte of it is written."""

        def land(index: int, payload: memoryview) -> None:
            # No own reference to the rows: a read that hangs must not keep the host's memory.
            assert self._rows is not None, "closing gives every job up"
            np.copyto(self._rows[places[index]], np.frombuffer(payload, np.uint8))

        now = time.monotonic()
        deadline = now + self._load_seconds
        batch = self._cache.load([self._cache.record(key) for key in keys], land, deadline)
        self._jobs[job_id] = _Transfer(list(keys), request, batch, deadline, now)

    @property
    def num_jobs(self) -> int:
        """Jobs that are not reported yet."""
        return len(self._jobs) + len(self._finished)

    def finished(self) -> list[Finished]:
        """Return the jobs that ended since the last call, each once. Give up jobs beyond their
        deadline."""
        now = time.monotonic()
        for job_id, job in list(self._jobs.items()):
            if not job.batch.poll() and now >= job.deadline:
                self._give_up(job)
            if job.batch.poll():
                del self._jobs[job_id]
                self._finished.append(self._result(job_id, job, now))
        ended, self._finished = self._finished, []
        return ended

    def _give_up(self, job: _Transfer) -> None:
        if job.is_late:
            return
        job.is_late = True
        if job.request is None:
            self._cache.give_up_store(job.batch)
        else:
            self._cache.give_up_load(job.batch)

    def _result(self, job_id: int, job: _Transfer, now: float) -> Finished:
        sound = (None,) if job.request is not None else (PutResult.STORED, PutResult.EXISTS)
        pairs = list(zip(job.keys, job.batch.results, strict=True))
        moved = [key for key, result in pairs if result in sound]
        if job.request is None:
            self._stored += [key for key, result in pairs if result is PutResult.STORED]
        else:
            self.touch(moved)  # not every release of vLLM says what was used
            wrong = [key for key, result in pairs if result not in sound]
            if wrong:
                self._observer.count("loads_failed", len(wrong))
                known = self._requests.get(job.request)
                if known is not None:
                    known.missed.update(wrong)
        return Finished(
            job_id,
            len(moved) == len(pairs),
            moved,
            now - job.submitted,
            len(moved) * self._cache.row_bytes,
        )

    # ---- events

    def take_stored(self) -> list[bytes]:
        """Return the keys of the rows that were stored since the last call. From now on, their
        removal is watched for."""
        stored, self._stored = self._stored, []
        for key in stored:
            self._watch.add(self._cache.record(key), key)
        return stored

    def take_removed(self) -> list[bytes]:
        """Return the keys of watched rows that are gone; each call looks at a few rows."""
        return self._watch.gone()

    # ---- the end

    def drain(self, seconds: float = DRAIN_SECONDS) -> None:
        """Wait until no thread touches the host's rows: up to `seconds` for all jobs, then give up
        the rest and wait for copies under way. `finished` reports all of them."""
        until = time.monotonic() + seconds
        for job in self._jobs.values():
            if not job.batch.wait(max(0.0, until - time.monotonic())):
                self._give_up(job)
        for job in self._jobs.values():
            job.batch.wait(DRAIN_SECONDS)  # a copy under way; memory only

    def begin_epoch(self, namespace: bytes) -> None:
        """Read and write under another namespace from now on, after a `drain`."""
        self._cache.begin_epoch(namespace)
        self._requests.clear()
        self._watch.clear()
        self._stored.clear()

    def close(self, seconds: float) -> None:
        """Give up all jobs, wait up to `seconds` for threads, and close the store."""
        self.drain(0.0)
        self._rows = None
        try:
            self._cache.close(seconds)
        finally:
            self._store.close()


class _Watch:
    """Stored rows, looked at in turn, so that the removal of each is noticed once."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._known: deque[tuple[ChunkKey, bytes]] = deque(maxlen=MAX_KNOWN)

    def add(self, record: ChunkKey, key: bytes) -> None:
        self._known.append((record, key))

    def clear(self) -> None:
        self._known.clear()

    def gone(self) -> list[bytes]:
        """Look at the next few rows, and return the keys of those that are gone."""
        gone = []
        for _ in range(min(len(self._known), _WATCHED_PER_STEP)):
            record, key = self._known.popleft()
            if self._store.where(record) is ABSENT:
                gone.append(key)
            else:
                self._known.append((record, key))
        return gone

"""Reads and writes many whole, verified records at a time on I/O threads. No caller need wait past
its deadline.

The adapter of Transformers calls `get_leading` and `put_all` and waits; SGLang's `PageRecords` and
vLLM's `TierRows` call `get` and `put`. kvferry's own cache of an engine does not use it.

The store reads and writes images only: an image is memory for one record. `get` and `put` copy
between an image and the caller's memory, but never after their batch has ended. `put_all` keeps the
images that it is given. So a store's call that outlives its deadline does no harm.
"""

from __future__ import annotations

import logging
import mmap
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import takewhile
from typing import Generic, NamedTuple, TypeVar

from kvferry.observe import Observer
from kvferry.record.check import ReadFault
from kvferry.record.leaves import joined
from kvferry.record.schema import RecordSchema, RowRange, leaves_of
from kvferry.store.backoff import Backoff
from kvferry.store.base import (
    HERE,
    NO_DEADLINE,
    PutResult,
    Store,
    Value,
)
from kvferry.store.io_pool import IOPool, Job
from kvferry.store.recordio import NOT_FINITE, RecordRead, read_record, seal_record
from kvferry.types import ChunkKey

logger = logging.getLogger(__name__)

R = TypeVar("R", bound=str)

WRITE_BYTES = 16 << 20
"""Most bytes of several records in one write. A single record may be larger."""

STALLED_SECONDS = 30.0
"""How long the store is not read after a read brought nothing by its deadline. A tier's circuit
breaker finds a read that hangs later, and ignores a short one that was late."""

Land = Callable[[int, memoryview], bool]
"""Called on an I/O thread with the place of a record in its batch and its verified image. Returns
True to keep the image; else the client uses it again. Must not block."""

Fill = Callable[[int, memoryview], None]
"""Called on an I/O thread with the place of a record in its batch and an image, whose payload it
fills. Must not block."""


class Batch(Generic[R]):
    """Records that are read or written together, and the result of each.

    Thread-safe. Every record ends once: by its I/O thread, or by `give_up`, whichever is first.

    Attributes:
        results: by place in the batch, set when the record ends; None for a read without a miss.
    """

    __slots__ = ("_changed", "_copying", "_ended", "_given_up", "_left", "results")

    def __init__(self, num_records: int) -> None:
        self.results: list[R | None] = [None] * num_records
        self._ended = bytearray(num_records)
        self._changed = threading.Condition()
        self._copying: set[int] = set()
        self._given_up: R | None = None
        self._left = num_records

    def poll(self) -> bool:
        """Whether every record ended. This batch then no longer touches its caller's memory. Never
        blocks."""
        return not self._left

    def has_ended(self, place: int) -> bool:
        """Whether one record ended. Never blocks."""
        return bool(self._ended[place])

    def wait(self, timeout: float, place: int | None = None) -> bool:
        """Wait up to `timeout` seconds for the record at `place`, or for all; True if ended."""
        with self._changed:
            return self._changed.wait_for(
                lambda: not self._left if place is None else bool(self._ended[place]), timeout
            )

    def give_up(self, result: R) -> None:
        """End every record under way with `result`. A record that is being copied ends after its
        copy. Never blocks for long."""
        with self._changed:
            self._given_up = result
            for place in range(len(self.results)):
                if place not in self._copying:
                    self._end(place, result)

    def copy(self, place: int, copy: Callable[[], None]) -> bool:
        """Run `copy`, which touches the caller's memory, unless the record has ended: then return
        False. Runs in: I/O thread."""
        with self._changed:
            if self._ended[place]:
                return False
            self._copying.add(place)
        try:
            copy()
        finally:
            with self._changed:
                self._copying.discard(place)
                if self._given_up is not None:
                    self._end(place, self._given_up)
        return True

    def end(self, place: int, result: R | None) -> None:
        """End a record, unless it ended before. Runs in: I/O thread."""
        with self._changed:
            self._end(place, result)

    def _end(self, place: int, result: R | None) -> None:
        if not self._ended[place]:
            self.results[place] = result
            self._ended[place] = 1
            self._left -= 1
            self._changed.notify_all()


class _Named(NamedTuple):
    """A record as it was asked for. Has its schema, as the client's may change meanwhile."""

    schema: RecordSchema
    key: ChunkKey
    first_token: int


class RecordClient:
    """Reads records of one schema on `io_threads` threads, and writes them on half as many.

    `get` and `put` never block. `get_leading` and `put_all` block, at most until their deadline;
    only one thread at a time may call these two.

    Args:
        store: not closed here, but by its owner.
        name: start of the threads' names.
    """

    def __init__(
        self,
        store: Store,
        schema: RecordSchema,
        observer: Observer,
        io_threads: int,
        name: str = "kvferry",
    ) -> None:
        self._store = store
        self._schema = schema
        self._values = store.in_namespace(schema.namespace)
        self._observer = observer
        self._readers = IOPool(io_threads, f"{name}-load")
        # Writes take the interpreter's lock more often: more threads would wait for each other.
        self._writers = IOPool(-(-io_threads // 2), f"{name}-save")
        self._spare: deque[memoryview] = deque()  # as many images as were ever used at once
        self._stalls = Backoff(time.monotonic, STALLED_SECONDS)
        self._writes: deque[Batch[PutResult]] = deque()  # of `put_all`, under way
        self._has_told = False  # of values that are not finite
        # Records that this `put_all` stored; writes under way of earlier calls that gave up.
        self._num_stored = self._num_old = 0

    # ---- the state of the store

    @property
    def is_stalled(self) -> bool:
        """Whether a read brought nothing in time less than `STALLED_SECONDS` ago. The callers of
        `get` check this; `get` does not."""
        return not self._stalls.is_over

    def note_stall(self) -> None:
        """Note that a read brought nothing in time: `is_stalled` is True for a while."""
        self._stalls.failed()

    def switch_namespace(self, schema: RecordSchema) -> None:
        """Read and write records of another namespace from now on; sizes stay as they are."""
        self._schema = schema
        self._values = self._store.in_namespace(schema.namespace)

    # ---- reading

    def get(
        self, keys: Sequence[ChunkKey], first_tokens: Sequence[int], land: Land, deadline: float
    ) -> Batch[ReadFault]:
        """Begin to read records. Each one that is right goes to `land`.

        Args:
            first_tokens: positions of the chunks in their prompts.
            deadline: deadline of the store's calls on the monotonic clock. A medium that hangs may
                overrun it: a caller that must not wait calls `give_up`.
        """
        batch: Batch[ReadFault] = Batch(len(keys))
        for place, (key, first_token) in enumerate(zip(keys, first_tokens, strict=True)):
            named = _Named(self._schema, key, first_token)
            read = partial(self._read, batch, place, named, land, deadline)
            self._submit(self._readers, batch, [place], read, ReadFault.IO_ERROR)
        return batch

    def _read(
        self,
        batch: Batch[ReadFault],
        place: int,
        named: _Named,
        land: Land,
        deadline: float,
    ) -> None:
        """Runs in: I/O thread."""
        if batch.has_ended(place):
            return
        image = self._new_image()
        read = RecordRead(
            key=named.key,
            first_token=named.first_token,
            head=image[: named.schema.head_bytes],
            rows=[(rows, image[start:stop]) for rows, start, stop in self._parts()],
            image=image,
        )
        reason = read_record(self._store, named.schema, read, self._observer, deadline)
        if reason is not None:
            self._observer.count(f"miss_{reason}")
        kept = False

        def copy() -> None:
            nonlocal kept
            kept = land(place, image)

        if reason is None:
            batch.copy(place, copy)
        if not kept:
            self._spare.append(image)
        batch.end(place, reason)

    def get_leading(
        self, keys: Sequence[ChunkKey], deadline: float, known: Mapping[ChunkKey, memoryview]
    ) -> list[memoryview]:
        """Return images of the leading chunks of a prompt that are there, right and in time. While
        the store is stalled there are none, not even those that are known.

        Args:
            deadline: end of the wait, on the monotonic clock.
            known: images that need not be read again.
        """
        now = time.monotonic()
        if self.is_stalled:
            self._observer.count("loads_skipped")
            return []
        images = [known[key] for key in takewhile(known.__contains__, keys)]
        self._values.probe(keys[len(images) :])
        if now >= deadline:
            self._observer.count(f"miss_{ReadFault.DEADLINE}")
            return images
        start, is_leading = len(images), True
        while start < len(keys):
            # The first chunk of a run is always read: the index may not know others' records yet.
            stop = start + 1
            while stop < len(keys) and self._store.where(keys[stop]) is HERE:
                stop += 1
            landed, goes_on = self._get_run(keys, start, stop, deadline)
            for image in landed:
                is_leading = is_leading and image is not None
                if is_leading and image is not None:
                    images.append(image)
            if not goes_on:
                break
            start = stop
        return images

    def _get_run(
        self, keys: Sequence[ChunkKey], start: int, stop: int, deadline: float
    ) -> tuple[list[memoryview | None], bool]:
        """Return images of consecutive chunks, None for a wrong one, and whether to read on. A
        chunk that is absent, unreadable or late ends the run. A wrong one does not: so all wrong
        ones are found and discarded now, and the next save replaces them."""
        landed: list[memoryview | None] = [None] * (stop - start)

        def keep(place: int, image: memoryview) -> bool:
            landed[place] = image
            return True

        first_tokens = [chunk * self._schema.chunk_tokens for chunk in range(start, stop)]
        batch = self.get(keys[start:stop], first_tokens, keep, deadline)
        try:
            for place in range(stop - start):
                if not batch.wait(max(0.0, deadline - time.monotonic()), place):
                    self._observer.count(f"miss_{ReadFault.DEADLINE}")
                    if not start + place:
                        self.note_stall()
                    return landed[:place], False
                reason = batch.results[place]
                if reason is not None and not reason.is_corruption:
                    return landed[:place], False
        finally:
            batch.give_up(ReadFault.CANCELLED)
        return landed, True

    # ---- writing

    def put(
        self, keys: Sequence[ChunkKey], first_tokens: Sequence[int], fill: Fill, deadline: float
    ) -> Batch[PutResult]:
        """Begin to hash and store records that `fill` fills. `deadline` is as for `get`."""
        batch: Batch[PutResult] = Batch(len(keys))
        named = [_Named(self._schema, *each) for each in zip(keys, first_tokens, strict=True)]
        share = -(-len(named) // self._writers.num_threads)
        size = min(self._store.values_per_put, WRITE_BYTES // self._schema.record_bytes, share)
        for places in _parts_of(range(len(named)), max(1, size)):
            write = partial(self._copy_and_write, batch, places, named, fill, deadline)
            self._submit(self._writers, batch, places, write, PutResult.FAILED)
        return batch

    def _copy_and_write(
        self,
        batch: Batch[PutResult],
        places: Sequence[int],
        named: Sequence[_Named],
        fill: Fill,
        deadline: float,
    ) -> None:
        """Runs in: I/O thread."""
        filled = {}
        for place in places:
            if not batch.has_ended(place):
                image = self._new_image()
                if self._fill(batch, place, fill, image):
                    filled[place] = named[place], image
                else:
                    self._spare.append(image)
        self._write(batch, filled, deadline)
        self._spare.extend(image for _, image in filled.values())

    def _fill(self, batch: Batch[PutResult], place: int, fill: Fill, image: memoryview) -> bool:
        """Fill an image. False if the record ended: it was given up, or `fill` failed."""
        try:
            return batch.copy(place, partial(fill, place, image))
        except Exception:
            self._observer.count("save_failed")
            logger.exception("storing a record failed")
            batch.end(place, PutResult.FAILED)
            return False

    def _write(
        self,
        batch: Batch[PutResult],
        filled: Mapping[int, tuple[_Named, memoryview]],
        deadline: float,
    ) -> None:
        """Seal and store the images whose values are finite, given by place in the batch. Runs in:
        I/O thread."""
        values: dict[int, Value] = {}
        for place, (record, image) in filled.items():
            digests, are_finite = joined(
                [
                    leaves_of(record.schema.components[rows.component], image[start:stop])
                    for rows, start, stop in self._parts()
                ]
            )
            if are_finite:
                seal_record(record.schema, record.key, record.first_token, digests, image)
                values[place] = record.key, [image]
            else:
                self._refuse(record)
                batch.end(place, PutResult.NOT_FINITE)
        if not values:
            return
        namespace = filled[next(iter(values))][0].schema.namespace  # of all that one call puts
        answers = self._store.in_namespace(namespace).put_all(list(values.values()), deadline)
        for place, (result, _) in zip(values, answers, strict=True):
            self._observer.count(f"put_{result}")
            if result is PutResult.STORED:
                self._observer.count("saved_bytes", len(filled[place][1]))
            batch.end(place, result)

    def _refuse(self, record: _Named) -> None:
        """Note that a record is not stored, because it has NaN or Inf."""
        self._observer.count("save_not_finite")
        if not self._has_told:
            self._has_told = True
            logger.warning("%s, first at token %d", NOT_FINITE, record.first_token)

    def put_all(self, images: Iterable[tuple[ChunkKey, int, memoryview]], deadline: float) -> int:
        """Hash and store chunks, given as key, first token and image. Writes each image's head.
        Takes few images from `images` at a time, and none after the deadline. Returns how many
        chunks were stored before the deadline."""
        self._num_old, self._num_stored = len(self._writes), 0
        limit = self._writers.num_threads
        source = iter(images)
        # First wait for writes that an earlier call gave up on: they still hold their images.
        while self._drained(deadline, limit):
            found = next(source, None)
            if found is None:
                self._drained(deadline, 0)
                break
            key, first_token, image = found
            batch: Batch[PutResult] = Batch(1)
            named = _Named(self._schema, key, first_token)
            write = partial(self._write, batch, {0: (named, image)}, NO_DEADLINE)
            self._submit(self._writers, batch, [0], write, PutResult.FAILED)
            self._writes.append(batch)
        return self._num_stored

    def _drained(self, deadline: float, limit: int) -> bool:
        """Wait until at most `limit` writes are under way; False if the deadline is over."""
        while len(self._writes) > limit:
            if not self._writes[0].wait(max(0.0, deadline - time.monotonic())):
                self._observer.count("save_deadline")
                return False
            batch = self._writes.popleft()
            if self._num_old:
                self._num_old -= 1
            else:
                self._num_stored += batch.results[0] is PutResult.STORED
        return True

    # ---- memory and threads

    def _new_image(self) -> memoryview:
        """Return memory for one record: `head | component 0 | ...`, as in the file. Page-aligned,
        so that direct I/O can fill it."""
        with suppress(IndexError):
            return self._spare.pop()
        return memoryview(mmap.mmap(-1, self._schema.record_bytes))

    def _parts(self) -> Iterator[tuple[RowRange, int, int]]:
        """All rows of each component, and their start and stop in an image."""
        schema = self._schema
        for index, component in enumerate(schema.components):
            start = schema.component_offsets[index]
            yield RowRange(index, 0, component.num_rows), start, start + component.num_bytes

    def _submit(
        self,
        pool: IOPool,
        batch: Batch[R],
        places: Sequence[int],
        work: Callable[[], None],
        failed: R,
    ) -> None:
        def end() -> None:
            for place in places:
                batch.end(place, failed)

        def run(_job: Job[None]) -> None:
            try:
                work()
            except Exception:
                reads = pool is self._readers
                self._observer.count("load_failed" if reads else "save_failed")
                logger.exception("%s a record failed", "reading" if reads else "storing")
            finally:
                end()

        job = pool.submit(run)
        if job.poll():  # no thread for it, or closed
            end()

    def close(self, timeout: float) -> bool:
        """Wait up to `timeout` seconds for reads and writes under way; True if all ended."""
        deadline = time.monotonic() + timeout
        done = self._readers.close(timeout)
        return self._writers.close(max(0.0, deadline - time.monotonic())) and done


def _parts_of(places: range, size: int) -> Iterator[range]:
    return (places[start : start + size] for start in range(0, len(places), size))

"""Records on their way between the layers of a Transformers cache and a store.

A cache layer holds keys and values `[rows, heads, tokens, size]`, padding included; a record
component holds `[layers, heads, tokens, K|V]` of visible tokens. In a cache, latents are the keys
and rotated keys the values.

I/O threads read and write whole records, bounded in time and memory. Every operation has memory of
its own, so one that outlives its deadline harms no other.
"""

# ruff: noqa: ANN401 - cache layers share no typed surface.

from __future__ import annotations

import logging
import mmap
import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from itertools import takewhile
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from kvferry.adapters.transformers.arguments import Prompt, StoredKVConfig
from kvferry.adapters.transformers.host_model import HostModel
from kvferry.blocks.audit import tensors_of
from kvferry.blocks.rows import RankRows
from kvferry.engine.kv_pool import pairs_apart, pairs_together
from kvferry.keys import Namespace
from kvferry.layout.shards import tensor_parallel_shard
from kvferry.observe import Observer
from kvferry.record.check import MissReason
from kvferry.record.schema import RecordSchema
from kvferry.store.base import PutResult, Store
from kvferry.store.io_pool import IOPool, Job
from kvferry.store.recordio import RecordRead, put_record, read_record
from kvferry.types import ChunkKey

if TYPE_CHECKING:
    from kvferry.adapters.transformers.loaded_cache import LoadedCache

logger = logging.getLogger(__name__)

STALLED_SECONDS = 30.0
"""How long a store that brought nothing before the deadline is not asked again."""


def record_layout(model: HostModel, config: StoredKVConfig) -> tuple[Namespace, RankRows]:
    """The namespace of a model's records, and where each layer's rows stand in one."""
    namespace = Namespace.of(model.identity, model.groups, config.chunk_tokens, config.tenant)
    schema = RecordSchema.for_groups(
        namespace=namespace.digest, chunk_tokens=config.chunk_tokens, groups=model.groups
    )
    return namespace, RankRows(model.groups, tensor_parallel_shard(model.groups, 0, 1), schema)


def _new_image(rows: RankRows) -> memoryview:
    """Memory for one record: `head | group 0 | ...`, as in the file. Page-aligned, so that a cold
    file can be read past the page cache."""
    return memoryview(mmap.mmap(-1, rows.slot_bytes))


def first_kept(cache: Any) -> int:
    """The first token that every layer still has: sliding-window layers drop those behind."""
    length = int(cache.get_seq_length())
    return max(int(length - layer.keys.shape[-2]) for layer in cache.layers)


def copy_tokens(
    cache: Any, model: HostModel, row: int, first_token: int, into: Sequence[torch.Tensor]
) -> None:
    """Copy consecutive tokens of one row of a cache, which has them in every layer.

    Args:
        first_token: counted from the row's first, padding included.
        into: by group `[layers, heads, tokens, content]`.
    """
    length = cache.get_seq_length()
    for layer, place in zip(cache.layers, model.layers, strict=True):
        target = into[place.group][place.row]
        start = first_token - (length - layer.keys.shape[-2])
        tokens = slice(start, start + target.shape[-2])
        keys, values = layer.keys[row, :, tokens].detach(), layer.values[row, :, tokens].detach()
        if place.has_pairs_apart:
            values = pairs_together(values)
        target.copy_(torch.cat((keys, values), dim=-1))


def gather(rows: RankRows, cache: Any, model: HostModel, row: int, first_token: int) -> memoryview:
    """A new image of one chunk of a row; see `copy_tokens`."""
    image = _new_image(rows)
    copy_tokens(cache, model, row, first_token, tensors_of(rows, image))
    return image


class StoredRow(NamedTuple):
    """What is stored of one row of a batch."""

    num_padding: int
    images: list[memoryview]
    """Of its leading chunks after the padding. All of them start within the tokens to fill."""


def fill(
    cache: LoadedCache,
    stored: Sequence[StoredRow],
    rows: RankRows,
    model: HostModel,
    num_tokens: int,
) -> None:
    """Put the first tokens of each row into a new cache: zeros for padding, then chunks."""
    tensors = [[tensors_of(rows, image) for image in each.images] for each in stored]
    size = rows.schema.chunk_tokens
    for number, place in enumerate(model.layers):
        shape = (len(stored), place.num_kv_heads, num_tokens, place.key_size + place.value_size)
        both = torch.empty(shape, dtype=place.dtype)
        for row, (num_padding, _) in enumerate(stored):
            both[row, :, :num_padding] = 0
            for chunk, groups in enumerate(tensors[row]):
                start = num_padding + chunk * size
                kept = groups[place.group][place.row][:, : num_tokens - start]
                both[row, :, start : start + size] = kept
        both = both.to(model.layer_devices[number])
        keys, values = both[..., : place.key_size], both[..., place.key_size :]
        if place.has_pairs_apart:
            values = pairs_apart(values)
        cache.fill(number, keys, values)


def cache_of(
    token_ids: list[int], images: Sequence[memoryview], rows: RankRows, model: HostModel
) -> LoadedCache:
    """A new cache of one prompt without padding, with its leading chunks in it."""
    from kvferry.adapters.transformers.loaded_cache import LoadedCache

    cache = LoadedCache([token_ids], [Prompt(0, token_ids)])
    if images:
        num_tokens = len(images) * rows.schema.chunk_tokens
        fill(cache, [StoredRow(0, list(images))], rows, model, num_tokens)
    return cache


class RecordIO:
    """Reads and writes of chunks, each on threads of its own. One calling thread at a time."""

    def __init__(
        self, store: Store, rows: RankRows, config: StoredKVConfig, observer: Observer
    ) -> None:
        self._store = store
        self._rows = rows
        self._config = config
        self._observer = observer
        self._readers = IOPool(config.io_threads, "kvferry-load")
        self._writers = IOPool(config.io_threads, "kvferry-save")
        self._stalled_until = 0.0
        self._writes: deque[Job[PutResult]] = deque()  # under way
        # Of the last call, and the writes under way that an earlier one gave up on.
        self._num_stored = self._num_old = 0

    def read(
        self, keys: Sequence[ChunkKey], deadline: float, known: Mapping[ChunkKey, memoryview]
    ) -> list[memoryview]:
        """The leading chunks of a prompt that are there, right, and in time.

        Args:
            deadline: of the monotonic clock.
            known: images that need not be read again.
        """
        now = time.monotonic()
        if now < self._stalled_until:
            self._observer.count("loads_skipped")
            return []
        images = [known[key] for key in takewhile(known.__contains__, keys)]
        self._store.probe(keys[len(images) :])
        if now >= deadline:
            self._observer.count(f"miss_{MissReason.DEADLINE}")
            return images
        done, is_leading = len(images), True
        under_way: deque[Job[memoryview | MissReason]] = deque()
        try:
            while done < len(keys):
                self._read_ahead(under_way, keys, done, deadline)
                if not under_way[0].wait(max(0.0, deadline - time.monotonic())):
                    self._observer.count(f"miss_{MissReason.DEADLINE}")
                    if not done:
                        self._stalled_until = now + STALLED_SECONDS
                    break
                job = under_way.popleft()
                done += 1
                if job.error is not None:
                    self._observer.count("load_failed")
                    logger.error("reading a chunk failed", exc_info=job.error)
                if isinstance(job.result, memoryview):
                    images += [job.result] if is_leading else []
                elif job.result is not None and job.result.is_corruption:
                    # Others may be wrong, too: found by this load, they are stored by the next
                    # save, which passes over what the store seems to have.
                    is_leading = False
                else:
                    break
        finally:
            for job in under_way:
                job.cancel()
        return images

    def _read_ahead(
        self,
        under_way: deque[Job[memoryview | MissReason]],
        keys: Sequence[ChunkKey],
        done: int,
        deadline: float,
    ) -> None:
        """Keep every thread busy with chunks that the index knows. The next chunk is always read:
        the index may not yet know a record of another process."""
        while len(under_way) < 2 * self._config.io_threads:
            chunk = done + len(under_way)
            if chunk == len(keys) or (under_way and not self._store.contains(keys[chunk])):
                return
            under_way.append(
                self._readers.submit(partial(self._read, keys[chunk], chunk, deadline))
            )

    def _read(
        self, key: ChunkKey, chunk: int, deadline: float, job: Job[memoryview | MissReason]
    ) -> memoryview | MissReason:
        """Runs in: I/O thread."""
        if job.cancelled:
            return MissReason.CANCELLED
        rows, schema, image = self._rows, self._rows.schema, _new_image(self._rows)
        read = RecordRead(
            key=key,
            first_token=chunk * schema.chunk_tokens,
            head=rows.head_of(image),
            rows=rows.rows_of(image, rows.all_groups),
        )
        reason = read_record(self._store, schema, read, self._observer, deadline)
        return image if reason is None else reason

    def write(self, images: Iterable[tuple[ChunkKey, int, memoryview]]) -> int:
        """Hash and store chunks, given as key, first token and payload. Returns how many were
        stored before the deadline. Makes few images at a time, and none after the deadline."""
        deadline = time.monotonic() + self._config.save_timeout_seconds
        self._num_old, self._num_stored = len(self._writes), 0
        limit = self._config.io_threads
        source = iter(images)
        # First wait for writes that an earlier call gave up on: they still hold their images.
        while self._drained(deadline, limit):
            image = next(source, None)
            if image is None:
                self._drained(deadline, 0)
                break
            self._writes.append(self._writers.submit(partial(self._write, *image)))
        return self._num_stored

    def _drained(self, deadline: float, limit: int) -> bool:
        """Wait until at most `limit` writes are under way; False if the deadline is over."""
        while len(self._writes) > limit:
            if not self._writes[0].wait(max(0.0, deadline - time.monotonic())):
                self._observer.count("save_deadline")
                return False
            job = self._writes.popleft()
            if self._num_old:
                self._num_old -= 1
            else:
                self._num_stored += job.result is PutResult.STORED
            if job.error is not None:
                self._observer.count("save_failed")
                logger.error("storing a chunk failed", exc_info=job.error)
        return True

    def _write(
        self, key: ChunkKey, first_token: int, image: memoryview, _job: Job[PutResult]
    ) -> PutResult:
        """Runs in: I/O thread."""
        digests = self._rows.digests(image, {})
        result = put_record(self._store, self._rows.schema, key, first_token, digests, image)
        self._observer.count(f"put_{result}")
        if result is PutResult.STORED:
            self._observer.count("saved_bytes", len(image))
        return result

    def close(self, timeout: float) -> None:
        """Wait up to `timeout` seconds for reads and writes under way."""
        deadline = time.monotonic() + timeout
        self._readers.close(timeout)
        self._writers.close(max(0.0, deadline - time.monotonic()))

"""Finding the stored prefix of a prompt: time per chunk and memory per known chunk, by store size.

The records are empty files, since a look-up opens none. First the store alone is asked for the
keys, which shows the share of its index in a look-up. Then a prompt of 1,000 stored chunks is
looked up through the scheduler role as hosts do. One request finds all chunks stored and none held
in host memory, so that each gets a slot to be fetched into. Another finds all chunks held, and the
scheduler role promises them at once. Each row opens its store afresh, and also times requests that
come while the index still fills.
"""

from __future__ import annotations

import gc
import os
import random
import shutil
import statistics
import time
import tracemalloc
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path

from benchmarks import Options
from benchmarks.host import CHUNK_TOKENS, HostRequest, HostStep, engine_spec
from benchmarks.limits import timed
from benchmarks.report import Row
from kvferry.cache.build import PrefixCache
from kvferry.cache.messages import (
    CacheMeta,
    CachePlan,
    Filled,
    RankReport,
)
from kvferry.contract.messages import WorkerOutput
from kvferry.contract.scheduler import SchedulerRole
from kvferry.keys import ChunkKeys
from kvferry.observe import Observer
from kvferry.store.base import HERE, Store
from kvferry.store.file.directory import record_path
from kvferry.store.file.index import KnownKeys
from kvferry.store.url import open_store
from kvferry.types import ChunkKey, KVGroup

PROMPT_CHUNKS = 1000
EARLY_TOKENS = 16 * CHUNK_TOKENS
"""Length of the requests that come while the index still fills."""

GROUP = KVGroup(num_layers=1, num_kv_heads=1, content_size=2, dtype="bfloat16", block_size=16)


def run(options: Options) -> Sequence[Row]:
    """One row per store size."""
    sizes = (1_000, 2_000) if options.quick else (1_000, 100_000, 1_000_000)
    return [measure(size, options.directory / str(size), options.seed) for size in sizes]


def measure(num_chunks: int, directory: Path, seed: int) -> Row:
    """Fill a store, open it as an engine does, look up."""
    url = f"file://{directory}"
    spec = engine_spec(GROUP)
    # An audit would shorten the hit by a chunk.
    options = {"store": url, "chunk_tokens": CHUNK_TOKENS, "audit": "off"}
    token_ids = list(range(PROMPT_CHUNKS * CHUNK_TOKENS + 1))
    try:
        cache = PrefixCache(spec, options, Observer())
        keys = ChunkKeys(cache.schema.namespace, CHUNK_TOKENS)
        keys.extend(token_ids)
        cache.close()
        create_records(directory, keys.keys, num_chunks, seed)
        rebuild_seconds = rebuild(url, directory)

        started = time.perf_counter()
        cache = PrefixCache(spec, options, Observer())
        open_ms = (time.perf_counter() - started) * 1e3
        scheduler = cache.scheduler()
        worst_ms, fill_seconds = while_filling(cache, scheduler, token_ids)
        find_us_per_chunk = find_us(cache.store, keys.keys)
        us_per_chunk = lookup_us(scheduler, token_ids, None)
        hold(scheduler, token_ids)
        held_us_per_chunk = lookup_us(scheduler, token_ids, PROMPT_CHUNKS * CHUNK_TOKENS)
        scheduler.close()
        cache.close()
    finally:
        shutil.rmtree(directory)
    return {
        "chunks_stored": num_chunks,
        "find_us_per_chunk": find_us_per_chunk,
        "us_per_chunk": us_per_chunk,
        "held_us_per_chunk": held_us_per_chunk,
        "index_bytes_per_chunk": index_bytes(num_chunks, seed) / num_chunks,
        "keys_us_per_chunk": keys_us(token_ids),
        "open_ms": open_ms,
        "index_fill_s": fill_seconds,
        "index_rebuild_s": rebuild_seconds,
        "worst_lookup_ms_while_filling": worst_ms,
    }


def create_records(directory: Path, keys: Iterable[ChunkKey], num_chunks: int, seed: int) -> None:
    """Create `num_chunks` empty files in place of records: under `keys`, the rest at random."""
    rng = random.Random(seed)
    names = [record_path(str(directory), key) for key in keys]
    names.extend(
        record_path(str(directory), ChunkKey(rng.randbytes(32)))
        for _ in range(num_chunks - len(names))
    )
    for shard in {os.path.dirname(name) for name in names}:
        os.makedirs(shard, exist_ok=True)
    for name in names:
        os.close(os.open(name, os.O_CREAT | os.O_WRONLY, 0o600))


def rebuild(url: str, directory: Path) -> float:
    """Delete a store's index; return the seconds that the store takes to rebuild it."""
    for file in directory.glob("index.sqlite3*"):
        file.unlink()
    started = time.perf_counter()
    with open_store(url) as store:
        if not store.wait_indexed(600):
            raise AssertionError("the index is not rebuilt")
        return time.perf_counter() - started


def while_filling(
    cache: PrefixCache, scheduler: SchedulerRole, token_ids: list[int]
) -> tuple[float, float]:
    """Look up prompts until the index is complete; return the slowest look-up in ms, and the
    seconds that the index took."""
    store = cache.store
    worst = 0.0
    begun = time.perf_counter()
    number = 0
    while not store.wait_indexed(0.002):
        prompt = HostRequest(f"early {number}", token_ids[: EARLY_TOKENS + 1], EARLY_TOKENS + 1)
        started = time.perf_counter()
        scheduler.on_new_request(prompt)
        scheduler.lookup(prompt, 0)
        worst = max(worst, time.perf_counter() - started)
        scheduler.request_finished(prompt, ([],))
        number += 1
    return worst * 1e3, time.perf_counter() - begun


def find_us(store: Store, keys: Sequence[ChunkKey]) -> float:
    """Median microseconds to ask the store for one key, all of which it has."""

    def find() -> None:
        if (found := list(map(store.where, keys)).count(HERE)) != len(keys):
            raise AssertionError(f"the store knows {found} of {len(keys)} records")

    return median_us(lambda: timed(find).wall, len(keys))


def lookup_us(scheduler: SchedulerRole, token_ids: list[int], expected: int | None) -> float:
    """Median microseconds per chunk of the first look-up of a request whose keys are known. The
    answer must be `expected` tokens, or None for "ask again"."""

    def look_up() -> float:
        prompt = HostRequest("prompt", token_ids, len(token_ids))
        scheduler.on_new_request(prompt)
        started = time.perf_counter()
        found = scheduler.lookup(prompt, 0).num_tokens
        seconds = time.perf_counter() - started
        scheduler.request_finished(prompt, ([],))
        if found != expected:
            raise AssertionError(f"looked up {found} tokens of a stored prompt, not {expected}")
        return seconds

    return median_us(look_up, PROMPT_CHUNKS)


def hold(scheduler: SchedulerRole, token_ids: list[int]) -> None:
    """Report every chunk of a prompt as fetched, as a worker would."""
    prompt = HostRequest("fetched", token_ids, len(token_ids))
    scheduler.on_new_request(prompt)
    scheduler.lookup(prompt, 0)
    plan = scheduler.build_plan(HostStep())
    if not isinstance(plan, CachePlan) or len(plan.fetches) != PROMPT_CHUNKS:
        raise AssertionError(f"a prompt of {PROMPT_CHUNKS} stored chunks is not fetched")
    filled = tuple(Filled(fetch.chunk.slot) for fetch in plan.fetches)
    report = CacheMeta(reports=(RankReport(rank=0, pool=plan.pool, filled=filled),))
    scheduler.update_output(WorkerOutput(meta=report))
    scheduler.request_finished(prompt, ([],))


def keys_us(token_ids: list[int]) -> float:
    """Median microseconds per chunk of hashing a prompt."""

    def hash_prompt() -> float:
        return timed(partial(ChunkKeys(bytes(32), CHUNK_TOKENS).extend, token_ids)).wall

    return median_us(hash_prompt, PROMPT_CHUNKS)


def median_us(seconds: Callable[[], float], count: int) -> float:
    """Median microseconds per item, of `count` items in a run; the first few runs do not count."""
    return statistics.median([seconds() for _ in range(40)][5:]) / count * 1e6


def index_bytes(num_chunks: int, seed: int) -> int:
    """Return the bytes that an index of random keys takes, keys included."""
    rng = random.Random(seed)
    gc.collect()
    tracemalloc.start()
    try:
        index = KnownKeys()
        for _ in range(num_chunks):
            index.add(ChunkKey(rng.randbytes(32)))
        return tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()

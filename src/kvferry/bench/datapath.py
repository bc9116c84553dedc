"""KV of an 8B model into and out of paged blocks, checksums on, beside the machine's own limits.

32 layers, 8 kv heads, head_dim 128, bf16, blocks of 16 tokens in random order: 128 KiB a token, 16
MiB a chunk. What runs is the connector's own worker role over a `file://` store; each case stands
beside the plainest thing the machine can do with as many bytes, measured in the same rounds.

`gb_per_s` is what the connector does on `--threads` threads by the direct path (read, verify and
copy piece by piece); `in_hand_gb_per_s` is the path through staging (read and verify everything,
then copy), start to end without overlap. `limit_gb_per_s` is one thread of the plain operation,
`limit_all_threads_gb_per_s` as many threads of it as the connector has.
"""

from __future__ import annotations

import os
import random
import shutil
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import numpy as np
import torch

from kvferry.bench.limits import DirectRead, Measured, PlainFiles, drop_from_cache, timed
from kvferry.bench.registry import BenchOptions, Row
from kvferry.connectors.registry import EngineSpec
from kvferry.connectors.shared_storage.build import Parts
from kvferry.connectors.shared_storage.messages import (
    BlockSlice,
    ChunkRef,
    Load,
    Prefetch,
    RankReport,
    Save,
    SharedStorageMeta,
    SharedStoragePlan,
)
from kvferry.connectors.shared_storage.worker import SharedStorageWorker
from kvferry.errors import StoreError
from kvferry.keys import ChunkKeys, ModelIdentity
from kvferry.observe import Counters
from kvferry.store.base import Store
from kvferry.store.file.mounts import file_system
from kvferry.topology import tensor_parallel_shard
from kvferry.types import ChunkKey, KVGroup

CHUNK_TOKENS = 128
BLOCK_SIZE = 16
GROUP = KVGroup(
    num_layers=32, num_kv_heads=8, content_size=256, dtype="bfloat16", block_size=BLOCK_SIZE
)
TOKEN_BYTES = 32 * 8 * 256 * 2
SHARED_MEMORY = Path("/dev/shm")


def run(options: BenchOptions) -> Sequence[Row]:
    """Measure all cases; medians over rounds in which each case and its limit take turns."""
    num_tokens = (64 << 20) // TOKEN_BYTES if options.quick else (1 << 30) // TOKEN_BYTES
    rounds = 2 if options.quick else 5
    rng = random.Random(options.seed)
    kv = PagedTensors(num_tokens, rng)
    rows = []
    if file_system(SHARED_MEMORY) == "tmpfs" and os.access(SHARED_MEMORY, os.W_OK):
        scratch = SHARED_MEMORY / f"kvferry-bench-{os.getpid()}"
        scratch.mkdir()
        try:
            bench = DataPath(kv, scratch, options, rounds)
            rows.append(bench.save("save_tmpfs"))
        finally:
            shutil.rmtree(scratch)
    bench = DataPath(kv, options.directory, options, rounds)
    rows.append(bench.save("save_disk"))
    rows.extend(bench.loads())
    return rows


class PagedTensors:
    """Random KV of `num_tokens` tokens in blocks of random order, and room to load it into."""

    def __init__(self, num_tokens: int, rng: random.Random) -> None:
        self.num_tokens = num_tokens
        num_blocks = num_tokens // BLOCK_SIZE
        shape = (32, num_blocks + 1, 8, BLOCK_SIZE, 256)
        noise = np.random.default_rng(0).integers(0, 2**15, 2**22, dtype=np.int16)
        # Allocated by torch, as an engine does: numpy's alignment would slow every copy down.
        self.tensor = torch.empty(shape, dtype=torch.bfloat16)
        bits = self.tensor.view(torch.int16).numpy().reshape(-1)
        bits[:] = np.resize(noise, bits.size)
        blocks = list(range(1, num_blocks + 1))
        rng.shuffle(blocks)
        self.blocks = tuple(blocks)

    @property
    def num_bytes(self) -> int:
        return self.num_tokens * TOKEN_BYTES


class DataPath:
    """The connector's worker over a store in one directory."""

    def __init__(
        self, kv: PagedTensors, directory: Path, options: BenchOptions, rounds: int
    ) -> None:
        self.kv = kv
        self.directory = directory
        self.threads = options.threads
        self.rounds = rounds
        self.chunks = self.chunks_of(0)
        self.ticket = 0

    def chunks_of(self, number: int) -> tuple[ChunkRef, ...]:
        """The chunks of one of many prompts of equal length."""
        keys = ChunkKeys(number.to_bytes(32, "little"), CHUNK_TOKENS)
        keys.extend(range(self.kv.num_tokens))
        return tuple(ChunkRef(key, index * CHUNK_TOKENS) for index, key in enumerate(keys.keys))

    # -- cases ----------------------------------------------------------------------------------

    def save(self, case: str) -> Row:
        """Blocks → hash → files, beside plain pwritev of as many bytes into new files."""
        ours: list[Measured] = []
        plain: list[float] = []
        parallel: list[float] = []
        one, several = (
            PlainFiles(
                self.directory / "plain", CHUNK_TOKENS * TOKEN_BYTES, self.kv.num_bytes, threads
            )
            for threads in (1, self.threads)
        )
        with self.opened(2 * self.threads) as (worker, store):

            def save(number: int) -> None:
                self.chunks = self.chunks_of(number)
                ours.append(timed(partial(self.save_all, worker)))
                for chunk in self.chunks:
                    store.delete(ChunkKey(chunk.key))

            def write(files: PlainFiles, seconds: list[float], _number: int) -> None:
                seconds.append(timed(files.write).wall)
                files.remove()

            cases: list[Callable[[int], None]] = [
                save,
                partial(write, one, plain),
                partial(write, several, parallel),
            ]
            # One round ahead, so that staging is backed by memory, as in an engine that runs.
            for number in range(self.rounds + 1):
                for work in cases:
                    work(number)
                # Who comes after a deletion gets its pages back from the host: not always the same.
                cases.append(cases.pop(0))
        shutil.rmtree(self.directory / "store")
        return self.row(case, ours[1:], ("pwritev", plain[1:], parallel[1:]))

    def loads(self) -> list[Row]:
        """Files → verify → blocks: from the page cache beside memcpy, from disk beside O_DIRECT."""
        self.chunks = self.chunks_of(0)
        with self.opened(2 * self.threads) as (worker, _store):
            self.save_all(worker)
        files = self.files()
        source = np.ones(self.kv.num_bytes, np.uint8)
        target = np.ones(self.kv.num_bytes, np.uint8)
        one, several = DirectRead(files, 1), DirectRead(files, self.threads)
        copy: list[Measured] = []
        plain: list[Measured] = []
        parallel: list[Measured] = []
        warm: list[Measured] = []
        warm_in_hand: list[Measured] = []
        cold: list[Measured] = []
        cold_in_hand: list[Measured] = []
        with self.opened(self.threads) as (worker, _store):
            cold_cases: list[tuple[list[Measured], Callable[[], None]]] = [
                (plain, one.read),
                (parallel, several.read),
                (cold, partial(self.load_direct, worker)),
                (cold_in_hand, partial(self.load_in_hand, worker)),
            ]
            # The first round touches memory for the first time; an engine does that once.
            for _ in range(self.rounds + 1):
                copy.append(timed(lambda: np.copyto(target, source)))
                warm.append(timed(partial(self.load_direct, worker)))
                warm_in_hand.append(timed(partial(self.load_in_hand, worker)))
            for _ in range(self.rounds):
                for results, work in cold_cases:
                    drop_from_cache(files)
                    results.append(timed(work))
                # Disks have moods, and caches of their own: nobody is always first.
                cold_cases.append(cold_cases.pop(0))
        limit = "O_DIRECT read" if one.works else "buffered read"
        return [
            self.row("load_warm", warm[1:], ("memcpy", walls(copy[1:]), None), warm_in_hand[1:]),
            self.row("load_cold", cold, (limit, walls(plain), walls(parallel)), cold_in_hand),
        ]

    def row(
        self,
        case: str,
        ours: Sequence[Measured],
        limit: tuple[str, Sequence[float], Sequence[float] | None],
        in_hand: Sequence[Measured] = (),
    ) -> Row:
        name, one_thread, all_threads = limit

        def rate(seconds: Sequence[float] | None) -> float | None:
            return self.kv.num_bytes / 1e9 / statistics.median(seconds) if seconds else None

        achieved, bound = rate(walls(ours)), rate(one_thread)
        cpu = statistics.median(run.cpu for run in ours)
        return {
            "case": case,
            "gb_per_s": achieved,
            "limit": f"{name}, 1 thread",
            "limit_gb_per_s": bound,
            "ratio": achieved / bound if achieved and bound else None,
            "cpu_s_per_gb": cpu / (self.kv.num_bytes / 1e9),
            "limit_all_threads_gb_per_s": rate(all_threads),
            "in_hand_gb_per_s": rate(walls(in_hand)),
        }

    def files(self) -> list[Path]:
        return sorted((self.directory / "store" / "records").rglob("*.safetensors"))

    # -- the worker and its plans ----------------------------------------------------------------

    @contextmanager
    def opened(self, io_threads: int) -> Iterator[tuple[SharedStorageWorker, Store]]:
        """A worker role over the directory, closed with its store. It loads on so many threads, and
        saves on half of them."""
        spec = EngineSpec(
            identity=ModelIdentity(weights=bytes(32), config={"model_type": "bench-8b"}),
            groups=(GROUP,),
            shard=tensor_parallel_shard((GROUP,), 0, 1),
            layer_names=None,
        )
        options = {
            "store": f"file://{self.directory / 'store'}",
            "chunk_tokens": CHUNK_TOKENS,
            "io_threads": io_threads,
            "load_timeout_seconds": 600.0,
            "staging_bytes": (len(self.chunks) + 2) * (CHUNK_TOKENS * TOKEN_BYTES + (1 << 16)),
        }
        parts = Parts(spec, options, Counters())
        worker = parts.worker()
        layers = enumerate(self.kv.tensor)
        worker.register_kv_caches({str(index): layer for index, layer in layers})
        try:
            yield worker, parts.store
        finally:
            worker.close()
            parts.store.close()

    def save_all(self, worker: SharedStorageWorker) -> None:
        """Save every chunk, a few ahead of the threads that write, until all are written."""
        waiting = list(reversed(self.chunks))
        outstanding = 0
        ahead = 2 * self.threads
        while waiting or outstanding:
            saves = [
                Save(chunk, (self.blocks_of(chunk.first_token, CHUNK_TOKENS),))
                for chunk in (waiting.pop() for _ in range(min(len(waiting), ahead - outstanding)))
            ]
            outstanding += len(saves)
            worker.begin_step(SharedStoragePlan(saves=tuple(saves)))
            worker.save()
            for saved in (done for report in reports(worker) for done in report.saved):
                outstanding -= 1
                if saved.retry:
                    index = next(i for i, c in enumerate(self.chunks) if c.key == saved.key)
                    waiting.append(self.chunks[index])
                elif not saved.stored:
                    raise StoreError("a chunk was not stored; is the disk full?")
            worker.end_step()
            time.sleep(0.0005)

    def load_direct(self, worker: SharedStorageWorker) -> None:
        self.run_load(worker, None)

    def load_in_hand(self, worker: SharedStorageWorker) -> None:
        self.ticket += 1
        prefetch = Prefetch(self.ticket, self.chunks, 0, self.kv.num_tokens)
        worker.begin_step(SharedStoragePlan(prefetches=(prefetch,)))
        while not any(news.done for report in reports(worker) for news in report.prefetched):
            time.sleep(0.0005)
        worker.end_step()
        self.run_load(worker, self.ticket)

    def run_load(self, worker: SharedStorageWorker, ticket: int | None) -> None:
        num_tokens = self.kv.num_tokens
        blocks = (self.blocks_of(0, num_tokens),)
        load = Load("bench", ticket, self.chunks, 0, num_tokens, blocks)
        worker.begin_step(SharedStoragePlan(loads=(load,)))
        worker.start_load()
        output = worker.collect(())
        worker.end_step()
        if output.invalid_block_ids:
            raise StoreError(f"{len(output.invalid_block_ids)} blocks were not loaded")

    def blocks_of(self, first_token: int, num_tokens: int) -> BlockSlice:
        first = first_token // BLOCK_SIZE
        return BlockSlice(first, self.kv.blocks[first : first + num_tokens // BLOCK_SIZE])


def reports(worker: SharedStorageWorker) -> Iterator[RankReport]:
    """News since the last call."""
    meta = worker.collect(()).meta
    if isinstance(meta, SharedStorageMeta):
        yield from meta.reports


def walls(runs: Sequence[Measured]) -> list[float]:
    """Wall seconds of each run."""
    return [run.wall for run in runs]

"""What verifying fetched records costs the thread that launches an engine's kernels.

A step on a GPU is hundreds of small calls on the host, each of which gives the interpreter's lock
away. The steps here are such calls on a small tensor, of a GPU if there is one. They run alone,
beside threads that verify records of an 8B model, and beside as many threads that hash without ever
holding the lock.
"""

from __future__ import annotations

import hashlib
import os
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch

from benchmarks import Options
from benchmarks.report import Row
from kvferry.record.schema import RecordSchema, leaf_digests
from kvferry.types import KVGroup

LAUNCHES = 300
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
GROUP = KVGroup(num_layers=32, num_kv_heads=8, content_size=256, dtype="bfloat16", block_size=16)


def run(options: Options) -> Sequence[Row]:
    """Return a row per number of threads: milliseconds of a step alone, beside verification and
    beside hashing without the lock, the ratio of the last two, and how fast records are verified.
    The cases take turns."""
    schema = RecordSchema.for_groups(namespace=bytes(32), chunk_tokens=128, groups=(GROUP,))
    [component] = schema.components
    record = memoryview(bytearray(os.urandom(component.num_bytes)))

    def verify() -> int:
        leaf_digests(component, record)
        return len(record)

    def hash_freely() -> int:
        hashlib.blake2b(record[: 1 << 20]).digest()
        return 1 << 20

    torch.set_num_threads(1)
    rounds, seconds = (1, 0.05) if options.quick else (5, 1.0)
    alone = statistics.median(_steps(lambda: 0, 0, seconds)[0] for _ in range(rounds))
    rows: list[Row] = []
    for threads in (1, options.threads, 4):
        verified = [_steps(verify, threads, seconds) for _ in range(rounds)]
        free = [_steps(hash_freely, threads, seconds) for _ in range(rounds)]
        beside = statistics.median(step for step, _ in verified)
        control = statistics.median(step for step, _ in free)
        rows.append(
            {
                "threads": threads,
                "alone_ms": alone * 1e3,
                "verifying_ms": beside * 1e3,
                "hashing_without_lock_ms": control * 1e3,
                "ratio": beside / control,
                "verified_gb_per_s": statistics.median(rate for _, rate in verified) / 1e9,
            }
        )
    return rows


def _steps(work: Callable[[], int], threads: int, seconds: float) -> tuple[float, float]:
    """Return the mean seconds of a step beside `threads` that do `work`, and their bytes/s."""
    x = torch.zeros(8, device=DEVICE)
    done, took = 0, 0.0
    with _working(work, threads) as num_bytes:
        started = time.perf_counter()
        while took < seconds:
            for _ in range(LAUNCHES):
                x.add_(1)
            if DEVICE == "cuda":  # as an engine waits for the tokens of a step
                torch.cuda.synchronize()
            done += 1
            took = time.perf_counter() - started
        return took / done, sum(num_bytes) / took


@contextmanager
def _working(work: Callable[[], int], threads: int) -> Iterator[list[int]]:
    """Repeat `work` in `threads`; yield the bytes that each has done so far."""
    stop, num_bytes = threading.Event(), [0] * threads

    def repeat(index: int) -> None:
        while not stop.is_set():
            num_bytes[index] += work()

    each = [threading.Thread(target=repeat, args=(index,)) for index in range(threads)]
    for thread in each:
        thread.start()
    try:
        yield num_bytes
    finally:
        stop.set()
        for thread in each:
            thread.join()

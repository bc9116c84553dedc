"""What verifying fetched records costs the thread that launches an engine's kernels.

A step on a GPU is hundreds of small calls on the host, each of which gives the interpreter's lock
away. The steps here are such calls on a small tensor, of a GPU if there is one. They run alone,
beside threads that verify a record of an 8B model again and again, and beside as many processes
that do just the same. These compete for cores, caches and memory as the threads do, but each has an
interpreter's lock of its own. So the ratio of the two is what sharing the lock costs.
"""

from __future__ import annotations

import multiprocessing
import os
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from multiprocessing.context import ForkProcess

import torch

from benchmarks import Options
from benchmarks.report import Row
from kvferry.processors import begin_io_thread
from kvferry.record.schema import RecordSchema, default_chunk_tokens, leaf_digests
from kvferry.testing.stores.hooks import wait_until
from kvferry.types import KVGroup

LAUNCHES = 300
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
GROUP = KVGroup(num_layers=32, num_kv_heads=8, content_size=256, dtype="bfloat16", block_size=16)
SHARED = multiprocessing.get_context("fork")
"""Forked processes read the same pages of the record as the threads do."""


def run(options: Options) -> Sequence[Row]:
    """Return a row per number of threads: milliseconds of a step alone, beside verification and
    beside verification without this process's lock, the ratio of the last two, and how fast both
    verify. The two take turns, and the ratio is the median of their pairs."""
    tokens = default_chunk_tokens((GROUP,))
    schema = RecordSchema.for_groups(namespace=bytes(32), chunk_tokens=tokens, groups=(GROUP,))
    [component] = schema.components
    record = memoryview(bytearray(os.urandom(component.num_bytes)))
    verify = partial(leaf_digests, component, record)
    torch.set_num_threads(1)
    rounds, seconds = (1, 0.05) if options.quick else (15, 0.35)
    rows: list[Row] = []
    for threads in (1, options.threads, 4):
        found = [
            [
                _steps(verify, workers, number, seconds)
                for workers, number in (
                    (threading.Thread, 0),
                    (threading.Thread, threads),
                    (ForkProcess, threads),
                )
            ]
            for _ in range(rounds)
        ]
        (alone, _), (beside, rate), (control, its_rate) = (
            map(statistics.median, zip(*case, strict=True)) for case in zip(*found, strict=True)
        )
        rows.append(
            {
                "threads": threads,
                "alone_ms": alone * 1e3,
                "verifying_ms": beside * 1e3,
                "without_lock_ms": control * 1e3,
                "ratio": statistics.median(step / limit for _, (step, _), (limit, _) in found),
                "verified_gb_per_s": rate * len(record) / 1e9,
                "without_lock_gb_per_s": its_rate * len(record) / 1e9,
            }
        )
    return rows


def _steps(
    verify: Callable[[], object],
    workers: type[threading.Thread | ForkProcess],
    number: int,
    seconds: float,
) -> tuple[float, float]:
    """Return the mean seconds of a step beside a number of workers, and their records/s."""
    x = torch.zeros(8, device=DEVICE)
    done, took = 0, 0.0
    with _verifying(verify, workers, number) as verified:
        started, before = time.perf_counter(), sum(verified)
        while took < seconds:
            for _ in range(LAUNCHES):
                x.add_(1)
            if DEVICE == "cuda":  # as an engine waits for the tokens of a step
                torch.cuda.synchronize()
            done += 1
            took = time.perf_counter() - started
        return took / done, (sum(verified) - before) / took


@contextmanager
def _verifying(
    verify: Callable[[], object], workers: type[threading.Thread | ForkProcess], number: int
) -> Iterator[Sequence[int]]:
    """Repeat `verify` in workers; yield how often each has done so."""
    stopped, verified = SHARED.RawValue("b", 0), SHARED.RawArray("q", max(1, number))
    started = os.getpid()

    def repeat(index: int) -> None:
        if workers is threading.Thread:
            begin_io_thread()
        # A process that was forked ends with this one, also if that is killed.
        while not stopped.value and started in (os.getpid(), os.getppid()):
            verify()
            verified[index] += 1

    each = [workers(target=repeat, args=(index,)) for index in range(number)]
    for worker in each:
        worker.start()
    try:
        wait_until(lambda: all(verified[:number]), "every worker verifies")
        yield verified
    finally:
        stopped.value = 1
        for worker in each:
            worker.join()

"""KV of an 8B model into and out of paged blocks, checksums on, beside the machine's own limits.

32 layers, 8 kv heads, head_dim 128, bf16, blocks of 16 tokens in random order: 128 KiB a token, 16
MiB a chunk. What runs is what a host runs: both roles of the connector over a `file://` store, step
by step (`bench.prompts`). Each case stands beside the plainest thing the machine can do with as
many bytes, measured in the same rounds.

A save is from the forward of a prompt until all its chunks are stored. A load is from the first
look-up of a prompt until its KV is in the blocks: fetch, verify, hold, promise, copy. No load finds
its prompt in memory: prompts take turns, and memory holds fewer than there are. `in_hand_gb_per_s`
is the part of it before the promise, from the first look-up until the hit is in hand.

`load_warm` reads the records from the page cache, `load_cold` after they were dropped from it; on a
tmpfs nothing can be dropped, and both read from memory.

`limit_gb_per_s` is one thread of the plain operation, `limit_all_threads_gb_per_s` as many threads
of it as the connector has.
"""

from __future__ import annotations

import itertools
import os
import shutil
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np

from kvferry.bench.limits import (
    DirectRead,
    Measured,
    PlainFiles,
    bring_into_cache,
    drop_from_cache,
    timed,
)
from kvferry.bench.prompts import CHUNK_TOKENS, TOKEN_BYTES, PagedTensors, PromptHost
from kvferry.bench.registry import BenchOptions, Row
from kvferry.errors import StoreError
from kvferry.store.filesystem import file_system

SHARED_MEMORY = Path("/dev/shm")
SAVE_MEMORY_PROMPTS = 4
"""The connector's memory holds so many prompts while it saves them: some of it is for loads."""

LOAD_MEMORY_PROMPTS = 2
"""And so many while it loads them: fewer than there are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """How much is moved."""

    prompt_tokens: int
    num_prompts: int
    """More than `SAVE_MEMORY_PROMPTS`."""
    rounds: int


FULL = Size(prompt_tokens=2048, num_prompts=8, rounds=5)
QUICK = Size(prompt_tokens=512, num_prompts=6, rounds=2)


def run(options: BenchOptions) -> Sequence[Row]:
    """Measure all cases; medians over rounds in which each case and its limit take turns."""
    return measure(options, QUICK if options.quick else FULL)


def measure(options: BenchOptions, size: Size) -> list[Row]:
    """`run` with another size."""
    kv = PagedTensors(size.prompt_tokens, options.seed)
    rows: list[Row] = []
    if file_system(SHARED_MEMORY) == "tmpfs" and os.access(SHARED_MEMORY, os.W_OK):
        scratch = SHARED_MEMORY / f"kvferry-bench-{os.getpid()}"
        scratch.mkdir()
        try:
            rows.append(DataPath(kv, scratch, options.threads, size).save("save_tmpfs"))
        finally:
            shutil.rmtree(scratch)
    path = DataPath(kv, options.directory, options.threads, size)
    rows.append(path.save("save_disk"))
    rows.extend(path.loads())
    return rows


@dataclass(slots=True)
class Case:
    """What one case took, and the plain operation beside it."""

    ours: list[Measured] = field(default_factory=list)
    in_hand: list[Measured] = field(default_factory=list)
    plain: list[Measured] = field(default_factory=list)
    plain_all_threads: list[Measured] = field(default_factory=list)

    def row(self, name: str, limit: str, num_bytes: int) -> Row:
        """Rates of the medians."""

        def rate(runs: Sequence[Measured]) -> float | None:
            gigabytes = num_bytes / 1e9
            return gigabytes / statistics.median(run.wall for run in runs) if runs else None

        achieved, bound = rate(self.ours), rate(self.plain)
        return {
            "case": name,
            "gb_per_s": achieved,
            "limit": f"{limit}, 1 thread",
            "limit_gb_per_s": bound,
            "ratio": achieved / bound if achieved and bound else None,
            "cpu_s_per_gb": statistics.median(run.cpu for run in self.ours) / (num_bytes / 1e9),
            "limit_all_threads_gb_per_s": rate(self.plain_all_threads),
            "in_hand_gb_per_s": rate(self.in_hand),
        }


class DataPath:
    """A host and its store in one directory."""

    def __init__(self, kv: PagedTensors, directory: Path, threads: int, size: Size) -> None:
        self.kv = kv
        self.directory = directory
        self.threads = threads
        self.size = size

    def host(self, *, io_threads: int, memory_prompts: int) -> PromptHost:
        """A host that starts: nothing is in its memory."""
        store = self.directory / "store"
        return PromptHost(self.kv, store, io_threads=io_threads, memory_prompts=memory_prompts)

    def files(self) -> list[Path]:
        """All records."""
        return sorted((self.directory / "store" / "records").rglob("*.safetensors"))

    def save(self, name: str) -> Row:
        """Blocks → hash → files, beside plain pwritev of as many bytes into new files. Leaves the
        records of all prompts."""
        case = Case()
        one, several = (
            PlainFiles(
                self.directory / "plain", CHUNK_TOKENS * TOKEN_BYTES, self.kv.num_bytes, threads
            )
            for threads in (1, self.threads)
        )
        # It saves on half of its threads.
        with self.host(io_threads=2 * self.threads, memory_prompts=SAVE_MEMORY_PROMPTS) as host:

            def save(number: int) -> None:
                case.ours.append(timed(partial(host.save, number)))

            def write(files: PlainFiles, runs: list[Measured], _number: int) -> None:
                runs.append(timed(files.write))
                files.remove()

            cases: list[Callable[[int], None]] = [
                save,
                partial(write, one, case.plain),
                partial(write, several, case.plain_all_threads),
            ]
            for number in range(self.size.num_prompts):
                for work in cases:
                    work(number)
                # Who comes after a deletion gets its pages back from the host: not always the same.
                cases.append(cases.pop(0))
        expected = self.size.num_prompts * self.size.prompt_tokens // CHUNK_TOKENS
        if (stored := len(self.files())) != expected:
            raise StoreError(f"{stored} of {expected} chunks were stored; is the disk full?")
        # The first prompts touch memory for the first time; an engine does that once.
        for runs in (case.ours, case.plain, case.plain_all_threads):
            del runs[:SAVE_MEMORY_PROMPTS]
        return case.row(name, "pwritev", self.kv.num_bytes)

    def loads(self) -> list[Row]:
        """Files → verify → blocks: from the page cache beside memcpy, from disk beside O_DIRECT."""
        files = self.files()
        some = files[: self.size.prompt_tokens // CHUNK_TOKENS]
        source = np.ones(self.kv.num_bytes, np.uint8)
        target = np.ones(self.kv.num_bytes, np.uint8)
        one, several = DirectRead(some, 1), DirectRead(some, self.threads)
        warm, cold = Case(), Case()
        with self.host(io_threads=self.threads, memory_prompts=LOAD_MEMORY_PROMPTS) as host:
            # All of its memory is touched, and so are the files.
            for number in range(self.size.num_prompts):
                host.load(number)
            prompts = itertools.cycle(range(self.size.num_prompts))

            def load(case: Case) -> None:
                loaded = host.load(next(prompts))
                case.ours.append(loaded.all)
                case.in_hand.append(loaded.in_hand)

            cold_cases: list[Callable[[], None]] = [
                lambda: cold.plain.append(timed(one.read)),
                lambda: cold.plain_all_threads.append(timed(several.read)),
                partial(load, cold),
            ]
            for _ in range(self.size.rounds):
                bring_into_cache(files)
                warm.plain.append(timed(lambda: np.copyto(target, source)))
                load(warm)
                for work in cold_cases:
                    drop_from_cache(files)
                    work()
                # Disks have moods, and caches of their own: nobody is always first.
                cold_cases.append(cold_cases.pop(0))
        direct = "O_DIRECT read" if one.works else "buffered read"
        return [
            warm.row("load_warm", "memcpy", self.kv.num_bytes),
            cold.row("load_cold", direct, self.kv.num_bytes),
        ]

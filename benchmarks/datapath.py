"""Saves and loads of an 8B model's KV in paged blocks, checksums on, beside the machine's limits.

The KV has 32 layers, 8 kv heads, head_dim 128 and bf16, in blocks of 16 tokens in random order: 128
KiB a token, 16 MiB a chunk. As in a host, both roles of the connector run over a `file://` store,
step by step. Each case takes turns with the plainest operation of the machine on as many bytes.

A save is timed from the forward of a prompt until all its chunks are stored. A load is timed from
the first look-up of a prompt until its KV is in the blocks. In between, the connector fetches and
verifies the chunks, holds them in its memory, promises the hit to the host, and copies. No load
finds its prompt in memory, since prompts take turns and memory holds fewer than there are.
`in_hand_gb_per_s` is the rate of a load up to the promise.

`load_warm` reads the records from the page cache, `load_cold` after they were dropped from it. On a
tmpfs nothing can be dropped, and both read from memory.

`limit_gb_per_s` is the rate of the plain operation on one thread, `limit_all_threads_gb_per_s` that
on as many threads as the connector has for the case.
"""

from __future__ import annotations

import itertools
import os
import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch

from benchmarks import Options
from benchmarks.host import (
    CHUNK_TOKENS,
    Blocks,
    HostRequest,
    RolesHost,
    Shape,
    fill_with_noise,
    group_of,
    opened_roles,
)
from benchmarks.limits import (
    DirectRead,
    PlainFiles,
    Seconds,
    bring_into_cache,
    drop_from_cache,
    now,
    since,
    timed,
)
from benchmarks.report import Row
from kvferry.contract.spec import Roles
from kvferry.errors import KVError
from kvferry.filesystem import file_system

BLOCK_SIZE = 16
GROUP = group_of(BLOCK_SIZE)
TOKEN_BYTES = GROUP.num_layers * GROUP.num_kv_heads * GROUP.content_size * 2
CHUNK_BYTES = CHUNK_TOKENS * TOKEN_BYTES
TIMEOUT_SECONDS = 600.0
IDLE_SECONDS = 0.001
"""Pause after a step without tokens, as in vLLM."""

SHARED_MEMORY = Path("/dev/shm")
SAVE_MEMORY_PROMPTS = 4
"""Prompts that fit the connector's memory while it saves; some of that memory is for loads."""

LOAD_MEMORY_PROMPTS = 2
"""Prompts that fit the connector's memory while it loads: fewer than there are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """How much is moved."""

    prompt_tokens: int
    num_prompts: int
    """More than `SAVE_MEMORY_PROMPTS`."""
    rounds: int


FULL = Size(prompt_tokens=2048, num_prompts=8, rounds=5)
QUICK = Size(prompt_tokens=128, num_prompts=5, rounds=1)


def run(options: Options) -> Sequence[Row]:
    """Measure all cases; medians over rounds in which each case and its limit take turns."""
    return measure(options, QUICK if options.quick else FULL)


def measure(options: Options, size: Size) -> list[Row]:
    """Do the work of `run` with the given size."""
    kv = PagedPrompt(size.prompt_tokens, options.seed)
    rows: list[Row] = []
    if file_system(SHARED_MEMORY) == "tmpfs" and os.access(SHARED_MEMORY, os.W_OK):
        with TemporaryDirectory(prefix="kvferry-bench-", dir=SHARED_MEMORY) as scratch:
            rows.append(DataPath(kv, Path(scratch), options.threads, size).save("save_tmpfs"))
    path = DataPath(kv, options.directory, options.threads, size)
    rows.append(path.save("save_disk"))
    rows.extend(path.loads())
    return rows


class PagedPrompt:
    """The KV of a prompt in blocks of random order, with one more block for the last token, which
    no hit covers."""

    def __init__(self, num_tokens: int, seed: int) -> None:
        self.num_tokens = num_tokens
        self.num_bytes = num_tokens * TOKEN_BYTES
        shape = Shape(1, BLOCK_SIZE, "HND")
        blocks = Blocks(GROUP, shape, 0, num_tokens + BLOCK_SIZE, random.Random(seed))
        fill_with_noise(blocks.tensors, seed)
        self.blocks = tuple(blocks.ids)
        self.layers = {str(index): layer for index, layer in enumerate(blocks.tensors)}
        self._saved = [layer.clone() for layer in blocks.tensors]

    def clear(self) -> None:
        """Overwrite all KV with zeros."""
        for layer in self.layers.values():
            layer.zero_()

    def is_restored(self) -> bool:
        """Whether the blocks of all tokens hold their first content."""
        ids = list(self.blocks[:-1])
        return all(
            torch.equal(layer[ids].view(torch.int16), saved[ids].view(torch.int16))
            for layer, saved in zip(self.layers.values(), self._saved, strict=True)
        )


@contextmanager
def prompt_host(
    kv: PagedPrompt, store: Path, *, io_threads: int, memory_prompts: int
) -> Iterator[PromptHost]:
    """Open a host over a store in a directory, with empty memory for `memory_prompts` prompts."""
    slot_bytes = CHUNK_BYTES + (1 << 16)
    options = {
        "store": f"file://{store}",
        "audit": "off",
        "chunk_tokens": CHUNK_TOKENS,
        "io_threads": io_threads,
        "load_timeout_seconds": TIMEOUT_SECONDS,
        "memory_bytes": memory_prompts * (kv.num_tokens // CHUNK_TOKENS) * slot_bytes,
    }
    with opened_roles(GROUP, options, kv.layers) as roles:
        roles.wait_ready(TIMEOUT_SECONDS)
        yield PromptHost(roles, kv)


class PromptHost(RolesHost):
    """Saves and loads whole prompts by number, one at a time. Every prompt has the same KV in the
    same blocks."""

    def __init__(self, roles: Roles, kv: PagedPrompt) -> None:
        super().__init__(roles, BLOCK_SIZE)
        self._kv = kv
        self._ids = itertools.count()

    def save(self, number: int) -> None:
        """Run a prompt that is not stored, and step until all its chunks are stored."""
        request = self._request(number)
        if hit := self._look_up(request):
            raise KVError(f"{hit} tokens of a new prompt were found stored")
        self.forward(request, self._kv.blocks, 0)
        while self.scheduler.has_work():
            self._pause()
        self._finish(request)

    def load(self, number: int) -> tuple[Seconds, Seconds]:
        """Run a prompt whose chunks are all stored.

        Returns:
            The time until the hit was promised, and the time until its KV was in the blocks.

        Raises:
            KVError: its KV is not in the blocks.
        """
        self._kv.clear()
        request = self._request(number)
        started = now()
        hit = self._look_up(request)
        in_hand = since(started)
        output = self.forward(request, self._kv.blocks, hit)
        in_blocks = since(started)
        self._finish(request)
        if hit != self._kv.num_tokens or output.invalid_block_ids or not self._kv.is_restored():
            raise KVError(
                f"{hit} of {self._kv.num_tokens} tokens hit, "
                f"{len(output.invalid_block_ids)} blocks were not loaded"
            )
        return in_hand, in_blocks

    def _request(self, number: int) -> HostRequest:
        # One token more than is stored, since the host always computes the last token.
        tokens = [number, *range(self._kv.num_tokens)]
        request = HostRequest(f"{number}.{next(self._ids)}", tokens, len(tokens))
        self.scheduler.on_new_request(request)
        return request

    def _look_up(self, request: HostRequest) -> int:
        deadline = time.monotonic() + TIMEOUT_SECONDS
        while (hit := self.scheduler.lookup(request, 0).num_tokens) is None:
            if time.monotonic() > deadline:
                raise KVError(f"no answer to a look-up in {TIMEOUT_SECONDS} s")
            self._pause()
        return hit

    def _pause(self) -> None:
        self.step([])
        time.sleep(IDLE_SECONDS)

    def _finish(self, request: HostRequest) -> None:
        self.scheduler.request_finished(request, request.block_ids)
        self.step([], {request.request_id})


@dataclass(slots=True)
class Timings:
    """The times of one case, and of the plain operation beside it."""

    ours: list[Seconds] = field(default_factory=list)
    in_hand: list[Seconds] = field(default_factory=list)
    plain: list[Seconds] = field(default_factory=list)
    plain_all_threads: list[Seconds] = field(default_factory=list)

    def row(self, name: str, limit: str, num_bytes: int) -> Row:
        """Return the row of the case, with rates from median times."""
        gigabytes = num_bytes / 1e9

        def rate(runs: Sequence[Seconds]) -> float:
            return gigabytes / statistics.median(run.wall for run in runs)

        achieved, bound = rate(self.ours), rate(self.plain)
        all_threads, in_hand = self.plain_all_threads, self.in_hand
        return {
            "case": name,
            "gb_per_s": achieved,
            "limit": f"{limit}, 1 thread",
            "limit_gb_per_s": bound,
            "ratio": achieved / bound,
            "cpu_s_per_gb": statistics.median(run.cpu for run in self.ours) / gigabytes,
            "limit_all_threads_gb_per_s": rate(all_threads) if all_threads else None,
            "in_hand_gb_per_s": rate(in_hand) if in_hand else None,
        }


class DataPath:
    """Measures saves and loads over a store in one directory."""

    def __init__(self, kv: PagedPrompt, directory: Path, threads: int, size: Size) -> None:
        self.kv = kv
        self.directory = directory
        self.store = directory / "store"
        self.threads = threads
        self.size = size

    def files(self) -> list[Path]:
        """Return the files of all records."""
        return sorted((self.store / "records").rglob("*.safetensors"))

    def save(self, name: str) -> Row:
        """Time saves (blocks → hash → files) beside plain pwritev of as many bytes into new files.
        The records of all prompts stay for `loads`."""
        case = Timings()
        files = PlainFiles(self.directory / "plain", CHUNK_BYTES, self.kv.num_bytes)
        # The connector saves on half of its threads.
        with prompt_host(
            self.kv, self.store, io_threads=2 * self.threads, memory_prompts=SAVE_MEMORY_PROMPTS
        ) as host:

            def write(threads: int, runs: list[Seconds]) -> None:
                runs.append(timed(partial(files.write, threads)))
                files.remove()

            numbers = itertools.count()
            cases: list[Callable[[], None]] = [
                lambda: case.ours.append(timed(partial(host.save, next(numbers)))),
                partial(write, 1, case.plain),
                partial(write, self.threads, case.plain_all_threads),
            ]
            for _ in range(self.size.num_prompts):
                for work in cases:
                    work()
                # The case after a deletion gets the freed pages, so each round rotates the order.
                cases.append(cases.pop(0))
        expected = self.size.num_prompts * self.size.prompt_tokens // CHUNK_TOKENS
        if (stored := len(self.files())) != expected:
            raise KVError(f"{stored} of {expected} chunks were stored; is the disk full?")
        # The first prompts touch memory for the first time; an engine does that once.
        for runs in (case.ours, case.plain, case.plain_all_threads):
            del runs[:SAVE_MEMORY_PROMPTS]
        return case.row(name, "pwritev", self.kv.num_bytes)

    def loads(self) -> list[Row]:
        """Time loads (files → verify → blocks): warm beside memcpy, cold beside O_DIRECT reads."""
        files = self.files()
        some = files[: self.size.prompt_tokens // CHUNK_TOKENS]
        source = np.ones(self.kv.num_bytes, np.uint8)
        target = np.ones(self.kv.num_bytes, np.uint8)
        direct = DirectRead(some)
        warm, cold = Timings(), Timings()
        with prompt_host(
            self.kv, self.store, io_threads=self.threads, memory_prompts=LOAD_MEMORY_PROMPTS
        ) as host:
            # The first loads touch all of the host's memory and all files.
            for number in range(self.size.num_prompts):
                host.load(number)
            prompts = itertools.cycle(range(self.size.num_prompts))

            def load(case: Timings) -> None:
                in_hand, in_blocks = host.load(next(prompts))
                case.in_hand.append(in_hand)
                case.ours.append(in_blocks)

            cold_cases: list[Callable[[], None]] = [
                lambda: cold.plain.append(timed(partial(direct.read, 1))),
                lambda: cold.plain_all_threads.append(timed(partial(direct.read, self.threads))),
                partial(load, cold),
            ]
            for _ in range(self.size.rounds):
                bring_into_cache(files)
                warm.plain.append(timed(lambda: np.copyto(target, source)))
                load(warm)
                for work in cold_cases:
                    drop_from_cache(files)
                    work()
                # A disk changes its speed and has a cache, so each round rotates the order.
                cold_cases.append(cold_cases.pop(0))
        plain_read = "O_DIRECT read" if direct.works else "buffered read"
        return [
            warm.row("load_warm", "memcpy", self.kv.num_bytes),
            cold.row("load_cold", plain_read, self.kv.num_bytes),
        ]

"""The parts `copies` and `stall` of the benchmark `device`: kvferry's copies between the blocks of
a model and pinned slots, as the worker role makes them. On a CPU the same calls copy at once."""

# mypy: allow-untyped-calls

from __future__ import annotations

import mmap
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch

from benchmarks import Options
from benchmarks.host import CHUNK_TOKENS, fill_with_noise, kv_tensors
from benchmarks.report import Row
from kvferry.blocks.copies import BlockCopies, ChunkCopy, DeviceSetup
from kvferry.blocks.rows import RankRows
from kvferry.blocks.tables import BlockSlice
from kvferry.contract.spec import EngineSpec
from kvferry.errors import LayoutError
from kvferry.keys import ModelIdentity
from kvferry.layout.shards import tensor_parallel_shard
from kvferry.record.schema import LEAF_BYTES, RecordSchema
from kvferry.types import KVGroup

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


class Model(NamedTuple):
    name: str
    groups: tuple[KVGroup, ...]
    tp: int = 1
    layout: str = "LBNHC"
    """vLLM's default on GPUs; latents have no axis of heads."""


def _group(layers: int, heads: int, content: int, block: int, window: int | None = None) -> KVGroup:
    return KVGroup(
        num_layers=layers,
        num_kv_heads=heads,
        content_size=content,
        dtype="bfloat16",
        block_size=block,
        window=window,
    )


MODELS = (
    Model("8B", (_group(32, 8, 256, 16),)),
    Model("70B, TP 4", (_group(80, 8, 256, 16),), tp=4),
    Model("MLA", (_group(61, 1, 576, 64),), layout="BND"),
    Model("window", (_group(18, 8, 128, 16), _group(18, 8, 128, 16, window=128))),
)


class Copies:
    """One rank's blocks of so many chunks in random order, and as many slots."""

    def __init__(self, model: Model, num_chunks: int, seed: int) -> None:
        groups = model.groups
        spec = EngineSpec(
            identity=ModelIdentity(weights=bytes(32), config={"model_type": "bench"}),
            groups=groups,
            shard=tensor_parallel_shard(groups, 0, model.tp),
            kv_layout=model.layout,
        )
        names = [[f"{at}.{layer}" for layer in range(g.num_layers)] for at, g in enumerate(groups)]
        parts = [replace(part, layer_names=tuple(names[part.group])) for part in spec.table_parts]
        spec = replace(spec, tables=tuple(parts))
        schema = RecordSchema.for_groups(
            namespace=bytes(32), chunk_tokens=CHUNK_TOKENS, groups=groups
        )
        self.rows = RankRows(groups, spec.shard, schema)
        self.num_bytes = num_chunks * sum(
            len(self.rows.group_rows(memoryview(bytearray(self.rows.slot_bytes)), at))
            for at in range(len(groups))
        )
        self.tensors: dict[str, torch.Tensor] = {}
        source = random.Random(seed)
        tables: list[list[int]] = []
        for at, (group, held) in enumerate(zip(groups, spec.shard.groups, strict=True)):
            num_blocks = num_chunks * CHUNK_TOKENS // group.block_size
            num_heads = held.heads[1] - held.heads[0]
            tensors = kv_tensors(model.layout, group, num_heads, num_blocks + 1, DEVICE)
            fill_with_noise(tensors, seed + at)
            self.tensors |= zip(names[at], tensors, strict=True)
            tables.append(source.sample(range(1, num_blocks + 1), num_blocks))
        slot_bytes = -(-self.rows.slot_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        self._memory = memoryview(mmap.mmap(-1, num_chunks * slot_bytes))
        # Room for all on their way: what is measured is the copies, and not the waits of saves.
        setup = DeviceSetup(num_bytes=lambda _device, _step: num_chunks * 3 // 2 * slot_bytes)
        self.copies = BlockCopies(spec, self.rows, setup)
        began = time.perf_counter()
        self.copies.register(self.tensors, self._memory, self._memory[:slot_bytes])
        self.start_seconds = time.perf_counter() - began
        self.chunks: list[ChunkCopy] = []
        for index in range(num_chunks):
            slices = []
            for group, table in zip(groups, tables, strict=True):
                size = CHUNK_TOKENS // group.block_size
                part = tuple(table[index * size : (index + 1) * size])
                slices.append(BlockSlice(index * size, part))
            first = index * CHUNK_TOKENS
            runs = self.copies.paged.chunk_runs(slices, first)
            slot = self._memory[index * slot_bytes : (index + 1) * slot_bytes]
            self.chunks.append(ChunkCopy(slot, runs, first))

    def save(self, count: int | None = None) -> None:
        chunks = self.chunks[:count]
        if len(list(self.copies.gather(iter(chunks)))) < len(chunks):
            raise LayoutError("saves found no free memory on the device")

    def load(self) -> None:
        for chunk in self.chunks:
            self.copies.scatter(chunk)

    def save_and_load_others(self) -> None:
        """Save one half while the other half is loaded."""
        half = len(self.chunks) // 2
        self.save(half)
        for chunk in self.chunks[half:]:
            self.copies.scatter(chunk)

    def check(self) -> None:
        """Save, lose what the blocks hold, load, and compare."""
        as_numbers = {name: each.view(torch.int16) for name, each in self.tensors.items()}
        before = {name: each.clone() for name, each in as_numbers.items()}
        self.save()
        synchronize()
        for tensor in as_numbers.values():
            tensor[1:] = 0  # the null block stays
        self.load()
        synchronize()
        for name, tensor in as_numbers.items():
            if not torch.equal(tensor, before[name]):
                raise LayoutError(f"{name} is not what was saved")

    def hash_seconds(self) -> float | None:
        """Seconds of the device to hash one chunk; None where it does not."""
        rows = self.copies.paged.new_rows()

        def work() -> None:
            for group, each in rows.items():
                self.copies.paged.leaves_later(group, each, LEAF_BYTES)

        return device_seconds(work) if DEVICE == "cuda" else None

    def close(self) -> None:
        if not self.copies.close(60.0):
            raise LayoutError("copies did not end in 60 s")


def copies(options: Options) -> Sequence[Row]:
    """Return a row per model: GB/s of saves, of loads, and of both at once; their ratio to plain
    copies of as many bytes; and what a chunk costs the engine's thread."""
    num_chunks, rounds = (2, 1) if options.quick else (48, 5)
    return [_measured(_small(model, options), num_chunks, rounds, options.seed) for model in MODELS]


def _small(model: Model, options: Options) -> Model:
    if not options.quick:
        return model
    return model._replace(groups=tuple(replace(group, num_layers=2) for group in model.groups))


def _measured(model: Model, num_chunks: int, rounds: int, seed: int) -> Row:
    case = Copies(model, num_chunks, seed)
    case.check()
    plain = torch.empty(case.num_bytes, dtype=torch.uint8, pin_memory=DEVICE == "cuda")
    there = torch.empty(case.num_bytes, dtype=torch.uint8, device=DEVICE)
    work: dict[str, Callable[[], object]] = {
        "out": case.save,
        "in": case.load,
        "both": case.save_and_load_others,
        "plain out": lambda: plain.copy_(there, non_blocking=True),
        "plain in": lambda: there.copy_(plain, non_blocking=True),
    }
    times = {
        name: [host_and_wall_seconds(each) for _ in range(rounds)] for name, each in work.items()
    }
    wall = {name: statistics.median(w for _, w in each) for name, each in times.items()}
    host = {name: statistics.median(h for h, _ in each) for name, each in times.items()}
    hashing = case.hash_seconds()
    case.close()
    size = case.num_bytes / 1e9
    return {
        "case": model.name,
        "chunk_mb": case.num_bytes / num_chunks / 1e6,
        "out_gb_per_s": size / wall["out"],
        "out_ratio": wall["plain out"] / wall["out"],
        "in_gb_per_s": size / wall["in"],
        "in_ratio": wall["plain in"] / wall["in"],
        "both_gb_per_s": size / wall["both"],
        "hash_gb_per_s": None if hashing is None else size / num_chunks / hashing,
        "out_host_us": host["out"] / num_chunks * 1e6,
        "in_host_us": host["in"] / num_chunks * 1e6,
        "start_s": case.start_seconds,
        "failed": 0,
    }


def stall(options: Options) -> Sequence[Row]:
    """Return a row per number of chunks of an 8B model that a step saves: how long its work on the
    engine's stream takes, which the next forward waits for."""
    counts = (1, 4) if options.quick else (1, 2, 4, 8, 16, 32, 64)
    case = Copies(_small(MODELS[0], options), max(counts), options.seed)
    rows: list[Row] = []
    for count in counts:
        seconds = []
        for _ in range(3):
            seconds.append(device_seconds(lambda count=count: case.save(count)))  # type: ignore[misc]
            synchronize()
        took = statistics.median(seconds[1:])
        moved = case.num_bytes * count / len(case.chunks)
        rows.append(
            {
                "case": f"{count} chunks",
                "stall_us": took * 1e6,
                "gather_gb_per_s": moved / took / 1e9,
                "failed": 0,
            }
        )
    case.close()
    return rows


def synchronize() -> None:
    if DEVICE == "cuda":
        torch.cuda.synchronize()


def host_and_wall_seconds(work: Callable[[], object]) -> tuple[float, float]:
    """How long the call takes, and how long until the device has done all of it."""
    synchronize()
    began = time.perf_counter()
    work()
    called = time.perf_counter()
    synchronize()
    return called - began, time.perf_counter() - began


def device_seconds(work: Callable[[], object]) -> float:
    """How long the work holds the engine's stream. All is submitted before it begins, so that the
    host's calls do not count."""
    if DEVICE != "cuda":
        return host_and_wall_seconds(work)[0]
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    torch.cuda._sleep(100_000_000)  # some 60 ms
    first.record()
    work()
    last.record()
    torch.cuda.synchronize()
    return float(first.elapsed_time(last)) / 1e3

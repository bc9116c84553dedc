"""Reading records that an engine of another shape stored, beside reads that convert nothing.

An engine of one shape stores the KV of an 8B model (32 layers, 8 kv heads, head_dim 128, bf16) or,
in one case, of an MLA model. One rank of an engine of another shape reads it. A read does a
connector's work on a chunk: copy the rank's rows from the record into staging, verify their leaves
(the pieces that have a digest each), and copy the rows into blocks of random order. Records lie in
memory, so that no disk takes part.

The straight read does the same for an engine that stored exactly these rows and whose blocks lie in
memory as the rows do (HND, a block per chunk). The two reads take turns. `ratio` is the time of the
converting read divided by that of the straight one, as the median over rounds; `copy_ratio` is the
same for the copy from staging into blocks alone. One thread works, and its CPU time counts. Before
it measures, the benchmark compares all rows with the stored ones.

On a machine with a GPU, more rows follow. They gather 1,024 tokens from blocks of 16 on the device,
with and without hashing, and copy them to the host; or copy them to the device, with and without
verifying, and scatter them. Their `ratio` is against a plain copy to or from pinned memory.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from operator import truediv

import numpy as np
import torch

from benchmarks import Options
from benchmarks.host import CHUNK_TOKENS, Blocks, Rows, Shape, fill_with_noise, group_of
from benchmarks.limits import timed
from benchmarks.report import Row
from kvferry.errors import LayoutError
from kvferry.record.checksum import CHECKSUM
from kvferry.record.leaves import FLOAT_BITS
from kvferry.record.schema import LEAF_BYTES
from kvferry.types import KVGroup


@dataclass(frozen=True, slots=True)
class Conversion:
    name: str
    writer: Shape
    reader: Shape
    is_mla: bool = False


CASES = (
    Conversion("tp 4 to 2", Shape(4, 128, "HND"), Shape(2, 128, "HND")),
    Conversion("block 16 to 128", Shape(2, 16, "HND"), Shape(2, 128, "HND")),
    Conversion("block 128 to 16", Shape(2, 128, "HND"), Shape(2, 16, "HND")),
    Conversion("NHD to HND", Shape(2, 128, "NHD"), Shape(2, 128, "HND")),
    Conversion("HND to NHD", Shape(2, 128, "HND"), Shape(2, 128, "NHD")),
    Conversion("HND to BLHNC", Shape(2, 128, "HND"), Shape(2, 128, "BLHNC")),
    Conversion("HND to keys and values apart", Shape(2, 128, "HND"), Shape(2, 128, "2BNHD")),
    Conversion("all three", Shape(4, 16, "NHD"), Shape(2, 128, "HND")),
    Conversion("all three, back", Shape(2, 128, "HND"), Shape(4, 16, "NHD")),
    Conversion("all three, to BLNHC", Shape(4, 128, "HND"), Shape(2, 16, "BLNHC")),
    Conversion("mla, block 16 to 64", Shape(4, 16, "BND"), Shape(2, 64, "BND"), is_mla=True),
)


def run(options: Options) -> Sequence[Row]:
    """Measure all cases; medians over rounds."""
    num_tokens, rounds = (CHUNK_TOKENS, 1) if options.quick else (8 * CHUNK_TOKENS, 15)
    rows = [measure(case, num_tokens, rounds, options.seed) for case in CASES]
    for layout in ("HND", "2BNHD") if torch.cuda.is_available() else ():
        rows += device_rows(layout, num_tokens, rounds, options.seed)
    return rows


def measure(case: Conversion, num_tokens: int, rounds: int, seed: int) -> Row:
    """Check and measure one case."""
    rng = random.Random(seed)
    records = stored(case, num_tokens, rng)
    group = group_of(case.reader.block_size, is_mla=case.is_mla)
    converting = Reader(group, case.reader, records, rng)
    rows = np.ascontiguousarray(records[:, :, slice(*converting.heads)])
    group = replace(group, num_kv_heads=rows.shape[2], block_size=CHUNK_TOKENS)
    straight = Reader(group, Shape(1, CHUNK_TOKENS, "HND"), rows, rng)
    for reader in (converting, straight):
        reader.read()
        if not np.array_equal(reader.in_blocks(), rows):
            raise LayoutError(f"{case.name}: what was read is not what was stored")
    work: Mapping[str, Callable[[], None]] = {
        "read": converting.read,
        "straight": straight.read,
        "copy": converting.copy,
        "straight copy": straight.copy,
        "memcpy": straight.memcpy,
    }
    seconds = [{name: timed(call).cpu for name, call in work.items()} for _ in range(rounds)]

    def rate(name: str) -> float:
        return rows.nbytes / 1e9 / statistics.median(each[name] for each in seconds)

    def ratio(name: str, limit: str) -> float:
        return statistics.median(each[name] / each[limit] for each in seconds)

    return {
        "case": case.name,
        "stored_by": str(case.writer),
        "read_by": str(case.reader),
        "gb_per_s": rate("read"),
        "straight_gb_per_s": rate("straight"),
        "ratio": ratio("read", "straight"),
        "copy_gb_per_s": rate("copy"),
        "copy_ratio": ratio("copy", "straight copy"),
        "memcpy_gb_per_s": rate("memcpy"),
    }


def stored(case: Conversion, num_tokens: int, rng: random.Random) -> Rows:
    """Return the records of all chunks, `[chunk, layer, head, token, content]`, as the writer's
    ranks gather them from their blocks."""
    group = group_of(case.writer.block_size, is_mla=case.is_mla)
    num_chunks = num_tokens // CHUNK_TOKENS
    heads, content = group.num_kv_heads, group.content_size
    records = np.zeros((num_chunks, group.num_layers, heads, CHUNK_TOKENS, content), np.int16)
    for rank in range(case.writer.tp):
        blocks = Blocks(group, case.writer, rank, num_tokens, rng)
        fill_with_noise(blocks.tensors, rank)
        rows = blocks.rows(np.empty(blocks.row_bytes, np.uint8))
        for record, runs in zip(records, blocks.runs, strict=True):
            blocks.paged.gather(rows, 0, runs, 0)
            record[:, slice(*blocks.heads)] = rows
    return records


class Reader:
    """The first rank of an engine, which reads its rows of every record into its blocks."""

    def __init__(self, group: KVGroup, shape: Shape, records: Rows, rng: random.Random) -> None:
        self._blocks = Blocks(group, shape, 0, len(records) * CHUNK_TOKENS, rng)
        self.heads = self._blocks.heads
        self._records = records[:, :, slice(*self.heads)]
        # torch aligns memory as well as an engine and a connector do.
        staging = torch.empty((len(records), self._blocks.row_bytes), dtype=torch.uint8)
        self._staging = staging.numpy()
        self._rows = [self._blocks.rows(chunk) for chunk in self._staging]
        for rows, record in zip(self._rows, self._records, strict=True):
            np.copyto(rows, record)
        self._digests = [self._leaf_digests(index) for index in range(len(records))]

    def read(self) -> None:
        """Copy records to staging, verify them, and copy them to blocks, chunk by chunk."""
        for index, rows in enumerate(self._rows):
            np.copyto(rows, self._records[index])
            if self._leaf_digests(index) != self._digests[index]:
                raise LayoutError("a leaf changed in memory")
            self._blocks.paged.scatter(rows, 0, self._blocks.runs[index], 0)

    def copy(self) -> None:
        """Copy from staging to blocks, without the other work of a read."""
        for rows, runs in zip(self._rows, self._blocks.runs, strict=True):
            self._blocks.paged.scatter(rows, 0, runs, 0)

    def memcpy(self) -> None:
        """Copy all rows from the records to staging at once."""
        np.copyto(self._staging, self._records.view(np.uint8).reshape(self._staging.shape))

    def in_blocks(self) -> Rows:
        """Return the rows that the blocks hold, `[chunk, layer, head, token, content]`."""
        found = np.zeros((len(self._rows), *self._rows[0].shape), np.int16)
        for rows, runs in zip(found, self._blocks.runs, strict=True):
            self._blocks.paged.gather(rows, 0, runs, 0)
        return found

    def _leaf_digests(self, index: int) -> list[bytes]:
        rows = self._rows[index]
        row_bytes = rows.shape[2] * rows.shape[3] * rows.itemsize
        chunk = memoryview(self._staging[index])
        return [
            CHECKSUM.of(chunk[start : min(start + LEAF_BYTES, row + row_bytes)])
            for row in range(0, len(chunk), row_bytes)
            for start in range(row, row + row_bytes, LEAF_BYTES)
        ]


class DeviceCopies:
    """Copies between an engine's blocks on a device and rows of all their tokens in pinned memory.
    With the device "cpu" it runs without a GPU, for tests."""

    def __init__(self, shape: Shape, num_tokens: int, seed: int, device: str) -> None:
        group = group_of(shape.block_size)
        blocks = Blocks(group, shape, 0, num_tokens, random.Random(seed), device)
        fill_with_noise(blocks.tensors, seed)
        self._paged = blocks.paged
        self._runs = blocks.paged.runs(blocks.ids, 0, num_tokens)
        rows = (group.num_layers, group.num_kv_heads, num_tokens, group.content_size)
        self.host = torch.empty(rows, dtype=torch.int16, pin_memory=device == "cuda")
        self.rows = torch.empty(rows, dtype=torch.int16, device=device)
        self.gather()
        self.rows.copy_(self.host)
        self._digests = self._hashed(self.rows)

    def gather(self) -> None:
        self._paged.gather(self.host, 0, self._runs, 0)

    def gather_and_hash(self) -> None:
        self._paged.gather(self.rows, 0, self._runs, 0)
        found = self._hashed(self.rows)
        self.host.copy_(self.rows)
        if found != self._digests:
            raise LayoutError("what was gathered has other checksums than before")

    def scatter(self) -> None:
        self._paged.scatter(self.host, 0, self._runs, 0)

    def verify_and_scatter(self) -> None:
        rows = self.host.to(self.rows.device)
        if self._hashed(rows) != self._digests:
            raise LayoutError("what was copied has other checksums than before")
        self._paged.scatter(rows, 0, self._runs, 0)

    def _hashed(self, rows: torch.Tensor) -> bytes | None:
        later = self._paged.digests_later(
            rows, LEAF_BYTES, CHECKSUM.kernel, *FLOAT_BITS["BF16"].words
        )
        if later is None:
            return None
        torch.cuda.current_stream().synchronize()
        return later()[0]


def device_rows(
    layout: str, num_tokens: int, rounds: int, seed: int, *, device: str = "cuda"
) -> list[Row]:
    """Time each copy of `DeviceCopies` in turns with a plain copy of as many bytes."""
    shape = Shape(1, 16, layout)
    copies = DeviceCopies(shape, num_tokens, seed, device)
    host = copies.host
    to_device = partial(copies.rows.copy_, host)
    to_host = partial(host.copy_, copies.rows)
    cases: list[tuple[str, Callable[[], object], Callable[[], object]]] = [
        ("gather to host", copies.gather, to_host),
        ("gather, hash, to host", copies.gather_and_hash, to_host),
        ("from host, scatter", copies.scatter, to_device),
        ("from host, verify, scatter", copies.verify_and_scatter, to_device),
    ]
    rows: list[Row] = []
    for name, work, plain in cases:
        pairs = [(_seconds(work, device), _seconds(plain, device)) for _ in range(rounds + 1)]
        ours, straight = zip(*pairs[1:], strict=True)  # the first pair compiles kernels
        rows.append(
            {
                "case": f"{device}: {name}",
                "read_by": str(shape),
                "gb_per_s": host.nbytes / 1e9 / statistics.median(ours),
                "straight_gb_per_s": host.nbytes / 1e9 / statistics.median(straight),
                "ratio": statistics.median(map(truediv, ours, straight)),
            }
        )
    return rows


def _seconds(work: Callable[[], object], device: str) -> float:
    """Return the wall seconds until everything that `work` starts on the device has ended."""

    def complete() -> None:
        work()
        if device == "cuda":
            torch.cuda.synchronize()

    return timed(complete).wall

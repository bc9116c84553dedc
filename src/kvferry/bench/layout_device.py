"""Between blocks on a GPU and pinned memory of the host, beside a plain copy as large.

An 8B model's KV in blocks of 16 tokens, 1,024 tokens at a time: gathered (and hashed) on the device
and copied to the host; copied to the device, (verified) and scattered. `ratio` is against the plain
copy of as many bytes from or to pinned memory, in turns.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Sequence

import torch

from kvferry.bench.limits import timed
from kvferry.bench.paged import Blocks, Shape, group_of
from kvferry.bench.registry import BenchOptions, Row
from kvferry.errors import LayoutError
from kvferry.layout.device import TorchCopies
from kvferry.record.schema import LEAF_BYTES


def device_rows(options: BenchOptions) -> Sequence[Row]:
    """The cases of this machine's GPU; none without one."""
    if not torch.cuda.is_available():
        return []
    num_tokens = 256 if options.quick else 1024
    rounds = 2 if options.quick else 15
    return [
        row
        for layout in ("HND", "2BNHD")
        for row in DeviceCopies(layout, num_tokens, options.seed).measure(rounds)
    ]


class DeviceCopies:
    """One rank's KV on the device, and rows of all its tokens in pinned memory.

    With "cpu" it shows that it runs, without a GPU.
    """

    def __init__(self, layout: str, num_tokens: int, seed: int, *, device: str = "cuda") -> None:
        group = group_of(16)
        self._device = device
        self._layout = layout
        self._blocks = Blocks(
            group,
            Shape(1, 16, layout),
            0,
            num_tokens,
            random.Random(seed),
            device=device,
            copies=TorchCopies if device == "cpu" else None,
        )
        self._blocks.fill(seed)
        self._paged = self._blocks.paged
        self._runs = self._paged.runs(self._blocks.ids, 0, num_tokens)
        shape = (group.num_layers, group.num_kv_heads, num_tokens, group.content_size)
        self._host = torch.empty(shape, dtype=torch.int16, pin_memory=device == "cuda")
        self._other = torch.empty(shape, dtype=torch.int16, device=device)
        self._paged.gather(self._host, 0, 0, self._runs, 0)
        self._digests = self._paged.digests(self._host, LEAF_BYTES)

    def gather(self) -> None:
        self._paged.gather(self._host, 0, 0, self._runs, 0)

    def gather_and_hash(self) -> None:
        found = self._paged.gather_with_digests(
            self._host, 0, 0, self._runs, 0, leaf_bytes=LEAF_BYTES
        )
        if found != self._digests:
            raise LayoutError("what was gathered has other checksums than before")

    def scatter(self) -> None:
        self._paged.scatter(self._host, 0, 0, self._runs, 0)

    def verify_and_scatter(self) -> None:
        rows = self._host.to(self._device)
        if self._paged.digests(rows, LEAF_BYTES) != self._digests:
            raise LayoutError("what was copied has other checksums than before")
        self._paged.scatter(rows, 0, 0, self._runs, 0)

    def to_host(self) -> None:
        self._host.copy_(self._other)

    def to_device(self) -> None:
        self._other.copy_(self._host)

    def measure(self, rounds: int) -> list[Row]:
        """Rows of all four cases."""
        self.to_device()  # `to_host` brings back what is there
        cases: list[tuple[str, Callable[[], None], Callable[[], None]]] = [
            ("gather to host", self.gather, self.to_host),
            ("gather, hash, to host", self.gather_and_hash, self.to_host),
            ("from host, scatter", self.scatter, self.to_device),
            ("from host, verify, scatter", self.verify_and_scatter, self.to_device),
        ]
        pairs: list[list[tuple[float, float]]] = [[] for _ in cases]
        for number in range(rounds + 1):
            for (_, work, plain), seconds in zip(cases, pairs, strict=True):
                measured = self._seconds(work), self._seconds(plain)
                if number:  # the first round compiles kernels
                    seconds.append(measured)
        return [
            self._row(name, seconds) for (name, _, _), seconds in zip(cases, pairs, strict=True)
        ]

    def _seconds(self, work: Callable[[], None]) -> float:
        def complete() -> None:
            work()
            if self._device == "cuda":
                torch.cuda.synchronize()

        return timed(complete).wall

    def _row(self, name: str, seconds: list[tuple[float, float]]) -> Row:
        gigabytes = self._host.nbytes / 1e9
        ours, plain = zip(*seconds, strict=True)
        return {
            "case": f"{self._device}: {name}",
            "stored_by": None,
            "read_by": f"TP 1, 16, {self._layout}",
            "gb_per_s": gigabytes / statistics.median(ours),
            "straight_gb_per_s": gigabytes / statistics.median(plain),
            "ratio": statistics.median(one / other for one, other in seconds),
            "copy_gb_per_s": None,
            "copy_ratio": None,
            "memcpy_gb_per_s": None,
        }

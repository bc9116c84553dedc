"""kvferry as a tier of vLLM's offloading, beside vLLM's own file tier on the same file system.

The tiers run in turns behind vLLM's manager and its shared memory (`tier_host`), without an engine.
A row is the KV of one chunk in that memory. The time of a store runs from the end of the copy from
the device until the tier has reported every row as stored. The time of a load runs from the first
look-up of its requests until all rows are in memory; loaded rows are then compared byte for byte.
Files are read before each load, so that they are in the page cache. Cases:

- `fs`: vLLM's file tier. Its reads and writes bypass the page cache if the file system allows it.
- `fs, buffered`: the same without O_DIRECT.
- `kvferry`: every row is hashed when it is stored and when it is loaded.
- `kvferry, unchecked`: no hashes, to show what they cost. Users have no such option.

The limits are one memcpy, buffered writes of new files, and buffered reads into one buffer.
"""

from __future__ import annotations

import importlib
import importlib.util
import random
import shutil
import statistics
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple
from unittest.mock import patch

import numpy as np

from benchmarks import Options
from benchmarks.limits import PlainFiles, bring_into_cache, timed
from benchmarks.report import Row
from kvferry.errors import ConfigError
from kvferry.filesystem import file_system
from kvferry.record.checksum import CHECKSUM
from kvferry.record.leaves import Leaves
from kvferry.record.schema import Component
from kvferry.testing.models import make_tiny_model

CASES = ("fs", "fs, buffered", "kvferry", "kvferry, unchecked")
PLACES = {"tmpfs": Path("/dev/shm"), "disk": None}
LOOKED_UP = 1000
"""Rows that one request of a look-up asks for."""

SMALL_ROW = 4096


class Size(NamedTuple):
    row_bytes: int
    num_rows: int
    rounds: int


FULL = (Size(256 << 10, 256, 7), Size(2 << 20, 32, 7), Size(16 << 20, 8, 5))
QUICK = (Size(256 << 10, 4, 1),)


def run(options: Options) -> list[Row]:
    """Return the rows of the table: on tmpfs and on disk, transfers of each size, then look-ups."""
    if importlib.util.find_spec("vllm") is None:
        raise ConfigError(
            "the benchmark tier needs vLLM beside kvferry in one environment; for a CPU, "
            "`make bench NAME=tier` makes one"
        )
    rows: list[Row] = []
    for name, place in PLACES.items():
        if place is not None and file_system(place) != "tmpfs":
            continue
        with TemporaryDirectory(prefix="kvferry-bench-", dir=place or options.directory) as path:
            bench = TierBench(Path(path), options)
            for size in QUICK if options.quick else FULL:
                rows += bench.transfers(name, size)
            rows += bench.lookups(name, 50 if options.quick else LOOKED_UP)
    return rows


class TierBench:
    """All cases in one directory."""

    def __init__(self, directory: Path, options: Options) -> None:
        self._host = importlib.import_module("benchmarks.tier_host")
        engine = importlib.import_module("vllm.engine.arg_utils").EngineArgs
        model = make_tiny_model(directory / "model")
        self._config = engine(model=str(model), skip_tokenizer_init=True).create_engine_config()
        self._directory = directory
        self._options = options

    def transfers(self, place: str, size: Size) -> list[Row]:
        """Time stores and loads of every case in each round; a different case goes first each time.
        Return one row for each case, with rates from medians over rounds."""
        noise = self._noise(size.num_rows, size.row_bytes)
        num_bytes = noise.nbytes
        stores: dict[str, list[float]] = {case: [] for case in CASES}
        loads: dict[str, list[float]] = {case: [] for case in CASES}
        limits: dict[str, list[float]] = {"memcpy": [], "write": [], "read": []}
        plain = self._directory / "plain"
        files = PlainFiles(plain, size.row_bytes, num_bytes)
        target = noise.copy()
        order = list(CASES)
        with ExitStack() as undo:
            hosts = {case: undo.enter_context(self._opened(case, noise)) for case in CASES}
            for turn in range(size.rounds + 1):  # the first touches all memory
                limits["memcpy"].append(timed(partial(np.copyto, target, noise)).wall)
                limits["write"].append(timed(partial(files.write, 1)).wall)
                limits["read"].append(timed(partial(read_all, plain, target.data.cast("B"))).wall)
                files.remove()
                for case in order:
                    with hashed_as(case):
                        stores[case].append(hosts[case].store(batch(turn, size.num_rows)))
                if not turn:
                    continue
                for case in order:
                    bring_into_cache(
                        [f for f in (self._directory / case).rglob("*") if f.is_file()]
                    )
                    wanted = shares(batch(turn - 1, size.num_rows), self._options.threads)
                    with hashed_as(case):
                        loads[case].append(hosts[case].load(wanted))
                order.append(order.pop(0))

        def rate(seconds: Sequence[float]) -> float:
            return num_bytes / 1e9 / statistics.median(seconds)

        own = {case: (rate(loads[case]), rate(stores[case][1:])) for case in CASES}
        best = [max(own[case][index] for case in CASES[:2]) for index in range(2)]
        return [
            {
                "case": case,
                "place": place,
                "row_kib": size.row_bytes >> 10,
                "load_gb_per_s": load,
                "load_ratio": load / best[0],
                "store_gb_per_s": store,
                "store_ratio": store / best[1],
                "memcpy_gb_per_s": rate(limits["memcpy"][1:]),
                "read_gb_per_s": rate(limits["read"][1:]),
                "write_gb_per_s": rate(limits["write"][1:]),
            }
            for case, (load, store) in own.items()
        ]

    def lookups(self, place: str, count: int) -> list[Row]:
        """Time look-ups that hit and that miss; return one row for each tier and answer."""
        noise = self._noise(count, SMALL_ROW)
        rows: list[Row] = []
        for case in ("fs", "kvferry"):
            with self._opened(case, noise) as host:
                host.store(range(count))
                for expected in (True, False):
                    asked = range(count) if expected else range(count, 2 * count)
                    ask = partial(host.look_up, asked, expected=expected)
                    runs = [ask() for _ in range(2 if self._options.quick else 40)][1:]
                    inside, known = (statistics.median(each) for each in zip(*runs, strict=True))
                    rows.append(
                        {
                            "case": f"{case}, {'hits' if expected else 'misses'}",
                            "place": place,
                            "lookup_us_per_chunk": inside / count * 1e6,
                            "known_us_per_chunk": known / count * 1e6,
                        }
                    )
        return rows

    def _noise(self, num_rows: int, row_bytes: int) -> np.ndarray:
        source = random.Random(self._options.seed)
        noise = np.frombuffer(source.randbytes(num_rows * row_bytes), np.uint8)
        return (noise & 0xBF).reshape(num_rows, -1)  # finite, whatever floats the bytes are

    @contextmanager
    def _opened(self, case: str, noise: np.ndarray) -> Iterator[Any]:
        """Open a host over a directory, which is removed afterwards."""
        where = self._directory / case
        if case.startswith("fs"):
            tier = {"type": "fs", "root_dir": str(where)}
        else:
            module = "kvferry.adapters.vllm.tier"
            tier = {"type": "KVFerryTier", "module_path": module, "store": where.as_uri()}
        try:
            with self._host.opened_host(tier, self._config, noise) as host:
                if case == "fs, buffered":
                    host.tier._use_o_direct = False
                yield host
        finally:
            shutil.rmtree(where)


@contextmanager
def hashed_as(case: str) -> Iterator[None]:
    """Hash and compare nothing in the unchecked case. No other case runs at the same time."""
    if not case.endswith("unchecked"):
        yield
        return

    def no_leaves(component: Component, payload: memoryview) -> Leaves:
        num_rows = len(payload) // component.row_bytes
        return Leaves(bytes(CHECKSUM.num_bytes * num_rows * component.leaves_per_row), True)

    with (
        patch("kvferry.store.record_client.leaves_of", no_leaves),
        patch("kvferry.store.recordio.check_rows", lambda *_: True),
    ):
        yield


def batch(turn: int, count: int) -> range:
    """Return the numbers of the rows that a turn stores."""
    return range(turn * count, (turn + 1) * count)


def shares(numbers: range, count: int) -> list[range]:
    """Split row numbers among at most `count` requests."""
    size = -(-len(numbers) // count)
    return [numbers[start : start + size] for start in range(0, len(numbers), size)]


def read_all(directory: Path, buffer: memoryview) -> None:
    for file in directory.iterdir():
        with file.open("rb", buffering=0) as opened:
            opened.readinto(buffer)

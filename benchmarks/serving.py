"""What it costs an engine if peers read its host memory while it prefills.

The embedded engine computes prompts, one after the other, on one thread. Meanwhile another process
reads the chunks of the previous prompt over TCP: not at all, once as the decoder of a handed-over
prompt does, or again and again without a pause, which no decoder does.
"""

from __future__ import annotations

import os
import random
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, cast

from benchmarks import Options
from benchmarks.audit import ONE_TOKEN, SHAPE
from benchmarks.pair import free_ports
from benchmarks.report import Row
from kvferry.cache.deciding.scheduler import CacheScheduler
from kvferry.contract.spec import Roles
from kvferry.engine import LLM
from kvferry.engine.config import EngineConfig
from kvferry.engine.connector import cache_arguments, open_roles
from kvferry.engine.model_config import ModelConfig
from kvferry.errors import KVError
from kvferry.keys import ChunkKeys
from kvferry.observe import Counters
from kvferry.testing.models import make_tiny_model
from kvferry.transfer.auth import read_key
from kvferry.transfer.base import KeyState
from kvferry.transfer.client import PeerClient
from kvferry.types import ChunkKey

CHUNK_TOKENS = 128
CASES = ("not read", "read once", "read without a pause")
_TIMEOUT_SECONDS = 60.0
_MAX_RECORD_BYTES = 32 << 20


def read_for_ever(key_file: str, port: str, namespace: str) -> None:
    """Run the other process: read the records of the keys in each line of stdin into one buffer,
    and print how many bytes they had."""
    client = PeerClient("127.0.0.1", int(port), bytes.fromhex(namespace), read_key(key_file))
    buffer = memoryview(bytearray(_MAX_RECORD_BYTES))
    for line in sys.stdin:
        num_bytes = 0
        for key in line.split():
            deadline = time.monotonic() + _TIMEOUT_SECONDS
            state, size = client.read(ChunkKey(bytes.fromhex(key)), [(0, buffer)], deadline)
            num_bytes += size if state is KeyState.HELD else 0
        print(num_bytes, flush=True)


class Reader:
    """The process that reads records, as the engine's process sees it. A context manager.

    Attributes:
        num_bytes: bytes read so far.
    """

    def __init__(self, key_file: Path, port: int, namespace: bytes) -> None:
        command = [sys.executable, "-m", "benchmarks.serving", str(key_file), f"{port}"]
        root = Path(__file__).parents[1]
        paths = os.pathsep.join([str(root / "src"), str(root), os.environ.get("PYTHONPATH", "")])
        self._process = subprocess.Popen(
            [*command, namespace.hex()],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=os.environ | {"PYTHONPATH": paths},
            text=True,
        )
        self.num_bytes = 0

    def read(self, keys: Sequence[ChunkKey]) -> None:
        """Have the process read the records once. Raises KVError if it read none."""
        asked, said = cast("IO[str]", self._process.stdin), cast("IO[str]", self._process.stdout)
        asked.write(" ".join(key.hex() for key in keys) + "\n")
        asked.flush()
        num_bytes = int(said.readline() or 0)
        if not num_bytes:
            raise KVError("the process that reads records has read none")
        self.num_bytes += num_bytes

    @contextmanager
    def reading(self, keys: Sequence[ChunkKey], case: str) -> Iterator[None]:
        """Have the process read the records while the block runs, as the case says."""
        ends = threading.Event()

        def go_on() -> None:
            while True:
                self.read(keys)
                if ends.is_set() or case == "read once":
                    return

        thread = threading.Thread(target=go_on)
        if case != "not read":
            thread.start()
        yield
        ends.set()
        if case != "not read":
            thread.join()

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, *exc: object) -> None:
        self._process.kill()
        self._process.communicate()


@contextmanager
def _serving(model: Path, options: dict[str, Any]) -> Iterator[tuple[LLM, CacheScheduler]]:
    """Yield an engine with a cache, and the scheduler role, which knows the keys' namespace."""
    config: dict[str, Any] = {"prefix_caching": False, "max_batched_tokens": 4096, "num_threads": 1}
    engine = EngineConfig(**config)
    # Nobody is at the address of its only peer, so what it computes stays in its memory alone.
    arguments = cache_arguments("peer://127.0.0.1:1", options, ModelConfig(model, engine), engine)
    roles: Roles = open_roles(arguments, Counters())
    with LLM(model, roles=roles, **config) as llm:
        yield llm, cast("CacheScheduler", roles.scheduler)


def run(options: Options) -> Sequence[Row]:
    """Return a row for each case: prompt tokens per second, their ratio to the first case, and the
    rate at which the other process read. Cases take turns."""
    num_tokens, num_rounds = (300, 1) if options.quick else (1000, 15)
    shape = {**SHAPE, "num_hidden_layers": 2} if options.quick else SHAPE
    model = make_tiny_model(options.directory / "model", seed=options.seed, **shape)
    key_file = options.directory / "peers.key"
    key_file.touch(0o600)
    key_file.write_bytes(os.urandom(32))
    chance = random.Random(options.seed)
    port, _ = free_ports()
    cache = {
        "audit": "off",
        "chunk_tokens": CHUNK_TOKENS,
        "serve": f"127.0.0.1:{port}?key_file={key_file}",
    }
    seconds: dict[str, list[float]] = {case: [] for case in CASES}
    rates: dict[str, list[float]] = {case: [] for case in CASES}
    with _serving(model, cache) as (llm, scheduler):
        namespace = scheduler.requests.namespace

        def prompt() -> tuple[list[int], list[ChunkKey]]:
            tokens = chance.choices(range(3, SHAPE["vocab_size"]), k=num_tokens)
            keys = ChunkKeys(namespace, CHUNK_TOKENS)
            keys.extend(tokens)
            return tokens, list(keys.keys)

        with Reader(key_file, port, namespace) as reader:
            _, before = _compute(llm, prompt())
            order = list(CASES)
            for _ in range(num_rounds):
                for case in order:
                    num_bytes = reader.num_bytes
                    with reader.reading(before, case):
                        took, before = _compute(llm, prompt())
                    seconds[case].append(took)
                    rates[case].append((reader.num_bytes - num_bytes) / took / 1e9)
                order.append(order.pop(0))
    alone = statistics.median(seconds[CASES[0]])
    return [
        {
            "case": case,
            "tokens_per_s": num_tokens / statistics.median(seconds[case]),
            "ratio": alone / statistics.median(seconds[case]),
            "read_gb_per_s": statistics.median(rates[case]),
        }
        for case in CASES
    ]


def _compute(llm: LLM, work: tuple[list[int], list[ChunkKey]]) -> tuple[float, list[ChunkKey]]:
    """Compute a prompt. Return the seconds until its chunks are sealed, and their keys."""
    tokens, keys = work
    started = time.perf_counter()
    llm.generate([tokens], ONE_TOKEN)
    if not llm.drain(_TIMEOUT_SECONDS):
        raise KVError("the engine does not seal what it computed")
    return time.perf_counter() - started, keys


if __name__ == "__main__":
    read_for_ever(*sys.argv[1:])

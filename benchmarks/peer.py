"""Reads of records from another process's memory over TCP, beside a plain socket and memcpy.

The other process serves records of one size. Each round runs these cases, one after the other:

- `stream`: a plain socket that the other process fills without a pause.
- `asked`: a plain socket on which each record is asked for, as a store asks.
- `transport`: our transport.
- `verified`, `verified_all`: reads that verify each record into its slot, on one or more threads.
- `memcpy`: a copy of as many bytes in memory.
- `nixl`: NIXL, if it is installed (`nixl_reads`).

All plain reads are `recv_into` with MSG_WAITALL.
"""

from __future__ import annotations

import os
import random
import secrets
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from itertools import cycle
from pathlib import Path

from benchmarks import Options
from benchmarks.limits import Seconds, timed
from benchmarks.nixl_reads import IS_INSTALLED, NixlReads, offer
from benchmarks.report import Row
from kvferry.errors import KVError
from kvferry.observe import Observer
from kvferry.record.check import ReadFault
from kvferry.record.schema import RecordSchema, RowRange, leaf_digests
from kvferry.store.kind import Opening
from kvferry.store.memory import MemoryStore
from kvferry.store.recordio import RecordRead, read_record
from kvferry.store.servers.peer import PeerStore
from kvferry.transfer.auth import read_key
from kvferry.transfer.base import KeyState
from kvferry.transfer.client import PeerClient
from kvferry.transfer.server import Listen, PeerServer
from kvferry.types import ChunkKey, KVGroup

SPACE = bytes(32)
NUM_RECORDS = 16
SIZES = (16 << 10, 256 << 10, 2 << 20)
"""Payload bytes of a record."""
TIMEOUT_SECONDS = 60.0
_ASK = b"?" * 64


def schema_of(payload_bytes: int) -> RecordSchema:
    """Return the schema of records with one layer of one head per 64 KiB, the size of a leaf."""
    rows = max(1, payload_bytes >> 16)
    content = payload_bytes // rows // (128 * 2)
    group = KVGroup(
        num_layers=rows, num_kv_heads=1, content_size=content, dtype="bfloat16", block_size=16
    )
    return RecordSchema.for_groups(namespace=SPACE, chunk_tokens=128, groups=(group,))


def key_of(number: int) -> ChunkKey:
    return ChunkKey(number.to_bytes(32, "little"))


def record_of(schema: RecordSchema, number: int, seed: int) -> bytes:
    payload = random.Random(f"{seed} {number}").randbytes(schema.payload_bytes)
    table = leaf_digests(schema.components[0], memoryview(payload))
    return schema.encode_head(key_of(number), 0, table) + payload


def serve(key_file: str, payload_bytes: int, seed: int) -> None:
    """Run the other process. It prints the ports of the peer, of the two plain sockets (asked, then
    flood) and of NIXL, and serves until its stdin ends."""
    schema, memory = schema_of(payload_bytes), MemoryStore()
    records = [record_of(schema, number, seed) for number in range(NUM_RECORDS)]
    for number, record in enumerate(records):
        memory.put(key_of(number), [record])
    flood, asked = (socket.create_server(("127.0.0.1", 0)) for _ in range(2))

    def answer() -> None:
        stream, _ = asked.accept()
        stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for record in cycle(records):  # in turn, as the reader asks
            if not stream.recv(len(_ASK), socket.MSG_WAITALL):
                return
            stream.sendall(record)

    def flow() -> None:
        while True:  # each run of the case connects anew
            stream, _ = flood.accept()
            with stream, suppress(OSError):
                for record in cycle(records):
                    stream.sendall(record)

    for work in (answer, flow):
        threading.Thread(target=work, daemon=True).start()
    with PeerServer(memory, lambda: SPACE, Listen(key_file=key_file)) as server:
        ports = [server.address[1], asked.getsockname()[1], flood.getsockname()[1]]
        print(*ports, offer(records) if IS_INSTALLED else 0, flush=True)
        sys.stdin.read()


@contextmanager
def served(directory: Path, payload_bytes: int, seed: int) -> Iterator[tuple[Path, list[int]]]:
    """Start the other process; yield its key file and ports."""
    key_file = directory / "peers.key"
    key_file.touch(0o600)
    key_file.write_text(secrets.token_hex(32))
    command = [
        sys.executable,
        "-m",
        "benchmarks.peer",
        str(key_file),
        f"{payload_bytes}",
        f"{seed}",
    ]
    root = Path(__file__).parents[1]
    paths = os.pathsep.join([str(root / "src"), str(root), os.environ.get("PYTHONPATH", "")])
    process = subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": paths},
    )
    with process:
        try:
            assert process.stdout is not None
            ports = process.stdout.readline().split()
            if len(ports) != 4:
                raise KVError("the process that serves records did not start")
            yield key_file, list(map(int, ports))
        finally:
            process.kill()


class Reads:
    """The ways to read `count` records into this process; all of them fill the same slots."""

    def __init__(
        self, key_file: Path, ports: Sequence[int], schema: RecordSchema, count: int, threads: int
    ) -> None:
        self.schema = schema
        self.count = count
        self._slots = [memoryview(bytearray(schema.record_bytes)) for _ in range(NUM_RECORDS)]
        self._source = bytes(schema.record_bytes)
        self._flood_port = ports[2]
        self._asked = socket.create_connection(("127.0.0.1", ports[1]))
        self._asked.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.client = PeerClient("127.0.0.1", ports[0], SPACE, read_key(key_file))
        self.store = PeerStore(self.client, Opening(index=False))
        self._pool = ThreadPoolExecutor(threads)
        self._nixl = NixlReads(ports[3], self._slots) if ports[3] else None

    def close(self) -> None:
        self._pool.shutdown()
        self._asked.close()
        self.store.close()
        if self._nixl is not None:
            self._nixl.close()

    def plain_stream(self) -> None:
        with socket.create_connection(("127.0.0.1", self._flood_port)) as stream:
            for number in range(self.count):
                stream.recv_into(self._slots[number % NUM_RECORDS], 0, socket.MSG_WAITALL)

    def plain_asked(self) -> None:
        for number in range(self.count):
            self._asked.sendall(_ASK)
            self._asked.recv_into(self._slots[number % NUM_RECORDS], 0, socket.MSG_WAITALL)

    def transport(self) -> None:
        deadline = time.monotonic() + TIMEOUT_SECONDS
        for number in range(self.count):
            index = number % NUM_RECORDS
            found = self.client.read(key_of(index), [(0, self._slots[index])], deadline)
            if found != (KeyState.HELD, self.schema.record_bytes):
                raise KVError("a record was not served")

    def verified(self, indexes: Sequence[int] = range(NUM_RECORDS), count: int = 0) -> None:
        for number in range(count or self.count):
            index = indexes[number % len(indexes)]
            slot = self._slots[index]
            head = self.schema.head_bytes
            rows = RowRange(0, 0, self.schema.components[0].num_rows)
            read = RecordRead(
                key=key_of(index), first_token=0, head=slot[:head], rows=[(rows, slot[head:])]
            )
            deadline = time.monotonic() + TIMEOUT_SECONDS
            missed: ReadFault | None = read_record(
                self.store, self.schema, read, Observer(), deadline
            )
            if missed is not None:
                raise KVError(f"a record was not served: {missed}")

    def verified_by_all(self, threads: int) -> None:
        shares = [range(NUM_RECORDS)[start::threads] for start in range(threads)]
        list(
            self._pool.map(
                lambda share: self.verified(share, max(1, self.count // threads)), shares
            )
        )

    def nixl(self) -> None:
        assert self._nixl is not None
        self._nixl.read(self.count)

    def memcpy(self) -> None:
        for number in range(self.count):
            self._slots[number % NUM_RECORDS][:] = self._source


def measure(options: Options, payload_bytes: int) -> Row:
    """Measure one record size. Each round runs every case once and starts with another one."""
    schema = schema_of(payload_bytes)
    num_rounds = 1 if options.quick else 9
    num_bytes = (1 << 20) if options.quick else (128 << 20)
    count = max(4, min(4000, num_bytes // payload_bytes))
    with served(options.directory, payload_bytes, options.seed) as (key_file, ports):
        reads = Reads(key_file, ports, schema, count, options.threads)
        cases: dict[str, Callable[[], None]] = {
            "stream": reads.plain_stream,
            "asked": reads.plain_asked,
            "transport": reads.transport,
            "verified": reads.verified,
            "verified_all": partial(reads.verified_by_all, options.threads),
            "memcpy": reads.memcpy,
        }
        if IS_INSTALLED:
            cases["nixl"] = reads.nixl
        runs: dict[str, list[Seconds]] = {name: [] for name in cases}
        order = list(cases)
        try:
            for _ in range(num_rounds + 1):
                for name in order:
                    runs[name].append(timed(cases[name]))
                order.append(order.pop(0))
        finally:
            reads.close()
    (options.directory / "peers.key").unlink()
    gigabytes = count * schema.record_bytes / 1e9

    def rate(name: str) -> float:
        # The first round touches all memory for the first time.
        return gigabytes / statistics.median(run.wall for run in runs[name][1:])

    return {
        "record_kib": payload_bytes >> 10,
        "transport_gb_per_s": rate("transport"),
        "asked_gb_per_s": rate("asked"),
        "ratio": rate("transport") / rate("asked"),
        "stream_gb_per_s": rate("stream"),
        "stream_ratio": rate("transport") / rate("stream"),
        "verified_gb_per_s": rate("verified"),
        "verified_ratio": rate("verified") / rate("asked"),
        "verified_all_threads_gb_per_s": rate("verified_all"),
        "memcpy_gb_per_s": rate("memcpy"),
    } | ({"nixl_gb_per_s": rate("nixl")} if IS_INSTALLED else {})


def run(options: Options) -> list[Row]:
    return [measure(options, size) for size in SIZES]


if __name__ == "__main__":
    serve(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))

"""Stores beside the plain clients of their servers, in one run.

Each value has the size of a small model's record. `read_gbps` is a read into given memory;
`verified_gbps` also checks every checksum, as an engine does. The plain clients are redis-py,
obstore, Mooncake's own client and Python's file calls; each of their values ends in a buffer, too.
"""

from __future__ import annotations

import importlib
import os
import statistics
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from benchmarks import Options
from benchmarks.report import Row
from kvferry.errors import ConfigError
from kvferry.observe import Observer
from kvferry.record.schema import RecordSchema, RowRange, leaf_digests
from kvferry.store.base import PutResult, Store, Where
from kvferry.store.kind import StoreUrl
from kvferry.store.recordio import RecordRead, put_record, read_record
from kvferry.store.servers.mooncake import own_address
from kvferry.store.servers.valkey import Login
from kvferry.store.url import open_store, parse_store_url
from kvferry.types import ChunkKey, KVGroup

CHUNK_TOKENS = 128
GROUP = KVGroup(num_layers=16, num_kv_heads=4, content_size=128, dtype="bfloat16", block_size=16)
"""A KV group whose records have 2 MiB."""

ASK_SECONDS = 10.0
"""How long one answer of a store may take."""

MOONCAKE_BYTES = 256 << 20
"""Buffer of Mooncake's plain client for values in transit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plain:
    """The calls of a plain client: put, get into a buffer, delete, and close."""

    put: Callable[[str, bytes], object]
    get: Callable[[str, memoryview], object]
    delete: Callable[[str], object]
    close: Callable[[], object] = lambda: None


class Records:
    """The records that are written and read: random rows under random keys of this run."""

    def __init__(self, count: int) -> None:
        self.schema = RecordSchema.for_groups(
            namespace=os.urandom(32), chunk_tokens=CHUNK_TOKENS, groups=(GROUP,)
        )
        self.keys = [ChunkKey(os.urandom(32)) for _ in range(count)]
        self.names = [f"kvferry-bench-{key.hex()}" for key in self.keys]
        self.image = bytearray(self.schema.record_bytes)
        payload = memoryview(self.image)[self.schema.head_bytes :]
        payload[:] = os.urandom(1 << 20) * (len(payload) >> 20)
        self.table = leaf_digests(self.schema.components[0], payload)
        self.every = RowRange(0, 0, self.schema.components[0].num_rows)

    def buffer(self) -> memoryview:
        """Return memory for one record. It is filled, so the first read takes no page faults."""
        return memoryview(bytearray(self.image))

    def put(self, store: Store, image: memoryview, index: int) -> None:
        key = self.keys[index]
        if put_record(store, self.schema, key, 0, self.table, image).result is not PutResult.STORED:
            raise ConfigError(f"{store.url} does not store a record of this benchmark")

    def read(self, store: Store, buffer: memoryview, index: int) -> None:
        if store.read(self.keys[index], [(0, buffer)]) != len(buffer):
            raise ConfigError(f"{store.url} lost a record of this benchmark; give it more room")

    def verify(self, store: Store, buffer: memoryview, index: int) -> None:
        head, payload = buffer[: self.schema.head_bytes], buffer[self.schema.head_bytes :]
        read = RecordRead(
            key=self.keys[index], first_token=0, head=head, rows=[(self.every, payload)]
        )
        if (reason := read_record(store, self.schema, read, Observer())) is not None:
            raise ConfigError(f"{store.url}: a record of this benchmark is {reason}")


def run(options: Options) -> list[Row]:
    """Measure each store with one thread and with several; return one row for each. By default a
    directory and memory are measured. Raises ConfigError if a store cannot be used or loses a
    value, StoreError if it fails."""
    return [
        _measure(url, options.directory, num_threads, quick=options.quick)
        for url in options.stores or (f"file://{options.directory}/store", "memory://bench")
        for num_threads in dict.fromkeys((1, options.threads))
    ]


def _measure(url: str, directory: Path, threads: int, *, quick: bool) -> Row:
    count, rounds = (8, 1) if quick else (64, 3)
    records = Records(count)
    gigabytes = count * records.schema.record_bytes / 1e9
    buffers = [records.buffer() for _ in range(count)]

    def rate(work: Callable[[int], object]) -> float:
        with ThreadPoolExecutor(threads) as pool:
            started = time.perf_counter()
            list(pool.map(work, range(count)))
            return gigabytes / (time.perf_counter() - started)

    found: dict[str, float | None] = {}
    with ExitStack() as undo:
        store = undo.enter_context(open_store(url, namespace=records.schema.namespace))
        # This first read reports a fault of the server or the URL in one line.
        store.read(records.keys[0], (), time.monotonic() + ASK_SECONDS)
        plain = plain_client(url, directory)
        if plain is not None:
            undo.callback(plain.close)
        try:
            if plain is not None:
                image = bytes(records.image)
                found["plain_put_gbps"] = rate(lambda at: plain.put(records.names[at], image))
            found["put_gbps"] = rate(lambda at: records.put(store, buffers[at], at))
            reads: dict[str, list[float]] = {"plain_get": [], "read": [], "verified": []}
            for _ in range(rounds):
                if plain is not None:
                    reads["plain_get"].append(
                        rate(lambda at: plain.get(records.names[at], buffers[at]))
                    )
                reads["read"].append(rate(lambda at: records.read(store, buffers[at], at)))
                reads["verified"].append(rate(lambda at: records.verify(store, buffers[at], at)))
            for name, rates in reads.items():
                found[f"{name}_gbps"] = statistics.median(rates) if rates else None
            asked = _ask_us(store, records.keys)
        finally:
            for key, name in zip(records.keys, records.names, strict=True):
                store.delete(key)
                if plain is not None:
                    plain.delete(name)
    return {
        "store": url.partition(":")[0],
        "threads": threads,
        **found,
        "put_ratio": _ratio(found["put_gbps"], found.get("plain_put_gbps")),
        "read_ratio": _ratio(found["read_gbps"], found["plain_get_gbps"]),
        "ask_us": asked,
    }


def _ratio(ours: float | None, plain: float | None) -> float | None:
    return None if ours is None or plain is None else ours / plain


def _ask_us(store: Store, keys: Sequence[ChunkKey]) -> float | None:
    """Return the microseconds per key of the answer to a probe; None if memory answers at once."""
    strange = [ChunkKey(os.urandom(32)) for _ in keys]
    store.probe(strange)
    if store.where(strange[-1]) is not Where.ASKED:
        return None
    started = time.perf_counter()
    while store.where(strange[-1]) is Where.ASKED and time.perf_counter() - started < ASK_SECONDS:
        time.sleep(0)
    return 1e6 * (time.perf_counter() - started) / len(strange)


def plain_client(url: str, directory: Path) -> Plain | None:
    """Return the client that other programs use for a store's server; None if there is none."""
    parsed = parse_store_url(url)
    if parsed.scheme == "file":
        return Plain(
            put=lambda name, value: (directory / name).write_bytes(value),
            get=lambda name, buffer: _read_file(directory / name, buffer),
            delete=lambda name: (directory / name).unlink(missing_ok=True),
        )
    if parsed.scheme in ("valkey", "redis") and "cluster" not in parsed.options:
        (host, port), *_ = parsed.hosts
        server: Any = _redis().Redis(
            host=host,
            port=port or 6379,
            credential_provider=Login(
                parsed.options.get("username") or parsed.username,
                parsed.password,
                parsed.options.get("password_file"),
            ),
        )
        return Plain(
            put=server.set,
            get=lambda name, buffer: _copy(server.get(name), buffer),
            delete=server.unlink,
            close=server.close,
        )
    if parsed.scheme == "s3":
        obstore: Any = importlib.import_module("obstore")
        ((bucket, _), *_) = parsed.hosts
        is_clear = parsed.options.get("endpoint", "").startswith("http:")
        place = importlib.import_module("obstore.store").S3Store(
            bucket, config=dict(parsed.options), client_options={"allow_http": is_clear}
        )
        return Plain(
            put=lambda name, value: obstore.put(place, name, value),
            get=lambda name, buffer: _copy(obstore.get(place, name).bytes(), buffer),
            delete=lambda name: obstore.delete(place, name),
        )
    if parsed.scheme == "mooncake":
        return _mooncake(parsed)
    return None


def _redis() -> ModuleType:
    try:
        return importlib.import_module("redis")
    except ModuleNotFoundError as error:
        raise ConfigError(
            "the plain client of Valkey is redis-py: run pip install redis hiredis"
        ) from error


def _mooncake(url: StoreUrl) -> Plain:
    """Open Mooncake's own client in this process. Its put copies a value into memory that it has
    registered; its get returns a value in memory of its own."""
    ((host, port), *_) = url.hosts
    client: Any = importlib.import_module("mooncake.store").MooncakeDistributedStore()
    options = dict(url.options)
    code = client.setup(
        own_address(host),
        options.get("metadata", "P2PHANDSHAKE"),
        0,
        MOONCAKE_BYTES,
        options.get("protocol", "tcp"),
        options.get("device", ""),
        f"{host}:{port}",
    )
    if code != 0:
        raise ConfigError(f"{url.scheme}: Mooncake's set-up answers {code}")

    def put(name: str, value: bytes) -> None:
        if (code := client.put(name, value)) != 0:
            raise ConfigError(f"{url.scheme}: Mooncake's put answers {code}; give it more room")

    return Plain(
        put=put,
        get=lambda name, buffer: _copy(client.get(name), buffer),
        delete=lambda name: client.remove(name, True),  # also while a read's lease lasts
        close=client.close,
    )


def _read_file(path: Path, buffer: memoryview) -> None:
    with path.open("rb", buffering=0) as file:
        file.readinto(buffer)


def _copy(value: bytes, buffer: memoryview) -> None:
    if len(value) != len(buffer):
        raise ConfigError("a plain client lost a value of this benchmark; give it more room")
    buffer[:] = memoryview(value)

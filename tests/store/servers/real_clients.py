"""Test suites for clients and for their stores, against real servers.

The subclasses have the fixtures `server` and `make_client`.
"""

from __future__ import annotations

import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest

from kvferry.errors import StoreError
from kvferry.observe import Observer
from kvferry.store.base import PutResult
from kvferry.store.kind import Opening
from kvferry.store.url import open_one
from kvferry.testing.stores import (
    ProbeTests,
    RemoteStoreTests,
    ScanTests,
)
from kvferry.testing.stores.hooks import wait_until

# How much longer than its deadline a call may take on a busy machine. A call that ignores its
# deadline takes longer still.
LATE_SECONDS = 10.0
NUM_BYTES = 300_007


def soon(seconds=20.0):
    return time.monotonic() + seconds


def value_of(seed=1, num_bytes=NUM_BYTES):
    return random.Random(seed).randbytes(num_bytes)


def read_whole(client, name, num_bytes=NUM_BYTES):
    buffer = bytearray(num_bytes)
    size = client.read(name, [(0, memoryview(buffer))], soon())
    return None if size is None else bytes(buffer[:size])


@contextmanager
def ends_within(seconds):
    """A deadline; what runs inside must end by itself, and soon after it."""
    start = time.monotonic()
    yield start + seconds
    assert time.monotonic() - start < seconds + LATE_SECONDS


def calls_of(client, name, seconds):
    """Return one call of each kind, each with a deadline of its own."""
    return [
        lambda: client.read(name, [(0, memoryview(bytearray(16)))], soon(seconds)),
        lambda: client.put(f"{name}/new", [value_of()], soon(seconds)),
        lambda: client.exists([f"{name}/{number}" for number in range(50)], soon(seconds)),
        lambda: client.delete(name, soon(seconds)),
        lambda: list(client.scan(f"{name}/", soon(seconds))),
    ]


def fail_in_time(call, seconds):
    with ends_within(seconds), pytest.raises(StoreError):
        call()


def name_behind(store, key):
    """Return the server's name for the value of a key, if the store's prefix has one part."""
    return f"{store.url.rpartition('/')[2]}/{bytes(32).hex()}/{key.hex()}"


class ServerStoreTests(ScanTests, ProbeTests, RemoteStoreTests):
    """The conformance suite. `url_of` makes a store's URL from a prefix; `behind` is a client by
    which the tests change values behind the store."""

    persistent = True

    @pytest.fixture(autouse=True)
    def _behind(self, make_client, url_of):
        self.url_of = url_of
        self.behind = make_client()

    def make_store(self, tmp_path, *, max_bytes=None, observer=None):
        assert max_bytes is None
        return open_one(self.url_of(tmp_path.name), Opening(observer=observer or Observer()))

    def poke(self, store, key, value):
        self.behind.delete(name_behind(store, key), soon())
        if value is not None:
            self.behind.put(name_behind(store, key), [value], soon())

    def peek(self, store, key):
        name = name_behind(store, key)
        size = self.behind.read(name, [], soon())
        return None if size is None else read_whole(self.behind, name, size)


class ClientTests:
    """Tests of a client.

    Attributes:
        tells_times: whether a list of names has times.
    """

    tells_times = True

    @pytest.fixture
    def client(self, make_client):
        return make_client()

    def test_a_value_comes_back(self, client, name):
        value = value_of()
        parts = [value[:5], bytearray(value[5:4096]), memoryview(value)[4096:]]
        assert client.put(name, parts, soon()) is PutResult.STORED
        assert read_whole(client, name) == value

    def test_ranges_fill_their_buffers_up_to_the_end(self, client, name):
        num_bytes = 3 << 20
        value = value_of(num_bytes=num_bytes)
        client.put(name, [value], soon())
        wanted = [
            (num_bytes - 10, 100),  # past the end
            (0, 8),
            (8, 0),
            (5, 100),  # overlaps another range
            (2 << 20, 4097),
            (num_bytes, 7),
            (num_bytes + (8 << 20), 7),  # for S3 a request of its own, wholly past the end
        ]
        buffers = [bytearray(b"\xee" * length) for _, length in wanted]
        ranges = [
            (offset, memoryview(each)) for (offset, _), each in zip(wanted, buffers, strict=True)
        ]
        assert client.read(name, ranges, soon()) == num_bytes
        for (offset, length), buffer in zip(wanted, buffers, strict=True):
            part = value[offset : offset + length]
            assert bytes(buffer) == part + b"\xee" * (length - len(part))

    def test_no_range_asks_the_size(self, client, name):
        client.put(name, [value_of()], soon())
        assert client.read(name, [], soon()) == NUM_BYTES
        assert client.read(name, [(7, memoryview(bytearray(0)))], soon()) == NUM_BYTES

    def test_what_is_absent_is_none(self, client, name):
        buffer = bytearray(b"\xee" * 16)
        assert client.read(name, [(0, memoryview(buffer))], soon()) is None
        assert buffer == b"\xee" * 16
        assert client.read(name, [], soon()) is None
        assert client.delete(name, soon()) is False
        assert list(client.scan(f"{name}/none/", soon())) == []

    def test_many_names_are_looked_up_at_once(self, client, name):
        names = [f"{name}/{number}" for number in range(100)]
        for each in names[::3]:
            client.put(each, [b"x"], soon())
        assert client.exists(names, soon()) == [number % 3 == 0 for number in range(100)]
        assert client.exists([], soon()) == []

    def test_the_first_writer_wins(self, make_client, name):
        clients = [make_client() for _ in range(2)] * 2
        values = [value_of(seed) for seed in range(4)]
        barrier = threading.Barrier(4)

        def write(number):
            barrier.wait()
            return clients[number].put(name, [values[number]], soon())

        with ThreadPoolExecutor(4) as pool:
            results = list(pool.map(write, range(4)))
        assert sorted(results) == [PutResult.EXISTS] * 3 + [PutResult.STORED]
        assert read_whole(clients[0], name) == values[results.index(PutResult.STORED)]

    def test_scan_lists_names_sizes_and_times(self, client, name):
        start = time.time()
        for number in range(3):
            client.put(f"{name}/{number}", [bytes(number + 1)], soon())
        client.put(f"{name}-beside", [b"x"], soon())
        found = sorted(client.scan(f"{name}/", soon()))
        assert [(each, size) for each, size, _ in found] == [
            (f"{name}/0", 1),
            (f"{name}/1", 2),
            (f"{name}/2", 3),
        ]
        if self.tells_times:
            assert all(start - 2 <= used <= time.time() + 2 for _, _, used in found)
        else:
            assert {used for _, _, used in found} == {0.0}

    def test_delete_says_whether_there_was_a_value(self, client, name):
        client.put(name, [b"x"], soon())
        assert client.delete(name, soon()) is True
        assert client.delete(name, soon()) is False
        assert client.exists([name], soon()) == [False]
        assert client.put(name, [b"y"], soon()) is PutResult.STORED

    def test_threads_share_a_client(self, client, name):
        def work(number):
            value = value_of(number)
            client.put(f"{name}/{number}", [value], soon())
            return read_whole(client, f"{name}/{number}") == value

        with ThreadPoolExecutor(8) as pool:
            assert all(pool.map(work, range(24)))

    def test_a_stopped_server_costs_the_deadline(self, server, client, name):
        value = value_of()
        client.put(name, [value], soon())
        buffer = bytearray(b"\xee" * NUM_BYTES)
        server.process.pause()
        try:
            calls = calls_of(client, name, 1.0)
            calls.append(lambda: client.read(name, [(0, memoryview(buffer))], soon(1.0)))
            with ThreadPoolExecutor(len(calls)) as pool:
                list(pool.map(lambda call: fail_in_time(call, 1.0), calls))
            with ends_within(0.0), pytest.raises(StoreError):
                client.read(name, [], time.monotonic() - 1)
        finally:
            server.process.resume()
        assert buffer == b"\xee" * NUM_BYTES
        assert client.put(f"{name}/after", [value], soon()) is PutResult.STORED
        assert read_whole(client, f"{name}/after") == value
        assert buffer == b"\xee" * NUM_BYTES

    def test_a_close_ends_what_is_under_way(self, server, client, name):
        client.put(name, [value_of()], soon())
        server.process.pause()
        try:
            with ThreadPoolExecutor(1) as pool:
                under_way = pool.submit(client.read, name, [], soon(60))
                wait_until(under_way.running, "the read is under way")
                with ends_within(0.0):
                    client.close()
                    client.close()
                with pytest.raises(StoreError, match="closed"):
                    under_way.result(30)
        finally:
            server.process.resume()
        with pytest.raises(StoreError, match="closed"):
            client.read(name, [], soon())

    def test_a_slow_server_is_waited_for(self, server, client, name):
        client.put(name, [value_of()], soon())
        server.process.pause()
        timer = threading.Timer(1.0, server.process.resume)
        timer.start()
        try:
            assert read_whole(client, name) == value_of()
        finally:
            timer.join()

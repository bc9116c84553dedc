"""`MooncakeClient` against a real master, with a process that lends it memory."""

from __future__ import annotations

import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest

from kvferry.errors import ConfigError, StoreError
from kvferry.store.base import PutResult
from kvferry.store.servers.mooncake import _LANE_BYTES, _NUM_LANES, MooncakeClient
from kvferry.store.servers.remote import RemoteStore
from kvferry.store.url import open_one
from kvferry.testing.stores import (
    ProbeTests,
    RemoteStoreTests,
    ScanTests,
    ShardedWriteTests,
    make_key,
)
from tests.servers.mooncake import SEGMENT_BYTES
from tests.servers.process import LOCALHOST, free_ports, wait_until

pytestmark = pytest.mark.usefixtures("patient_calls")

# What a call may take beyond its deadline, on a busy machine. One that ignores it takes longer.
LATE_SECONDS = 5.0
NUM_BYTES = 300_007


@pytest.fixture
def make_client(mooncake):
    clients = []

    def make(master=None, **options):
        options = {"admin": mooncake.admin, **options}
        clients.append(MooncakeClient(master or mooncake.master, **options))
        return clients[-1]

    yield make
    for client in clients:
        client.close()


@pytest.fixture
def client(make_client):
    return make_client()


@pytest.fixture
def waits_long(monkeypatch):
    """A close that waits for its child takes longer than a busy machine does."""
    monkeypatch.setattr("kvferry.store.servers.mooncake._CLOSE_SECONDS", 30.0)


@pytest.fixture
def name(request):
    """Each test has names of its own."""
    return f"kv/{request.node.name}/one"


class TestMooncakeStore(ScanTests, ProbeTests, ShardedWriteTests, RemoteStoreTests):
    persistent = True

    @pytest.fixture(autouse=True)
    def _server(self, mooncake):
        self.server = mooncake

    def _connect(self):
        return MooncakeClient(self.server.master, admin=self.server.admin)

    def make_store(self, tmp_path, *, max_bytes=None, observer=None):
        assert max_bytes is None
        return RemoteStore(
            f"mooncake://{self.server.master}",
            self._connect(),
            prefix=f"{tmp_path.name}/",
            namespace=bytes(32),
            observer=observer,
        )

    def poke(self, store, key, value):
        store._client.delete(store._name(key), soon())
        if value is not None:
            store._client.put(store._name(key), [value], soon())

    def peek(self, store, key):
        name = store._name(key)
        client = self._connect() if store._closed else store._client
        try:
            size = client.read(name, [], soon())
            return None if size is None else read_whole(client, name, size)
        finally:
            if client is not store._client:
                client.close()

    def test_scan_lists_every_value_once(self, store):
        """Unlike others, Mooncake does not say when a value was used."""
        for number, size in enumerate((1, 4096, 9001)):
            store.put(make_key(number), [bytes(size)])
        assert {(each.key, each.num_bytes, each.last_used) for each in store.scan()} == {
            (make_key(number), size, 0.0) for number, size in enumerate((1, 4096, 9001))
        }


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
    start = time.monotonic()
    yield
    assert time.monotonic() - start < seconds + LATE_SECONDS


def test_a_value_comes_back(client, name):
    value = value_of()
    parts = [value[:5], bytearray(value[5:4096]), memoryview(value)[4096:]]
    assert client.put(name, parts, soon()) is PutResult.STORED
    assert read_whole(client, name) == value


def test_ranges_fill_their_buffers_up_to_the_end(client, name):
    num_bytes = 3 << 20
    value = value_of(num_bytes=num_bytes)
    client.put(name, [value], soon())
    wanted = [
        (num_bytes - 10, 100),  # past the end
        (0, 8),
        (8, 0),
        (5, 100),  # again what another range holds
        (2 << 20, 4097),
        (num_bytes, 7),
        (num_bytes + (8 << 20), 7),
    ]
    buffers = [bytearray(b"\xee" * length) for _, length in wanted]
    ranges = [(offset, memoryview(each)) for (offset, _), each in zip(wanted, buffers, strict=True)]
    assert client.read(name, ranges, soon()) == num_bytes
    for (offset, length), buffer in zip(wanted, buffers, strict=True):
        part = value[offset : offset + length]
        assert bytes(buffer) == part + b"\xee" * (length - len(part))


def test_no_range_asks_the_size(client, name):
    client.put(name, [value_of()], soon())
    assert client.read(name, [], soon()) == NUM_BYTES
    assert client.read(name, [(7, memoryview(bytearray(0)))], soon()) == NUM_BYTES


def test_what_is_absent_is_none(client, name):
    buffer = bytearray(b"\xee" * 16)
    assert client.read(name, [(0, memoryview(buffer))], soon()) is None
    assert buffer == b"\xee" * 16
    assert client.read(name, [], soon()) is None
    assert client.delete(name, soon()) is False
    assert list(client.scan(f"{name}/none/", soon())) == []


def test_many_names_are_looked_up_at_once(client, name):
    names = [f"{name}/{number}" for number in range(100)]
    for each in names[::3]:
        client.put(each, [b"x"], soon())
    assert client.exists(names, soon()) == [number % 3 == 0 for number in range(100)]
    assert client.exists([], soon()) == []


def test_the_first_writer_wins(make_client, name):
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


def test_scan_lists_names_sizes_and_times(client, name):
    for number in range(3):
        client.put(f"{name}/{number}", [bytes(number + 1)], soon())
    client.put(f"{name}-beside", [b"x"], soon())
    found = sorted(client.scan(f"{name}/", soon()))
    assert [(each, size) for each, size, _ in found] == [
        (f"{name}/0", 1),
        (f"{name}/1", 2),
        (f"{name}/2", 3),
    ]
    assert {used for _, _, used in found} == {0.0}


def test_delete_says_whether_there_was_a_value(client, name):
    client.put(name, [b"x"], soon())
    assert client.delete(name, soon()) is True
    assert client.delete(name, soon()) is False
    assert client.exists([name], soon()) == [False]
    assert client.put(name, [b"y"], soon()) is PutResult.STORED


def test_threads_share_a_client(client, name):
    def work(number):
        value = value_of(number)
        client.put(f"{name}/{number}", [value], soon())
        return read_whole(client, f"{name}/{number}") == value

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(work, range(24)))


def test_a_value_larger_than_the_memory_of_a_lane(client, name):
    num_bytes = 2 * _LANE_BYTES + 4097
    value = value_of(num_bytes=num_bytes)
    parts = [value[:100], value[100 : _LANE_BYTES + 7], value[_LANE_BYTES + 7 :]]
    assert client.put(name, parts, soon()) is PutResult.STORED
    assert read_whole(client, name, num_bytes) == value
    buffers = [bytearray(_LANE_BYTES - 3), bytearray(100)]
    ranges = [(5, memoryview(buffers[0])), (2 * _LANE_BYTES, memoryview(buffers[1]))]
    assert client.read(name, ranges, soon()) == num_bytes
    assert buffers[0] == value[5 : _LANE_BYTES + 2]
    assert buffers[1] == value[2 * _LANE_BYTES : 2 * _LANE_BYTES + 100]


def test_a_value_without_room_says_so(client, name):
    """Smaller ones make room: Mooncake evicts."""
    assert client.put(name, [bytes(SEGMENT_BYTES + 1)], soon()) is PutResult.NO_SPACE
    assert client.exists([name], soon()) == [False]
    assert client.put(name, [b"x"], soon()) is PutResult.STORED


def test_a_client_may_lend_memory_of_its_own(make_client, name):
    lender = make_client(segment_bytes=32 << 20)
    assert lender.put(name, [value_of()], soon()) is PutResult.STORED
    assert read_whole(make_client(), name) == value_of()


@pytest.mark.parametrize("master", ["somewhere", ":50051", "host:port"])
def test_a_wrong_master_is_one_line(master):
    with pytest.raises(ConfigError, match="the master is host:port"):
        MooncakeClient(master)


def test_without_the_admin_port_there_is_no_scan(make_client):
    with pytest.raises(StoreError, match="add admin="):
        next(make_client(admin=None).scan("", soon()))


def test_a_master_that_is_not_there_fails_soon(make_client):
    client = make_client(master=f"{LOCALHOST}:{free_ports(1)[0]}")
    with pytest.raises(StoreError, match="no connection to the master: Connection refused"):
        client.read("a/b", [], soon())
    with ends_within(0.0), pytest.raises(StoreError, match="Connection refused"):
        client.read("a/b", [], soon())


def calls_of(client, name, seconds):
    """Every kind of call with a deadline of its own."""
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


def test_a_stopped_master_costs_the_deadline(mooncake, client, name):
    value = value_of()
    client.put(name, [value], soon())
    buffer = bytearray(b"\xee" * NUM_BYTES)
    mooncake.process.pause()
    try:
        calls = calls_of(client, name, 1.0)
        calls.append(lambda: client.read(name, [(0, memoryview(buffer))], soon(1.0)))
        assert len(calls) > _NUM_LANES
        with ThreadPoolExecutor(len(calls)) as pool:
            list(pool.map(lambda call: fail_in_time(call, 1.0), calls))
        with ends_within(0.0), pytest.raises(StoreError):
            client.read(name, [], time.monotonic() - 1)
    finally:
        mooncake.process.resume()
    assert client.put(f"{name}/after", [value], soon()) is PutResult.STORED
    assert read_whole(client, f"{name}/after") == value
    assert buffer == b"\xee" * NUM_BYTES


def test_a_start_that_hangs_holds_nobody(mooncake, make_client, name, waits_long):
    mooncake.process.pause()
    try:
        with ends_within(0.0):
            client = make_client()
        fail_in_time(lambda: client.read(name, [], soon(0.5)), 0.5)
        with ends_within(0.0):
            client.close()
    finally:
        mooncake.process.resume()


def test_a_close_ends_what_is_under_way(mooncake, client, name, waits_long):
    client.put(name, [value_of()], soon())
    mooncake.process.pause()
    try:
        with ThreadPoolExecutor(1) as pool:
            under_way = pool.submit(client.read, name, [], soon(60))
            time.sleep(0.2)
            with ends_within(0.0):
                client.close()
                client.close()
            with pytest.raises(StoreError):
                under_way.result(5)
    finally:
        mooncake.process.resume()
    with pytest.raises(StoreError, match="closed"):
        client.read(name, [], soon())


def test_a_writer_that_gave_up_leaves_no_value(mooncake, client, name):
    """Its first piece arrived; the second, after the deadline, does not."""
    with client._lane("put", soon()) as call:
        assert call.ask(["put", name, 2 * NUM_BYTES, 0, NUM_BYTES]) == 0
    assert client.read(name, [], soon()) is None
    # Until then, it is another writer's.
    wait_until(lambda: client.put(name, [b"x"], soon()) is PutResult.STORED, "room for the value")
    assert read_whole(client, name) == b"x"


def test_a_child_that_died_is_replaced(client, name):
    client.put(name, [value_of()], soon())
    client._child._process.kill()
    fail_in_time(lambda: client.read(name, [], soon()), 1.0)
    time.sleep(1.0)
    assert read_whole(client, name) == value_of()


def test_a_lender_that_died_fails_its_values_only(mooncake, client, name):
    client.put(name, [value_of()], soon())
    mooncake.lender.kill()
    try:
        fail_in_time(lambda: read_whole(client, name), 2.0)
    finally:
        mooncake.stop()
        mooncake.start()


def test_a_master_that_died_fails_and_comes_back_empty(mooncake, client, name):
    for each in (name, f"{name}/old"):
        client.put(each, [value_of()], soon())
    mooncake.stop()
    try:
        for call in calls_of(client, name, 0.5):
            fail_in_time(call, 0.5)
    finally:
        mooncake.start()

    def stores():
        try:  # again, should the master have taken it before it knew who lends memory
            client.put(name, [b"again"], soon(5))
            return read_whole(client, name) == b"again"
        except StoreError:
            return False

    wait_until(stores, "the master")
    assert client.exists([name, f"{name}/old"], soon()) == [True, False]


def test_a_slow_master_is_waited_for(mooncake, client, name):
    client.put(name, [value_of()], soon())
    mooncake.process.pause()
    timer = threading.Timer(1.0, mooncake.process.resume)
    timer.start()
    try:
        assert read_whole(client, name) == value_of()
    finally:
        timer.join()


def test_a_url_opens_a_store(mooncake, name):
    url = f"mooncake://{mooncake.master}/{name}?segment=16MiB&protocol=tcp&admin={mooncake.admin}"
    with open_one(url) as store:
        assert store.url == f"mooncake://{mooncake.master}/{name}"
        assert store.put(make_key(), [b"value"]) is PutResult.STORED
        assert store.read(make_key(), ()) == 5
        assert [entry.key for entry in store.scan()] == [make_key()]


@pytest.mark.parametrize(
    ("url", "match"),
    [
        ("mooncake:///kv", "names no master; write mooncake://host:50051/prefix"),
        ("mooncake://host/kv", "names no single master"),
        ("mooncake://host:1,host:2/kv", "names no single master"),
        ("mooncake://host:1/kv?protocol=udp", "'protocol' is none of tcp, rdma"),
        ("mooncake://host:1/kv?segment=much", "'segment' is not a size"),
    ],
)
def test_a_wrong_url_is_one_line(url, match):
    with pytest.raises(ConfigError, match=match):
        open_one(url)

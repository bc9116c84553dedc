"""`ObjectClient` against a real S3 server: SeaweedFS."""

from __future__ import annotations

import logging
import os
import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress

import obstore
import pytest
from obstore.store import S3Store

from kvferry.errors import ConfigError, StoreError
from kvferry.store.base import PutResult
from kvferry.store.servers.objects import ObjectClient, spans_of
from kvferry.store.servers.remote import RemoteStore
from kvferry.store.url import open_one
from kvferry.testing.stores import (
    ProbeTests,
    RemoteStoreTests,
    ScanTests,
    ShardedWriteTests,
    make_key,
)
from tests.servers.process import LOCALHOST, free_ports
from tests.servers.proxy import running_proxy
from tests.servers.seaweed import ACCESS_KEY, BUCKET, SECRET_KEY

pytestmark = pytest.mark.usefixtures("patient_calls")

# What a call may take beyond its deadline, on a busy machine. One that ignores it takes longer.
LATE_SECONDS = 4.0
NUM_BYTES = 300_007


@pytest.fixture(autouse=True)
def credentials(seaweed, monkeypatch):
    for name, value in seaweed.environment.items():
        monkeypatch.setenv(name, value)


@pytest.fixture
def make_client(seaweed):
    clients = []

    def make(bucket=BUCKET, endpoint=None):
        clients.append(
            ObjectClient("s3", bucket, endpoint=endpoint or seaweed.endpoint, region="us-east-1")
        )
        return clients[-1]

    yield make
    for client in clients:
        client.close()


@pytest.fixture
def client(make_client):
    return make_client()


@pytest.fixture
def name(request):
    """Each test has names of its own in the one bucket."""
    return f"kv/{request.node.name}/one"


class TestObjectStore(ScanTests, ProbeTests, ShardedWriteTests, RemoteStoreTests):
    persistent = True

    @pytest.fixture(autouse=True)
    def _server(self, seaweed):
        self.endpoint = seaweed.endpoint

    def make_store(self, tmp_path, *, max_bytes=None, observer=None):
        assert max_bytes is None
        client = ObjectClient("s3", BUCKET, endpoint=self.endpoint, region="us-east-1")
        return RemoteStore(
            f"s3://{BUCKET}",
            client,
            prefix=f"{tmp_path.name}/",
            namespace=bytes(32),
            observer=observer,
        )

    @property
    def bucket(self):
        """By which the tests reach behind a store."""
        return S3Store(
            BUCKET,
            endpoint=self.endpoint,
            region="us-east-1",
            client_options={"allow_http": True},
        )

    def poke(self, store, key, value):
        path = store._name(key)
        obstore.delete(self.bucket, path)
        if value is not None:
            obstore.put(self.bucket, path, value)

    def peek(self, store, key):
        with suppress(FileNotFoundError):
            return bytes(obstore.get(self.bucket, store._name(key)).bytes())
        return None


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
        (num_bytes + (8 << 20), 7),  # a request of its own, all of it behind the end
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


def test_ranges_near_each_other_are_one_request():
    def buffer(length):
        return memoryview(bytearray(length))

    assert spans_of([(100, buffer(10)), (0, buffer(10))]) == [(0, 110)]
    assert spans_of([(0, buffer(10)), (2 << 20, buffer(10))]) == [
        (0, 10),
        (2 << 20, (2 << 20) + 10),
    ]
    assert spans_of([(0, buffer(100)), (10, buffer(5))]) == [(0, 100)]
    assert spans_of([(5, buffer(0))]) == []


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
    clients = [make_client() for _ in range(4)]
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
    assert all(start - 2 <= changed <= time.time() + 2 for _, _, changed in found)


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


@pytest.mark.parametrize(
    ("wrong", "hint"),
    [
        ({"AWS_SECRET_ACCESS_KEY": "wrong-secret-0123456789"}, "SignatureDoesNotMatch"),
        ({"AWS_ACCESS_KEY_ID": "unknown-key-0123456789"}, "InvalidAccessKeyId"),
        ({}, "NoSuchBucket"),
    ],
)
def test_a_wrong_bucket_or_secret_is_one_line(wrong, hint, make_client, monkeypatch, caplog):
    caplog.set_level(logging.DEBUG)
    for variable, text in wrong.items():
        monkeypatch.setenv(variable, text)
    client = make_client(bucket=BUCKET if wrong else "nowhere")
    calls = [
        lambda: client.check(soon()),
        lambda: client.read("a/b", [], soon()),
        lambda: client.put("a/b", [b"x"], soon()),
        lambda: client.exists(["a/b"], soon()),
        lambda: client.delete("a/b", soon()),
        lambda: next(client.scan("a/", soon())),
    ]
    for number, call in enumerate(calls):
        with pytest.raises(StoreError if number else ConfigError, match=hint) as caught:
            call()
        message = str(caught.value)
        assert "\n" not in message
        assert len(message) < 250
        assert caught.value.__cause__ is None
        for secret in (ACCESS_KEY, SECRET_KEY, *wrong.values()):
            assert secret not in message + caplog.text + repr(client)


def test_an_endpoint_holds_no_credentials():
    with pytest.raises(ConfigError, match="AWS_ACCESS_KEY_ID") as caught:
        ObjectClient("s3", BUCKET, endpoint="http://user:hidden@127.0.0.1:1")
    assert "hidden" not in str(caught.value)


@pytest.mark.parametrize(
    ("scheme", "options", "match"),
    [
        ("gs", {"endpoint": "http://127.0.0.1:1"}, "gs has no option 'endpoint'"),
        ("az", {"region": "x"}, "az has no option 'region'"),
        ("az", {}, "check AZURE_STORAGE_ACCOUNT_NAME"),
    ],
)
def test_options_that_a_cloud_lacks_are_refused(scheme, options, match):
    with pytest.raises(ConfigError, match=match):
        ObjectClient(scheme, "bucket", **options)


def test_a_server_that_is_not_there_fails_at_once(make_client):
    client = make_client(endpoint=f"http://{LOCALHOST}:{free_ports(1)[0]}")
    with ends_within(1.0), pytest.raises(StoreError, match="Connection refused"):
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


def test_a_stopped_server_costs_the_deadline(seaweed, client, name):
    value = value_of()
    client.put(name, [value], soon())
    buffer = bytearray(b"\xee" * NUM_BYTES)
    seaweed.process.pause()
    try:
        calls = calls_of(client, name, 1.0)
        calls.append(lambda: client.read(name, [(0, memoryview(buffer))], soon(1.0)))
        with ThreadPoolExecutor(len(calls)) as pool:
            list(pool.map(lambda call: fail_in_time(call, 1.0), calls))
        with ends_within(0.0), pytest.raises(StoreError):
            client.read(name, [], time.monotonic() - 1)
    finally:
        seaweed.process.resume()
    assert buffer == b"\xee" * NUM_BYTES
    client.put(f"{name}/after", [value], soon())
    assert read_whole(client, f"{name}/after") == value
    assert buffer == b"\xee" * NUM_BYTES


def test_a_close_ends_what_is_under_way(seaweed, client, name):
    client.put(name, [value_of()], soon())
    child = client._child._process
    seaweed.process.pause()
    try:
        with ThreadPoolExecutor(1) as pool:
            under_way = pool.submit(client.read, name, [], soon(60))
            time.sleep(0.2)
            with ends_within(0.0):
                client.close()
                client.close()
            with pytest.raises(StoreError, match="closed"):
                under_way.result(5)
    finally:
        seaweed.process.resume()
    with pytest.raises(StoreError, match="closed"):
        client.read(name, [], soon())
    assert child.poll() is not None


def test_a_server_that_died_fails_and_comes_back_empty(seaweed, client, name):
    client.put(name, [value_of()], soon())
    seaweed.stop()
    try:
        for call in calls_of(client, name, 1.0):
            fail_in_time(call, 1.0)
    finally:
        seaweed.start(empty=True)
    assert client.read(name, [], soon()) is None
    assert client.exists([name], soon()) == [False]
    assert client.put(name, [b"again"], soon()) is PutResult.STORED
    assert read_whole(client, name) == b"again"


def test_a_slow_server_is_waited_for(seaweed, client, name):
    client.put(name, [value_of()], soon())
    seaweed.process.pause()
    timer = threading.Timer(1.0, seaweed.process.resume)
    timer.start()
    try:
        assert read_whole(client, name) == value_of()
    finally:
        timer.join()


def test_no_credential_is_in_the_command_line(client, name):
    client.put(name, [b"x"], soon())
    with open(f"/proc/{os.getpid()}/cmdline", "rb") as file:
        assert SECRET_KEY.encode() not in file.read()


@pytest.fixture
def proxy(seaweed):
    with running_proxy(int(seaweed.endpoint.rpartition(":")[2])) as proxy:
        yield proxy


def test_a_value_that_comes_too_slowly_costs_the_deadline(proxy, make_client, name):
    client = make_client(endpoint=f"http://{LOCALHOST}:{proxy.port}")
    client.put(name, [value_of()], soon())
    proxy.limit(NUM_BYTES / 3)
    buffer = bytearray(b"\xee" * NUM_BYTES)
    with ends_within(1.0), pytest.raises(StoreError, match="did not end within"):
        client.read(name, [(0, memoryview(buffer))], soon(1.0))
    proxy.black_hole()
    fail_in_time(lambda: client.exists([name], soon(0.5)), 0.5)
    proxy.pass_all()
    assert read_whole(client, name) == value_of()
    assert buffer == b"\xee" * NUM_BYTES


def test_a_connection_that_is_cut_is_tried_again_or_fails(proxy, make_client, name):
    client = make_client(endpoint=f"http://{LOCALHOST}:{proxy.port}")
    client.put(name, [value_of()], soon())
    proxy.cut_after(NUM_BYTES // 2)
    with ends_within(3.0), suppress(StoreError):
        assert read_whole(client, name) == value_of()
    proxy.refuse()
    fail_in_time(lambda: client.read(name, [], soon(2.0)), 2.0)
    proxy.pass_all()
    assert read_whole(client, name) == value_of()


def test_a_url_opens_a_store(seaweed, name):
    url = f"s3://{BUCKET}/{name}/?endpoint={seaweed.endpoint}&region=us-east-1"
    with open_one(url) as store:
        assert store.url == f"s3://{BUCKET}/{name}"
        assert store.put(make_key(), [b"value"]) is PutResult.STORED
        assert store.read(make_key(), ()) == 5
    with open_one(url, index=False) as store:
        assert [entry.key for entry in store.scan()] == [make_key()]


@pytest.mark.parametrize(
    ("url", "match"),
    [
        ("s3://nowhere/kv", "NoSuchBucket; create it"),
        (f"s3://{BUCKET}:80/kv", "more than a bucket"),
        (f"s3://key:hidden@{BUCKET}/kv", "credentials into the environment"),
        ("s3:///kv", "names no bucket; write s3://bucket/prefix"),
        (f"s3://{BUCKET}/a//b", "made of names"),
        (f"s3://{BUCKET}/../b", "made of names"),
        (f"s3://{BUCKET}/a%0Ab", "made of names"),
        (f"s3://{BUCKET}/kv?secret=hidden", "unknown option 'secret'"),
    ],
)
def test_a_wrong_url_is_one_line(seaweed, url, match):
    mark = "&" if "?" in url else "?"
    with pytest.raises(ConfigError, match=match) as caught:
        open_one(f"{url}{mark}endpoint={seaweed.endpoint}&region=us-east-1")
    assert "hidden" not in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_store_whose_server_is_down_opens(name):
    endpoint = f"http://{LOCALHOST}:{free_ports(1)[0]}"
    with open_one(f"s3://{BUCKET}/{name}?endpoint={endpoint}&region=us-east-1") as store:
        assert store.put(make_key(), [b"value"]) is PutResult.FAILED
        with pytest.raises(StoreError, match="Connection refused"):
            store.read(make_key(), ())

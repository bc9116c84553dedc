"""`MooncakeClient` against a real master, with a process that lends it memory."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from kvferry.errors import ConfigError, StoreError
from kvferry.store.base import PutResult
from kvferry.store.servers.mooncake import _LANE_BYTES, MooncakeClient, MooncakeOptions
from kvferry.store.url import open_one
from kvferry.testing.stores import make_key
from kvferry.testing.stores.hooks import wait_until
from tests.servers.mooncake import SEGMENT_BYTES
from tests.servers.process import LOCALHOST, free_ports
from tests.store.servers.real_clients import (
    NUM_BYTES,
    ClientTests,
    ServerStoreTests,
    calls_of,
    ends_within,
    fail_in_time,
    read_whole,
    soon,
    value_of,
)

pytestmark = pytest.mark.usefixtures("patient_calls")


@pytest.fixture
def server(mooncake):
    return mooncake


@pytest.fixture
def make_client(server, closing):
    def make(master=None, **options):
        options = MooncakeOptions(**{"admin": server.admin, **options})
        return closing(MooncakeClient(master or server.master, options))

    return make


@pytest.fixture
def client(make_client):
    return make_client()


@pytest.fixture
def url_of(server):
    return lambda path: f"mooncake://{server.master}/{path}?admin={server.admin}"


class TestMooncakeStore(ServerStoreTests):
    def test_scan_lists_every_value_once(self, store):
        """Unlike others, Mooncake does not say when a value was used."""
        for number, size in enumerate((1, 4096, 9001)):
            store.put(make_key(number), [bytes(size)])
        assert {
            (each.key, each.stored_bytes, each.last_used) for each in store.catalogue().scan()
        } == {(make_key(number), size, 0.0) for number, size in enumerate((1, 4096, 9001))}


def children():
    """Return the ids of the processes that this one has started."""
    tasks = Path("/proc/self/task").iterdir()
    return {int(each) for task in tasks for each in (task / "children").read_text().split()}


class TestMooncakeClient(ClientTests):
    tells_times = False

    def test_a_child_ends_with_its_client(self, make_client):
        others = children()
        client = make_client()
        (child,) = children() - others
        client.close()
        assert child not in children()

    def test_a_child_that_died_is_replaced(self, make_client, name):
        others = children()
        client = make_client()
        client.put(name, [value_of()], soon())
        (child,) = children() - others
        os.kill(child, 9)
        fail_in_time(lambda: client.read(name, [], soon()), 1.0)

        def is_back():
            try:
                return read_whole(client, name) == value_of()
            except StoreError:
                return False

        wait_until(is_back, "another child")


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
    lender = make_client(segment=32 << 20)
    assert lender.put(name, [value_of()], soon()) is PutResult.STORED
    assert read_whole(make_client(), name) == value_of()


def test_without_the_admin_port_there_is_no_scan(make_client):
    with pytest.raises(StoreError, match="add admin="):
        next(make_client(admin=None).scan("", soon()))


def test_an_admin_url_without_a_port_is_of_port_80(make_client):
    with pytest.raises(StoreError, match=r"refused|assign|unreachable"):
        next(make_client(admin="http://[::1]").scan("", soon()))


def test_a_master_that_is_not_there_fails_soon(make_client):
    client = make_client(master=f"{LOCALHOST}:{free_ports(1)[0]}")
    with pytest.raises(StoreError, match="no connection to the master: Connection refused"):
        client.read("a/b", [], soon())
    with ends_within(0.0), pytest.raises(StoreError, match="Connection refused"):
        client.read("a/b", [], soon())


def test_a_start_that_hangs_holds_nobody(server, make_client, name):
    server.process.pause()
    try:
        with ends_within(0.0):
            client = make_client()
        fail_in_time(lambda: client.read(name, [], soon(0.5)), 0.5)
        with ends_within(0.0):
            client.close()
    finally:
        server.process.resume()


def test_a_writer_that_gave_up_leaves_no_value(server, client, name):
    """Its first piece arrived; the second, after the deadline, does not."""
    with client._lane("put", soon()) as call:
        assert call.ask(["put", name, 2 * NUM_BYTES, 0, NUM_BYTES]) == 0
    assert client.read(name, [], soon()) is None
    # Until then, it is another writer's.
    wait_until(lambda: client.put(name, [b"x"], soon()) is PutResult.STORED, "room for the value")
    assert read_whole(client, name) == b"x"


def test_a_lender_that_died_fails_its_values_only(server, client, name):
    client.put(name, [value_of()], soon())
    server.lender.kill()
    try:
        fail_in_time(lambda: read_whole(client, name), 2.0)
    finally:
        server.stop()
        server.start()


def test_a_master_that_died_fails_and_comes_back_empty(server, client, name):
    for each in (name, f"{name}/old"):
        client.put(each, [value_of()], soon())
    server.stop()
    try:
        for call in calls_of(client, name, 0.5):
            fail_in_time(call, 0.5)
    finally:
        server.start()

    def stores():
        try:  # again, should the master have taken it before it knew who lends memory
            client.put(name, [b"again"], soon(5))
            return read_whole(client, name) == b"again"
        except StoreError:
            return False

    wait_until(stores, "the master")
    assert client.exists([name, f"{name}/old"], soon()) == [True, False]


def test_a_url_opens_a_store(server, name):
    url = f"mooncake://{server.master}/{name}?segment=16MiB&protocol=tcp&admin={server.admin}"
    with open_one(url) as store:
        assert store.url == f"mooncake://{server.master}/{name}"
        assert store.put(make_key(), [b"value"]).result is PutResult.STORED
        assert store.read(make_key(), ()) == 5
        assert [entry.key for entry in store.catalogue().scan()] == [make_key()]


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

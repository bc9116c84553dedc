"""The client of Valkey and Redis, against real servers."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.parse import quote

import pytest

from kvferry.errors import KVError, StoreError
from kvferry.store.base import PutResult
from kvferry.store.servers.resp import command
from kvferry.store.servers.valkey import Login, ValkeyClient
from kvferry.store.servers.valkey_nodes import ValkeyNode
from kvferry.store.url import open_one
from kvferry.testing.stores import (
    make_key,
    read_value,
)
from tests.servers.certificates import make_certificate
from tests.servers.process import LOCALHOST, free_ports
from tests.servers.proxy import running_proxy
from tests.servers.valkey import ValkeyServer, running_valkey
from tests.store.servers.real_clients import (
    ClientTests,
    ServerStoreTests,
    calls_of,
    ends_within,
    fail_in_time,
    soon,
    value_of,
)  # fmt: skip

pytestmark = pytest.mark.usefixtures("patient_calls")

SECRET = "pa:ss/word@%20"


def read_whole(client: ValkeyClient, name: str, deadline: float | None = None) -> bytes | None:
    deadline = soon() if deadline is None else deadline
    size = client.read(name, [], deadline)
    if size is None:
        return None
    buffer = bytearray(size)
    assert client.read(name, [(0, memoryview(buffer))], deadline) in (size, None)
    return bytes(buffer)


@pytest.fixture
def connect(closing: Callable[[ValkeyClient], ValkeyClient]) -> Callable[..., ValkeyClient]:
    """Makes clients of a port of this machine."""
    return lambda port, **options: closing(ValkeyClient([(LOCALHOST, port)], **options))


@pytest.fixture
def server(valkey_server: ValkeyServer) -> Iterator[ValkeyServer]:
    """Empty after the test."""
    yield valkey_server
    valkey_server.ask("FLUSHALL")


@pytest.fixture(params=["server", "cluster"])
def nodes(request: pytest.FixtureRequest) -> Iterator[list[ValkeyServer]]:
    """One server, or three of a cluster. Empty after the test."""
    if request.param == "server":
        nodes = [request.getfixturevalue("valkey_server")]
    else:
        nodes = request.getfixturevalue("valkey_cluster").nodes
    yield nodes
    for node in nodes:
        node.ask("FLUSHALL")


@pytest.fixture
def client(nodes: list[ValkeyServer], connect: Callable[..., ValkeyClient]) -> ValkeyClient:
    return connect(nodes[-1].port, cluster=len(nodes) > 1)


@pytest.fixture
def lone() -> Iterator[ValkeyServer]:
    """A server that the test may stop, kill or fill."""
    with running_valkey() as server:
        yield server


class TestStoreOnValkey(ServerStoreTests):
    """On one server, and on three nodes."""

    @pytest.fixture
    def make_client(self, nodes, closing):
        seeds, is_cluster = [(LOCALHOST, node.port) for node in nodes], len(nodes) > 1
        return lambda: closing(ValkeyClient(seeds, cluster=is_cluster))

    @pytest.fixture
    def url_of(self, nodes):
        hosts = ",".join(f"{LOCALHOST}:{node.port}" for node in nodes)
        options = "?cluster=true" if len(nodes) > 1 else ""
        return lambda path: f"valkey://{hosts}/{path}{options}"


class TestValkeyClient(ClientTests):
    @pytest.fixture
    def make_client(self, server, connect):
        return lambda: connect(server.port)


class TestValkeyClusterClient(ClientTests):
    # A node that stops holds only the calls for it.
    test_a_stopped_server_costs_the_deadline = None
    test_a_close_ends_what_is_under_way = None
    test_a_slow_server_is_waited_for = None

    @pytest.fixture
    def make_client(self, valkey_cluster, connect):
        return lambda: connect(valkey_cluster.nodes[1].port, cluster=True)


# On one server and on a cluster.


def test_a_prefix_is_text_and_no_pattern_and_many_names_are_listed(client):
    for number in range(700):
        client.put(f"kv/ns/{number}", [b"x" * (number + 1)], soon())
    client.put("kv/n*/other", [b"x"], soon())
    found = {(name, size) for name, size, _ in client.scan("kv/ns/", soon())}
    assert found == {(f"kv/ns/{number}", number + 1) for number in range(700)}
    assert [name for name, _, _ in client.scan("kv/n*/", soon())] == ["kv/n*/other"]


def test_a_name_with_a_brace_is_refused(client):
    with pytest.raises(StoreError, match="brace"):
        client.put("kv/{ns}/a", [b"x"], soon())


def test_a_call_without_a_deadline_works(client):
    assert client.put("kv/ns/a", [b"x"], float("inf")) is PutResult.STORED


def test_both_sides_of_a_fork_have_their_own_connections(client):
    client.put("kv/ns/a", [b"from the parent"], soon())
    child = os.fork()
    if child == 0:
        is_right = False
        with contextlib.suppress(KVError):
            is_right = read_whole(client, "kv/ns/a") == b"from the parent"
            client.put("kv/ns/b", [b"from the child"], soon())
        os._exit(0 if is_right else 1)
    values = [read_whole(client, "kv/ns/a") for _ in range(50)]
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert set(values) == {b"from the parent"}
    assert read_whole(client, "kv/ns/b") == b"from the child"


# What is of one server.


def test_a_full_server_has_no_space(connect):
    with running_valkey(maxmemory="6mb", maxmemory_policy="noeviction") as server:
        client = connect(server.port)
        value = value_of(num_bytes=400_000)
        results = [client.put(f"kv/ns/{number}", [value], soon()) for number in range(20)]
        num_stored = results.count(PutResult.STORED)
        assert 3 < num_stored < 16
        assert results == [PutResult.STORED] * num_stored + [PutResult.NO_SPACE] * (20 - num_stored)
        assert read_whole(client, "kv/ns/0") == value


def test_an_evicting_server_gives_whole_values_or_none(connect):
    with running_valkey(maxmemory="8mb", maxmemory_policy="allkeys-lru") as server:
        client = connect(server.port)
        values = {f"kv/ns/{number}": value_of(number, 200_000) for number in range(60)}
        stop = threading.Event()

        def write() -> None:
            while not stop.is_set():
                for name, value in values.items():
                    client.put(name, [value], soon())

        writer = threading.Thread(target=write)
        writer.start()
        found, end, is_evicting = 0, time.monotonic() + 20.0, False
        try:
            while not (found > 20 and is_evicting):
                assert time.monotonic() < end, (found, is_evicting)
                for name, value in values.items():
                    buffers = [bytearray(50_000) for _ in range(4)]
                    ranges = [(50_000 * i, memoryview(each)) for i, each in enumerate(buffers)]
                    if client.read(name, ranges, soon()) is not None:
                        assert b"".join(buffers) == value
                        found += 1
                is_evicting = b"evicted_keys:0\r" not in server.ask("INFO", "stats")
        finally:
            stop.set()
            writer.join(20)


def test_a_scan_says_when_a_value_was_used_and_does_not_use_it(server, connect):
    client = connect(server.port)
    client.put("kv/idle/old", [b"abc"], soon())
    value = server.ask("DUMP", "kv/idle/old")
    server.ask("RESTORE", "kv/idle/old", 0, value, "REPLACE", "IDLETIME", 3600)
    for _ in range(2):
        ((_, _, last_used),) = client.scan("kv/idle/", soon())
        assert abs(time.time() - 3600 - last_used) < 60
    assert client.delete("kv/idle/old", soon())


def test_the_last_use_is_unknown_where_the_server_counts_uses(connect):
    with running_valkey(maxmemory="50mb", maxmemory_policy="allkeys-lfu") as server:
        client = connect(server.port)
        client.put("kv/ns/a", [b"abc"], soon())
        assert list(client.scan("kv/", soon())) == [("kv/ns/a", 3, 0.0)]


@pytest.fixture(scope="module")
def locked() -> Iterator[ValkeyServer]:
    """A server with a password."""
    with running_valkey(requirepass=SECRET) as server:
        yield server


def test_a_password_is_given(locked, tmp_path, connect):
    file = tmp_path / "password"
    file.write_text(SECRET + "\n")
    for login in (Login(password=SECRET), Login("default", SECRET), Login(password_file=str(file))):
        client = connect(locked.port, login=login)
        assert client.put("kv/ns/a", [value_of(num_bytes=100_000)], soon()) is not PutResult.FAILED


def test_a_password_that_changed_is_read_again(locked, tmp_path, connect):
    file = tmp_path / "password"
    file.write_text("an old one")
    client = connect(locked.port, login=Login(password_file=str(file)))
    with pytest.raises(StoreError, match="refused the login"):
        client.exists(["kv/ns/a"], soon())
    file.write_text(SECRET)
    client.exists(["kv/ns/a"], soon())


@pytest.mark.parametrize(
    "login", [Login(password="wr0ng-secret"), Login("some0ne", "wr0ng-secret")]
)
def test_a_wrong_password_is_one_clear_line_without_it(locked, login, caplog, connect):
    caplog.set_level(logging.DEBUG)
    client = connect(locked.port, login=login)
    with pytest.raises(StoreError, match=r"refused the login \(WRONGPASS\); check") as caught:
        client.put("kv/ns/a", [value_of(num_bytes=300_000)], soon())
    text = f"{caught.value!r} {caught.value} {caught.value.__cause__!r} {login!r} {caplog.text}"
    assert "wr0ng" not in text
    assert "some0ne" not in text
    assert "\n" not in str(caught.value)


def test_a_missing_password_is_named(locked, connect):
    client = connect(locked.port)
    with pytest.raises(StoreError, match=r"NOAUTH.*give username and password_file"):
        client.put("kv/ns/a", [value_of(num_bytes=3_000_000)], soon())


def test_a_replica_is_read_and_refuses_writes(lone, connect):
    client = connect(lone.port)
    client.put("kv/ns/a", [b"x"], soon())
    lone.ask("REPLICAOF", LOCALHOST, free_ports(1)[0])
    lone.ask("CONFIG", "SET", "replica-serve-stale-data", "yes")
    with pytest.raises(StoreError, match="put of 'kv/ns/b' refused: READONLY"):
        client.put("kv/ns/b", [b"x"], soon())
    assert read_whole(client, "kv/ns/a") == b"x"
    lone.ask("REPLICAOF", "NO", "ONE")
    assert client.put("kv/ns/b", [b"x"], soon()) is PutResult.STORED


def test_a_list_under_the_name_of_a_value_is_a_wrong_record(server, connect):
    """So that its reader takes it out; as an error it would speak against the whole server."""
    client = connect(server.port)
    server.ask("LPUSH", "kv/ns/list", "x")
    assert client.put("kv/ns/list", [b"value"], soon()) is PutResult.EXISTS
    assert client.read("kv/ns/list", [(0, memoryview(bytearray(5)))], soon()) == 1
    assert [(name, size) for name, size, _ in client.scan("kv/", soon())] == [("kv/ns/list", 1)]
    assert client.delete("kv/ns/list", soon())
    assert client.put("kv/ns/list", [b"value"], soon()) is PutResult.STORED


# Servers and networks that fail.


def test_a_killed_server_is_an_error_and_comes_back_empty(lone, connect):
    client = connect(lone.port)
    client.put("kv/ns/a", [b"value"], soon())
    lone.process.kill()
    for call in calls_of(client, "kv/ns/a", 2.0):
        fail_in_time(call, 2.0)
    lone.start()
    assert client.exists(["kv/ns/a"], soon()) == [False]
    assert read_whole(client, "kv/ns/a") is None
    assert client.put("kv/ns/a", [b"value"], soon()) is PutResult.STORED


def test_connections_that_a_server_closed_are_replaced(lone, connect):
    client = connect(lone.port)
    for _ in range(3):
        client.exists(["kv/ns/a"], soon())
        lone.ask("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
    assert client.put("kv/ns/a", [b"value"], soon()) is PutResult.STORED


def test_a_connect_that_is_not_answered_ends_at_the_deadline():
    # A backlog that is full: the kernel drops further requests to connect.
    with socket.create_server((LOCALHOST, 0), backlog=0) as listener:
        address = listener.getsockname()
        waiting = [socket.socket() for _ in range(3)]
        for each in waiting:
            each.setblocking(False)
            each.connect_ex(address)
        node = ValkeyNode(*address, Login(), None)
        with ends_within(0.4) as deadline, pytest.raises(StoreError, match="no answer in time"):
            node.ask([command("PING")], deadline)
        for each in waiting:
            each.close()
        node.close()


@pytest.mark.parametrize("num_bytes", [0, 3, 10, 150_000, 299_999])
def test_a_value_cut_in_the_middle_is_an_error(server, num_bytes, connect):
    value = value_of(num_bytes=300_000)
    with running_proxy(server.port) as proxy:
        client = connect(proxy.port)
        client.put("kv/ns/a", [value], soon())
        proxy.cut_after(num_bytes)
        with ends_within(15.0) as deadline, pytest.raises(StoreError, match=r"closed|reset"):
            read_whole(client, "kv/ns/a", deadline)
        proxy.pass_all()
        assert read_whole(client, "kv/ns/a") == value


def test_a_slow_network_is_waited_for_and_no_longer_than_the_deadline(server, connect):
    value = value_of(num_bytes=2_000_000)
    with running_proxy(server.port) as proxy:
        client = connect(proxy.port)
        client.put("kv/ns/a", [value], soon())
        proxy.limit(5e6)
        with ends_within(15.0) as deadline:
            assert read_whole(client, "kv/ns/a", deadline) == value
        # Something arrives all the time, and the call still ends.
        with ends_within(0.15) as deadline, pytest.raises(StoreError, match="no answer in time"):
            read_whole(client, "kv/ns/a", deadline)


def test_a_deadline_that_has_passed_is_an_error_at_once(server, connect):
    client = connect(server.port)
    with ends_within(0.0), pytest.raises(StoreError, match="no answer in time"):
        client.exists(["kv/ns/a"], time.monotonic() - 1)


def test_a_host_without_an_address_is_an_error(closing):
    client = closing(ValkeyClient([("no-such-host.invalid", 6379)]))
    with ends_within(2.0) as deadline, pytest.raises(StoreError, match=r"no-such-host\.invalid"):
        client.exists(["kv/ns/a"], deadline)


@contextlib.contextmanager
def answering(*answers: bytes) -> Iterator[int]:
    """A server that answers whatever comes with the next of `answers`, the last one for ever."""
    with socket.create_server((LOCALHOST, 0)) as listener:

        def serve() -> None:
            with contextlib.suppress(OSError):
                while True:
                    stream, _ = listener.accept()
                    with stream, contextlib.suppress(OSError):
                        stream.settimeout(20)  # a call that waits for more is seen to wait
                        left = list(answers)
                        while stream.recv(1 << 20):
                            stream.sendall(left.pop(0) if len(left) > 1 else left[0])

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield listener.getsockname()[1]
        # Closing a listener does not wake the thread that waits for it.
        listener.shutdown(socket.SHUT_RDWR)
        thread.join(10)


def test_bytes_of_another_value_are_handed_on(connect):
    """The record's checksums are what knows better."""
    with answering(b"+OK\r\n", b"$4\r\nabcd\r\n:4\r\n:1\r\n") as port:
        client = connect(port)
        buffer = bytearray(4)
        assert client.read("kv/ns/a", [(0, memoryview(buffer))], soon()) == 4
        assert buffer == b"abcd"


def test_a_server_that_repeats_the_password_is_not_quoted(connect):
    echo = f"-ERR unknown command 'AUTH', with args beginning with: '{SECRET}'\r\n".encode()
    with answering(echo) as port:
        client = connect(port, login=Login("someone", SECRET))
        with pytest.raises(StoreError) as caught:
            client.exists(["kv/ns/a"], soon())
        assert "refused the login (ERR)" in str(caught.value)


def test_a_node_of_a_cluster_asks_for_the_option(valkey_cluster, connect):
    client = connect(valkey_cluster.nodes[0].port)
    name = next(
        name
        for name in (f"kv/ns/{number}" for number in range(300))
        if valkey_cluster.nodes[0].ask("CLUSTER", "KEYSLOT", name) > 6000
    )
    with pytest.raises(StoreError, match=r"add \?cluster=true"):
        client.put(name, [b"x"], soon())


def test_a_server_that_is_no_cluster_says_so(server, connect):
    client = connect(server.port, cluster=True)
    with pytest.raises(StoreError, match="cluster support disabled"):
        client.exists(["kv/ns/a"], soon())


def test_slots_that_move_are_followed(valkey_cluster, connect):
    first, second, _ = valkey_cluster.nodes
    ids = {node.port: node.ask("CLUSTER", "MYID").decode() for node in (first, second)}
    client = connect(first.port, cluster=True)
    names = [f"kv/ns/{number}" for number in range(300)]
    name = next(each for each in names if first.ask("CLUSTER", "KEYSLOT", each) < 5000)
    slot = first.ask("CLUSTER", "KEYSLOT", name)
    client.put(name, [b"before"], soon())
    second.ask("CLUSTER", "SETSLOT", slot, "IMPORTING", ids[first.port])
    first.ask("CLUSTER", "SETSLOT", slot, "MIGRATING", ids[second.port])
    assert read_whole(client, name) == b"before"
    first.ask("MIGRATE", LOCALHOST, second.port, name, 0, 1000)
    assert read_whole(client, name) == b"before"  # by ASK
    assert client.exists([name], soon()) == [True]
    for node in (second, first):
        node.ask("CLUSTER", "SETSLOT", slot, "NODE", ids[second.port])
    assert read_whole(client, name) == b"before"  # by MOVED
    assert client.delete(name, soon())
    for node in (first, second):
        node.ask("CLUSTER", "SETSLOT", slot, "NODE", ids[first.port])


def test_a_node_that_stops_holds_only_the_calls_for_it(valkey_cluster, closing):
    first, second, third = valkey_cluster.nodes
    seeds = [(LOCALHOST, node.port) for node in (first, second, third)]
    client = closing(ValkeyClient(seeds, cluster=True))
    names = [f"kv/ns/{number}" for number in range(30)]
    owners = {name: first.ask("CLUSTER", "KEYSLOT", name) * 3 // 16384 for name in names}
    for name in names:
        client.put(name, [b"x"], soon())
    third.process.pause()
    try:
        lost = next(name for name in names if owners[name] == 2)
        kept = next(name for name in names if owners[name] == 0)
        with ends_within(0.3) as deadline, pytest.raises(StoreError, match="no answer in time"):
            client.read(lost, [], deadline)
        with ends_within(10.0) as deadline:
            assert client.read(kept, [], deadline) == 1
    finally:
        third.process.resume()
    for node in valkey_cluster.nodes:
        node.ask("FLUSHALL")


# TLS.


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return make_certificate(tmp_path_factory.mktemp("tls"))


def test_tls(server, certificate, connect):
    value = value_of(num_bytes=1_000_003)
    trusting = ssl.create_default_context(cafile=certificate[0])
    with running_proxy(server.port, certificate) as proxy:
        client = connect(proxy.port, tls=trusting)
        pieces = [value[:17], memoryview(value)[17:]]
        assert client.put("kv/ns/tls", pieces, soon()) is PutResult.STORED
        for _ in range(3):
            assert read_whole(client, "kv/ns/tls") == value
        assert proxy.num_connections == 1
        proxy.black_hole()
        with ends_within(0.4) as deadline, pytest.raises(StoreError, match="no answer in time"):
            read_whole(client, "kv/ns/tls", deadline)


def test_a_certificate_that_is_not_trusted_is_refused(server, certificate, connect):
    with running_proxy(server.port, certificate) as proxy:
        client = connect(proxy.port, tls=ssl.create_default_context())
        with pytest.raises(StoreError, match="certificate is refused: self-signed certificate"):
            client.exists(["kv/ns/a"], soon())


def test_a_store_by_url_with_tls_and_a_password(locked, certificate, tmp_path):
    file = tmp_path / "password"
    file.write_text(SECRET)
    ca_file = quote(str(certificate[0]), safe="/")
    with running_proxy(locked.port, certificate) as proxy:
        at = f"localhost:{proxy.port}/kv?ca_file={ca_file}"
        for url in (
            f"valkeys://{at}&password_file={quote(str(file))}",
            f"rediss://:{quote(SECRET, safe='')}@{at}",
        ):
            with open_one(url) as store:
                assert store.put(make_key(), [b"value"]).result is not PutResult.FAILED
                assert read_value(store, make_key()) == b"value"
                assert SECRET not in store.url


def test_tls_to_a_server_without_it_is_an_error(server, certificate, connect):
    trusting = ssl.create_default_context(cafile=certificate[0])
    client = connect(server.port, tls=trusting)
    # It waits for the end of what looks like a command.
    with ends_within(0.3) as deadline, pytest.raises(StoreError, match="no answer in time"):
        client.exists(["kv/ns/a"], deadline)

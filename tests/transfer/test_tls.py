"""Peers inside TLS: what is read, who is refused, and what ends with the deadline all the same."""

from __future__ import annotations

import random
import socket
import subprocess
import threading
import time
from contextlib import closing

import pytest

from kvferry.errors import ConfigError, StoreError
from kvferry.network import Stream
from kvferry.store.kind import Opening
from kvferry.store.url import open_one
from kvferry.testing.stores import read_value
from kvferry.testing.stores.hooks import wait_until
from kvferry.transfer.auth import PeerFiles, SharedKey
from kvferry.transfer.base import KeyState
from kvferry.transfer.client import PeerClient
from kvferry.transfer.messages import MAX_RANGES
from kvferry.transfer.server import Listen, PeerServer
from tests.servers.certificates import Files, make_authority, make_files
from tests.transfer.lending import KEY, SPACE, soon

A = b"a" * 32
RECORD = random.Random(1).randbytes(5_000_011)
"""More than the buffers of a connection take, and no multiple of TLS's own records."""


@pytest.fixture(scope="module")
def authority(tmp_path_factory):
    return make_authority(tmp_path_factory.mktemp("tls") / "ours")


@pytest.fixture(scope="module")
def files(authority):
    return make_files(authority, "peer")


@pytest.fixture
def serve_tls(lender, key_file, files, serve, counters):
    """Factory of servers that speak TLS; `serve` looks after threads and loans."""
    servers = []

    def make(files=files):
        listen = Listen(key_file=key_file, **files._asdict())
        servers.append(PeerServer(lender, lambda: SPACE, listen, observer=counters))
        return servers[-1]

    lender.records[A] = RECORD
    yield make
    for server in servers:
        server.close()


@pytest.fixture
def connect_tls(files, serve_tls):
    clients = []

    def make(port, files=files, host="127.0.0.1", key=KEY):
        tls = None if files is None else PeerFiles(**files._asdict()).open_tls("client")
        clients.append(PeerClient(host, port, SPACE, key, tls))
        return clients[-1]

    yield make
    for client in clients:
        client.close()


def read(client, deadline=None):
    buffer = memoryview(bytearray(len(RECORD)))
    assert client.read(A, [(0, buffer)], deadline or soon()) == (KeyState.HELD, len(RECORD))
    return buffer


def test_what_is_read_is_what_is_held(serve_tls, connect_tls):
    server = serve_tls()
    client = connect_tls(server.address[1])
    assert client.states_of([A, b"b" * 32], soon()) == [KeyState.HELD, KeyState.ABSENT]
    for _ in range(3):
        assert read(client) == RECORD
    assert server.num_connections == 1  # it is used again
    places = [(offset * 1000, offset % 700) for offset in range(MAX_RANGES)]
    buffers = [memoryview(bytearray(length)) for _, length in places]
    client.read(A, [(at, view) for (at, _), view in zip(places, buffers, strict=True)], soon())
    for (offset, length), buffer in zip(places, buffers, strict=True):
        assert buffer == RECORD[offset : offset + length]


def test_nothing_crosses_in_clear(serve_tls, connect_tls, relay, lender):
    lender.records[A] = b"in clear " * 100_000
    between = relay(serve_tls().address[1])
    seen = bytearray()
    between.watch = seen.extend
    buffer = memoryview(bytearray(900_000))
    connect_tls(between.port).read(A, [(0, buffer)], soon())
    assert buffer == lender.records[A]
    assert len(seen) > 900_000
    assert b"in clear" not in seen
    assert A not in seen


def test_who_has_no_certificate_of_the_authority_is_refused(
    serve_tls, connect_tls, tmp_path, caplog, files, counters
):
    port = serve_tls().address[1]
    foreign = make_files(make_authority(tmp_path / "theirs"), "peer")
    trusting = foreign._replace(ca_file=files.ca_file)
    with pytest.raises(StoreError, match=r"TLS failed: .*unknown ca"):
        read(connect_tls(port, trusting))
    with pytest.raises(StoreError, match="its certificate is refused"):
        read(connect_tls(port, foreign))
    with pytest.raises(StoreError):
        read(connect_tls(port, None), soon(1.0))  # speaks no TLS
    with socket.create_connection(("127.0.0.1", port)) as stream:
        stream.sendall(b"GET / HTTP/1.1\r\n\r\n")
        wait_until(lambda: counters["peer_refused"] >= 3, "the certificates and this are refused")
    assert read(connect_tls(port)) == RECORD
    assert any("its certificate is refused" in message for message in caplog.messages)


def test_a_certificate_does_not_stand_for_the_key(serve_tls, connect_tls):
    port = serve_tls().address[1]
    with pytest.raises(StoreError, match="the keys are different"):
        read(connect_tls(port, key=SharedKey(b"x" * 32)))


def test_a_certificate_of_another_machine_is_refused(serve_tls, connect_tls, authority):
    port = serve_tls(make_files(authority, "other", "DNS:worker-7,IP:192.0.2.1")).address[1]
    with pytest.raises(StoreError, match="certificate is refused: IP address mismatch"):
        read(connect_tls(port))
    with pytest.raises(StoreError, match="its certificate is refused: Hostname mismatch"):
        read(connect_tls(port, host="localhost"))


def test_a_server_without_tls_is_refused(serve, connect_tls):
    with pytest.raises(StoreError, match="TLS failed: wrong version number"):
        read(connect_tls(serve().address[1]))


@pytest.mark.parametrize("at", [100, 3_000, 1_000_000])
def test_a_flipped_bit_or_a_cut_ends_the_call(serve_tls, connect_tls, relay, at):
    between = relay(serve_tls().address[1])
    for fault in ("flipped", "cut"):
        between.fault = at, fault
        client = connect_tls(between.port)
        with pytest.raises(StoreError):
            read(client)
        between.fault = None
        assert read(client) == RECORD


@pytest.mark.parametrize("at", [1, 100, 3_000, 1_000_000])
def test_silence_ends_with_the_deadline(serve_tls, connect_tls, relay, at):
    between = relay(serve_tls().address[1])
    between.fault = at, "silent"
    client = connect_tls(between.port)
    started = time.monotonic()
    with pytest.raises(StoreError, match="no answer in time"):
        read(client, started + 0.5)
    assert 0.45 < time.monotonic() - started < 20


def test_a_reader_that_stops_reading_ends_at_the_server(serve_tls, connect_tls, relay, lender):
    between = relay(serve_tls().address[1])
    between.fault = 1_000_000, "held"
    client = connect_tls(between.port)
    with pytest.raises(StoreError, match="no answer in time"):
        read(client, soon(0.5))
    wait_until(lambda: lender.num_lent == 0, "the loan is back")


def test_a_close_ends_calls_under_way(serve_tls, connect_tls, lender):
    client = connect_tls(serve_tls().address[1])
    lender.gate.clear()
    errors = []

    def call():
        try:
            read(client)
        except StoreError as error:
            errors.append(error)

    thread = threading.Thread(target=call)
    thread.start()
    wait_until(lambda: lender.num_lent == 1, "it is asked")
    client.close()
    thread.join(30)
    assert not thread.is_alive()
    assert len(errors) == 1
    lender.gate.set()


def test_an_end_while_tls_takes_over_the_socket_ends_the_handshake(files):
    near, far = socket.socketpair()
    stream = Stream(near)
    real = PeerFiles(**files._asdict()).open_tls("client")

    class Slow:
        def wrap_socket(self, *args, **options):
            secured = real.wrap_socket(*args, **options)
            stream.end()
            return secured

    with far, closing(stream), pytest.raises(ConnectionAbortedError):
        stream.secure(Slow(), soon(), "127.0.0.1")


# -- options ------------------------------------------------------------------------------------


def test_a_store_by_url(serve_tls, key_file, files):
    query = "&".join(f"{name}={value}" for name, value in files._asdict().items())
    port = serve_tls().address[1]
    url = f"peer://127.0.0.1:{port}?key_file={key_file}&{query}"
    with open_one(url, Opening(namespace=SPACE)) as store:
        assert read_value(store, A) == RECORD
    listen = Listen.parse(f"127.0.0.1:0?key_file={key_file}&{query}")
    assert listen == Listen(key_file=key_file, **files._asdict())


@pytest.mark.parametrize("given", [("cert_file",), ("ca_file",), ("cert_file", "cert_key_file")])
def test_options_by_halves_are_refused(given, key_file, lender, files):
    some = {name: getattr(files, name) for name in given}
    (missing, *_) = [name for name in Files._fields if name not in given]
    with pytest.raises(ConfigError, match=rf"serve: TLS needs .*; add .*{missing}"):
        PeerServer(lender, lambda: SPACE, Listen(key_file=key_file, **some))
    query = "&".join(f"{name}={value}" for name, value in some.items())
    with pytest.raises(ConfigError, match=f"TLS needs .*; add .*{missing}") as caught:
        open_one(f"peer://127.0.0.1:1?key_file={key_file}&{query}")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", Files._fields)
def test_a_file_that_is_absent_or_no_pem_is_one_error(name, tmp_path, files):
    for content, part in ((None, "No such file"), (b"no PEM", "no usable PEM")):
        path = tmp_path / "file"
        if content is not None:
            path.write_bytes(content)
        with pytest.raises(ConfigError, match=part):
            PeerFiles(**(files._asdict() | {name: str(path)})).open_tls("client")


def test_a_key_with_a_password_is_refused_without_a_question(tmp_path, files):
    locked = tmp_path / "locked.key"
    command = ["openssl", "pkcs8", "-topk8", "-in", files.cert_key_file, "-out", str(locked)]
    subprocess.run([*command, "-passout", "pass:word"], check=True, timeout=30)
    with pytest.raises(ConfigError, match="no usable PEM"):
        PeerFiles(**(files._asdict() | {"cert_key_file": str(locked)})).open_tls("server")

"""Fixtures: servers with a key file that must leave nothing behind, their clients, and relays."""

from __future__ import annotations

import threading
from contextlib import ExitStack

import pytest

from kvferry.observe import Counters
from kvferry.testing.stores.hooks import wait_until
from kvferry.transfer.base import Bounds
from kvferry.transfer.client import PeerClient
from kvferry.transfer.server import Listen, PeerServer
from tests.servers.patience import make_connections_patient
from tests.transfer.lending import KEY, PATIENCE_SECONDS, SPACE, DictLender, Raw, Relay

PATIENT = Bounds(handshake_seconds=PATIENCE_SECONDS)
"""No greeting fails because the machine is busy."""


@pytest.fixture
def key_file(tmp_path):
    path = tmp_path / "peers.key"
    path.touch(0o600)
    path.write_bytes(b"k" * 32)
    return str(path)


@pytest.fixture
def lender():
    return DictLender()


@pytest.fixture
def counters():
    """Of all servers of a test."""
    return Counters()


@pytest.fixture
def serve(lender, key_file, counters, monkeypatch):
    """Factory of servers. At the end all loans must be back and all threads gone."""
    make_connections_patient(monkeypatch)
    before = set(threading.enumerate())
    with ExitStack() as stack:

        def make(port=0, bounds=PATIENT):
            listen = Listen(port=port, key_file=key_file)
            server = PeerServer(lender, lambda: SPACE, listen, bounds=bounds, observer=counters)
            return stack.enter_context(server)

        yield make
    wait_until(lambda: set(threading.enumerate()) <= before, "all threads end")
    assert lender.num_lent == 0


@pytest.fixture
def connect(serve):
    """Factory of clients of a server, which are closed before it."""
    clients = []

    def make(server, namespace=SPACE, key=KEY):
        clients.append(PeerClient(*server.address, namespace, key))
        return clients[-1]

    yield make
    for client in clients:
        client.close()


@pytest.fixture
def raw(serve):
    """Factory of connections that tests drive by hand."""
    made = []

    def make(server):
        made.append(Raw(server))
        return made[-1]

    yield make
    for each in made:
        each.close()


@pytest.fixture
def relay():
    """Factory of relays to a port."""
    with ExitStack() as stack:
        yield lambda port: stack.enter_context(Relay(port))

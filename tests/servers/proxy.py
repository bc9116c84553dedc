"""A TCP proxy in front of a server. Tests make it slow, let it cut connections, or silence it."""

from __future__ import annotations

import contextlib
import select
import socket
import ssl
import threading
from collections.abc import Iterator
from enum import Enum
from pathlib import Path

from tests.servers.process import LOCALHOST

_PIECE = 64 * 1024
_TICK_SECONDS = 0.05


class Way(Enum):
    """What a proxy does with connections and the bytes on them."""

    PASS = "pass"
    BLACK_HOLE = "black hole"
    """Connections stay open and nothing passes, in either direction."""
    REFUSE = "refuse"
    """New connections are closed as they come, open ones at once."""


class Proxy:
    """Listens on a free port and passes bytes to the port `target`, in the way that was set last.

    Only the server's answers are limited and cut; requests pass as they come. With a certificate,
    clients speak TLS to the proxy, which speaks plain TCP to the server.

    Attributes:
        port: port on which the proxy listens.
        num_connections: connections accepted so far.
    """

    def __init__(self, target: int, certificate: tuple[Path, Path] | None = None) -> None:
        self._target = target
        self._tls: ssl.SSLContext | None = None
        if certificate is not None:
            self._tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            self._tls.load_cert_chain(*certificate)
        self._way = Way.PASS
        self._cut_after: int | None = None
        self._bytes_per_second: float | None = None
        self._closed = threading.Event()
        self._threads: list[threading.Thread] = []
        self.num_connections = 0
        self._listener = socket.create_server((LOCALHOST, 0))
        self._listener.settimeout(_TICK_SECONDS)
        self.port: int = self._listener.getsockname()[1]
        self._run(self._accept)

    def pass_all(self) -> None:
        """Pass everything, as at the start."""
        self._way, self._cut_after, self._bytes_per_second = Way.PASS, None, None

    def cut_after(self, num_bytes: int) -> None:
        """Close connections once this many more bytes of answers have passed, over all of them."""
        self._cut_after = num_bytes

    def limit(self, bytes_per_second: float) -> None:
        """Pass answers at this rate, on each connection."""
        self._bytes_per_second = bytes_per_second

    def black_hole(self) -> None:
        self._way = Way.BLACK_HOLE

    def refuse(self) -> None:
        self._way = Way.REFUSE

    def close(self) -> None:
        """End all connections and threads. Idempotent."""
        self._closed.set()
        for thread in self._threads:
            thread.join(10)
            assert not thread.is_alive()
        self._listener.close()

    def _run(self, target: object, *args: object) -> None:
        thread = threading.Thread(target=target, args=args, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        while not self._closed.is_set():
            with contextlib.suppress(TimeoutError):
                client, _ = self._listener.accept()
                self.num_connections += 1
                self._run(self._serve, client)

    def _serve(self, client: socket.socket) -> None:
        with contextlib.suppress(OSError), contextlib.ExitStack() as undo:
            undo.callback(client.close)
            if self._way is Way.REFUSE:
                return
            while self._way is Way.BLACK_HOLE and not self._closed.wait(_TICK_SECONDS):
                pass
            if self._tls is not None:
                client.settimeout(5)
                client = self._tls.wrap_socket(client, server_side=True)
                undo.callback(client.close)
            server = undo.enter_context(socket.create_connection((LOCALHOST, self._target), 5))
            self._carry(client, server)

    def _carry(self, client: socket.socket, server: socket.socket) -> None:
        """Pass both directions in one thread, since two must not use one TLS connection at once."""
        client.settimeout(5)
        server.settimeout(5)
        while not self._closed.is_set() and self._way is not Way.REFUSE:
            if isinstance(client, ssl.SSLSocket) and client.pending():
                readable = [client]
            else:
                readable, _, _ = select.select([client, server], [], [], _TICK_SECONDS)
            for source in readable:
                if self._way is Way.BLACK_HOLE:
                    self._closed.wait(_TICK_SECONDS)
                    break
                piece = source.recv(_PIECE)
                if not piece:
                    return
                if source is client:
                    server.sendall(piece)
                elif not self._answer(piece, client):
                    return

    def _answer(self, piece: bytes, client: socket.socket) -> bool:
        """Pass an answer to the client; return False if the connection is to be cut."""
        if self._bytes_per_second is not None:
            self._closed.wait(len(piece) / self._bytes_per_second)
        if self._cut_after is None:
            client.sendall(piece)
            return True
        passing = piece[: self._cut_after]
        self._cut_after -= len(passing)
        client.sendall(passing)
        return self._cut_after > 0


@contextlib.contextmanager
def running_proxy(target: int, certificate: tuple[Path, Path] | None = None) -> Iterator[Proxy]:
    """Run a proxy to a port of loopback for the block."""
    proxy = Proxy(target, certificate)
    try:
        yield proxy
    finally:
        proxy.close()

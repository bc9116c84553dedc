"""Serves a lender's records to peers on the server's own threads, never within an engine's steps.

With the option `serve`, a `PeerServer` starts beside an engine's scheduler role. One thread
accepts; each connection has a thread, which answers one question at a time straight from the
lender's memory. A reader that goes away or stops reading ends only its own connection.
"""

from __future__ import annotations

import logging
import re
import secrets
import selectors
import socket
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from typing import Any, NoReturn

from kvferry.config import unknown
from kvferry.errors import ConfigError, FaultKind, StoreError
from kvferry.network import addresses_of, is_loopback, join_host
from kvferry.observe import Observer
from kvferry.processors import begin_io_thread
from kvferry.transfer.auth import PeerFiles, SharedKey
from kvferry.transfer.base import Bounds, KeyState, Lender, Loan
from kvferry.transfer.messages import (
    GREETINGS,
    MAX_FRAME_BYTES,
    MAX_GREETING_BYTES,
    MAX_READ_BYTES,
    QUESTIONS,
    VERSION,
    Challenge,
    Frames,
    Hello,
    KeyStates,
    Lent,
    Read,
    Refused,
    Welcome,
    part_lengths,
)
from kvferry.types import ChunkKey

logger = logging.getLogger(__name__)

_RESOLVE_SECONDS = 10.0
_HOST_AND_PORT = re.compile(
    r"(?:(?:\[([0-9A-Fa-f:.]+)\]|([A-Za-z0-9._-]+))(?::(\d{1,5}))?|([0-9A-Fa-f:.]+))", re.ASCII
)
_MAX_SAID = 16
"""How many different reasons of refusals are logged."""
_LEAVE_SECONDS = 1.0
"""How long to wait for the thread of a connection that was ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Listen(PeerFiles):
    """Where a server listens, and where others reach it.

    Attributes:
        host: name or address to bind to.
        port: port to bind to; 0 takes a free one.
        advertise: `host` or `host:port` that others connect to, if that differs, as behind network
            address translation. `PeerServer.address` says it.
    """

    host: str = "127.0.0.1"
    port: int = 0
    advertise: str = ""

    @classmethod
    def parse(cls, text: str) -> Listen:
        """Parse `host:port`, with the other attributes after a `?`. Raises ConfigError."""
        place, _, query = text.partition("?")
        found = _HOST_AND_PORT.fullmatch(place)
        host = found and (found[1] or found[2])
        if not found or not host or found[3] is None:
            raise ConfigError(f"serve {place!r} is not host:port; port 0 takes a free one")
        options = dict(option.partition("=")[::2] for option in query.split("&") if option)
        known = ["advertise", *PeerFiles.__slots__]
        for name in options.keys() - set(known):
            raise ConfigError(f"serve: {unknown('option', name, known)}")
        return cls(host=host, port=int(found[3]), **options)

    def __post_init__(self) -> None:
        if not 0 <= self.port < 1 << 16:
            raise ConfigError(f"port is {self.port}; it is 0 to 65535")
        self.address_of(self.port)

    def address_of(self, port: int) -> tuple[str, int]:
        """Return what others connect to if the server listens on `port`. Raises ConfigError."""
        found = _HOST_AND_PORT.fullmatch(self.advertise or self.host)
        if found is None or int(found[3] or 1) not in range(1, 1 << 16):
            raise ConfigError(f"advertise {self.advertise!r} is neither host nor host:port")
        return found[1] or found[2] or found[4], int(found[3] or port)

    def is_at(self, host: str, port: int | None) -> bool:
        """Whether this address certainly is the server's own."""
        is_everywhere = self.host == ("::" if ":" in host else "0.0.0.0")
        is_here = is_everywhere and port == self.port and is_loopback(host)
        return is_here or (host, port) in ((self.host, self.port), self.address_of(self.port))

    def for_engine(self, index: int) -> Listen:
        """Return the settings of one of several engines with one configuration. `index` is added to
        both ports, but not to port 0. Raises ConfigError."""
        host, advertised = self.address_of(0)  # 0: `advertise` names no port
        highest = max(self.port, advertised)
        if highest + index >= 1 << 16:
            raise ConfigError(
                f"serve: port {highest} and data-parallel index {index} make {highest + index}, "
                "and ports end at 65535; set a lower port"
            )
        return replace(
            self,
            port=self.port and self.port + index,
            advertise=join_host(host, advertised + index) if advertised else self.advertise,
        )


class PeerServer:
    """A server that listens from its construction until `close`.

    Args:
        lender: the holder of the records.
        namespace: returns the current namespace of the records. A client that names another one is
            refused, also after a change while it is connected.
        listen: where the server listens.
        bounds: the server's limits.
        observer: counts `peer_served_records`, `peer_served_bytes`, `peer_refused`, and
            `peer_overdue_loans`, which ran out before their reader had all: it gets a miss.

    Attributes:
        incarnation: 16 random bytes, new for each server.
        address: host and port that others connect to.

    Raises:
        ConfigError: the address does not resolve or cannot be bound, the key is missing or not to
            be trusted, or the certificates cannot be used.
    """

    def __init__(
        self,
        lender: Lender[Any],
        namespace: Callable[[], bytes],
        listen: Listen = Listen(),  # frozen
        *,
        bounds: Bounds | None = None,
        observer: Observer | None = None,
    ) -> None:
        self.incarnation = secrets.token_bytes(16)
        bounds = bounds if bounds is not None else Bounds()
        if listen.key_file is None and not is_loopback(listen.host):
            raise ConfigError(
                f"peers are to be served at {listen.host!r}, which other machines may reach, and "
                "no key is given; name a key_file, or listen on 127.0.0.1"
            )
        self._observer = observer if observer is not None else Observer()
        key = listen.open_key()
        self._desk = _Desk(lender, namespace, key, self.incarnation, bounds, self._observer)
        try:
            self._tls = listen.open_tls("server")
        except ConfigError as error:
            raise ConfigError(f"serve: {error}") from None
        self._lock = threading.Lock()
        self._connections: dict[_Client, threading.Thread] = {}  # oldest first
        self._said: set[str] = set()
        self._closed = False
        self._listener = _bind(listen)
        self.address = listen.address_of(self._listener.getsockname()[1])
        self._wake = socket.socketpair()  # `close` writes to [0]; the thread watches [1]
        self._thread = threading.Thread(target=self._accept, name="kvferry-serve", daemon=True)
        self._thread.start()

    @property
    def num_connections(self) -> int:
        """Number of open connections."""
        return len(self._connections)

    def _accept(self) -> None:
        begin_io_thread()
        with selectors.DefaultSelector() as selector:
            selector.register(self._listener, selectors.EVENT_READ)
            selector.register(self._wake[1], selectors.EVENT_READ)
            while not self._closed:
                try:
                    if any(key.fileobj is self._listener for key, _ in selector.select()):
                        self._accept_one()
                except Exception as error:  # outermost loop of a thread: it hears the next one
                    # Such as no memory, thread or file for one more; or the client has gone.
                    self._say(str(error) or type(error).__name__)
                    time.sleep(0.01)

    def _accept_one(self) -> None:
        accepted, _ = self._listener.accept()
        with ExitStack() as undo:
            undo.callback(accepted.close)
            client = _Client(accepted)
            if not self._has_place():
                self._observer.count("peer_refused")
                return
            thread = threading.Thread(
                target=self._serve, args=(client,), name="kvferry-serve", daemon=True
            )
            undo.callback(self._forget, client)
            with self._lock:
                self._connections[client] = thread
                if self._closed:  # meanwhile: `close` did not see this connection
                    client.end()
            thread.start()
            undo.pop_all()

    def _has_place(self) -> bool:
        """Whether one more connection has a place. If all are taken, the oldest connection that has
        not proved itself loses its place, so those without the key keep no peer out."""
        with self._lock:
            if len(self._connections) < self._desk.bounds.max_connections:
                return not self._closed
            strangers = (each for each in self._connections.items() if not each[0].namespace)
            stranger, thread = next(strangers, (None, None))
        if stranger is None or thread is None:
            return False
        self._observer.count("peer_refused")
        stranger.end()
        thread.join(_LEAVE_SECONDS)
        return not thread.is_alive()

    def _serve(self, client: _Client) -> None:
        """Runs in: the thread of a connection."""
        begin_io_thread()
        try:
            deadline = time.monotonic() + self._desk.bounds.handshake_seconds
            if self._tls is not None:
                client.secure(self._tls, deadline)
            self._desk.greet(client, deadline)
            while True:
                num_bytes = self._desk.answer(client)
                if num_bytes:
                    self._observer.count("peer_served_records")
                    self._observer.count("peer_served_bytes", num_bytes)
        except StoreError as error:
            self._say(str(error))  # first, so that who sees the count finds the line
            self._observer.count("peer_refused")
        except OSError as error:
            logger.debug("a connection of a peer ended: %s", error)
        except Exception:  # outermost loop of a thread: the others go on
            logger.exception("a connection of a peer failed")
        finally:
            self._forget(client)

    def _say(self, reason: str) -> None:
        """Log a refusal, once for each reason: anyone who reaches the port can cause many."""
        with self._lock:
            is_new = reason not in self._said and len(self._said) < _MAX_SAID
            if is_new:
                self._said.add(reason)
        if is_new:
            logger.warning("a peer is refused: %s; this is logged once", reason)

    def _forget(self, client: _Client) -> None:
        with self._lock:
            self._connections.pop(client, None)
        client.close()

    def close(self) -> None:
        """End all connections, also in mid-answer, and wait for their threads for a limited time.
        Idempotent."""
        with self._lock:
            was_closed, self._closed = self._closed, True
            threads = [self._thread, *self._connections.values()]
            for client in self._connections:
                client.end()
        if was_closed:
            return
        self._wake[0].send(b"x")
        deadline = time.monotonic() + self._desk.bounds.close_seconds
        for thread in threads:
            with suppress(RuntimeError):  # the thread has not started yet
                thread.join(max(0.0, deadline - time.monotonic()))
        for each in (self._listener, *self._wake):
            each.close()

    def __enter__(self) -> PeerServer:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __repr__(self) -> str:
        state = "closed" if self._closed else f"{self.num_connections} connections"
        return f"<PeerServer {join_host(*self.address)} {state}>"


def _bind(listen: Listen) -> socket.socket:
    """Open a listening socket. Raises ConfigError."""
    place = join_host(listen.host, listen.port)
    try:
        (host, *_) = addresses_of(listen.host, _RESOLVE_SECONDS)
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return socket.create_server((host, listen.port), family=family)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or "it is no address"
        raise ConfigError(f"peers cannot be served at {place}: {reason}") from None


class _Client(Frames):
    """The connection of a client.

    Attributes:
        namespace: empty until the client has proved itself.
        number: number of the client's last question.
    """

    def __init__(self, stream: socket.socket) -> None:
        super().__init__(stream)
        self.namespace = b""
        self.number = 0


class _Desk:
    """The protocol on the server's side, for the threads of all connections: greet and answer."""

    def __init__(
        self,
        lender: Lender[Any],
        namespace: Callable[[], bytes],
        key: SharedKey,
        incarnation: bytes,
        bounds: Bounds,
        observer: Observer,
    ) -> None:
        self._lender = lender
        self._namespace = namespace
        self._key = key
        self._incarnation = incarnation
        self.bounds = bounds
        self._observer = observer
        self._room = _Room(bounds.max_bytes)

    def greet(self, client: _Client, deadline: float) -> None:
        """Check the client's key and namespace, and prove ours. Raises as `Frames` does."""
        nonce = secrets.token_bytes(32)
        client.send(Challenge(VERSION, self._incarnation, nonce), deadline)
        hello = client.receive(GREETINGS, MAX_GREETING_BYTES, deadline)
        if not isinstance(hello, Hello):
            raise StoreError(FaultKind.PROTOCOL, "it does not say who it is")
        said = (self._incarnation, nonce, hello.nonce, hello.namespace)
        if hello.version != VERSION:
            self._refuse(
                client, FaultKind.PROTOCOL, f"only version {VERSION} is spoken here", deadline
            )
        if not self._key.is_proof(hello.proof, "client", *said):
            self._refuse(client, FaultKind.LOGIN, "the keys are different", deadline)
        client.namespace = hello.namespace
        self._check_namespace(client, deadline)
        client.send(Welcome(self._key.proof("server", *said)), deadline)

    def answer(self, client: _Client) -> int:
        """Answer the next question; return the record bytes sent. Raises as `Frames` does."""
        deadline = time.monotonic() + self.bounds.idle_seconds
        question = client.receive(QUESTIONS, MAX_FRAME_BYTES, deadline)
        deadline = time.monotonic() + self.bounds.answer_seconds
        self._check_namespace(client, deadline)
        if question.number <= client.number:
            self._refuse(client, FaultKind.PROTOCOL, "a question that was asked before", deadline)
        client.number = question.number
        if isinstance(question, Read):
            return self._lend(client, question, deadline)
        states = bytes(self._state_of(ChunkKey(key)) for key in question.keys)
        client.send(KeyStates(question.number, self._incarnation, states), deadline)
        return 0

    def _state_of(self, key: ChunkKey) -> KeyState:
        loan = self._lender.lend(key, 0.0)
        if loan is None or loan is KeyState.PENDING:
            return loan or KeyState.ABSENT
        self._lender.release(loan)
        return KeyState.HELD

    def _lend(self, client: _Client, asked: Read, deadline: float) -> int:
        deadline = min(deadline, time.monotonic() + asked.milliseconds / 1000)
        # Room comes before the loan, so that a wait for room keeps no slot lent.
        taken = self._room.enter(sum(length for _, length in asked.ranges), deadline)
        try:
            loan = self._lender.lend(ChunkKey(asked.key), deadline - time.monotonic())
            if loan is None or loan is KeyState.PENDING:
                state = loan or KeyState.ABSENT
                client.send(Lent(asked.number, self._incarnation, state, 0), deadline)
                return 0
            try:
                return self._send_record(client, asked, loan, deadline)
            finally:
                if time.monotonic() >= deadline:
                    self._observer.count("peer_overdue_loans")
                self._lender.release(loan)
        finally:
            self._room.leave(taken)

    def _send_record(self, client: _Client, asked: Read, loan: Loan, deadline: float) -> int:
        parts = [part.cast("B") for part in loan.buffers]
        size = sum(len(part) for part in parts)
        lengths = part_lengths(size, asked.ranges)
        num_bytes = sum(lengths)
        if num_bytes > MAX_READ_BYTES:
            reason = f"a read of more than {MAX_READ_BYTES} bytes"
            self._refuse(client, FaultKind.UNUSABLE, reason, deadline)
        views = [
            view
            for (offset, _), length in zip(asked.ranges, lengths, strict=True)
            for view in cut(parts, offset, length)
        ]
        head = Lent(asked.number, self._incarnation, KeyState.HELD, size)
        client.send(head, deadline, views)
        return num_bytes

    def _check_namespace(self, client: _Client, deadline: float) -> None:
        if client.namespace != self._namespace():
            reason = "another model, configuration or tenant is served here"
            self._refuse(client, FaultKind.UNUSABLE, reason, deadline)

    def _refuse(self, client: _Client, kind: FaultKind, reason: str, deadline: float) -> NoReturn:
        client.send(Refused(reason, kind), deadline)
        raise StoreError(kind, reason)


class _Room:
    """The bytes that may be in transit at once, over all connections."""

    def __init__(self, num_bytes: int) -> None:
        self._most = self._left = num_bytes
        self._changed = threading.Condition()

    def enter(self, num_bytes: int, deadline: float) -> int:
        """Wait for room, and return how much is taken: at most all. Raises TimeoutError."""
        wanted = min(num_bytes, self._most)
        with self._changed:
            seconds = max(0.0, deadline - time.monotonic())
            if not self._changed.wait_for(lambda: self._left >= wanted, seconds):
                raise TimeoutError("no room for an answer in time")
            self._left -= wanted
        return wanted

    def leave(self, taken: int) -> None:
        with self._changed:
            self._left += taken
            self._changed.notify_all()


def cut(parts: list[memoryview], offset: int, length: int) -> list[memoryview]:
    """Return the pieces of `parts` that are `length` bytes at `offset` of their concatenation."""
    found = []
    for part in parts:
        if length <= 0:
            break
        if offset < len(part):
            piece = part[offset : offset + length]
            found.append(piece)
            length -= len(piece)
        offset = max(0, offset - len(part))
    return found

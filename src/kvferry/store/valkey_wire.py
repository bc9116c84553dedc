"""Connections to Valkey and Redis servers, each call of which ends at its deadline.

The sockets are ours and the parser of replies is hiredis. The clients of redis-py and valkey-py
start their timeout again with every piece that arrives, and once more for every retry: a server
that sends a little from time to time holds such a call for as long as it likes.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import ssl
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

from kvferry.config import printable
from kvferry.errors import ConfigError, StoreError
from kvferry.store.base import Buffer

if TYPE_CHECKING:
    import hiredis

Command = Sequence[Buffer]
"""One packed command: its bytes, in pieces."""
Reply = object
"""bytes, int, None, a list of these, or an `ErrorReply`."""
Credentials = Callable[[], tuple[str, str] | None]
"""Asked at every connect, so that a password that was changed is found. User (may be empty) and
password; None: no login."""

CALL_SECONDS = 30.0
"""Limit of a call without a deadline."""
_CONNECT_SECONDS = 2.0
_READ_BYTES = 256 * 1024
_SMALL_BYTES = 64 * 1024
"""Up to here, joining the pieces of a command is cheaper than sending them one by one."""
_MAX_IDLE = 16
_KEEPALIVE = (("TCP_KEEPIDLE", 30), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 3))
_NOTHING_YET = object()


class Address(NamedTuple):
    """Where a server listens."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


class ErrorReply(Exception):
    """An error that the server answered instead of a value: a reply like others, never raised."""

    @property
    def code(self) -> str:
        """Its first word: OOM, MOVED, READONLY, ..."""
        word = str(self).partition(" ")[0]
        return word if word.isalpha() and word.isupper() else "ERR"

    def for_people(self) -> str:
        """One line of at most 200 characters."""
        return printable(str(self))[:200]


def pack(*words: str | bytes | int) -> Command:
    """A command of small words."""
    return pack_with_value(words, ())


def pack_with_value(
    before: Sequence[str | bytes | int], value: Sequence[Buffer], after: Sequence[bytes] = ()
) -> Command:
    """A command whose words are `before`, the concatenation of `value` (if it has pieces), and
    `after`. The pieces of the value are not copied."""
    words = [word if isinstance(word, bytes) else str(word).encode() for word in before]
    head = b"*%d\r\n" % (len(words) + bool(value) + len(after))
    head += b"".join(b"$%d\r\n%b\r\n" % (len(word), word) for word in words)
    if not value:
        return (head,)
    views = [memoryview(piece).cast("B") for piece in value]
    tail = b"\r\n" + b"".join(b"$%d\r\n%b\r\n" % (len(word), word) for word in after)
    return (head + b"$%d\r\n" % sum(view.nbytes for view in views), *views, tail)


class _ProtocolFault(Exception):
    """What came is no reply."""


class Connection:
    """One logged-in connection, used by one call at a time.

    A connection whose call failed or ran out of time is closed and never used again: the answer may
    still come, and would be taken for that of the next call.
    """

    def __init__(self, address: Address, stream: socket.socket, parser: hiredis.Reader) -> None:
        self.address = address
        self._stream = stream
        self._parser = parser
        self._buffer = memoryview(bytearray(_READ_BYTES))

    def send(self, commands: Sequence[Command], deadline: float) -> None:
        """Send all of `commands`. Raises TimeoutError, OSError."""
        pieces = [piece for command in commands for piece in command]
        if sum(len(piece) for piece in pieces) <= _SMALL_BYTES:
            pieces = [b"".join(pieces)]
        for piece in pieces:
            self._stream.settimeout(_seconds_left(deadline))
            self._stream.sendall(piece)

    def receive(self, deadline: float) -> Reply:
        """The next reply. Raises TimeoutError, OSError; StoreError if it is none."""
        try:
            while (reply := self._parser.gets()) is _NOTHING_YET:
                self._stream.settimeout(_seconds_left(deadline))
                num_bytes = self._stream.recv_into(self._buffer)
                if num_bytes == 0:
                    raise ConnectionResetError("the server closed the connection")
                self._parser.feed(self._buffer, 0, num_bytes)  # type: ignore[arg-type]  # any buffer
        except _ProtocolFault:
            # Without the parser's message: it quotes what came, which can be anything.
            raise StoreError("it does not speak the protocol of Valkey and Redis") from None
        return reply

    def is_quiet(self) -> bool:
        """Whether nothing has come since the last call: neither an end nor a stray reply."""
        poll = select.poll()
        poll.register(self._stream, select.POLLIN)
        return not poll.poll(0)

    def close(self) -> None:
        """Idempotent."""
        self._stream.close()


class Connections:
    """Idle connections of one process to any number of servers, which all take the same login.

    Each call takes one connection for itself, so there are as many as threads called at once.
    After a fork, the child makes its own: both sides would read replies from a shared one.
    """

    def __init__(self, credentials: Credentials, tls: ssl.SSLContext | None) -> None:
        try:
            import hiredis
        except ImportError:
            raise ConfigError(
                "a store on Valkey or Redis needs hiredis: pip install 'kvferry[valkey]'"
            ) from None
        self._new_parser: Callable[[], hiredis.Reader] = lambda: hiredis.Reader(
            protocolError=_ProtocolFault, replyError=ErrorReply, notEnoughData=_NOTHING_YET
        )
        self._credentials = credentials
        self._tls = tls
        # Appending to and popping from a deque need no lock, which a fork could leave locked.
        self._idle: dict[Address, deque[Connection]] = {}
        self._process = os.getpid()
        self._closed = False

    @contextlib.contextmanager
    def borrow(self, address: Address, deadline: float) -> Iterator[Connection]:
        """A connection to `address` for one call.

        Raises:
            StoreError: no connection, or whatever goes wrong with it inside the `with`.
        """
        connection = None
        try:
            connection = self._find_idle(address) or self._connect(address, deadline)
            yield connection
        except BaseException as error:
            if connection is not None:
                connection.close()
            if isinstance(error, StoreError | OSError):
                raise StoreError(f"valkey server {address}: {_reason(error)}") from None
            raise
        idle = self._idle.setdefault(address, deque())
        if len(idle) >= _MAX_IDLE:
            connection.close()
        else:
            idle.append(connection)
        if self._closed:  # meanwhile
            self.forget(address)

    def forget(self, address: Address) -> None:
        """Close the idle connections to a server whose role has changed: its name may lead to
        another one now."""
        _close_all({address: self._idle.pop(address, deque())})

    def close(self) -> None:
        """Idempotent. Connections in use are closed as their calls end."""
        self._closed = True
        _close_all(self._idle)

    def _find_idle(self, address: Address) -> Connection | None:
        if self._closed:
            raise StoreError("the store is closed")
        if self._process != os.getpid():
            inherited, self._idle = self._idle, {}
            self._process = os.getpid()
            _close_all(inherited)  # this side's copies: the parent goes on using them
        idle = self._idle.get(address)
        while idle:
            with contextlib.suppress(IndexError):  # another thread took the last one
                connection = idle.pop()
                if connection.is_quiet():
                    return connection
                connection.close()
        return None

    def _connect(self, address: Address, deadline: float) -> Connection:
        limit = min(deadline, time.monotonic() + _CONNECT_SECONDS)
        stream = _open_socket(address, limit)
        try:
            if self._tls is not None:
                stream.settimeout(_seconds_left(limit))
                stream = self._tls.wrap_socket(stream, server_hostname=address.host)
            connection = Connection(address, stream, self._new_parser())
            self._log_in(connection, limit)
        except BaseException:
            stream.close()
            raise
        return connection

    def _log_in(self, connection: Connection, deadline: float) -> None:
        credentials = self._credentials()
        commands = []
        if credentials is not None:
            user, password = credentials
            commands.append(pack("AUTH", user, password) if user else pack("AUTH", password))
        # Also asks a server that wants a password, and got none, to say so: it would answer a large
        # value by closing the connection.
        commands.append(pack("CLIENT", "SETNAME", "kvferry"))
        connection.send(commands, deadline)
        for _ in commands:
            reply = connection.receive(deadline)
            if not isinstance(reply, ErrorReply) or reply.code == "NOPERM":
                continue
            if credentials is not None:
                # The code alone: a server that does not know AUTH repeats its arguments.
                raise StoreError(f"refused the login ({reply.code}); check username and password")
            hint = "; give username and password_file" if reply.code == "NOAUTH" else ""
            raise StoreError(f"refused the connection: {reply.for_people()}{hint}")


def _close_all(idle: dict[Address, deque[Connection]]) -> None:
    for connections in list(idle.values()):
        while connections:
            with contextlib.suppress(IndexError):  # another thread took the last one
                connections.pop().close()


def _reason(error: StoreError | OSError) -> str:
    """What went wrong, in words without a name or a number of this process."""
    if isinstance(error, StoreError):
        return str(error)
    if isinstance(error, TimeoutError):
        return "no answer in time"
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"its certificate is refused: {error.verify_message}"
    if isinstance(error, ssl.SSLError):
        return f"TLS failed: {error.reason or 'the connection was cut'}"
    return error.strerror or str(error) or type(error).__name__


def _seconds_left(deadline: float) -> float:
    left = deadline - time.monotonic()
    if left <= 0:
        # Zero would mean a socket that does not block.
        raise TimeoutError
    return left


def _open_socket(address: Address, deadline: float) -> socket.socket:
    fault = OSError(f"the host name {address.host!r} has no address")
    for family, place in _resolve(address, deadline):
        stream = socket.socket(family, socket.SOCK_STREAM)
        try:
            stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            stream.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for option, value in _KEEPALIVE:
                if hasattr(socket, option):
                    stream.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
            stream.settimeout(_seconds_left(deadline))
            stream.connect(place)
        except OSError as error:
            stream.close()
            fault = error
        else:
            return stream
    raise fault


def _resolve(address: Address, deadline: float) -> list[tuple[int, tuple[str, int]]]:
    """Families and socket addresses of a host; TimeoutError if the name service does not answer."""
    found: list[tuple[int, tuple[str, int]]] = []
    faults: list[OSError] = []

    def ask(flags: int = 0) -> None:
        try:
            answers = socket.getaddrinfo(*address, type=socket.SOCK_STREAM, flags=flags)
            found.extend((family, place) for family, _, _, _, place in answers)  # type: ignore[misc]
        except OSError as error:
            faults.append(error)

    ask(socket.AI_NUMERICHOST)
    if not found:
        faults.clear()
        # A look-up cannot be given a deadline. The thread ends when the resolver gives up.
        thread = threading.Thread(target=ask, name="kvferry-resolve", daemon=True)
        thread.start()
        thread.join(_seconds_left(deadline))
    if faults:
        raise faults[0]
    if not found:
        raise TimeoutError
    return list(found)

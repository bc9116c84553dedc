"""Network clients and servers: bytes with deadlines, in clear or inside TLS; the connections to one
server; addresses, and words for errors. Peers and the Valkey store use it."""

from __future__ import annotations

import errno
import ipaddress
import math
import os
import queue
import socket
import ssl
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import ClassVar, Generic, TypeVar

from kvferry.errors import ConfigError, FaultKind, KVError, StoreError

CONNECT_SECONDS = 2.0
CALL_SECONDS = 30.0
"""Time limit of calls that have no deadline or a later one."""
BUFFER_BYTES = 1 << 16
"""Most bytes that `Stream.read` returns."""
_AHEAD_BYTES = 1 << 12
"""Most bytes read ahead of what is asked for. What follows in them is copied."""
_EXACT_SECONDS = 0.02
"""How far off a timeout may be: for less, it is not set again, which takes a system call."""
_CLOSED = "it is closed"
_NUMERIC = socket.NI_NUMERICHOST | socket.NI_NUMERICSERV  # shows the scope of an address, too
_MAX_BUFFERS = 512
"""Buffers in one system call. Every system takes at least 1024."""
_AWAY = (
    *(errno.ECONNREFUSED, errno.EHOSTDOWN, errno.EHOSTUNREACH, errno.ENETDOWN, errno.ENETUNREACH),
    *(errno.ENODEV, errno.ENOTCONN, errno.ENXIO, errno.EREMOTEIO, errno.ESTALE),
)
_KINDS = {
    **dict.fromkeys(_AWAY, FaultKind.AWAY),
    **dict.fromkeys((errno.EACCES, errno.EPERM), FaultKind.RIGHTS),
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT), FaultKind.FULL),
    errno.EROFS: FaultKind.READ_ONLY,
    errno.EAGAIN: FaultKind.INDEXING,  # no other file of a store is waited for
}
"""By number of a system's error, of a connection or a mount."""


def seconds_left(deadline: float) -> float:
    """Return the seconds until a monotonic `deadline`, more than 0. Raises TimeoutError if late."""
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError
    return left


def call_ends(deadline: float) -> float:
    """Return when a call that begins now ends at the latest."""
    return min(deadline, time.monotonic() + CALL_SECONDS)


def http(url: str, seconds: float, max_bytes: int, *, body: bytes | None = None) -> bytes:
    """Return what a web server answers to a GET, or to a POST of JSON, whole.

    Raises:
        OSError: no answer, none within `seconds` (TimeoutError), one that does not end by then or
            within `max_bytes`, or a status of refusal (HTTPError).
        HTTPException, ValueError: no answer of HTTP, or no URL.
    """
    # Loaded when it is used: few processes ask a web server, and all of them load this module.
    import urllib.request

    kind = {} if body is None else {"Content-Type": "application/json"}
    until, parts, size = time.monotonic() + seconds, list[bytes](), 0
    asked = urllib.request.Request(url, body, kind)
    with urllib.request.urlopen(asked, timeout=seconds) as answer:
        while part := answer.read1(BUFFER_BYTES):
            parts.append(part)
            size += len(part)
            if time.monotonic() > until or size > max_bytes:
                raise OSError("it does not end its answer")
    return b"".join(parts)


def reason_of(error: Exception) -> str:
    """Say what went wrong with a connection, without a name or number of this process."""
    match error:
        case KVError():
            return str(error)
        case TimeoutError():
            return "no answer in time"
        case ssl.SSLCertVerificationError():
            return f"its certificate is refused: {error.verify_message}"
        case ssl.SSLEOFError() | ssl.SSLZeroReturnError():
            return "it closed the connection"
        case ssl.SSLError():
            return f"TLS failed: {(error.reason or 'unknown').replace('_', ' ').lower()}"
        case OSError():
            return error.strerror or str(error) or type(error).__name__
        case MemoryError():
            return "no memory for its answer"
    return "its host name is not valid"


def fault_kind(error: BaseException) -> FaultKind:
    """What an error of a connection, or of a mount, means to its operator: BUG if it is one of
    neither."""
    match error:
        case StoreError() | ConfigError():
            return error.fault.kind
        case TimeoutError():
            return FaultKind.LATE
        case ssl.SSLError():
            return FaultKind.PROTOCOL
        case ConnectionError() | socket.gaierror():
            return FaultKind.AWAY
        case OSError():
            return _KINDS.get(error.errno or 0, FaultKind.REFUSED)
        case MemoryError():
            return FaultKind.REFUSED
    return FaultKind.BUG


def addresses_of(host: str, seconds: float) -> list[str]:
    """Look up the numeric addresses of a host. Raises TimeoutError, OSError, ValueError."""
    found: queue.SimpleQueue[list[str] | Exception] = queue.SimpleQueue()

    def look_up() -> None:
        try:
            answers = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
            found.put([socket.getnameinfo(place, _NUMERIC)[0] for *_, place in answers])
        except (OSError, ValueError) as error:
            found.put(error)

    # getaddrinfo takes no timeout, so it runs in a thread, which ends when the resolver gives up.
    try:
        threading.Thread(target=look_up, name="kvferry-resolve", daemon=True).start()
    except RuntimeError:
        raise OSError("a thread to look up its address could not start") from None
    try:
        answer = found.get(timeout=seconds)
    except queue.Empty:
        raise TimeoutError from None
    if isinstance(answer, Exception):
        raise answer
    return answer


def connect(addresses: Sequence[str], port: int, deadline: float) -> socket.socket:
    """Connect to the first address that answers. Raises OSError."""
    fault = OSError(errno.EHOSTUNREACH, "it has no address")
    for address in addresses:
        try:
            return socket.create_connection((address, port), seconds_left(deadline))
        except OSError as error:
            fault = error
    raise fault


def is_loopback(host: str) -> bool:
    """Whether the text of `host` can only mean this machine: 127.0.0.0/8, ::1 or localhost."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"


def is_same_host(one: str, other: str) -> bool:
    """Whether two texts name one host, as far as the texts alone show it: nothing is looked up. All
    addresses of this machine's loopback count as one."""
    try:
        is_equal = ipaddress.ip_address(one) == ipaddress.ip_address(other)
    except ValueError:
        is_equal = one.lower().rstrip(".") == other.lower().rstrip(".")
    return is_equal or (is_loopback(one) and is_loopback(other))


def join_host(host: str, port: int | None) -> str:
    """`host:port`, or `host` alone, with brackets around an IPv6 address."""
    return (f"[{host}]" if ":" in host else host) + ("" if port is None else f":{port}")


def load_pem(
    context: ssl.SSLContext, cert_file: str | None, key_file: str | None, ca_file: str | None
) -> None:
    """Load the files of a TLS context. Raises ConfigError for one that cannot be read or used."""
    shown = cert_file if key_file is None else f"{cert_file} and {key_file}"
    try:
        if cert_file is not None:
            # An empty password: else OpenSSL asks at the terminal for that of an encrypted key.
            context.load_cert_chain(cert_file, key_file, password="")
        if ca_file is not None:
            shown = ca_file
            context.load_verify_locations(ca_file)
    except OSError as error:  # an SSLError is one
        was_read = isinstance(error, ssl.SSLError)
        reason = "no usable PEM, or a key that does not fit" if was_read else error.strerror
        raise ConfigError(f"{shown}: {reason}") from None


class Stream:
    """The bytes of a connection over a socket, which it owns, in clear or inside TLS. One thread at
    a time, except for `end`.

    Calls end at their deadline (`time.monotonic()` seconds). Whatever fails raises OSError, or
    TimeoutError if it is late. Close the stream then: a late answer would be taken for the next
    one. Bytes go straight from and into the callers' buffers, several in one system call.
    """

    def __init__(self, stream: socket.socket) -> None:
        if stream.family != socket.AF_UNIX:
            stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket = stream
        self._is_ended = False
        self._pid = os.getpid()
        # Bytes that were received and not read yet: [start, end) of the buffer.
        self._buffer = bytearray(BUFFER_BYTES)
        self._start = 0
        self._end = 0

    def secure(self, tls: ssl.SSLContext, deadline: float, host: str | None = None) -> None:
        """Go on inside TLS. The other side's certificate must name `host`; None on a server."""
        self._socket.settimeout(seconds_left(deadline))
        secured = tls.wrap_socket(
            self._socket,
            server_side=host is None,
            server_hostname=host,
            do_handshake_on_connect=False,
        )
        self._socket = secured  # first, so that `end` ends the handshake, too
        if self._is_ended:  # meanwhile: that reached neither socket
            raise ConnectionAbortedError(_CLOSED)
        secured.do_handshake()

    def write(self, buffers: Sequence[bytes | memoryview], deadline: float) -> None:
        """Send the bytes of all buffers."""
        views = [memoryview(each) for each in buffers if len(each)]
        while views:
            # No call that sends all: with TLS, Python's restarts its timeout for every TLS record.
            self._arm(deadline)
            if isinstance(self._socket, ssl.SSLSocket):
                sent = self._socket.send(views[0])
            else:
                sent = self._socket.sendmsg(views[:_MAX_BUFFERS])
            views = _rest(views, sent)

    def read(self, num_bytes: int, deadline: float) -> memoryview:
        """Return the next bytes, `BUFFER_BYTES` at most. They stay valid until the next call."""
        while self._end - self._start < num_bytes:
            self._read_ahead(num_bytes, deadline)
        self._start += num_bytes
        return memoryview(self._buffer)[self._start - num_bytes : self._start]

    def read_into(self, views: Sequence[memoryview], deadline: float) -> None:
        """Fill all views."""
        left = [view for view in views if view.nbytes]
        while left and self._start < self._end:
            num_bytes = min(left[0].nbytes, self._end - self._start)
            left[0][:num_bytes] = self.read(num_bytes, deadline)
            left = _rest(left, num_bytes)
        while left:
            left = _rest(left, self._receive(left, deadline))

    def is_quiet(self) -> bool:
        """Whether the connection can be used: the other side has neither closed it nor sent what
        was not asked for. False in the child of a fork, as the parent uses the connection."""
        if self._start < self._end or self._pid != os.getpid():
            return False
        try:
            self._socket.settimeout(0.0)
            self._socket.recv(1)
        except (BlockingIOError, ssl.SSLWantReadError):
            return True
        except OSError:
            pass
        return False

    def end(self) -> None:
        """Make the thread that uses the connection fail and close it. Any thread may call this."""
        if self._pid == os.getpid():
            self._is_ended = True
            with suppress(OSError):
                # Not the method of SSLSocket, after which the other thread would go on in clear.
                socket.socket.shutdown(self._socket, socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the connection. Call this on the thread that uses it: else that thread could go on
        with a new file that has the same descriptor number. Idempotent."""
        self._socket.close()

    def _arm(self, deadline: float) -> None:
        """Set the timeout of the next system call to the time left until `deadline`."""
        left = seconds_left(deadline)
        if abs(left - (self._socket.gettimeout() or math.inf)) > _EXACT_SECONDS:
            self._socket.settimeout(left)

    def _read_ahead(self, num_bytes: int, deadline: float) -> None:
        """Receive more bytes into the buffer, where `num_bytes` are needed."""
        left = self._buffer[self._start : self._end]
        self._buffer[: len(left)] = left
        self._start, self._end = 0, len(left)
        room = memoryview(self._buffer)[self._end : max(num_bytes, _AHEAD_BYTES)]
        self._end += self._receive([room], deadline)

    def _receive(self, views: list[memoryview], deadline: float) -> int:
        """Receive some bytes into the first views; return how many."""
        self._arm(deadline)
        if isinstance(self._socket, ssl.SSLSocket):
            num_bytes = self._socket.recv_into(views[0])
        else:
            num_bytes = self._socket.recvmsg_into(views[:_MAX_BUFFERS])[0]
        if not num_bytes:
            raise ConnectionResetError("it closed the connection")
        return num_bytes


def _rest(views: list[memoryview], moved: int) -> list[memoryview]:
    """Return the views without their first `moved` bytes."""
    for index, view in enumerate(views):
        if moved < view.nbytes:
            return [view[moved:], *views[index + 1 :]]
        moved -= view.nbytes
    return []


C = TypeVar("C", bound=Stream)


class Endpoint(ABC, Generic[C]):
    """A server, and the connections to it. Each has one call at a time; a call without an idle
    connection opens one, which takes `CONNECT_SECONDS` of its time at most, and the login what is
    left. Thread-safe, and safe on both sides of a fork: it has no lock, and a connection knows its
    process.

    Attributes:
        found_at: addresses of `host` when it was last connected to.
    """

    what: ClassVar[str]
    """What messages call the server."""

    def __init__(
        self, host: str, port: int, tls: ssl.SSLContext | None, kind: Callable[[socket.socket], C]
    ) -> None:
        self.host = host
        self.port = port
        self.found_at: list[str] = []
        self._tls = tls
        self._kind = kind
        self._idle: list[C] = []
        self._busy: set[C] = set()
        self._keeps_idle = True
        self._closed = False

    @abstractmethod
    def _log_in(self, connection: C, deadline: float) -> None:
        """Do what comes before the first call on a connection."""

    @contextmanager
    def connection(self, deadline: float) -> Iterator[C]:
        """Context of a call. Whatever fails in it ends the connection, and raises StoreError with
        the server's name."""
        connection = None
        try:
            seconds_left(deadline)
            connection = self._idle_one() or self._connect(deadline)
            yield connection
        except BaseException as error:
            if connection is not None:
                self._end(connection)
            # ValueError: an impossible host name. MemoryError: little memory was left.
            if isinstance(error, KVError | OSError | ValueError | MemoryError):
                kind = FaultKind.UNUSABLE if isinstance(error, ValueError) else fault_kind(error)
                reason = reason_of(error)
                if self._closed:
                    kind, reason = FaultKind.CLOSED, _CLOSED
                raise StoreError(kind, f"{self.what} {self}: {reason}") from None
            raise
        self._busy.discard(connection)
        self._idle.append(connection)
        if not self._keeps_idle:
            self.refresh()

    def refresh(self) -> None:
        """Close idle connections: the name of the server may lead to another one by now."""
        with suppress(IndexError):  # none is left: other threads take them, too
            while True:
                self._idle.pop().close()

    def leave(self) -> None:
        """Close idle connections now, and the others as their calls end."""
        self._keeps_idle = False
        self.refresh()

    def close(self) -> None:
        """End all connections and the calls under way. Idempotent."""
        self._closed = True
        self.leave()
        for connection in self._busy.copy():
            connection.end()

    def _idle_one(self) -> C | None:
        while True:
            try:
                connection = self._idle.pop()
            except IndexError:
                return None
            self._begin(connection)
            if connection.is_quiet():
                return connection
            self._end(connection)

    def _connect(self, deadline: float) -> C:
        limit = min(deadline, time.monotonic() + CONNECT_SECONDS)
        self.found_at = addresses_of(self.host, seconds_left(limit))
        connection = self._kind(connect(self.found_at, self.port, limit))
        self._begin(connection)
        try:
            if self._tls is not None:
                connection.secure(self._tls, limit, self.host)
            self._log_in(connection, deadline)
        except BaseException as error:
            self._end(connection)
            if isinstance(error, ConnectionError | ssl.SSLError):  # before it answered once
                raise StoreError(FaultKind.PROTOCOL, reason_of(error)) from None
            raise
        return connection

    def _begin(self, connection: C) -> None:
        self._busy.add(connection)
        if self._closed:  # set before: `close` ends what it finds in `_busy`
            self._end(connection)
            raise OSError(_CLOSED)

    def _end(self, connection: C) -> None:
        self._busy.discard(connection)
        connection.close()

    def __str__(self) -> str:
        return join_host(self.host, self.port)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self}>"

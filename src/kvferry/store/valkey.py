"""Values on a Valkey or Redis server, or a cluster of them, as plain strings, by redis-py.

A value is one string key: it appears by SET NX, and goes by UNLINK, expiry or the server's
eviction, which needs no quota of ours. Names share no hash tag, so a cluster spreads them.

redis-py limits each wait for bytes, but no call as a whole: a server that sends a little from time
to time would hold a call for as long as it likes. So each thread keeps the deadline of its call
beside the library, and the sockets below ask it before each wait. Once it has passed, every further
step of the library, such as another address or another node, fails at once.
"""

from __future__ import annotations

import functools
import math
import os
import queue
import re
import socket
import ssl
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple, NoReturn

from kvferry.config import printable
from kvferry.errors import ConfigError, StoreError
from kvferry.store.base import Buffer, PutResult
from kvferry.store.remote import RemoteClient

try:
    import hiredis  # noqa: F401  # redis-py has another parser, many times slower
    import redis
    from redis.backoff import NoBackoff
    from redis.connection import ConnectionPool, PythonRespSerializer
    from redis.exceptions import (
        AskError,
        NoPermissionError,
        OutOfMemoryError,
        ReadOnlyError,
        RedisClusterException,
    )
    from redis.retry import Retry
except ModuleNotFoundError as error:
    raise ConfigError(
        "a store on Valkey or Redis needs redis and hiredis: run pip install 'kvferry[valkey]'"
    ) from error

Command = tuple[str | bytes | int, ...]
"""Words, the second of which names a value."""

DEFAULT_PORT = 6379
_CALL_SECONDS = 30.0
"""Limit of a call without a deadline."""
_CONNECT_SECONDS = 2.0
_LEARN_SECONDS = 2.0
"""Limit of learning the nodes of a cluster."""
_SCAN_COUNT = 500
_OTHER_TYPE_BYTES = 1
"""The size of a list or a hash under the name of a value. No record is so small: its reader takes
it out, and the name is free again."""
_SMALL_BYTES = 64 * 1024
"""Up to here, joining the pieces of a command is cheaper than sending them one by one."""
# The library trusts the form of answers: a malformed one ends in any of the last four.
_FAULTS = (
    *(redis.RedisError, RedisClusterException, StoreError, OSError),
    *(ValueError, TypeError, LookupError, AttributeError),
)


class Login(NamedTuple):
    """User and password of a server. Nothing shows it."""

    username: str = ""
    password: str = ""
    password_file: str | None = None
    """Its first line is the password, read at every connect; instead of `password`."""

    def get_credentials(self) -> tuple[str, ...]:
        """User, if there is one, and password, as redis-py asks for them; nothing for no login.

        Raises:
            StoreError: the file cannot be read.
        """
        password = self.password
        if self.password_file is not None:
            try:
                lines = Path(self.password_file).read_text("utf-8").splitlines()
            except (OSError, UnicodeDecodeError) as error:
                reason = getattr(error, "strerror", None) or "it is not text"
                # Without its name: someone may have given the password itself.
                raise StoreError(f"password_file: {reason}") from None
            password = lines[0] if lines else ""
        if self.username:
            return (self.username, password)
        return (password,) if password else ()

    def __repr__(self) -> str:
        return "Login(...)"


class _Deadline(threading.local):
    """When the call that this thread is in has to end; `time.monotonic()` seconds."""

    at = 0.0

    def seconds_left(self) -> float:
        """Raises TimeoutError when none are."""
        left = self.at - time.monotonic()
        if left <= 0:
            # Zero would mean a socket that does not block.
            raise TimeoutError
        return left

    @contextmanager
    def at_most(self, seconds: float) -> Iterator[None]:
        """Earlier for what happens inside."""
        whole, self.at = self.at, min(self.at, time.monotonic() + seconds)
        try:
            yield
        finally:
            self.at = whole


class _TimedSocket:
    """A connected socket, each wait of which ends at the deadline of the thread that waits."""

    def __init__(self, stream: socket.socket, deadline: _Deadline) -> None:
        self._stream = stream
        self._deadline = deadline

    def recv_into(self, buffer: bytearray) -> int:
        self._stream.settimeout(self._deadline.seconds_left())
        return self._stream.recv_into(buffer)

    def sendall(self, piece: Buffer) -> None:
        # Not the socket's `sendall`: with TLS, that of Python starts its timeout at every record.
        view = memoryview(piece)
        while view.nbytes:
            self._stream.settimeout(self._deadline.seconds_left())
            view = view[self._stream.send(view) :]

    def __getattr__(self, name: str) -> object:
        return getattr(self._stream, name)


class _Connection(redis.Connection):
    """A connection that is made, logged in and used within the deadline of the calling thread.

    The library drops it when a call fails or runs out of time: the answer may still come, and would
    be taken for that of the next call.
    """

    def __init__(
        self, deadline: _Deadline, login: Login, tls: ssl.SSLContext | None, **options: object
    ) -> None:
        self._deadline = deadline
        self._tls = tls
        self._login = login
        super().__init__(credential_provider=login, **options)  # type: ignore[no-untyped-call]

    def _connect(self) -> _TimedSocket:
        host, fault = self.host, OSError("it has no address")
        limit = time.monotonic() + min(_CONNECT_SECONDS, self._deadline.seconds_left())
        try:
            for self.host in _addresses_of(host, limit - time.monotonic()):
                # Zero is an attempt that does not wait.
                self.socket_connect_timeout = max(limit - time.monotonic(), 0.0)
                try:
                    stream = super()._connect()  # type: ignore[no-untyped-call]
                    return _TimedSocket(self._secure(stream, host), self._deadline)
                except OSError as error:
                    fault = error
            raise fault
        finally:
            self.host = host

    def _secure(self, stream: socket.socket, host: str) -> socket.socket:
        # By a context of ours: the library's options read the files at every connect, and trust
        # the system's authorities beside `ca_file`.
        if self._tls is None:
            return stream
        with stream:  # closed if this fails; what comes back has taken its place
            stream.settimeout(self._deadline.seconds_left())
            return self._tls.wrap_socket(stream, server_hostname=host)

    def on_connect_check_health(self, check_health: bool = True) -> None:
        """Log in. Then the library gives the connection a name, which also makes a server that
        wants a password, and got none, say so: it would answer a large value by closing."""
        try:
            super().on_connect_check_health(check_health)
        except NoPermissionError:
            pass  # a user of these keys alone cannot give names
        except (redis.ResponseError, redis.AuthenticationError) as error:
            self.disconnect()  # type: ignore[no-untyped-call]
            if self._login.get_credentials():
                # The code alone: a server that does not know AUTH repeats its arguments.
                reason = f"refused the login ({_code(error)}); check username and password"
                raise StoreError(reason) from None
            hint = "; give username and password_file" if _code(error) == "NOAUTH" else ""
            raise StoreError(f"refused the connection: {_text(error)}{hint}") from None
        except BaseException:
            self.disconnect()  # type: ignore[no-untyped-call]
            raise


class ValkeyClient(RemoteClient):
    """One Valkey or Redis server (6.2 or newer), or a cluster of them.

    Makes no thread (but one that looks a host name up, while it does). A call takes a connection of
    its own, so calls of several threads do not wait for each other. Servers that were away are
    found again by the next call. Works on both sides of a fork.

    Args:
        addresses: the server; of a cluster, any of its nodes, tried in this order.
        cluster: spread over the nodes of a cluster.
        login: None if the server asks for none.
        tls: None for a connection in clear.

    Raises:
        ConfigError: no address, several of them without a cluster, or a password file that cannot
            be read.
    """

    def __init__(
        self,
        addresses: Sequence[tuple[str, int]],
        *,
        cluster: bool = False,
        login: Login | None = None,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        if not addresses or (len(addresses) > 1 and not cluster):
            raise ConfigError(
                f"{len(addresses)} servers; name one, or several nodes of a cluster with "
                "?cluster=true"
            )
        login = login if login is not None else Login()
        try:
            login.get_credentials()
        except StoreError as error:
            raise ConfigError(str(error)) from None
        self._addresses = list(addresses)
        self._is_cluster = cluster
        self._deadline = _Deadline()
        self._new_pool = functools.partial(
            ConnectionPool,
            connection_class=_Connection,
            deadline=self._deadline,
            login=login,
            tls=tls,
            protocol=2,
            retry=Retry(NoBackoff(), 0),
            client_name="kvferry",
            driver_info=None,
            max_connections=1 << 16,
            socket_read_size=256 * 1024,
        )
        # By process: after a fork, another thread may have held a lock of the inherited one.
        self._servers: dict[int, ConnectionPool | redis.RedisCluster] = {}
        self._learning = threading.Lock()
        # Set when the nodes of a cluster may have changed: the one that failed, or empty.
        self._failed: str | None = None
        self._closed = False

    def read(
        self, name: str, ranges: Sequence[tuple[int, memoryview]], deadline: float
    ) -> int | None:
        wanted = [(offset, view.cast("B")) for offset, view in ranges if view.nbytes]
        commands: list[Command] = [
            ("GETRANGE", name, offset, offset + view.nbytes - 1) for offset, view in wanted
        ]
        # The size comes last: a value that went while its ranges were read has none.
        *pieces, last = self._ask([*commands, ("STRLEN", name)], deadline)
        if _is_of_other_type(last):
            return _OTHER_TYPE_BYTES
        size = self._number(last, "read", name)
        for (offset, view), piece in zip(wanted, pieces, strict=True):
            if not isinstance(piece, bytes) or len(piece) > view.nbytes:
                self._refuse(piece, "read", name)
            if len(piece) != max(min(view.nbytes, size - offset), 0):
                return None  # it went, and another one came, between two ranges
            view[: len(piece)] = piece
        return size or None

    def put(self, name: str, buffers: Sequence[Buffer], deadline: float) -> PutResult:
        (reply,) = self._ask([("SET", name, b"".join(buffers), "NX")], deadline)
        if isinstance(reply, OutOfMemoryError):
            return PutResult.NO_SPACE
        if reply is not None and reply is not True and reply != b"OK":
            self._refuse(reply, "put", name)
        return PutResult.STORED if reply else PutResult.EXISTS

    def exists(self, names: Sequence[str], deadline: float) -> list[bool]:
        replies = self._ask([("EXISTS", name) for name in names], deadline)
        return [
            self._number(reply, "exists", name) > 0
            for name, reply in zip(names, replies, strict=True)
        ]

    def delete(self, name: str, deadline: float) -> bool:
        (reply,) = self._ask([("UNLINK", name)], deadline)
        return self._number(reply, "delete", name) > 0

    def scan(self, prefix: str, deadline: float) -> Iterator[tuple[str, int, float]]:
        """As in the base class. A value may come twice while the server resizes its table. The last
        use is unknown where the server evicts by frequency (LFU)."""
        # Characters of the pattern language stand for themselves.
        pattern = re.sub(r"([\\*?\[\]^])", r"\\\1", prefix) + "*"
        with self._within(deadline) as server:
            pools = _pools(server)
        for pool in pools:
            cursor = b"0"
            while True:
                command = ("SCAN", cursor, "MATCH", pattern, "COUNT", _SCAN_COUNT)
                with self._within(deadline):
                    (reply,) = self._exchange(pool, [command])
                    match reply:
                        case [bytes(cursor), list(keys)]:
                            found = self._describe(pool, keys, prefix)
                        case _:
                            self._refuse(reply, "scan", prefix)
                yield from found
                if cursor == b"0":
                    break

    def close(self) -> None:
        self._closed = True
        server = self._servers.pop(os.getpid(), None)
        for pool in _pools(server) if server is not None else ():
            pool.disconnect(inuse_connections=False)  # the others as their calls end

    @contextmanager
    def _within(self, deadline: float) -> Iterator[ConnectionPool | redis.RedisCluster]:
        """What is asked inside ends at the deadline. Raises StoreError for all that fails."""
        if self._closed:
            raise StoreError("valkey: the store is closed")
        endless = time.monotonic() + _CALL_SECONDS
        self._deadline.at = deadline if deadline < math.inf else endless
        try:
            server = self._servers.get(os.getpid())
            if server is None:
                server = self._servers.setdefault(os.getpid(), self._open())
            if self._failed is not None and isinstance(server, redis.RedisCluster):
                self._learn_nodes(server)
            yield server
        except _FAULTS as error:
            raise StoreError(_reason(error)) from None
        finally:
            self._deadline.at = 0.0

    def _open(self) -> ConnectionPool | redis.RedisCluster:
        self._learning = threading.Lock()  # of this process, too
        if not self._is_cluster:
            ((host, port),) = self._addresses
            return self._new_pool(host=host, port=port)
        fault = ""
        for host, port in self._addresses:
            try:
                with self._deadline.at_most(_LEARN_SECONDS):
                    return redis.RedisCluster(
                        # Only with a URL does the library take a pool of ours.
                        url=f"redis://{_place(host, port)}",
                        connection_pool_class=self._new_pool,
                        protocol=2,
                        retry=Retry(NoBackoff(), 0),
                        reinitialize_steps=0,  # `_learn_nodes` does that
                    )
            except _FAULTS as error:
                fault = f"valkey cluster, asked at {_place(host, port)}: {_reason(error)}"
        raise StoreError(fault)

    def _learn_nodes(self, cluster: redis.RedisCluster) -> None:
        """Learn them again. Keeps the old ones if no node answers."""
        # Other threads go on with the old ones: the library would let them wait for this one.
        learning = self._learning
        if not learning.acquire(blocking=False):
            return
        failed, self._failed = self._failed, None
        try:
            # Half of the time at most, so that the call itself can still succeed.
            seconds = min(self._deadline.seconds_left() / 2, _LEARN_SECONDS)
            with suppress(*_FAULTS), self._deadline.at_most(seconds):
                cluster.nodes_manager.initialize(last_failed_node_name=failed or None)
        finally:
            learning.release()

    def _ask(self, commands: Sequence[Command], deadline: float) -> list[object]:
        """Replies to commands, in one round trip to each node. Errors that a server answered are
        replies, too."""
        if any("{" in str(command[1]) for command in commands):
            raise StoreError("valkey: a name holds a brace, which decides the place in a cluster")
        if not commands:
            return []
        replies: list[object] = [None] * len(commands)
        with self._within(deadline) as server:
            if isinstance(server, ConnectionPool):
                return self._exchange(server, commands)
            groups: dict[ConnectionPool, list[int]] = {}
            for number, command in enumerate(commands):
                node = server.get_node_from_key(command[1])
                pool = server.get_redis_connection(node).connection_pool
                groups.setdefault(pool, []).append(number)
            for pool, numbers in groups.items():
                found = self._exchange(pool, [commands[number] for number in numbers])
                for number, reply in zip(numbers, found, strict=True):
                    is_elsewhere = isinstance(reply, AskError)  # or a MovedError, which is one
                    replies[number] = (
                        self._follow(server, commands[number]) if is_elsewhere else reply
                    )
        return replies

    def _follow(self, cluster: redis.RedisCluster, command: Command) -> object:
        """The reply to a command whose value was moved."""
        self._failed = ""
        try:
            return cluster.execute_command(
                *command, target_nodes=cluster.get_node_from_key(command[1])
            )
        except redis.ResponseError as error:
            return error

    def _exchange(self, pool: ConnectionPool, commands: Sequence[Command]) -> list[object]:
        host, port = pool.connection_kwargs["host"], pool.connection_kwargs["port"]
        try:
            connection = pool.get_connection()
            try:
                if commands[0][0] == "SET":  # that of hiredis is slow with large values
                    packer = PythonRespSerializer(_SMALL_BYTES, connection.encoder.encode)
                    packed = packer.pack(*commands[0])
                else:
                    packed = connection.pack_commands(commands)
                connection.send_packed_command(packed)
                replies = [_receive(connection) for _ in commands]
            except BaseException:
                connection.disconnect()
                raise
            finally:
                if self._closed:  # meanwhile
                    connection.disconnect()
                pool.release(connection)
        except _FAULTS as error:
            self._failed = f"{host}:{port}"
            raise StoreError(f"valkey server {_place(host, port)}: {_reason(error)}") from None
        if not self._is_cluster and any(isinstance(each, AskError) for each in replies):
            what = "it is a node of a cluster; add ?cluster=true"
            raise StoreError(f"valkey server {_place(host, port)}: {what}")
        return replies

    def _describe(
        self, pool: ConnectionPool, keys: list[object], prefix: str
    ) -> list[tuple[str, int, float]]:
        texts = [key.decode("utf-8", "replace") for key in keys if isinstance(key, bytes)]
        names = list(dict.fromkeys(text for text in texts if text.startswith(prefix)))
        if not names:
            return []
        # STRLEN counts as a use: the last one is asked for first, and stays as it was where the
        # server knows NO-TOUCH (Valkey, Redis 7.2).
        commands: list[Command] = [("CLIENT NO-TOUCH", "ON")]
        commands += [("OBJECT IDLETIME", name) for name in names]
        commands += [("STRLEN", name) for name in names]
        _, *replies, _ = self._exchange(pool, [*commands, ("CLIENT NO-TOUCH", "OFF")])
        idles, sizes = replies[: len(names)], replies[len(names) :]
        now, found = time.time(), []
        for name, reply, idle in zip(names, sizes, idles, strict=True):
            size = _OTHER_TYPE_BYTES if _is_of_other_type(reply) else reply
            if isinstance(size, int) and size > 0:  # else it went, or is none of ours
                found.append((name, size, now - idle if isinstance(idle, int) else 0.0))
        return found

    def _number(self, reply: object, what: str, name: str) -> int:
        if not isinstance(reply, int):
            self._refuse(reply, what, name)
        return reply

    def _refuse(self, reply: object, what: str, name: str) -> NoReturn:
        if not isinstance(reply, redis.ResponseError):
            raise StoreError(f"valkey: {what} of {name!r}: a reply that makes no sense")
        self._failed = ""
        server = self._servers.get(os.getpid())
        if isinstance(reply, ReadOnlyError) and isinstance(server, ConnectionPool):
            # The server became a replica: its name may lead to the new primary.
            server.disconnect(inuse_connections=False)
        raise StoreError(f"valkey: {what} of {name!r} refused: {_text(reply)}")


def make_tls(
    ca_file: str | None = None, cert_file: str | None = None, key_file: str | None = None
) -> ssl.SSLContext:
    """What `ValkeyClient` takes as `tls`: checks the server's certificate and name.

    Args:
        ca_file: PEM file of those who sign servers; None for those that the system trusts.
        cert_file: PEM file of a certificate to show to the server, if it asks for one.
        key_file: PEM file of its key, unless that is in the same file.

    Raises:
        ConfigError: a file that is absent or holds something else.
    """
    if key_file is not None and cert_file is None:
        raise ConfigError("key_file is given without cert_file")
    shown = ca_file
    try:
        context = ssl.create_default_context(cafile=ca_file)
        shown = f"{cert_file} and {key_file}" if key_file is not None else cert_file
        if cert_file is not None:
            context.load_cert_chain(cert_file, key_file)
    except OSError as error:  # an SSLError is one
        reason = "holds no usable PEM" if isinstance(error, ssl.SSLError) else error.strerror
        raise ConfigError(f"{shown}: {reason}") from None
    return context


def _addresses_of(host: str, seconds: float) -> list[str]:
    """Numeric addresses of a host. Raises TimeoutError, OSError."""
    found: queue.SimpleQueue[list[str] | Exception] = queue.SimpleQueue()

    def look_up() -> None:
        try:
            answers = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
            found.put([str(place[0]) for *_, place in answers])
        except (OSError, ValueError) as error:
            found.put(error)

    # A look-up takes no timeout. The thread ends when the resolver gives up.
    threading.Thread(target=look_up, name="kvferry-resolve", daemon=True).start()
    try:
        answer = found.get(timeout=seconds)
    except queue.Empty:
        raise TimeoutError from None
    if isinstance(answer, Exception):
        raise answer
    return answer


def _place(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _pools(server: ConnectionPool | redis.RedisCluster) -> list[ConnectionPool]:
    if isinstance(server, ConnectionPool):
        return [server]
    return [server.get_redis_connection(node).connection_pool for node in server.get_primaries()]


def _receive(connection: redis.Connection) -> object:
    try:
        return connection.read_response()
    except redis.ResponseError as error:
        return error


def _is_of_other_type(reply: object) -> bool:
    return isinstance(reply, redis.ResponseError) and _code(reply) == "WRONGTYPE"


def _code(error: redis.RedisError) -> str:
    """The first word of an error that a server answered: WRONGPASS, NOAUTH, ..."""
    word = error.status_code or str(error).partition(" ")[0]
    return word if word.isalpha() and word.isupper() else "ERR"


def _text(error: redis.RedisError) -> str:
    """What the server answered, in one line of at most 200 characters, without the user's name."""
    text = re.sub(r"\bUser \S+ has", "the user has", f"{error.status_code or ''} {error}")
    return printable(text.strip())[:200]


def _reason(error: BaseException) -> str:
    """What went wrong, in words without a name or a number of this process."""
    fault: BaseException | None = error
    while fault is not None and not isinstance(fault, StoreError | OSError | redis.ResponseError):
        fault = fault.__cause__ or fault.__context__
    match fault:
        case StoreError():
            return str(fault)
        case redis.ResponseError():
            return f"it answered {_text(fault)}"
        case TimeoutError():
            return "no answer in time"
        case ssl.SSLCertVerificationError():
            return f"its certificate is refused: {fault.verify_message}"
        case OSError():
            return fault.strerror or str(fault) or type(fault).__name__
    if isinstance(error, redis.TimeoutError):
        return "no answer in time"
    if isinstance(error, redis.ConnectionError | RedisClusterException):
        return printable(str(error))[:200]
    # Without the library's words: they quote what came, which can be anything.
    return "it does not speak the protocol of Valkey and Redis"

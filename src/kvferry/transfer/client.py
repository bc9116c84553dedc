"""Reads what one peer holds, for the store of `peer://` URLs. Each connection has one call at a
time; a call without an idle connection opens one."""

from __future__ import annotations

import os
import secrets
import socket
import ssl
import threading
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

from kvferry.config import printable
from kvferry.errors import TransferError, TransferTimeout
from kvferry.network import addresses_of, connect, is_same_host, join_host, reason_of, seconds_left
from kvferry.transfer.auth import SharedKey
from kvferry.transfer.base import KeyState
from kvferry.transfer.messages import (
    GREETINGS,
    MAX_FRAME_BYTES,
    MAX_GREETING_BYTES,
    MAX_KEYS,
    MAX_RANGES,
    REPLIES,
    VERSION,
    AskKeys,
    Challenge,
    Hello,
    KeyStates,
    Lent,
    PeerFault,
    Question,
    Read,
    Refused,
    Welcome,
    part_lengths,
)
from kvferry.transfer.stream import Stream
from kvferry.transfer.tls import TlsStream
from kvferry.types import ChunkKey

CONNECT_SECONDS = 2.0
CALL_SECONDS = 30.0
"""Time limit of calls that have no deadline or a later one."""

A = TypeVar("A", KeyStates, Lent)
M = TypeVar("M")
R = TypeVar("R")


class PeerClient:
    """A client of one peer. Thread-safe, and usable on both sides of a fork.

    Calls block until `deadline` (`time.monotonic()` seconds) at most. Whatever fails raises
    TransferError, or TransferTimeout if time ran out, also for connecting. A call that fails ends
    its connection; so the peer learns that no one waits any more.

    Args:
        host: name or address.
        namespace: namespace of the records; a peer that serves another one refuses.
        key: the key that all peers share.
        tls: TLS context from `PeerFiles.open_tls`; None: connections are in clear.

    Attributes:
        incarnation: incarnation of the server that answered last; empty before.
    """

    def __init__(
        self,
        host: str,
        port: int,
        namespace: bytes,
        key: SharedKey,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self.host = host
        self.port = port
        self.incarnation = b""
        self._found_at: list[str] = []  # addresses of `host`
        self._namespace = namespace
        self._key = key
        self._tls = tls
        self._lock = threading.Lock()
        self._idle: list[_PeerConnection] = []
        self._busy: set[_PeerConnection] = set()
        self._closed = False

    def is_at(self, host: str, port: int) -> bool:
        """Whether an address is that of this peer, also in another spelling. Looks up nothing:
        knows the addresses of its own host since it last connected."""
        return port == self.port and any(
            is_same_host(host, each) for each in (self.host, *self._found_at)
        )

    def states_of(self, keys: Sequence[ChunkKey], deadline: float) -> list[KeyState]:
        """Ask for the state of each key. Without keys, only find out which server answers."""
        states: list[KeyState] = []
        for start in range(0, max(1, len(keys)), MAX_KEYS):
            some = tuple(keys[start : start + MAX_KEYS])

            def ask(connection: _PeerConnection, some: tuple[ChunkKey, ...] = some) -> bytes:
                question = AskKeys(connection.next_number(), some)
                return connection.ask(question, KeyStates).states

            answer = self._call(ask, deadline)
            if len(answer) != len(some) or any(each > KeyState.HELD for each in answer):
                raise PeerFault(f"peer {self}: an answer that makes no sense")
            states += map(KeyState, answer)
        return states

    def read(
        self, key: ChunkKey, ranges: Sequence[tuple[int, memoryview]], deadline: float
    ) -> tuple[KeyState, int]:
        """Fill the buffers with the ranges of a record, straight from the connection. A range that
        passes the end is filled up to it. The bytes may be anything: verify them. No buffer
        is written after the call returns or raises.

        Returns:
            The state of the key, and the size of the record if it is held.
        """
        if len(ranges) > MAX_RANGES:
            raise TransferError(f"peer {self}: a read of more than {MAX_RANGES} ranges")

        def ask(connection: _PeerConnection) -> Lent:
            return connection.read(key, ranges)

        answer = self._call(ask, deadline)
        if answer.state > KeyState.HELD:
            raise PeerFault(f"peer {self}: an answer that makes no sense")
        return KeyState(answer.state), answer.size

    def close(self) -> None:
        """End all connections and the calls in progress. Idempotent."""
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
            for connection in self._busy:
                connection.stream.end()
        for connection in idle:
            connection.stream.close()

    # -- parts ----------------------------------------------------------------------------------

    def _call(self, ask: Callable[[_PeerConnection], R], deadline: float) -> R:
        deadline = min(deadline, time.monotonic() + CALL_SECONDS)
        connection = None
        try:
            seconds_left(deadline)
            connection = self._take() or self._connect(deadline)
            connection.deadline = deadline
            answer = ask(connection)
        except BaseException as error:
            if connection is not None:
                self._end(connection)
            if isinstance(error, TransferError):
                raise type(error)(f"peer {self}: {error}") from None
            if isinstance(error, OSError | ValueError | MemoryError):
                is_late = isinstance(error, TimeoutError)
                kind = TransferTimeout if is_late else TransferError
                raise kind(f"peer {self}: {reason_of(error)}") from None
            raise
        self._give_back(connection)
        return answer

    def _take(self) -> _PeerConnection | None:
        """Take an idle connection; None if there is none. The child of a fork discards those of its
        parent, which still uses them."""
        while True:
            with self._lock:
                if self._closed:
                    raise TransferError("it is closed")
                if not self._idle:
                    return None
                connection = self._idle.pop()
                self._busy.add(connection)
            if connection.pid == os.getpid() and connection.stream.is_quiet():
                return connection
            self._end(connection)

    def _give_back(self, connection: _PeerConnection) -> None:
        with self._lock:
            self._busy.discard(connection)
            if not self._closed:
                self._idle.append(connection)
                return
        connection.stream.close()

    def _end(self, connection: _PeerConnection) -> None:
        with self._lock:
            self._busy.discard(connection)
        connection.stream.close()

    def _connect(self, deadline: float) -> _PeerConnection:
        limit = min(deadline, time.monotonic() + CONNECT_SECONDS)
        self._found_at = addresses_of(self.host, seconds_left(limit))
        stream = connect(self._found_at, self.port, limit)
        connection = _PeerConnection(self._wrap(stream), limit)
        with self._lock:
            self._busy.add(connection)
            is_closed = self._closed
        try:
            if is_closed:
                raise TransferError("it is closed")
            connection.greet(self._namespace, self._key)
        except BaseException:
            self._end(connection)
            raise
        self.incarnation = connection.incarnation
        return connection

    def _wrap(self, stream: socket.socket) -> Stream:
        try:
            return Stream(stream) if self._tls is None else TlsStream(stream, self._tls, self.host)
        except BaseException:
            stream.close()
            raise

    def __str__(self) -> str:
        return join_host(self.host, self.port)

    def __repr__(self) -> str:
        return f"<PeerClient {self}>"


class _PeerConnection:
    """A connection to the peer: a stream, and the number of its last question. One thread at a
    time."""

    def __init__(self, stream: Stream, deadline: float) -> None:
        self.stream = stream
        self.deadline = deadline
        self.pid = os.getpid()
        self.incarnation = b""
        self._number = 0

    def greet(self, namespace: bytes, key: SharedKey) -> None:
        """Prove that we have the key, and check that the peer has it."""
        self.stream.begin(self.deadline)
        nonce = secrets.token_bytes(32)
        challenge = self._greeting(Challenge)
        if challenge.version != VERSION:
            raise PeerFault(f"it speaks version {challenge.version}, not {VERSION}")
        said = (challenge.incarnation, challenge.nonce, nonce, namespace)
        hello = Hello(VERSION, namespace, nonce, key.proof("client", *said))
        self.stream.send(hello, self.deadline)
        if not key.is_proof(self._greeting(Welcome).proof, "server", *said):
            raise PeerFault("its key is different")
        self.incarnation = challenge.incarnation

    def _greeting(self, kind: type[M]) -> M:
        return _expect(self.stream.receive(GREETINGS, MAX_GREETING_BYTES, self.deadline), kind)

    def next_number(self) -> int:
        """Return the number of the next question."""
        self._number += 1
        return self._number

    def ask(self, question: Question, kind: type[A]) -> A:
        """Send a question and return the answer. The bytes of a record, if any, come next."""
        self.stream.send(question, self.deadline)
        answer = _expect(self.stream.receive(REPLIES, MAX_FRAME_BYTES, self.deadline), kind)
        if (answer.number, answer.incarnation) != (question.number, self.incarnation):
            raise PeerFault("it answered another question")
        return answer

    def read(self, key: ChunkKey, ranges: Sequence[tuple[int, memoryview]]) -> Lent:
        views = [(offset, view.cast("B")) for offset, view in ranges]
        wanted = tuple((offset, len(view)) for offset, view in views)
        milliseconds = max(1, int(1000 * seconds_left(self.deadline)))
        answer = self.ask(Read(self.next_number(), key, wanted, milliseconds), Lent)
        if answer.state == KeyState.HELD:
            lengths = part_lengths(answer.size, wanted)
            parts = [view[:length] for (_, view), length in zip(views, lengths, strict=True)]
            self.stream.receive_into(parts, self.deadline)
        return answer


def _expect(message: object, kind: type[M]) -> M:
    """Return `message` if it is of this kind. Raises PeerFault for another one."""
    if isinstance(message, kind):
        return message
    if isinstance(message, Refused):
        # The peer's own words, made safe for a log.
        raise PeerFault(f"it refuses: {printable(message.reason)}")
    raise PeerFault("it does not speak the protocol of peers")

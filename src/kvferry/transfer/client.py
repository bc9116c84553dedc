"""Reads what one peer holds, for the store of `peer://` URLs."""

from __future__ import annotations

import secrets
import socket
import ssl
import time
from collections.abc import Sequence
from typing import TypeVar

from kvferry.errors import FaultKind, StoreError
from kvferry.network import CONNECT_SECONDS, Endpoint, call_ends, is_same_host, seconds_left
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
    Frames,
    Hello,
    KeyStates,
    Lent,
    Question,
    Read,
    Refused,
    Welcome,
    part_lengths,
)
from kvferry.types import ChunkKey

A = TypeVar("A", KeyStates, Lent)
M = TypeVar("M")


class _PeerConnection(Frames):
    """A connection to the peer, which knows the number of its last question."""

    def __init__(self, stream: socket.socket) -> None:
        super().__init__(stream)
        self.incarnation = b""
        self._number = 0

    def greet(self, namespace: bytes, key: SharedKey, deadline: float) -> None:
        """Prove that we have the key, and check that the peer has it."""
        nonce = secrets.token_bytes(32)
        challenge = self._greeting(Challenge, deadline)
        if challenge.version != VERSION:
            wrong = f"it speaks version {challenge.version}, not {VERSION}"
            raise StoreError(FaultKind.PROTOCOL, wrong)
        said = (challenge.incarnation, challenge.nonce, nonce, namespace)
        self.send(Hello(VERSION, namespace, nonce, key.proof("client", *said)), deadline)
        if not key.is_proof(self._greeting(Welcome, deadline).proof, "server", *said):
            raise StoreError(FaultKind.LOGIN, "its key is different")
        self.incarnation = challenge.incarnation

    def _greeting(self, kind: type[M], deadline: float) -> M:
        return _expect(self.receive(GREETINGS, MAX_GREETING_BYTES, deadline), kind)

    def next_number(self) -> int:
        """Return the number of the next question."""
        self._number += 1
        return self._number

    def ask(self, question: Question, kind: type[A], deadline: float) -> A:
        """Send a question and return the answer. The bytes of a record, if any, come next."""
        self.send(question, deadline)
        answer = _expect(self.receive(REPLIES, MAX_FRAME_BYTES, deadline), kind)
        if (answer.number, answer.incarnation) != (question.number, self.incarnation):
            raise StoreError(FaultKind.PROTOCOL, "it answered another question")
        return answer


class PeerClient(Endpoint[_PeerConnection]):
    """A client of one peer. Thread-safe, and usable on both sides of a fork.

    Calls block until `deadline` (`time.monotonic()` seconds) at most. Whatever fails raises
    StoreError, also for connecting. A call that fails ends its connection; so the peer learns that
    no one waits any more.

    Args:
        host: name or address.
        namespace: namespace of the records; a peer that serves another one refuses.
        key: the key that all peers share.
        tls: TLS context from `PeerFiles.open_tls`; None: connections are in clear.

    Attributes:
        incarnation: incarnation of the server that answered last; empty before.
    """

    what = "peer"

    def __init__(
        self,
        host: str,
        port: int,
        namespace: bytes,
        key: SharedKey,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        super().__init__(host, port, tls, _PeerConnection)
        self.incarnation = b""
        self._namespace = namespace
        self._key = key

    def is_at(self, host: str, port: int) -> bool:
        """Whether an address is that of this peer, also in another spelling. Looks up nothing:
        knows the addresses of its own host since it last connected."""
        return port == self.port and any(
            is_same_host(host, each) for each in (self.host, *self.found_at)
        )

    def states_of(self, keys: Sequence[ChunkKey], deadline: float) -> list[KeyState]:
        """Ask for the state of each key. Without keys, only find out which server answers."""
        until = call_ends(deadline)
        states: list[KeyState] = []
        for start in range(0, max(1, len(keys)), MAX_KEYS):
            some = tuple(keys[start : start + MAX_KEYS])
            with self.connection(until) as connection:
                question = AskKeys(connection.next_number(), some)
                answer = connection.ask(question, KeyStates, until).states
                if len(answer) != len(some):
                    raise StoreError(FaultKind.PROTOCOL, "an answer that makes no sense")
                states += map(_state, answer)
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
        until = call_ends(deadline)
        views = [(offset, view.cast("B")) for offset, view in ranges]
        wanted = tuple((offset, len(view)) for offset, view in views)
        with self.connection(until) as connection:
            if len(wanted) > MAX_RANGES:
                raise StoreError(FaultKind.UNUSABLE, f"a read of more than {MAX_RANGES} ranges")
            milliseconds = max(1, int(1000 * seconds_left(until)))
            question = Read(connection.next_number(), key, wanted, milliseconds)
            answer = connection.ask(question, Lent, until)
            state = _state(answer.state)
            if state is KeyState.HELD:
                lengths = part_lengths(answer.size, wanted)
                parts = [view[:length] for (_, view), length in zip(views, lengths, strict=True)]
                connection.read_into(parts, until)
        return state, answer.size

    def _log_in(self, connection: _PeerConnection, deadline: float) -> None:
        limit = min(deadline, time.monotonic() + CONNECT_SECONDS)
        connection.greet(self._namespace, self._key, limit)
        self.incarnation = connection.incarnation


def _state(number: int) -> KeyState:
    try:
        return KeyState(number)
    except ValueError:
        raise StoreError(FaultKind.PROTOCOL, "an answer that makes no sense") from None


def _expect(message: object, kind: type[M]) -> M:
    """Return `message` if it is of this kind. Raises StoreError for another one."""
    if isinstance(message, kind):
        return message
    if isinstance(message, Refused):
        raise StoreError(*message.fault)
    raise StoreError(FaultKind.PROTOCOL, "it does not speak the protocol of peers")

"""The contract between a `PeerServer` and the lender whose records it serves; the server's limits.

The transport moves opaque bytes: a *record* is whatever a lender holds under a key. The reader
verifies every record, so a loan keeps bytes in place for the sake of a hit, not of correctness. The
cache and the memory store are lenders.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Literal, Protocol, TypeVar

from kvferry.types import ChunkKey


class KeyState(IntEnum):
    """What a peer says of one key."""

    ABSENT = 0
    PENDING = 1
    """Being made: ask again. Neither a hit nor a miss to remember."""
    HELD = 2


class Loan(Protocol):
    """A record in memory that is lent for reading."""

    @property
    def buffers(self) -> Sequence[memoryview]:
        """The bytes of the record, in order."""


L = TypeVar("L", bound=Loan)


class Lender(Protocol[L]):
    """A holder of records in memory. Thread-safe: several threads of a server call it at once. Does
    no I/O, and takes no lock but its own."""

    def lend(self, key: ChunkKey, seconds: float) -> L | Literal[KeyState.PENDING] | None:
        """Lend the record of `key`; PENDING while it is being made, None if it is not here. Its
        bytes stay until `release`, at most for `seconds`, unless an eviction has begun."""

    def release(self, loan: L) -> None:
        """End a loan: the reader is done."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """The limits of a server.

    Attributes:
        max_connections: connections at once. One more takes the place of one that has not proved
            itself; if there is none, the new one is closed.
        max_bytes: bytes of records in transit, over all connections. A read waits for room until
            its deadline.
        handshake_seconds: time for both sides to prove themselves.
        idle_seconds: time after which a connection without a request is closed.
        answer_seconds: most time that an answer takes, whatever deadline the reader has.
        close_seconds: how long a close waits for threads.
    """

    max_connections: int = 64
    max_bytes: int = 256 << 20
    handshake_seconds: float = 5.0
    idle_seconds: float = 300.0
    answer_seconds: float = 30.0
    close_seconds: float = 5.0

"""What a server of records needs of those who hold them, and what it answers.

A transport moves opaque bytes: a *record* is whatever a lender holds under a key. The reader
verifies it. So a loan keeps bytes in place for the sake of the hit, never for its rightness.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Literal, Protocol, TypeVar

from kvferry.types import ChunkKey


class KeyState(IntEnum):
    """Of one key, at a peer."""

    ABSENT = 0
    PENDING = 1
    """Being made, so ask again: neither a hit, nor an absence to remember."""
    HELD = 2


class Loan(Protocol):
    """A record in memory, for reading."""

    @property
    def buffers(self) -> Sequence[memoryview]:
        """The bytes of the record, in order."""


L = TypeVar("L", bound=Loan)


class Lender(Protocol[L]):
    """Holds records in memory. Thread-safe: threads of a server call it, several at once; memory
    only, under no lock but its own."""

    def lend(self, key: ChunkKey, seconds: float) -> L | Literal[KeyState.PENDING] | None:
        """The record of `key`, whose bytes stay until `release`, or for `seconds`, unless it is
        just being evicted; None if it is not here."""

    def release(self, loan: L) -> None:
        """The reader is done."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """What a server gives at most.

    Attributes:
        max_connections: at once; another one is closed.
        max_bytes: of records that are on their way, over all connections; a read waits for its
            turn, until its deadline.
        handshake_seconds: until both sides have proved themselves.
        idle_seconds: until a connection without a request is closed.
        answer_seconds: no answer takes longer, whatever deadline the reader has.
        close_seconds: how long a close waits for threads.
    """

    max_connections: int = 64
    max_bytes: int = 256 << 20
    handshake_seconds: float = 5.0
    idle_seconds: float = 300.0
    answer_seconds: float = 30.0
    close_seconds: float = 5.0

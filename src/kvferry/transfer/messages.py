"""The messages of `client` and `server`: msgpack arrays of limited size. Nothing is unpickled.

    server                                 client
    Challenge(version, incarnation, nonce)
                                           Hello(version, namespace, nonce, proof)
    Welcome(proof), or Refused(reason)
                                           AskKeys or Read, one at a time
    KeyStates, Lent and the bytes of all ranges, or Refused

A frame is the length of a message in four bytes, little endian, and the message. Numbers of
questions only grow, so no frame can be replayed within its connection. Answers repeat the number
and the incarnation, so the client refuses an answer to an earlier call or of an earlier server.
"""

from __future__ import annotations

import ssl
from collections.abc import Sequence
from typing import Annotated, TypeVar

import msgspec
from msgspec import Meta

from kvferry.config import printable
from kvferry.errors import Fault, FaultKind, StoreError
from kvferry.network import BUFFER_BYTES, Stream, reason_of

VERSION = 1
MAX_GREETING_BYTES = 512
"""Limit of a frame until both sides have proved themselves."""
MAX_FRAME_BYTES = BUFFER_BYTES
MAX_KEYS = 1024
MAX_RANGES = 2048
MAX_READ_BYTES = 1 << 31
"""Limit of all ranges of one read together."""

Digest = Annotated[bytes, Meta(min_length=32, max_length=32)]
Incarnation = Annotated[bytes, Meta(min_length=16, max_length=16)]
Count = Annotated[int, Meta(ge=0, le=2**62)]


class Message(msgspec.Struct, frozen=True, array_like=True):
    """A msgpack array. Items that a later version appends are ignored."""


class Challenge(Message, frozen=True, tag=0):
    version: Count
    incarnation: Incarnation
    """A random value, new each time that a server starts."""
    nonce: Digest


class Hello(Message, frozen=True, tag=1):
    version: Count
    namespace: Digest
    nonce: Digest
    proof: Digest


class Welcome(Message, frozen=True, tag=2):
    proof: Digest


class Refused(Message, frozen=True, tag=3):
    reason: Annotated[str, Meta(max_length=200)]
    kind: Annotated[str, Meta(max_length=20)] = FaultKind.REFUSED
    """A `FaultKind`, or one that a later release knows. Earlier releases send none."""

    @property
    def fault(self) -> Fault:
        """What the other side said, made safe for a log."""
        known = self.kind in FaultKind.__members__.values()
        kind = FaultKind(self.kind) if known else FaultKind.REFUSED
        return Fault(kind, f"it refuses: {printable(self.reason)}")


class AskKeys(Message, frozen=True, tag=4):
    """Asks which of these keys are held."""

    number: Count
    keys: Annotated[tuple[Digest, ...], Meta(max_length=MAX_KEYS)]


class Read(Message, frozen=True, tag=6):
    """Asks for ranges of a record: offset and length of each."""

    number: Count
    key: Digest
    ranges: Annotated[tuple[tuple[Count, Count], ...], Meta(max_length=MAX_RANGES)]
    milliseconds: Count
    """How long the reader waits. A duration, because clocks differ."""


class KeyStates(Message, frozen=True, tag=7):
    number: Count
    incarnation: Incarnation
    states: Annotated[bytes, Meta(max_length=MAX_KEYS)]
    """A `KeyState` for each key."""


class Lent(Message, frozen=True, tag=9):
    """Answers `Read`. The part of each range that lies in the record follows."""

    number: Count
    incarnation: Incarnation
    state: Annotated[int, Meta(ge=0, le=255)]
    size: Count
    """Size of the record in bytes; 0 if it is not held."""


Question = AskKeys | Read
Reply = KeyStates | Lent | Refused

_HEAD_BYTES = 4
_ENCODER = msgspec.msgpack.Encoder()
GREETINGS = msgspec.msgpack.Decoder(Challenge | Hello | Welcome | Refused)
QUESTIONS = msgspec.msgpack.Decoder(Question)
REPLIES = msgspec.msgpack.Decoder(Reply)

Decoder = msgspec.msgpack.Decoder
T = TypeVar("T")


def encode(message: Message) -> bytes:
    """Return a message as a frame."""
    body = _ENCODER.encode(message)
    return len(body).to_bytes(_HEAD_BYTES, "little") + body


def decode(decoder: Decoder[T], body: bytes | bytearray | memoryview) -> T:
    """Return the message of a frame. Raises StoreError if it holds none."""
    try:
        return decoder.decode(body)
    # UnicodeDecodeError is a ValueError; deeply nested arrays raise RecursionError.
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise StoreError(FaultKind.PROTOCOL, "it does not speak the protocol of peers") from error


class Frames(Stream):
    """A connection of two peers, which `client` and `server` use. Besides OSError, calls raise
    StoreError for what breaks the protocol."""

    def secure(self, tls: ssl.SSLContext, deadline: float, host: str | None = None) -> None:
        try:
            super().secure(tls, deadline, host)
        except (ssl.SSLEOFError, ssl.SSLZeroReturnError):
            raise
        except ssl.SSLError as error:
            raise StoreError(FaultKind.PROTOCOL, reason_of(error)) from None

    def send(self, message: Message, deadline: float, buffers: Sequence[memoryview] = ()) -> None:
        """Send a frame, and the bytes of `buffers` after it."""
        self.write([encode(message), *buffers], deadline)

    def receive(self, decoder: Decoder[T], max_bytes: int, deadline: float) -> T:
        """Receive the next message, of at most `max_bytes`."""
        length = int.from_bytes(self.read(_HEAD_BYTES, deadline), "little")
        if not 0 < length <= max_bytes:
            raise StoreError(FaultKind.PROTOCOL, "it does not speak the protocol of peers")
        return decode(decoder, self.read(length, deadline))


def part_lengths(size: int, ranges: Sequence[tuple[int, int]]) -> list[int]:
    """Return how many bytes of each range lie in a record of `size` bytes."""
    return [max(0, min(length, size - offset)) for offset, length in ranges]

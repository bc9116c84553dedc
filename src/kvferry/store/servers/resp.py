"""The protocol of Valkey and Redis (RESP2), read so that no reply takes more memory than expected.

A server announces how much it is going to send, and what answers at its port may be no Valkey. So a
reply that is larger or deeper than any of ours ends the connection before memory is taken for it.
"""

from __future__ import annotations

import re
import socket
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from kvferry.config import printable
from kvferry.errors import FaultKind, StoreError
from kvferry.network import Stream
from kvferry.store.base import Buffer

_JOINED_BYTES = 64 * 1024
"""A larger value is sent by itself. A smaller one is copied and sent with others: less work."""
_JOINED_WORDS = 1000
_MAX_LINE_BYTES = 1024
"""Lines hold a number, a word or an error."""
_MAX_DEPTH = 4
"""Depth of nested lists: a cluster's slot ranges, their nodes, the attributes of nodes."""
_ROOM = 4 << 20
"""Bytes of memory that a reply without `into` may take: 4,000 ranges of a cluster's slots, with a
replica of each."""
_ITEM_BYTES = 64
"""Memory that an item of a list takes besides its bytes."""
_STRANGE = "it does not speak the protocol of Valkey and Redis"
_MORE = "it sends more than was asked for"

_KINDS = {
    **dict.fromkeys(("NOAUTH", "WRONGPASS"), FaultKind.LOGIN),
    **dict.fromkeys(("ASK", "CLUSTERDOWN", "CROSSSLOT", "MOVED"), FaultKind.CLUSTER),
    "NOPERM": FaultKind.RIGHTS,
    "OOM": FaultKind.FULL,
    "READONLY": FaultKind.READ_ONLY,
}
"""By code of an error that a server answered."""

_TEXT = (str, bytes, int)
Word = str | bytes | int | Sequence[Buffer]
"""A word of a command. Several buffers are one word; large ones are not copied."""


class Command(NamedTuple):
    """A command, and where its reply goes."""

    words: tuple[Word, ...]
    into: memoryview | None = None
    """The memory for a reply of bytes; a longer one is refused."""


def command(*words: Word, into: memoryview | None = None) -> Command:
    return Command(words, into)


class ErrorReply(NamedTuple):
    """An error that a server answered."""

    text: str

    @property
    def code(self) -> str:
        """The first word: WRONGPASS, NOAUTH, ...; ERR if that is no code."""
        word = self.text.partition(" ")[0]
        return word if word.isascii() and word.isalpha() and word.isupper() else "ERR"

    @property
    def kind(self) -> FaultKind:
        """What it means to the server's operator."""
        return _KINDS.get(self.code, FaultKind.REFUSED)

    def __str__(self) -> str:
        """One line of at most 200 characters, without the user's name."""
        return printable(re.sub(r"\bUser \S+ has", "the user has", self.text))[:200]


def code_of(reply: object) -> str:
    """The code of an error that a server answered; empty for any other reply."""
    return reply.code if isinstance(reply, ErrorReply) else ""


class Connection(Stream):
    """A connection for one call at a time. Every wait ends at the call's deadline."""

    def __init__(self, stream: socket.socket) -> None:
        super().__init__(stream)
        self._deadline = 0.0
        self._room = 0

    def ask(self, commands: Sequence[Command], deadline: float) -> list[object]:
        """Send commands and return their replies: a number, None, bytes of a short text, the filled
        part of `into`, an `ErrorReply`, or a list of these with bytes of any length.

        Whatever is raised, close the connection: the next call would take a late reply for its own.

        Raises:
            OSError: the connection failed, or the deadline passed (TimeoutError).
            StoreError: the server sent anything else.
        """
        self._deadline = deadline
        for piece in _pack(commands):
            self.write([piece], deadline)
        replies = [self._reply(each) for each in commands]
        if self._start < self._end:
            raise StoreError(FaultKind.PROTOCOL, _MORE)
        return replies

    def _reply(self, asked: Command) -> object:
        line = self._line()
        if asked.into is not None and line[:1] == b"$" and line != b"$-1":
            return self._bulk(asked.into, _number(line))
        self._room = _ROOM
        return self._parse(line, 0)

    def _parse(self, line: bytes, depth: int) -> object:
        kind = line[:1]
        if depth:
            self._reserve(len(line))
        if kind == b":":
            return _number(line)
        if kind == b"+":
            return line[1:]
        if kind == b"-":
            return ErrorReply(line[1:].decode("utf-8", "replace"))
        if line in (b"$-1", b"*-1"):
            return None
        if kind == b"$":
            size = _number(line)
            self._reserve(size)
            return bytes(self._bulk(memoryview(bytearray(size)), size))
        if kind == b"*" and depth < _MAX_DEPTH:
            count = _number(line)
            self._reserve(_ITEM_BYTES * count)
            return [self._parse(self._line(), depth + 1) for _ in range(count)]
        raise StoreError(FaultKind.PROTOCOL, _STRANGE)

    def _reserve(self, num_bytes: int) -> None:
        if not 0 <= num_bytes <= self._room:
            raise StoreError(FaultKind.PROTOCOL, _MORE)
        self._room -= num_bytes

    def _bulk(self, view: memoryview, size: int) -> memoryview:
        """Read `size` bytes into the first part of `view`; return that part."""
        if not 0 <= size <= view.nbytes:
            raise StoreError(FaultKind.PROTOCOL, _MORE)
        view = view[:size]
        self.read_into([view], self._deadline)
        if self._line():
            raise StoreError(FaultKind.PROTOCOL, _STRANGE)
        return view

    def _line(self) -> bytes:
        """Read the next line; return it without its end."""
        while True:
            end = self._buffer.find(b"\r\n", self._start, self._end)
            if (end if end >= 0 else self._end) - self._start > _MAX_LINE_BYTES:
                raise StoreError(FaultKind.PROTOCOL, _STRANGE)
            if end >= 0:
                line = bytes(self._buffer[self._start : end])
                self._start = end + 2
                return line
            self._read_ahead(_MAX_LINE_BYTES, self._deadline)


def _number(line: bytes) -> int:
    """The number after the first character. Raises StoreError if none of up to 64 bits follows."""
    digits = line[1:]
    if len(digits) <= 20 and digits.removeprefix(b"-").isdigit():
        number = int(digits)
        if -(1 << 63) <= number < 1 << 63:
            return number
    raise StoreError(FaultKind.PROTOCOL, _STRANGE)


def _pack(commands: Sequence[Command]) -> Iterator[bytes | memoryview]:
    """Yield the commands in the pieces in which they are sent."""
    packed: list[bytes | memoryview] = []
    for words, *_ in commands:
        packed.append(b"*%d\r\n" % len(words))
        for word in words:
            if isinstance(word, _TEXT):
                text = word if isinstance(word, bytes) else str(word).encode()
                packed.append(b"$%d\r\n%b\r\n" % (len(text), text))
                continue
            views = [memoryview(buffer).cast("B") for buffer in word]
            size = sum(map(len, views))
            packed.append(b"$%d\r\n" % size)
            if size > _JOINED_BYTES:
                yield b"".join(packed)
                yield from views
                packed = [b"\r\n"]
            else:
                packed += [*views, b"\r\n"]
        if len(packed) > _JOINED_WORDS:  # the server begins while the others are packed
            yield b"".join(packed)
            packed = []
    yield b"".join(packed)

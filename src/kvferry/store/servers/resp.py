"""The protocol of Valkey and Redis (RESP2), with a deadline for each call. Values go from and to
memory of the caller. What answers at a port may be no Valkey: a reply of another form ends the
connection.
"""

from __future__ import annotations

import os
import re
import socket
import ssl
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from kvferry.config import printable
from kvferry.errors import StoreError
from kvferry.network import seconds_left
from kvferry.store.base import Buffer

_BUFFER_BYTES = 32 * 1024
_JOINED_BYTES = 64 * 1024
"""A larger value is sent by itself. A smaller one is copied and sent with others: less work."""
_JOINED_WORDS = 1000
_MAX_LINE_BYTES = 1024
"""Lines hold a number, a word or an error."""
_STRANGE = "it does not speak the protocol of Valkey and Redis"
_MORE = "it sends more than was asked for"

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

    def __str__(self) -> str:
        """One line of at most 200 characters, without the user's name."""
        return printable(re.sub(r"\bUser \S+ has", "the user has", self.text))[:200]


def code_of(reply: object) -> str:
    """The code of an error that a server answered; empty for any other reply."""
    return reply.code if isinstance(reply, ErrorReply) else ""


class Connection:
    """A connection for one call at a time. Every wait ends at the call's deadline. `close` closes
    `stream`."""

    def __init__(self, stream: socket.socket) -> None:
        self._stream = stream
        self._pid = os.getpid()
        self._deadline = 0.0
        # Bytes that were received and not read yet: [start, end) of the buffer.
        self._buffer = bytearray(_BUFFER_BYTES)
        self._start = 0
        self._end = 0

    def ask(self, commands: Sequence[Command], deadline: float) -> list[object]:
        """Send commands and return their replies: a number, None, bytes of a short text, the filled
        part of `into`, an `ErrorReply`, or a list of these with bytes of any length.

        Whatever is raised, the connection is closed: the next call would take a late reply for its
        own.

        Raises:
            OSError: the connection failed, or the deadline passed (TimeoutError).
            StoreError: the server sent anything else.
        """
        self._deadline = deadline
        try:
            self._send(commands)
            replies = [self._reply(each) for each in commands]
            if self._start < self._end:
                raise StoreError(_MORE)
        except BaseException:
            self.close()
            raise
        return replies

    def is_quiet(self) -> bool:
        """Whether the connection can be used: the server has neither closed it nor sent anything
        unasked. False in the child of a fork, as the parent uses the connection."""
        if self._pid != os.getpid():
            return False
        try:
            self._stream.settimeout(0.0)
            self._stream.recv(1)
        except (BlockingIOError, ssl.SSLWantReadError):
            return True
        except OSError:
            pass
        return False

    def close(self) -> None:
        """Idempotent."""
        self._stream.close()

    def _send(self, commands: Sequence[Command]) -> None:
        # Not the socket's `sendall`: with TLS, Python's restarts its timeout for every TLS record.
        for piece in _pack(commands):
            view, sent = memoryview(piece), 0
            while sent < len(view):
                self._stream.settimeout(seconds_left(self._deadline))
                sent += self._stream.send(view[sent:])

    def _reply(self, asked: Command) -> object:
        line = self._line()
        if asked.into is not None and line[:1] == b"$" and line != b"$-1":
            return self._bulk(asked.into, _number(line))
        return self._parse(line)

    def _parse(self, line: bytes) -> object:
        kind = line[:1]
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
            return bytes(self._bulk(memoryview(bytearray(max(0, size))), size))
        if kind == b"*":
            return [self._parse(self._line()) for _ in range(_number(line))]
        raise StoreError(_STRANGE)

    def _bulk(self, view: memoryview, size: int) -> memoryview:
        """Read `size` bytes into the first part of `view`; return that part."""
        if not 0 <= size <= view.nbytes:
            raise StoreError(_MORE)
        view = view[:size]
        done = min(size, self._end - self._start)
        view[:done] = memoryview(self._buffer)[self._start : self._start + done]
        self._start += done
        while done < size:
            done += self._receive(view[done:])
        if self._line():
            raise StoreError(_STRANGE)
        return view

    def _line(self) -> bytes:
        """Read the next line; return it without its end."""
        while True:
            end = self._buffer.find(b"\r\n", self._start, self._end)
            if (end if end >= 0 else self._end) - self._start > _MAX_LINE_BYTES:
                raise StoreError(_STRANGE)
            if end >= 0:
                line = bytes(self._buffer[self._start : end])
                self._start = end + 2
                return line
            left = self._buffer[self._start : self._end]
            self._buffer[: len(left)] = left
            self._start, self._end = 0, len(left)
            self._end += self._receive(memoryview(self._buffer)[self._end :])

    def _receive(self, view: memoryview) -> int:
        self._stream.settimeout(seconds_left(self._deadline))
        num_bytes = self._stream.recv_into(view)
        if not num_bytes:
            raise ConnectionResetError("it closed the connection")
        return num_bytes


def _number(line: bytes) -> int:
    """The number after the first character. Raises StoreError if none follows."""
    try:
        return int(line[1:])
    except ValueError:
        raise StoreError(_STRANGE) from None


def _pack(commands: Sequence[Command]) -> Iterator[Buffer]:
    """Yield the commands in the pieces in which they are sent."""
    packed: list[Buffer] = []
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

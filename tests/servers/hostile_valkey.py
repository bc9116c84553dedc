"""A server that speaks Valkey's protocol, and attacks its clients with wrong replies if told to."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator
from itertools import repeat

from tests.servers.paced import paced
from tests.servers.process import LOCALHOST

VALUE = bytes(range(256)) * 400
"""The value of every name that ends in a 1; other names have none."""

Answer = Callable[[bytes], Iterator[bytes]]
"""Makes the pieces to send instead of a right reply. After them the connection is closed."""


def sends(*pieces: bytes, again: bytes = b"", wait: float = 0.0) -> Answer:
    """Send the pieces, then send `again` for ever, with a wait after each."""

    def answer(_right: bytes) -> Iterator[bytes]:
        yield from pieces
        if again:
            yield from paced(repeat(again), wait)

    return answer


def after_right(again: bytes) -> Answer:
    """Send the right reply, then send `again` for ever."""

    def answer(right: bytes) -> Iterator[bytes]:
        yield right
        yield from sends(again=again)(right)

    return answer


def dribbled(right: bytes) -> Iterator[bytes]:
    yield from paced((bytes([byte]) for byte in right), 0.03)


def silent(_right: bytes) -> Iterator[bytes]:
    yield from paced(repeat(b""), 0.05)


_MUCH = b"x" * (1 << 20)
ATTACKS: dict[str, Answer] = {
    "a list of 1e9 items": sends(b"*1000000000\r\n", again=b":1\r\n" * 9999),
    "a list of 4e9 items": sends(b"*4000000000\r\n", again=b"$-1\r\n" * 9999),
    "a value of 512 MiB": sends(b"$536870912\r\n", again=_MUCH),
    "a value of -5 bytes": sends(b"$-5\r\n"),
    "a value cut short": sends(b"$100\r\nhello"),
    "a list cut short": sends(b"*3\r\n:1\r\n"),
    "a page of 1e6 names": sends(b"*2\r\n$1\r\n7\r\n*1000000\r\n", again=b"$4\r\nkv/1\r\n" * 9999),
    "lists in lists": sends(again=b"*1\r\n" * 9999),
    "a move to nowhere": sends(b"-MOVED 1 \x1b[31m:0655359\r\n"),
    "pushes": sends(again=b">2\r\n+invalidate\r\n*-1\r\n" * 999),
    "null": sends(b"_\r\n" * 99),
    "an error": sends(again=b"-ERR no \x1b[31m\r\n" * 999),
    "it is loading": sends(again=b"-LOADING the dataset\r\n" * 999),
    "no room": sends(again=b"-OOM command not allowed\r\n" * 999),
    "another page": sends(b"*2\r\n$1\r\n0\r\n*0\r\n" * 99),
    "zeros": sends(again=bytes(1 << 20)),
    "an alert of TLS": sends(b"\x15\x03\x01\x00\x02\x02\x16"),
    "no text of an error": sends(b"-\r\n" * 99),
    "a number too large": sends(b"*99999999999\r\n"),
    "a web page": sends(b"HTTP/1.1 400 Bad Request\r\n\r\n<html>\r\n"),
    "the right reply, then numbers": after_right(b":1\r\n" * 9999),
    "the right reply, slowly": dribbled,
    "silence": silent,
    "the end": sends(),
}
"""Wrong replies. A server that is old, full, restarting or no Valkey sends such."""


class HostileValkey:
    """Listens on a free port; each connection has a thread.

    Attributes:
        port: port on which the server listens.
        answer: the attack; None while the server is honest.
        names: names on each page of a list.
        next_cursor: function from a page's cursor to that of the next page; b"0" ends the list.
    """

    def __init__(self, answer: Answer | None = None, *, greets: bool = True) -> None:
        """Start the server; with `greets`, it is honest while a client connects."""
        self.answer = answer
        self.names: list[bytes] = [b"kv/1"]
        self.next_cursor: Callable[[bytes], bytes] = lambda _cursor: b"0"
        self._greets = greets
        self._is_closed = False
        self._listener = socket.create_server((LOCALHOST, 0))
        self.port: int = self._listener.getsockname()[1]
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()

    def close(self) -> None:
        self._is_closed = True
        self._listener.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(20)
            assert not thread.is_alive()
        self._listener.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                stream, _ = self._listener.accept()
                thread = threading.Thread(target=self._serve, args=(stream,), daemon=True)
                self._threads.append(thread)
                thread.start()

    def _serve(self, stream: socket.socket) -> None:
        stream.settimeout(0.2)
        received = b""
        with stream, contextlib.suppress(ConnectionError):
            while not self._is_closed:
                try:
                    chunk = stream.recv(1 << 20)
                except TimeoutError:
                    continue
                if not chunk:
                    return
                received += chunk
                commands, received = _parse(received)
                if not commands:
                    continue
                right = b"".join(map(self._right_reply, commands))
                is_greeting = self._greets and commands[0][:2] == [b"CLIENT", b"SETNAME"]
                if self.answer is None or is_greeting:
                    self._send(stream, right)
                    continue
                for piece in self.answer(right):
                    if not self._send(stream, piece):
                        break
                return

    def _send(self, stream: socket.socket, piece: bytes) -> bool:
        """Send a piece. Return False if the client has left or does not read."""
        view, end = memoryview(piece), time.monotonic() + 10
        while view and not self._is_closed and time.monotonic() < end:
            with contextlib.suppress(TimeoutError):
                view = view[stream.send(view) :]
        if not piece:
            stream.setblocking(False)
            try:
                return bool(stream.recv(1 << 16))
            except BlockingIOError:
                return not self._is_closed
            finally:
                stream.settimeout(0.2)
        return not view

    def _right_reply(self, words: list[bytes]) -> bytes:
        name = words[1] if len(words) > 1 else b""
        has_value = name.endswith(b"1")
        match words[0]:
            case b"GETRANGE":
                part = VALUE[int(words[2]) : int(words[3]) + 1] if has_value else b""
                return b"$%d\r\n%b\r\n" % (len(part), part)
            case b"STRLEN":
                return b":%d\r\n" % (len(VALUE) if has_value else 0)
            case b"SET":
                return b"$-1\r\n" if has_value else b"+OK\r\n"
            case b"EXISTS" | b"UNLINK":
                return b":%d\r\n" % has_value
            case b"SCAN":
                cursor = self.next_cursor(name)
                names = b"".join(b"$%d\r\n%b\r\n" % (len(each), each) for each in self.names)
                head = b"*2\r\n$%d\r\n%b\r\n*%d\r\n" % (len(cursor), cursor, len(self.names))
                return head + names
            case b"OBJECT":
                return b":1\r\n"
            case b"CLUSTER":
                place = b"$9\r\n127.0.0.1\r\n:%d\r\n" % self.port
                return b"*1\r\n*3\r\n:0\r\n:16383\r\n*4\r\n" + place + b"$2\r\nid\r\n*0\r\n"
        return b"+OK\r\n"


def _parse(received: bytes) -> tuple[list[list[bytes]], bytes]:
    """Split received bytes into whole commands and the rest."""
    commands: list[list[bytes]] = []
    at = 0
    while True:
        words: list[bytes] = []
        try:
            end = received.index(b"\r\n", at)
            count, start = int(received[at + 1 : end]), end + 2
            for _ in range(count):
                end = received.index(b"\r\n", start)
                size = int(received[start + 1 : end])
                start = end + 2 + size + 2
                if start > len(received):
                    return commands, received[at:]
                words.append(received[end + 2 : start - 2])
        except ValueError:
            return commands, received[at:]
        commands.append(words)
        at = start


@contextlib.contextmanager
def hostile_valkey(answer: Answer | None = None, *, greets: bool = True) -> Iterator[HostileValkey]:
    """Run a server for the block."""
    server = HostileValkey(answer, greets=greets)
    try:
        yield server
    finally:
        server.close()

"""A list of names by HTTP, as it comes: bounded in time and in bytes, whatever the server sends."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from typing import TypeVar
from urllib.parse import urlsplit

T = TypeVar("T")

MAX_LIST_BYTES = 1 << 30
"""Some five million names of ours."""

_PIECE_BYTES = 64 << 10
_MAX_NAME_BYTES = 4 << 10


def names_at(url: str, deadline: float, longest: float) -> Iterator[str]:
    """The words of the answer to a GET of `url`, one after the other.

    Args:
        deadline: `time.monotonic()` seconds.
        longest: seconds that the server may take in all; who takes the names is not hurried.

    Raises:
        ValueError: the answer is no list of names, has no end, or takes too long; one line, without
            the URL.
    """
    patience = _Patience(min(deadline - time.monotonic(), longest))
    with closing(_connection(url, patience.seconds)) as connection:
        patience.wait_for(connection.connect)
        patience.socket = connection.sock
        patience.wait_for(lambda: connection.request("GET", urlsplit(url).path))
        with closing(patience.wait_for(connection.getresponse)) as response:
            if response.status != 200:
                raise ValueError(f"the server answers {response.status}")
            rest, num_bytes = b"", 0
            while piece := patience.wait_for(lambda: response.read1(_PIECE_BYTES)):
                num_bytes += len(piece)
                *words, rest = _split(rest + piece)
                if num_bytes > MAX_LIST_BYTES or len(rest) > _MAX_NAME_BYTES:
                    raise ValueError("what the server sends does not end")
                for word in words:
                    yield word.decode(errors="replace")
            if response.length:
                raise ValueError("the list ends too early")
            if rest:
                yield rest.decode(errors="replace")


def _split(text: bytes) -> list[bytes]:
    """The words of `text`; the last, which may go on, is empty if it has ended."""
    words = text.split()
    return words if words and not text[-1:].isspace() else [*words, b""]


def _connection(url: str, seconds: float) -> HTTPConnection:
    """Not connected yet."""
    try:
        parts = urlsplit(url)
        if parts.hostname and parts.scheme == "http":
            return HTTPConnection(parts.hostname, parts.port, timeout=seconds)
        if parts.hostname and parts.scheme == "https":
            return HTTPSConnection(parts.hostname, parts.port, timeout=seconds)
    except (ValueError, HTTPException):
        pass
    raise ValueError("admin is no URL of a metrics port, such as http://10.0.0.1:9003")


class _Patience:
    """How long a server is waited for in all. The timeout of a socket begins again with each byte.

    Attributes:
        seconds: that are left.
        socket: cut when they are over.
    """

    def __init__(self, seconds: float) -> None:
        self.seconds = max(0.001, seconds)
        self.socket: socket.socket | None = None

    def wait_for(self, call: Callable[[], T]) -> T:
        """What `call` returns.

        Raises:
            ValueError: it failed, or the time is over; one line.
        """
        started = time.monotonic()
        timer = threading.Timer(self.seconds, self._cut)
        timer.daemon = True
        timer.start()
        why = ""
        try:
            result = call()
        except HTTPException as error:
            why = f"no answer of HTTP ({type(error).__name__})"  # its text quotes the server's
        except OSError as error:
            why = error.strerror or type(error).__name__
        finally:
            timer.cancel()
        self.seconds -= time.monotonic() - started
        if self.seconds <= 0:
            raise ValueError("the list took too long")
        if why:
            raise ValueError(why)
        return result

    def _cut(self) -> None:
        if self.socket is not None:
            with suppress(OSError):
                # Not the method of a TLS socket, which is for the thread that reads only.
                socket.socket.shutdown(self.socket, socket.SHUT_RDWR)

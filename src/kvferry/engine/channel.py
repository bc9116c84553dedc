"""Messages between the first rank's process and a child of it, over a socket pair.

Pickled: both ends are this package in two processes of ours, and nobody else has the socket. What
comes from a network or a file never goes this way.
"""

from __future__ import annotations

import pickle
import socket
import struct
from typing import Any

from kvferry.errors import RankError

_LENGTH = struct.Struct("<Q")


class Channel:
    """One end. Not thread-safe; after any error it is of no more use."""

    def __init__(self, end: socket.socket) -> None:
        self._socket = end

    def send(self, message: object, timeout_seconds: float) -> None:
        """Hand over a message.

        Raises:
            RankError: the other end is gone, or does not read.
        """
        payload = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
        try:
            self._socket.settimeout(timeout_seconds)
            self._socket.sendall(_LENGTH.pack(len(payload)) + payload)
        except OSError as error:  # TimeoutError is one
            raise RankError(f"cannot reach the other process: {error}") from error

    def receive(self, timeout_seconds: float | None) -> Any:  # noqa: ANN401 - whatever was sent
        """The next message; None as timeout waits as long as the other end lives.

        Raises:
            TimeoutError: nothing has come yet; may be called again.
            RankError: the other end is gone, or stopped within a message.
        """
        try:
            self._socket.settimeout(timeout_seconds)
            first = self._socket.recv(1)
        except TimeoutError:
            raise
        except OSError as error:
            raise RankError(f"the other process is gone: {error}") from error
        try:
            (length,) = _LENGTH.unpack(first + self._exactly(_LENGTH.size - 1, first))
            return pickle.loads(self._exactly(length, first))
        except (OSError, EOFError) as error:
            raise RankError(f"the other process is gone: {error or 'it closed'}") from error

    def _exactly(self, count: int, first: bytes) -> bytes:
        if not first:
            raise EOFError
        parts = []
        while count:
            part = self._socket.recv(min(count, 1 << 20))
            if not part:
                raise EOFError
            parts.append(part)
            count -= len(part)
        return b"".join(parts)

    def close(self) -> None:
        """Idempotent. The other end sees it."""
        self._socket.close()

"""A connection of two peers, which `client` and `server` use: frames and bytes with deadlines.

Bytes go straight from and into the callers' buffers, several buffers in one system call. The socket
blocks with a kernel timeout, so one system call moves a large buffer whole, not segment by segment.
"""

from __future__ import annotations

import math
import socket
import struct
from collections.abc import Callable, Sequence
from contextlib import suppress

from kvferry.errors import TransferError, TransferTimeout
from kvferry.network import seconds_left
from kvferry.transfer.messages import (
    MAX_FRAME_BYTES,
    Decoder,
    Message,
    PeerFault,
    T,
    decode,
    encode,
)

_MAX_BUFFERS = 512
"""Buffers in one system call. Every system takes at least 1024."""
_EXACT_SECONDS = 0.02
"""How far off a timeout may be. The socket's timeout is not set again for a smaller difference."""
_HEAD_BYTES = 4
_AHEAD_BYTES = 256
"""Bytes read at once at the start of a frame; most frames fit. What follows the frame is copied."""


class Stream:
    """A connection over a socket, which it owns. One thread at a time, except for `end`.

    A call that fails raises TransferError, or TransferTimeout if the deadline passed. Do not use
    the connection after that: a late answer would be taken for the next one.
    """

    def __init__(self, stream: socket.socket) -> None:
        self._socket = stream
        stream.settimeout(None)
        if stream.family != socket.AF_UNIX:
            stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        # Infinite, as a new socket's timeouts are, so the first deadline sets them.
        self._timeouts = {socket.SO_RCVTIMEO: math.inf, socket.SO_SNDTIMEO: math.inf}
        self._frame = memoryview(bytearray(_HEAD_BYTES + MAX_FRAME_BYTES))
        self._ahead = self._frame[:0]  # bytes read ahead of the next call

    def begin(self, deadline: float) -> None:
        """Do what comes before the first frame: nothing, or in `TlsStream` the handshake."""

    def send(self, message: Message, deadline: float, buffers: Sequence[memoryview] = ()) -> None:
        """Send a frame, and the bytes of `buffers` after it."""
        views = [memoryview(encode(message)), *buffers]
        self._move(self._send_some, socket.SO_SNDTIMEO, views, deadline)

    def receive(self, decoder: Decoder[T], max_bytes: int, deadline: float) -> T:
        """Receive the next message. Raises PeerFault for a longer frame or another message."""
        length = int.from_bytes(self._receive_ahead(_HEAD_BYTES, deadline), "little")
        if not 0 < length <= max_bytes:
            raise PeerFault("it does not speak the protocol of peers")
        return decode(decoder, self._receive_ahead(length, deadline))

    def receive_into(self, buffers: Sequence[memoryview], deadline: float) -> None:
        """Fill all buffers."""
        views = list(buffers)
        while views and self._ahead:
            part = self._ahead[: views[0].nbytes]
            views[0][: len(part)] = part
            self._ahead = self._ahead[len(part) :]
            views = _rest(views, len(part))
        self._move(self._receive_all, socket.SO_RCVTIMEO, views, deadline)

    def is_quiet(self) -> bool:
        """Whether the other side has neither closed the connection nor sent anything unasked."""
        if self._ahead:
            return False
        try:
            self._socket.recv(1, socket.MSG_DONTWAIT | socket.MSG_PEEK)
        except BlockingIOError:
            return True
        except OSError:
            pass
        return False

    def end(self) -> None:
        """Make the thread that uses the connection fail and close it. Any thread may call this."""
        with suppress(OSError):
            # Not the method of SSLSocket, after which the other thread would go on in clear.
            socket.socket.shutdown(self._socket, socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the connection. Call this on the thread that uses it: else that thread could go on
        with a new file that has the same descriptor number. Idempotent."""
        self._socket.close()

    # -- parts ----------------------------------------------------------------------------------

    def _send_some(self, views: list[memoryview]) -> int:
        return self._socket.sendmsg(views)

    def _receive_ahead(self, num_bytes: int, deadline: float) -> memoryview:
        """Return the next bytes, which stay valid until the next call."""
        if len(self._ahead) < num_bytes:
            num_read = len(self._ahead)
            self._frame[:num_read] = self._ahead
            while num_read < num_bytes:
                room = self._frame[num_read : max(num_bytes, _AHEAD_BYTES)]
                num_read += self._wait(self._receive_some, socket.SO_RCVTIMEO, [room], deadline)
            self._ahead = self._frame[:num_read]
        found, self._ahead = self._ahead[:num_bytes], self._ahead[num_bytes:]
        return found

    def _receive_all(self, views: list[memoryview]) -> int:
        return self._receive_some(views, socket.MSG_WAITALL)

    def _receive_some(self, views: list[memoryview], flags: int = 0) -> int:
        num_bytes, _, _, _ = self._socket.recvmsg_into(views, 0, flags)
        if not num_bytes:
            raise TransferError("it closed the connection")
        return num_bytes

    def _move(
        self,
        some: Callable[[list[memoryview]], int],
        option: int,
        views: list[memoryview],
        deadline: float,
    ) -> None:
        views = [view for view in views if view.nbytes]
        while views:
            moved = self._wait(some, option, views[:_MAX_BUFFERS], deadline)
            views = _rest(views, moved)

    def _wait(
        self,
        some: Callable[[list[memoryview]], int],
        option: int,
        views: list[memoryview],
        deadline: float,
    ) -> int:
        """Make one system call; return how many bytes it moved."""
        try:
            self._arm(option, deadline)
            return some(views)
        except (BlockingIOError, TimeoutError):
            raise TransferTimeout("no answer in time") from None
        except OSError as error:
            raise TransferError(error.strerror or type(error).__name__) from None

    def _arm(self, option: int, deadline: float) -> None:
        """Set the timeout of the next system call to the time left until `deadline`."""
        left = seconds_left(deadline)
        if abs(left - self._timeouts[option]) < _EXACT_SECONDS:
            return
        seconds, microseconds = divmod(max(1, int(left * 1e6)), 1_000_000)
        self._socket.setsockopt(
            socket.SOL_SOCKET, option, struct.pack("@ll", seconds, microseconds)
        )
        self._timeouts[option] = left


def _rest(views: list[memoryview], moved: int) -> list[memoryview]:
    """Return the views without their first `moved` bytes."""
    for index, view in enumerate(views):
        if moved < view.nbytes:
            return [view[moved:], *views[index + 1 :]]
        moved -= view.nbytes
    return []
